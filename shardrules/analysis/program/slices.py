"""Programs for several TPU slices: each slice has a program of its own, and all of them meet over the network.

XLA compiles for the devices of one slice. What goes between slices is a pair of host transfers that names the slices
and the chips in them that take part; `100002` is chip 2 of the first slice.
"""

import re
from typing import Self, final

import attrs
from jax.sharding import Mesh

from shardrules.analysis.program.replica_groups import Groups
from shardrules.analysis.program.text import Instruction
from shardrules.core.axes import AnyMesh, mesh_text
from shardrules.core.errors import MeshError, ProgramTextError
from shardrules.mesh.layout import DeviceInfo

_FIELD = re.compile(r'_xla_megascale_(\w+)=(?:"([^"]*)"|(\{\{.*?\}\}))')
_SLICE = 100_000
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
    """Where the devices of each slice stand in a mesh.

    **Arguments:**

    - `partitions`: for each slice the places, in `mesh.devices.flat`, of the partitions of its program.
    - `chips`: the same for its chips, in the order of their numbers.

    ```python
    assert Slices.of(sr.mesh_shape("data:2,model:2"), 4).partitions == ((0, 1, 2, 3),)
    two = Slices(((0, 1), (2, 3)), ((0, 1), (2, 3)))
    assert two.in_every_slice(((0, 1),)) == ((0, 1), (2, 3))
    ```
    """

    partitions: tuple[tuple[int, ...], ...]
    chips: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mesh: AnyMesh | None, count: int) -> Self:
        """Finds the slices of a mesh.

        **Arguments:**

        - `mesh`: the mesh; only its devices know of several slices. Without a mesh there is one slice.
        - `count`: how many devices the program of a slice runs on.

        **Returns:**

        The `Slices`; one, where the program runs on the whole mesh.

        **Raises:**

        `MeshError` when the mesh is not made of such slices.
        """
        size = count if mesh is None else mesh.size
        infos = [DeviceInfo.of(device) for device in mesh.devices.flat] if isinstance(mesh, Mesh) else []
        slices = {}
        for at in range(size):
            number = infos[at].slice_index or 0 if infos and size > count else 0
            slices.setdefault(number, []).append(at)
        if any(len(places) != count for places in slices.values()):
            raise MeshError(
                f"mesh {mesh_text(mesh)} has {size} devices, but the program was compiled for {count}, which are no "
                "slice of it: pass the mesh, devices and all, that the function was compiled for"
            )
        partitions = [slices[number] for number in sorted(slices)]
        chips = [sorted(places, key=lambda at: infos[at].id if infos else at) for places in partitions]
        return cls(tuple(map(tuple, partitions)), tuple(map(tuple, chips)))

    def in_every_slice(self, groups: Groups) -> Groups:
        """Returns what groups of partitions are in the mesh: the same in every slice.

        **Arguments:**

        - `groups`: groups of partitions of one slice's program.

        **Returns:**

        Groups of places in `mesh.devices.flat`.
        """
        return tuple(tuple(places[one] for one in group) for places in self.partitions for group in groups)

    def groups_between(self, one: Instruction) -> Groups:
        """Reads which devices a transfer between slices brings together.

        **Arguments:**

        - `one`: a `send` of which `kind_between_slices` is not empty.

        **Returns:**

        Groups of places in `mesh.devices.flat`; sources and targets for a `collective-permute`.

        **Raises:**

        `ProgramTextError` for slices or chips that are not there.
        """
        text = _fields(one).get("target", "")
        try:
            if "x{" in text:  # "{1,2}x{0:3}": each of the chips 0 to 3 with its like in the other slice
                slices, _, chips = text.partition("x")
                first, _, last = chips.strip("{}").partition(":")
                return tuple(
                    tuple(self.chips[int(number) - 1][chip] for number in slices.strip("{}").split(","))
                    for chip in range(int(first), int(last or first) + 1)
                )
            groups = [re.findall(r"\d+", inside) for inside in re.findall(r"\{([\d,\->]+)\}", text)]
            return tuple(tuple(self._place(int(number)) for number in group) for group in groups)
        except (IndexError, ValueError) as error:
            known = f"{len(self.chips)} slices of {len(self.chips[0])}"
            raise ProgramTextError(f"{one.name} goes between slices {text!r}, of which {known} are known") from error

    def _place(self, number: int) -> int:
        return self.chips[number // _SLICE - 1][number % _SLICE]


def kind_between_slices(one: Instruction) -> str:
    """Tells which collective between slices an instruction begins.

    **Arguments:**

    - `one`: any instruction.

    **Returns:**

    Its kind, `"all-reduce"`; empty where it is none.
    """
    return _KINDS.get(_fields(one).get("transfer_type", ""), "") if one.op == "send" else ""


def _fields(one: Instruction) -> dict[str, str]:
    return {name: quoted or listed for name, quoted, listed in _FIELD.findall(one.text)}
