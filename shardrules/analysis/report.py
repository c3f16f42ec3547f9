"""What a sharded tree adds up to: totals, shares, balance, and the leaves that weigh most."""

import math
from collections.abc import Sequence
from typing import final

import attrs

from shardrules.analysis.placed import Placed
from shardrules.core.axes import AnyMesh, mesh_sizes, mesh_text
from shardrules.core.check import bytes_text
from shardrules.core.finding import shape_text, template
from shardrules.core.spec import axis_names


@final
@attrs.frozen
class AxisUse:
    """What one mesh axis does.

    **Arguments:**

    - `axis`, `size`: the axis.
    - `array_count`: how many arrays are split over it.
    - `split_bytes`: how many bytes these arrays have, each counted whole.
    """

    axis: str
    size: int
    array_count: int
    split_bytes: int


@final
@attrs.frozen
class Weight:
    """A replicated array, or equal ones.

    **Arguments:**

    - `path`: where it is, with `*` for indices where there are several.
    - `shape`: its shape.
    - `count`: how many.
    - `device_bytes`: what they take together on every device.
    """

    path: str
    shape: tuple[int, ...]
    count: int
    device_bytes: int


@final
@attrs.frozen
class ShardingReport:
    """What a tree and its specs add up to. It prints as a page of text.

    **Arguments:**

    - `mesh`: the mesh as text.
    - `device_count`: how many devices it has.
    - `array_count`, `element_count`: the arrays of the tree, and their elements.
    - `sharded_array_count`, `sharded_element_count`: those whose spec names an axis.
    - `total_bytes`, `sharded_bytes`: of all arrays, and of those whose spec names an axis, each counted once.
    - `device_bytes`: on the device that holds most.
    - `stored_bytes`: on all devices together, copies included.
    - `axes`: what each mesh axis does.
    - `replicated`: the replicated arrays that weigh most, heaviest first.

    ```python
    specs = {"w": P("data"), "b": P()}
    tree = {"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32)}
    report = sr.ShardingAnalyzer(sr.mesh_shape("data:4")).analyze(tree, specs)
    assert (report.device_bytes, report.sharded_share) == (48, 128 / 144)
    ```
    """

    mesh: str
    device_count: int
    array_count: int
    element_count: int
    sharded_array_count: int
    sharded_element_count: int
    total_bytes: int
    sharded_bytes: int
    device_bytes: int
    stored_bytes: int
    axes: tuple[AxisUse, ...]
    replicated: tuple[Weight, ...]

    @property
    def sharded_share(self) -> float:
        """The share of all bytes that is in arrays whose spec names an axis; 0 for no bytes at all."""
        return self.sharded_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def balance(self) -> float:
        """How evenly devices are filled: the average of them over the fullest. 1 is even."""
        return self.stored_bytes / (self.device_count * self.device_bytes) if self.device_bytes else 1.0

    @property
    def redundancy(self) -> float:
        """How many copies of a byte there are on average: 1 is fully sharded, the device count fully replicated."""
        return self.stored_bytes / self.total_bytes if self.total_bytes else 1.0

    def __str__(self) -> str:
        lines = [
            f"mesh          {self.mesh} ({self.device_count} devices)",
            f"arrays        {self.array_count:,}, of which {self.sharded_array_count:,} are split",
            f"bytes         {bytes_text(self.total_bytes)} in all, {self.sharded_share:.1%} in split arrays",
            f"per device    {bytes_text(self.device_bytes)}, balance {self.balance:.3f}, {self.redundancy:.2f} copies",
        ]
        lines += [
            f"axis {use.axis!r:<9}size {use.size}, splits {use.array_count:,} arrays, {bytes_text(use.split_bytes)}"
            for use in self.axes
        ]
        if self.replicated:
            lines.append("largest replicated:")
        for one in self.replicated:
            many = f"  x{one.count}" if one.count > 1 else ""
            lines.append(f"  {bytes_text(one.device_bytes):>10}  {one.path}{many}  {shape_text(one.shape)}")
        return "\n".join(lines)


def report(arrays: Sequence[Placed], mesh: AnyMesh | None, largest: int) -> ShardingReport:
    """Returns the report on some arrays.

    **Arguments:**

    - `arrays`: what `place` returned.
    - `mesh`: the mesh, or `None`, which counts as one device.
    - `largest`: how many of the replicated arrays to list.

    **Returns:**

    A `ShardingReport`.
    """
    sizes = mesh_sizes(mesh)
    devices = math.prod(sizes.values())
    split = [one for one in arrays if one.is_split]
    # An axis that a spec names twice is an error of the spec; here it must not make copies vanish.
    stored = sum(one.shards_bytes * max(1, devices // one.ways) for one in arrays)
    return ShardingReport(
        mesh_text(mesh),
        devices,
        len(arrays),
        sum(one.leaf.size for one in arrays),
        len(split),
        sum(one.leaf.size for one in split),
        sum(one.leaf.nbytes for one in arrays),
        sum(one.leaf.nbytes for one in split),
        sum(one.device_bytes for one in arrays),
        stored,
        tuple(_use(name, size, split) for name, size in sizes.items()),
        _heaviest([one for one in arrays if not one.is_split], largest),
    )


def _use(axis: str, size: int, split: Sequence[Placed]) -> AxisUse:
    over = [one for one in split if axis in axis_names(one.spec)]
    return AxisUse(axis, size, len(over), sum(one.leaf.nbytes for one in over))


def _heaviest(whole: Sequence[Placed], largest: int) -> tuple[Weight, ...]:
    groups: dict[tuple[str, tuple[int, ...]], list[Placed]] = {}
    for one in whole:
        groups.setdefault((template(one.leaf.path), one.leaf.shape), []).append(one)
    weights = [
        Weight(same[0].leaf.path if len(same) == 1 else path, shape, len(same), sum(one.device_bytes for one in same))
        for (path, shape), same in groups.items()
    ]
    return tuple(sorted(weights, key=lambda one: (-one.device_bytes, one.path))[:largest])
