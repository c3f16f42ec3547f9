"""Programs for several TPU slices: each slice has a program of its own, and they meet over the network.

XLA compiles for the devices of one slice. A collective between slices becomes a pair of host transfers, send and recv,
that names the slices and the chips in them that take part. `100002` is chip 2 of the first slice:

    %send = (...) send(%x, %token), is_host_transfer=true, frontend_attributes={
        _xla_megascale_transfer_type="ALL_REDUCE", _xla_megascale_target={{100002,200002}}}
"""

import re
from typing import Self, final

import attrs
from jax.sharding import Mesh

from shardrules.core.axes import AnyMesh, mesh_text
from shardrules.core.errors import MeshError, ProgramTextError
from shardrules.mesh.layout import DeviceInfo
from shardrules.programs.compiled.replica_groups import Groups
from shardrules.programs.compiled.text import Instruction

_FIELD = re.compile(r'_xla_megascale_(\w+)=(?:"([^"]*)"|(\{\{.*?\}\}))')

_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}


@final
@attrs.frozen
class Slices:
    """The devices of each slice of a mesh, as indices of `mesh.devices.flat`."""

    partitions: tuple[tuple[int, ...], ...]  # for each slice, in the order of the partitions of its program
    chips: tuple[tuple[int, ...], ...]  # for each slice, in the order of the ids of its chips

    @classmethod
    def of(cls, mesh: AnyMesh | None, count: int) -> Self:
        """Finds the slices of a mesh, with `count` devices of a program in each.

        Only devices know of several slices, so an `AbstractMesh` has one slice, and so does a missing mesh.
        """
        size = count if mesh is None else mesh.size
        infos = [DeviceInfo.of(device) for device in mesh.devices.flat] if isinstance(mesh, Mesh) else []
        slices: dict[int, list[int]] = {}
        for device_index in range(size):
            # A program for the whole mesh treats it as one slice, whatever its devices say.
            slice_index = infos[device_index].slice_index or 0 if infos and size > count else 0
            slices.setdefault(slice_index, []).append(device_index)
        if any(len(devices) != count for devices in slices.values()):
            raise MeshError(
                f"mesh {mesh_text(mesh)} has {size} devices, but the program was compiled for {count}, which is not a "
                "slice of it: pass the mesh, with its devices, that the function was compiled for"
            )
        # Partitions are in mesh order, as JAX passes the devices to the compiler; chips are numbered by their ids.
        partitions = [slices[slice_index] for slice_index in sorted(slices)]
        chips = [sorted(devices, key=lambda index: infos[index].id if infos else index) for devices in partitions]
        return cls(tuple(map(tuple, partitions)), tuple(map(tuple, chips)))

    def in_every_slice(self, groups: Groups) -> Groups:
        """Returns the devices of the mesh in groups of partitions, which are the same in every slice."""
        return tuple(
            tuple(devices[partition] for partition in group) for devices in self.partitions for group in groups
        )

    def groups_between(self, send: Instruction) -> Groups:
        """Returns the devices that a transfer between slices brings together, or its pairs of source and target."""
        text = _megascale_fields(send).get("target", "")
        try:
            if "x{" in text:  # "{1,2}x{0:3}": each of the chips 0 to 3 with its counterpart in the other slice
                slices, _, chips = text.partition("x")
                first, _, last = chips.strip("{}").partition(":")
                return tuple(
                    tuple(self.chips[int(slice_id) - 1][chip] for slice_id in slices.strip("{}").split(","))
                    for chip in range(int(first), int(last or first) + 1)
                )
            # Lists of chips, or pairs of source and target: {{100000,200000}} or {{100000->200000}}
            groups = [re.findall(r"\d+", inside) for inside in re.findall(r"\{([\d,\->]+)\}", text)]
            return tuple(tuple(self._device(int(chip_id)) for chip_id in group) for group in groups)
        except (IndexError, ValueError) as error:
            expected = f"{len(self.chips)} slices of {len(self.chips[0])} chips"
            raise ProgramTextError(f"{send.name} goes between slices {text!r}, but the mesh has {expected}") from error

    def _device(self, chip_id: int) -> int:
        slice_number, chip = divmod(chip_id, 100_000)  # XLA's encoding, with slices from 1
        return self.chips[slice_number - 1][chip]


def kind_between_slices(instruction: Instruction) -> str:
    """The collective between slices that an instruction begins, `"all-reduce"`; empty where it begins none."""
    return _KINDS.get(_megascale_fields(instruction).get("transfer_type", ""), "") if instruction.op == "send" else ""


def _megascale_fields(instruction: Instruction) -> dict[str, str]:
    return {name: quoted or listed for name, quoted, listed in _FIELD.findall(instruction.text)}
