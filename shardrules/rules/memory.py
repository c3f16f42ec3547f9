"""`MemoryConstrainedShardingRule`: split as little as a byte limit allows."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.axes import AnyMesh, Axis, as_mesh, axis_tuple, mesh_key, mesh_repr
from shardrules.core.errors import PlanError
from shardrules.core.fields import byte_count, one_of
from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.rule import LeavesShardingRule, from_fields
from shardrules.core.spec import Entries, axis_names, make_spec, pad
from shardrules.core.text import bytes_text
from shardrules.rules.auto import as_axes
from shardrules.rules.budget import LeafGroup, Option, choose, smallest_budget

Scope: TypeAlias = Literal["array", "tree"]
"""The arrays that the limit applies to: each array by itself, or all arrays of the tree together."""


@final
@attrs.frozen
class MemoryConstrainedShardingRule(LeavesShardingRule):
    """Splits arrays until they fit a limit of bytes per device, and no further.

    With `scope="array"` each array must fit by itself: the largest axis goes to the largest dimension that it divides,
    then the next, one axis for each dimension, until the array fits. An array that cannot fit is an `over-budget` error
    of the plan.

    With `scope="tree"` all arrays together must fit, including those that earlier rules of a composite have decided.
    The rule splits arrays so that devices fetch as few bytes as possible from each other to see whole arrays again.
    Several axes may share a dimension, and of equal arrays some may be split and others not. If no choice fits, the
    error names the smallest limit that does.

    Axes of size 1 are not used.

    **Arguments:**

    - `max_memory_per_device`: the limit in bytes.
    - `mesh`: the mesh to decide for, whatever mesh is planned for; by default the latter.
    - `axis_names`: the axes to use; by default all.
    - `scope`: `"array"` or `"tree"`.

    ```python
    rule = sr.MemoryConstrainedShardingRule(1024, sr.mesh_shape("dp:2,tp:4"))
    assert rule.apply({"a": np.ones((32, 32), np.float32)}) == {"a": P("tp", None)}
    ```
    """

    max_memory_per_device: int = attrs.field(converter=byte_count("max_memory_per_device"))
    mesh: AnyMesh | None = attrs.field(default=None, converter=as_mesh, repr=mesh_repr, eq=mesh_key)
    axis_names: tuple[Axis, ...] | None = attrs.field(default=None, converter=as_axes)
    scope: Scope = attrs.field(default="array", converter=one_of("scope", "array", "tree"))
    # Of equal layers the tree may need only some split, so with that scope each leaf is decided by itself.
    reads_index = from_fields(lambda rule: "no" if rule.scope == "array" else "value")
    tree_budgets = from_fields(lambda rule: (rule.max_memory_per_device,) if rule.scope == "tree" else ())
    named_axes = from_fields(lambda rule: rule.axis_names or ())

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns decisions for `leaves` that meet the limit. Raises `PlanError` when the tree cannot fit."""
        # An unknown axis is an error even where the limit needs no split.
        for axis in self.axis_names or ():
            leaves.items[0].axis_size(axis)
        if self.scope == "tree":
            return Verdict(self._fit_tree(leaves))
        return Verdict(tuple(map(self._fit_array, leaves.items)))

    def _free_axes(self, leaf: Leaf) -> list[Axis]:
        """The axes that can split this leaf, largest first."""
        axes = tuple(leaf.sizes) if self.axis_names is None else self.axis_names
        used = leaf.used_axes
        free = [
            axis for axis in axes if leaf.axis_size(axis) > 1 and not any(name in used for name in axis_tuple(axis))
        ]
        return sorted(free, key=lambda axis: -leaf.axis_size(axis))

    def _fit_array(self, leaf: Leaf) -> Decision:
        limit = self.max_memory_per_device
        old_entries = leaf.entries[: leaf.ndim]
        entries = list(old_entries)
        device_bytes = leaf.shard_bytes(make_spec(old_entries))
        if device_bytes <= limit:
            fits = f"fits {bytes_text(limit)}"
            return leaf.replicate(fits) if leaf.spec is None else Decision(leaf.spec, fits)
        dims = sorted(range(leaf.ndim), key=lambda dim: -leaf.shape[dim])
        for axis in self._free_axes(leaf):
            size = leaf.axis_size(axis)
            dim = next((dim for dim in dims if entries[dim] == () and leaf.shape[dim] % size == 0), None)
            # Axes may overlap where `axis_names` holds tuples.
            split_axes = axis_names(make_spec(tuple(entries)))
            if dim is None or any(name in split_axes for name in axis_tuple(axis)):
                continue
            entries[dim] = axis_tuple(axis)
            device_bytes = leaf.shard_bytes(make_spec(tuple(entries)))
            if device_bytes <= limit:
                break
        reason = f"{bytes_text(device_bytes)} per device for a limit of {bytes_text(limit)}"
        findings = () if device_bytes <= limit else (self._over_budget(leaf, device_bytes),)
        if tuple(entries) == old_entries:
            # For no opinion, too, `apply` returns an entry for each dimension.
            blank = pad(PartitionSpec(), leaf.ndim)
            return Decision(None, f"no free axis divides a free dimension; {reason}", None, findings, blank)
        return Decision(make_spec(tuple(entries)), reason, None, findings)

    def _over_budget(self, leaf: Leaf, device_bytes: int) -> Finding:
        why = (
            f"with one axis for each dimension a device holds at least {device_bytes:,} bytes, more than the limit of "
            f"{self.max_memory_per_device:,}"
        )
        remedy = f"Raise max_memory_per_device to {device_bytes:,} or more, or use a larger mesh"
        rule = "MemoryConstrainedShardingRule"
        return Finding("error", "over-budget", why, leaf.path, remedy, leaf.shape, rule=rule)

    def _fit_tree(self, leaves: Leaves) -> tuple[Decision, ...]:
        settled_bytes = sum(
            count * (leaf.nbytes if leaf.spec is None else leaf.shard_bytes(leaf.spec))
            for leaf, count in leaves.settled
        )
        # Finding the choices of a leaf is slow, and a model has few different leaves. Leaves with equal choices are one
        # group, whatever their dtypes: which of them are split depends on the groups.
        cache: dict[object, tuple[_Choice, ...]] = {}
        groups: dict[tuple[_Choice, ...], list[int]] = {}
        for leaf_index, leaf in enumerate(leaves.items):
            key = (leaf.shape, leaf.dtype, leaf.entries, leaf.outer_axes)
            if key not in cache:
                cache[key] = tuple(_choices(leaf, self._free_axes(leaf)))
            groups.setdefault(cache[key], []).append(leaf_index)
        problem = [
            LeafGroup(len(leaf_indices), tuple(choice.option for choice in choices))
            for choices, leaf_indices in groups.items()
        ]
        limit = self.max_memory_per_device
        counts = choose(problem, limit - settled_bytes)
        if counts is None:
            least_bytes = smallest_budget(problem) + settled_bytes
            raise PlanError(
                f"{self!r}: no assignment fits {limit:,} bytes ({bytes_text(limit)}) per device. The smallest limit "
                f"that works on this mesh is {least_bytes:,} bytes ({bytes_text(least_bytes)}): raise "
                "max_memory_per_device to that, use a larger mesh, or make indivisible dimensions multiples of its "
                "axes."
            )
        decisions: list[Decision] = [leaf.skip("") for leaf in leaves.items]
        for (choices, leaf_indices), option_counts in zip(groups.items(), counts, strict=True):
            order = [choice for choice, count in zip(choices, option_counts, strict=True) for _ in range(count)]
            for leaf_index, choice in zip(leaf_indices, order, strict=True):
                decisions[leaf_index] = Decision(make_spec(choice.entries), f"{choice.reason} {bytes_text(limit)}")
        return tuple(decisions)


