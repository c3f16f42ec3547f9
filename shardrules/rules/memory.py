"""`MemoryConstrainedShardingRule`: split as little as a byte limit asks for."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.axes import AnyMesh, Axis, as_mesh, axis_tuple, mesh_key, mesh_repr
from shardrules.core.check import bytes_text
from shardrules.core.errors import PlanError
from shardrules.core.fields import byte_count, one_of
from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.rule import LeavesShardingRule, from_fields
from shardrules.core.spec import Entries, axis_names, make_spec, pad, shard_bytes
from shardrules.rules.auto import as_axes
from shardrules.rules.budget import LeafGroup, Option, choose, smallest_budget

Scope: TypeAlias = Literal["array", "tree"]
"""What the limit is for: each array by itself, or all arrays of the tree together."""


@final
@attrs.frozen
class MemoryConstrainedShardingRule(LeavesShardingRule):
    """Splits arrays until they fit a limit of bytes per device, and no further.

    With `scope="array"` each array by itself is to fit: the biggest axis goes to the biggest dimension that it divides,
    then the next, one axis a dimension, until the array fits. One that cannot is an `over-budget` error of the plan.

    With `scope="tree"` all arrays together are to fit, those decided by earlier rules of a composite included, and
    what is split is chosen so that devices have the fewest bytes to fetch from each other to see whole arrays again.
    Here several axes may share a dimension, and of equal arrays some may be split and others not. If no choice fits,
    the error names the smallest limit that does.

    Axes of size 1 are not spent.

    **Arguments:**

    - `max_memory_per_device`: the limit in bytes.
    - `mesh`: the rule's own mesh; by default the one that is planned for.
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
    # Of equal layers the tree may need only some split, so each leaf is looked at by itself.
    reads_index = from_fields(lambda rule: "no" if rule.scope == "array" else "value")
    tree_budgets = from_fields(lambda rule: (rule.max_memory_per_device,) if rule.scope == "tree" else ())

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns the decisions that meet the limit.

        **Arguments:**

        - `leaves`: what to decide.

        **Returns:**

        A `Verdict`.

        **Raises:**

        `PlanError` when the tree cannot fit; it names the smallest limit that works. Also when the mesh lacks an axis.
        """
        for axis in self.axis_names or ():
            leaves.items[0].axis_size(axis)  # a typo must not hide behind a limit that needs no split
        if self.scope == "tree":
            return Verdict(self._fit_tree(leaves))
        return Verdict(tuple(map(self._fit_array, leaves.items)))

    def _axes(self, leaf: Leaf) -> list[Axis]:
        """The axes worth spending, biggest first."""
        wanted = tuple(leaf.sizes) if self.axis_names is None else self.axis_names
        taken = leaf.taken
        free = [axis for axis in wanted if leaf.axis_size(axis) > 1 and not any(n in taken for n in axis_tuple(axis))]
        return sorted(free, key=lambda axis: -leaf.axis_size(axis))

    def _fit_array(self, leaf: Leaf) -> Decision:
        limit = self.max_memory_per_device
        found = list(leaf.entries[: leaf.ndim])
        held = shard_bytes(leaf.shape, leaf.dtype, make_spec(tuple(found)), leaf.sizes)
        if held <= limit:
            fits = f"fits {bytes_text(limit)}"
            return leaf.replicate(fits) if leaf.spec is None else Decision(leaf.spec, fits)
        dims = sorted(range(leaf.ndim), key=lambda dim: -leaf.shape[dim])
        for axis in self._axes(leaf):
            split = leaf.axis_size(axis)
            dim = next((dim for dim in dims if found[dim] == () and leaf.shape[dim] % split == 0), None)
            spent = axis_names(make_spec(tuple(found)))
            if dim is None or any(name in spent for name in axis_tuple(axis)):
                continue
            found[dim] = axis_tuple(axis)
            held = shard_bytes(leaf.shape, leaf.dtype, make_spec(tuple(found)), leaf.sizes)
            if held <= limit:
                break
        reason = f"{bytes_text(held)} per device for a limit of {bytes_text(limit)}"
        findings = () if held <= limit else (self._over(leaf, held),)
        if tuple(found) == leaf.entries[: leaf.ndim]:
            blank = pad(PartitionSpec(), leaf.ndim)
            return Decision(None, f"no free axis divides a free dimension; {reason}", None, findings, blank)
        return Decision(make_spec(tuple(found)), reason, None, findings)

    def _over(self, leaf: Leaf, held: int) -> Finding:
        return Finding(
            "error",
            "over-budget",
            f"{held:,} bytes per device is what one axis a dimension reaches, the limit is "
            f"{self.max_memory_per_device:,}",
            leaf.path,
            f"Raise max_memory_per_device to {held:,} or more, or use a larger mesh",
            leaf.shape,
            rule="MemoryConstrainedShardingRule",
        )

    def _fit_tree(self, leaves: Leaves) -> tuple[Decision, ...]:
        sizes = leaves.items[0].sizes
        settled = sum(
            count * (leaf.nbytes if leaf.spec is None else shard_bytes(leaf.shape, leaf.dtype, leaf.spec, sizes))
            for leaf, count in leaves.settled
        )
        cache: dict[object, tuple[_Choice, ...]] = {}
        groups: dict[tuple[_Choice, ...], list[int]] = {}
        for number, leaf in enumerate(leaves.items):
            key = (leaf.shape, leaf.dtype, leaf.entries, leaf.aside)
            choices = cache.get(key)
            if choices is None:
                cache[key] = choices = tuple(_choices(leaf, self._axes(leaf)))
            groups.setdefault(choices, []).append(number)
        problem = [LeafGroup(len(same), tuple(one.option for one in choices)) for choices, same in groups.items()]
        limit = self.max_memory_per_device
        answer = choose(problem, limit - settled)
        if answer is None:
            least = smallest_budget(problem) + settled
            raise PlanError(
                f"{self!r}: no assignment fits {limit:,} bytes ({bytes_text(limit)}) per device. The smallest limit "
                f"that works on this mesh is {least:,} bytes ({bytes_text(least)}): raise max_memory_per_device to "
                "that, use a larger mesh, or make indivisible dimensions multiples of its axes."
            )
        decisions: list[Decision] = [leaf.skip("") for leaf in leaves.items]
        for (choices, same), numbers in zip(groups.items(), answer, strict=True):
            order = [choice for choice, number in zip(choices, numbers, strict=True) for _ in range(number)]
            for number, choice in zip(same, order, strict=True):
                decisions[number] = choice.decision(limit)
        return tuple(decisions)


@final
@attrs.frozen
class _Choice:
    """One way to hold a leaf, and what it costs."""

    entries: Entries
    option: Option
    split: bool

    def decision(self, limit: int) -> Decision:
        if not self.split:
            return Decision(
                make_spec(self.entries if any(self.entries) else ()),
                f"stays as it is: the tree fits {bytes_text(limit)}",
            )
        return Decision(make_spec(self.entries), f"split so that the tree fits {bytes_text(limit)}")


def _choices(leaf: Leaf, axes: Sequence[Axis]) -> Iterator[_Choice]:
    """For each reachable number of ways the simplest assignment: fewest axes, biggest axes on biggest dimensions."""
    before = leaf.entries[: leaf.ndim]
    dims = sorted(leaf.free_dims(), key=lambda dim: -leaf.shape[dim])
    whole = shard_bytes(leaf.shape, leaf.dtype, make_spec(before), leaf.sizes)
    yield _Choice(before, Option(whole, 0), split=False)
    best: dict[int, tuple[tuple[int, int], Entries]] = {}
    order = list(leaf.sizes)
    for places in itertools.product([None, *dims], repeat=len(axes)):
        found = list(before)
        names = [name for axis, dim in zip(axes, places, strict=True) if dim is not None for name in axis_tuple(axis)]
        if not names or len(dict.fromkeys(names)) < len(names):
            continue
        for dim in dims:
            here = [axis for axis, place in zip(axes, places, strict=True) if place == dim]
            found[dim] = tuple(sorted((name for axis in here for name in axis_tuple(axis)), key=order.index))
        ways = [math.prod(leaf.sizes[name] for name in found[dim]) for dim in dims]
        if any(leaf.shape[dim] % way for dim, way in zip(dims, ways, strict=True)):
            continue
        simplicity = (len(names), sum(1 for dim in dims if found[dim]))
        total = math.prod(ways)
        if total not in best or simplicity < best[total][0]:
            best[total] = (simplicity, tuple(found))
    for total in sorted(best):
        found = best[total][1]
        held = shard_bytes(leaf.shape, leaf.dtype, make_spec(found), leaf.sizes)
        if held < whole:
            yield _Choice(found, Option(held, whole - held), split=True)
