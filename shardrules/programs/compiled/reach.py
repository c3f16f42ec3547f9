"""The reach of collectives: the mesh axes, the hosts or slices, and the dimensions of a torus that they span."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Self, final

import attrs
from jax.sharding import Mesh

from shardrules.core.axes import AnyMesh, mesh_sizes
from shardrules.mesh.layout import DeviceInfo
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.compiled.replica_groups import Groups, Span, groups_of, sent_pairs, span
from shardrules.programs.compiled.slices import Slices, kind_between_slices
from shardrules.programs.compiled.text import Instruction
from shardrules.programs.machine.targets import Target, closed_dims


@final
@attrs.frozen
class Topology:
    """The position of each device of a mesh on its machine, in the order of `mesh.devices.flat`."""

    granules: tuple[int, ...]  # indices of hosts of GPUs, or of slices of TPUs
    coords: tuple[tuple[int, ...], ...]  # in the torus of the slice; empty where there is no torus
    ring_sizes: tuple[int, ...] = ()  # of the dimensions of the torus; 0 for those that do not close to a ring

    @classmethod
    def of(cls, mesh: Mesh, target: Target) -> Self:
        """Finds the devices of a mesh that `target.mesh` returned."""
        infos = [DeviceInfo.of(device) for device in mesh.devices.flat]
        if target.platform == "tpu":
            closed = zip(target.shape, closed_dims(target.chip, target.shape), strict=True)
            return cls(
                tuple(info.slice_index or 0 for info in infos),
                tuple(info.coords or () for info in infos),
                tuple(size if is_closed else 0 for size, is_closed in closed),
            )
        # Hosts are consecutive devices of the target, whatever their order in the mesh.
        granule_size = target.granule or len(infos)
        granules = {device.id: index // granule_size for index, device in enumerate(target.devices())}
        # GPUs have coords, too, but a switch connects them: no torus.
        return cls(tuple(granules[info.id] for info in infos), ((),) * len(infos))

    def host_count(self, groups: Groups) -> int:
        """Returns how many hosts or slices a group spans at most; 1 without groups."""
        return max((len({self.granules[device] for device in group}) for group in groups), default=1)

    def extents(self, groups: Groups) -> list[list[int]]:
        """Returns for each group at how many positions its devices are, along each dimension of the torus."""
        coords = [zip(*(self.coords[device] for device in group), strict=True) for group in groups]
        return [[len({*positions}) for positions in dims] for dims in coords]

    def torus_dims(self, groups: Groups) -> int:
        """Returns along how many dimensions of the torus the devices of a group differ at most; 0 without a torus."""
        return max((sum(extent > 1 for extent in extents) for extents in self.extents(groups)), default=0)

    def open_dims(self, groups: Groups) -> int:
        """Returns along how many dimensions of the torus the devices of a group lie on a line, not on a ring."""
        pairs = [zip(extents, self.ring_sizes, strict=False) for extents in self.extents(groups)]
        return max((sum(1 < extent != size for extent, size in dims) for dims in pairs), default=0)

    def chip_devices(self, groups: Groups) -> int:
        """Returns how many devices of a group share a chip at most; 1 without a torus."""
        # Coordinates repeat from slice to slice: only with the granule they are those of one chip.
        positions = ([(self.granules[device], self.coords[device]) for device in group] for group in groups)
        return max((max(Counter(group).values()) for group in positions if group and group[0][1]), default=1)

    def torus_along(self, groups: Groups) -> tuple[int, ...]:
        """Returns the dimensions of the torus along which the devices of any group differ."""
        return tuple(sorted({dim for extents in self.extents(groups) for dim, each in enumerate(extents) if each > 1}))

    def torus_way(self, pairs: Groups, dim: int) -> int:
        """Returns which way pairs of source and target send along a dimension: 1 up, -1 down, 0 both."""
        steps = {self.coords[target][dim] - self.coords[source][dim] for source, target in pairs} - {0}
        size = self.ring_sizes[dim] if dim < len(self.ring_sizes) else 0
        if size:  # Around a ring data takes the shorter way, and any of two that are as long.
            steps = {0 if 2 * abs(step) == size else (step + size // 2) % size - size // 2 for step in steps}
        return all(step > 0 for step in steps) - all(step < 0 for step in steps)


@final
@attrs.frozen
class GroupReach:
    """The reach of the groups of a collective, as `Collective` has it."""

    span: Span
    size: int
    host_count: int = 1
    torus_dims: int = 0
    open_dims: int = 0
    chip_devices: int = 1
    torus_along: tuple[int, ...] = ()
    torus_ways: tuple[int, ...] = ()


@final
@attrs.define
class GroupReader:
    """Reads how far the collectives of a program reach."""

    program: CompiledProgram
    sizes: Mapping[str, int]
    """The mesh axes with their sizes, in mesh order; empty without a mesh."""

    slices: Slices
    topology: Topology | None
    _reaches: dict[str, GroupReach] = attrs.Factory(dict)
    """By the text of the groups: most collectives of a program share a few texts, and reading one is slow."""

    @classmethod
    def of(cls, program: CompiledProgram, mesh: AnyMesh | None, target: Target | None) -> Self:
        """Prepares to read a program that was compiled for this mesh on this target, as far as they are known."""
        if target is None or mesh is None:
            return cls(program, mesh_sizes(mesh), Slices.of(mesh, program.partition_count), None)
        real_mesh = target.mesh(mesh)
        slices, topology = Slices.of(real_mesh, program.partition_count), Topology.of(real_mesh, target)
        return cls(program, mesh_sizes(mesh), slices, topology)

    def read(self, kind: str, instruction: Instruction) -> GroupReach:
        """Returns how far a collective of this kind reaches, which the instruction begins."""
        # Everything that `groups_of` and `groups_between` read must be in the key.
        names = ["replica_groups", "source_target_pairs", "device_ids", "use_global_device_ids"]
        if kind_between_slices(instruction):
            names.append("frontend_attributes")
        texts = [instruction.attributes.get(name) for name in names]
        key = f"{kind} {instruction.op} {texts} {'channel_id' in instruction.attributes} {sent_pairs(instruction)}"
        if key not in self._reaches:
            self._reaches[key] = self._reach(kind, self._groups(instruction))
        return self._reaches[key]

    def _reach(self, kind: str, groups: Groups) -> GroupReach:
        # Pairs of source and target are not groups. They go along every axis on which any source and target differ, and
        # a pair of a device with itself sends nothing.
        is_permute = kind == "collective-permute"
        groups = tuple(pair for pair in groups if pair[0] != pair[1]) if is_permute else groups
        mesh_span = span(groups, self.sizes)
        size = max(map(len, groups), default=1)
        if is_permute and self.sizes:
            mesh_span = Span(mesh_span.crossed, mesh_span.crossed)
            size = math.prod(self.sizes[axis] for axis in mesh_span.crossed)
        elif is_permute:
            size = max(1, len({device for pair in groups for device in pair}))
        if self.topology is None:
            return GroupReach(mesh_span, size)
        along = self.topology.torus_along(groups)
        return GroupReach(
            mesh_span,
            size,
            self.topology.host_count(groups),
            self.topology.torus_dims(groups),
            self.topology.open_dims(groups),
            self.topology.chip_devices(groups),
            along,
            tuple(self.topology.torus_way(groups, dim) for dim in along) if is_permute else (),
        )

    def _groups(self, instruction: Instruction) -> Groups:
        if kind_between_slices(instruction):
            return self.slices.groups_between(instruction)
        groups = groups_of(instruction, self.program.partition_count)
        return self.slices.in_every_slice(groups)
