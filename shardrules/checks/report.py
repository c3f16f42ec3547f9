"""The totals of a sharded tree: bytes, shares, balance, and its largest replicated arrays."""

import math
from collections.abc import Sequence
from typing import final

import attrs

from shardrules.checks.placed import PlacedLeaf
from shardrules.core.axes import AnyMesh, mesh_sizes, mesh_text
from shardrules.core.errors import printable
from shardrules.core.finding import shape_text, template
from shardrules.core.spec import axis_names, part_count
from shardrules.core.text import bytes_text


@final
@attrs.frozen
class AxisUse:
    """The arrays that a mesh axis splits, and their bytes, each array counted whole."""

    axis: str
    size: int
    array_count: int
    split_bytes: int


@final
@attrs.frozen
class ReplicatedLeaf:
    """A replicated array, or `count` arrays that share a path template and a shape.

    `path` has `*` for indices where there are several; `device_bytes` is what all of them take on every device.
    """

    path: str
    shape: tuple[int, ...]
    count: int
    device_bytes: int


@final
@attrs.frozen
class ShardingReport:
    """The totals of a tree and its specs, from `ShardingAnalyzer.analyze`. It prints as a page of text.

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
    """The number of arrays with a spec that names an axis."""
    sharded_element_count: int
    total_bytes: int
    """Each array counted once."""
    sharded_bytes: int
    device_bytes: int
    """On the device that stores most."""
    stored_bytes: int
    """On all devices together, copies included."""
    axes: tuple[AxisUse, ...]
    replicated: tuple[ReplicatedLeaf, ...]
    """The largest replicated arrays, largest first."""

    @property
    def sharded_share(self) -> float:
        """The share of all bytes in arrays whose spec names an axis; 0 for no bytes at all."""
        return self.sharded_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def balance(self) -> float:
        """The evenness of devices: the average device over the fullest. 1 is even."""
        return self.stored_bytes / (self.device_count * self.device_bytes) if self.device_bytes else 1.0

    @property
    def redundancy(self) -> float:
        """The average number of copies of a byte: 1 is fully sharded, the device count fully replicated."""
        return self.stored_bytes / self.total_bytes if self.total_bytes else 1.0

    def __str__(self) -> str:
        lines = [
            f"mesh          {printable(self.mesh)} ({self.device_count} devices)",
            f"arrays        {self.array_count:,}, {self.sharded_array_count:,} of them split",
            f"bytes         {bytes_text(self.total_bytes)} in total, {self.sharded_share:.1%} in split arrays",
            f"per device    {bytes_text(self.device_bytes)}, balance {self.balance:.3f}, {self.redundancy:.2f} copies",
        ]
        lines += [
            f"axis {use.axis!r:<9}size {use.size}, splits {use.array_count:,} arrays, {bytes_text(use.split_bytes)}"
            for use in self.axes
        ]
        if self.replicated:
            lines.append("largest replicated:")
        for leaf in self.replicated:
            times = f"  x{leaf.count}" if leaf.count > 1 else ""
            lines.append(
                f"  {bytes_text(leaf.device_bytes):>10}  {printable(leaf.path)}{times}  {shape_text(leaf.shape)}"
            )
        return "\n".join(lines)


def sharding_report(leaves: Sequence[PlacedLeaf], mesh: AnyMesh | None, largest: int) -> ShardingReport:
    """Adds up leaves, and lists the `largest` replicated ones. No mesh counts as one device."""
    sizes = mesh_sizes(mesh)
    device_count = math.prod(sizes.values())
    split = [leaf for leaf in leaves if axis_names(leaf.spec)]
    # A spec that names an axis twice is wrong, and counts here as more parts than there are devices. Without the
    # `max` such an array would have no copy at all.
    stored_bytes = sum(leaf.shards_bytes * max(1, device_count // part_count(leaf.spec, sizes)) for leaf in leaves)
    return ShardingReport(
        mesh=mesh_text(mesh),
        device_count=device_count,
        array_count=len(leaves),
        element_count=sum(leaf.leaf.size for leaf in leaves),
        sharded_array_count=len(split),
        sharded_element_count=sum(leaf.leaf.size for leaf in split),
        total_bytes=sum(leaf.nbytes for leaf in leaves),
        sharded_bytes=sum(leaf.nbytes for leaf in split),
        device_bytes=sum(leaf.device_bytes for leaf in leaves),
        stored_bytes=stored_bytes,
        axes=tuple(_axis_use(name, size, split) for name, size in sizes.items()),
        replicated=_largest_replicated([leaf for leaf in leaves if not axis_names(leaf.spec)], largest),
    )


def _axis_use(axis: str, size: int, split: Sequence[PlacedLeaf]) -> AxisUse:
    users = [leaf for leaf in split if axis in axis_names(leaf.spec)]
    return AxisUse(axis, size, len(users), sum(leaf.nbytes for leaf in users))


def _largest_replicated(replicated: Sequence[PlacedLeaf], largest: int) -> tuple[ReplicatedLeaf, ...]:
    groups: dict[tuple[str, tuple[int, ...]], list[PlacedLeaf]] = {}
    for leaf in replicated:
        groups.setdefault((template(leaf.leaf.path), leaf.leaf.shape), []).append(leaf)
    merged = [
        ReplicatedLeaf(
            group[0].leaf.path if len(group) == 1 else path, shape, len(group), sum(leaf.device_bytes for leaf in group)
        )
        for (path, shape), group in groups.items()
    ]
    return tuple(sorted(merged, key=lambda leaf: (-leaf.device_bytes, leaf.path))[:largest])