@final
@attrs.frozen
class _Choice:
    """One way to split a leaf, and what it costs."""

    entries: Entries
    option: Option
    reason: str


def _choices(leaf: Leaf, axes: Sequence[Axis]) -> Iterator[_Choice]:
    """For each possible number of parts the simplest assignment: fewest axes, largest axes on largest dimensions."""
    old_entries = leaf.entries[: leaf.ndim]
    dims = sorted(leaf.free_dims(), key=lambda dim: -leaf.shape[dim])
    unsplit_bytes = leaf.shard_bytes(make_spec(old_entries))
    yield _Choice(old_entries if any(old_entries) else (), Option(unsplit_bytes, 0), "stays as it is: the tree fits")
    simplest: dict[int, tuple[tuple[int, int], Entries]] = {}
    axis_order = list(leaf.sizes)
    # Every way to give each axis to one dimension, or to none. The order makes the first of equally simple ways the one
    # with large axes on large dimensions.
    for dim_of_axis in itertools.product([None, *dims], repeat=len(axes)):
        entries = list(old_entries)
        pairs = list(zip(axes, dim_of_axis, strict=True))
        names = [name for axis, dim in pairs if dim is not None for name in axis_tuple(axis)]
        # An axis may occur alone and in a tuple of axes, and can split only one dim.
        if not names or len(dict.fromkeys(names)) < len(names):
            continue
        for dim in dims:
            on_dim = [name for axis, other in pairs if other == dim for name in axis_tuple(axis)]
            # The axes of one dim follow the order of the mesh, in whatever order they were tried.
            entries[dim] = tuple(sorted(on_dim, key=axis_order.index))
        dim_parts = [math.prod(leaf.sizes[name] for name in entries[dim]) for dim in dims]
        if any(leaf.shape[dim] % part_count for dim, part_count in zip(dims, dim_parts, strict=True)):
            continue
        simplicity = (len(names), sum(1 for dim in dims if entries[dim]))
        part_count = math.prod(dim_parts)
        if part_count not in simplest or simplicity < simplest[part_count][0]:
            simplest[part_count] = (simplicity, tuple(entries))
    for part_count in sorted(simplest):
        entries = simplest[part_count][1]
        device_bytes = leaf.shard_bytes(make_spec(entries))
        if device_bytes < unsplit_bytes:
            yield _Choice(entries, Option(device_bytes, unsplit_bytes - device_bytes), "split so that the tree fits")
