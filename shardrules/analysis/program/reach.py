"""Where collectives go: along which axes of a mesh, over how many hosts or slices, along how much of a torus."""

import math
from collections.abc import Mapping
from typing import Self, final

import attrs
from jax.sharding import Mesh

from shardrules.analysis.machine.targets import Target
from shardrules.analysis.program.program import CompiledProgram
from shardrules.analysis.program.replica_groups import Groups, Span, groups_of, sent_pairs, span
from shardrules.analysis.program.slices import Slices, kind_between_slices
from shardrules.analysis.program.text import Instruction
from shardrules.core.axes import AnyMesh, mesh_sizes
from shardrules.mesh.layout import DeviceInfo


@final
@attrs.frozen
class Topology:
    """Where each device of a mesh stands on its machine.

    **Arguments:**

    - `granules`: for each place in `mesh.devices.flat` the number of its host of GPUs, or of its slice of TPUs.
    - `coords`: the same for where it stands in the torus of its slice; nothing there where there is no torus.

    ```python
    reach = Topology((0, 0, 1, 1), ((0, 0), (0, 1), (0, 0), (0, 1)))
    assert reach.host_count(((0, 1), (2, 3))) == 1 and reach.host_count(((0, 2), (1, 3))) == 2
    assert reach.torus_dims(((0, 1), (2, 3))) == 1 and reach.torus_dims(((0, 2), (1, 3))) == 0
    ```
    """

    granules: tuple[int, ...]
    coords: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mesh: Mesh, target: Target) -> Self:
        """Finds where the devices of a mesh stand.

        **Arguments:**

        - `mesh`: one that `target.mesh` returned.
        - `target`: the machine.

        **Returns:**

        A `Topology`.

        ```python
        from shardrules.analysis.machine.targets import Target

        target = Target.parse("cpu:8")
        assert Topology.of(target.mesh(sr.mesh_shape("data:8")), target) == Topology((0,) * 8, ((),) * 8)
        ```
        """
        infos = [DeviceInfo.of(device) for device in mesh.devices.flat]
        if target.platform == "tpu":
            return cls(tuple(info.slice_index or 0 for info in infos), tuple(info.coords or () for info in infos))
        size = target.granule or len(infos)
        granules = {device.id: place // size for place, device in enumerate(target.devices())}
        return cls(tuple(granules[info.id] for info in infos), ((),) * len(infos))  # GPUs' coords are no torus

    def host_count(self, groups: Groups) -> int:
        """Returns how many hosts or slices a group spans.

        **Arguments:**

        - `groups`: groups of places in `mesh.devices.flat`.

        **Returns:**

        The most that one of them spans; 1 where there are none.
        """
        return max((len({self.granules[place] for place in group}) for group in groups), default=1)

    def torus_dims(self, groups: Groups) -> int:
        """Returns along how many dimensions of the torus the devices of a group differ.

        **Arguments:**

        - `groups`: groups of places in `mesh.devices.flat`.

        **Returns:**

        The most for one of them; 0 where there is no torus.
        """
        stands = (zip(*(self.coords[place] for place in group), strict=True) for group in groups)
        return max((sum(len(dict.fromkeys(along)) > 1 for along in stand) for stand in stands), default=0)


@final
@attrs.frozen
class GroupReach:
    """What is alike in all groups of a collective.

    **Arguments:**

    - `along`: the axes of the mesh that they are.
    - `size`: how many devices the largest has.
    - `host_count`: how many hosts or slices one of them spans, at the most; 1 where nothing is known of them.
    - `torus_dims`: along how many dimensions of the torus the devices of one differ, at the most; likewise 0.
    """

    along: Span
    size: int
    host_count: int
    torus_dims: int


@final
@attrs.frozen
class GroupReader:
    """Where the collectives of a program go.

    **Arguments:**

    - `program`: the program.
    - `sizes`: the axes of the mesh with their sizes, in mesh order; empty where no mesh is known.
    - `slices`: where the devices of each slice stand in the mesh.
    - `reach`: where those of the mesh stand on the machine; `None` where that is not known.
    - `known`: what has been found out already, by the text of the groups. Most collectives share a few of them.
    """

    program: CompiledProgram
    sizes: Mapping[str, int]
    slices: Slices
    reach: Topology | None
    known: dict[str, GroupReach]

    @classmethod
    def of(cls, program: CompiledProgram, mesh: AnyMesh | None, target: Target | None) -> Self:
        """Prepares to look at the collectives of a program.

        **Arguments:**

        - `program`: the program.
        - `mesh`: the mesh that it was compiled for, if it is known.
        - `target`: the machine that it was compiled for, if it is known.

        **Returns:**

        A `GroupReader`.

        **Raises:**

        `MeshError` when the mesh is not that of the program; whatever `target.mesh` raises.
        """
        if target is None or mesh is None:
            return cls(program, mesh_sizes(mesh), Slices.of(mesh, program.device_count), None, {})
        placed = target.mesh(mesh)
        return cls(program, mesh_sizes(mesh), Slices.of(placed, program.device_count), Topology.of(placed, target), {})

    def group(self, kind: str, one: Instruction) -> GroupReach:
        """Finds out about the groups of a collective.

        **Arguments:**

        - `kind`: what it does, `"all-gather"`.
        - `one`: the instruction that begins it.

        **Returns:**

        A `GroupReach`.
        """
        names = ["replica_groups", "source_target_pairs", "device_ids", "use_global_device_ids"]
        if kind_between_slices(one):
            names.append("frontend_attributes")
        texts = [one.attributes.get(name) for name in names]
        key = f"{kind} {one.op} {texts} {'channel_id' in one.attributes} {sent_pairs(one)}"
        if key not in self.known:
            self.known[key] = self._look(kind, self._groups(one))
        return self.known[key]

    def _look(self, kind: str, groups: Groups) -> GroupReach:
        """Pairs of source and target are no groups: they go along every axis on which any two of them differ."""
        permute = kind == "collective-permute"
        moving = tuple(pair for pair in groups if pair[0] != pair[1]) if permute else groups
        along = span(moving, self.sizes)
        size = max(map(len, groups), default=1)
        if permute and self.sizes:
            along = Span(along.crossed, along.crossed)
            size = math.prod(self.sizes[name] for name in along.crossed)
        elif permute:
            size = max(1, len(dict.fromkeys(each for pair in moving for each in pair)))
        far = (1, 0) if self.reach is None else (self.reach.host_count(moving), self.reach.torus_dims(moving))
        return GroupReach(along, size, *far)

    def _groups(self, one: Instruction) -> Groups:
        if kind_between_slices(one):
            return self.slices.groups_between(one)
        return self.slices.in_every_slice(groups_of(one, self.program.replica_count, self.program.partition_count))
