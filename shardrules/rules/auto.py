"""`AutoShardingRule`: largest dimensions first, each over the first axis that divides it."""

import math
from collections.abc import Mapping, Sequence
from typing import final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.axes import AnyMesh, Axis, as_axis, as_mesh, axis_tuple, mesh_key, mesh_repr
from shardrules.core.fields import integer
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.rule import LeafShardingRule, from_fields
from shardrules.core.spec import Entries, make_spec, pad


def as_axes(axes: Sequence[Axis] | str | None) -> tuple[Axis, ...] | None:
    """Returns axes in their normal form, a tuple; a single name is one axis, and `None` stays `None`."""
    return None if axes is None else tuple(map(as_axis, (axes,) if isinstance(axes, str) else axes))


def auto_entries(
    shape: tuple[int, ...],
    axes: Sequence[Axis],
    sizes: Mapping[str, int],
    *,
    reverse: bool = False,
    decided: Entries = (),
    used: Sequence[str] = (),
) -> Entries:
    """Returns the entries where each dimension, largest first, takes the first free axis that divides it.

    Dimensions that have an entry in `decided` keep it, and axes in `used` are not free. A tuple among `axes` splits one
    dimension over all of its axes.
    """
    result = list(decided) or [()] * len(shape)
    spent = list(used)
    # Sorting is stable: of equal dimensions the lowest comes first, on every host.
    for dim in sorted(range(len(shape)), key=lambda dim: shape[dim] if reverse else -shape[dim]):
        if result[dim] != ():
            continue
        for axis in axes:
            names = axis_tuple(axis)
            if any(name in spent for name in names) or shape[dim] % math.prod(sizes[name] for name in names):
                continue
            result[dim] = names
            spent += names
            break
    return tuple(result)


@final
@attrs.frozen
class AutoShardingRule(LeafShardingRule):
    """Splits every array that is large enough: dimensions largest first, each over the first free axis that divides it.

    Axes of size 1 are not used. Where no axis divides any dimension the rule has no opinion.

    **Arguments:**

    - `mesh`: the mesh to decide for, whatever mesh is planned for; by default the latter.
    - `axis_names`: the axes to use, in order of preference; by default all, in mesh order. A tuple is used as one.
    - `min_shard_size`: arrays of fewer elements are skipped; by default the number of devices. `0` skips none.
    - `reverse`: smallest dimensions first. Ties go to the lowest dimension either way.

    ```python
    rule = sr.AutoShardingRule(sr.mesh_shape("dp:2,tp:4"), axis_names=["dp", "tp"])
    assert rule.apply({"a": np.ones((8, 16))}) == {"a": P("tp", "dp")}
    ```
    """

    mesh: AnyMesh | None = attrs.field(default=None, converter=as_mesh, repr=mesh_repr, eq=mesh_key)
    axis_names: tuple[Axis, ...] | None = attrs.field(default=None, converter=as_axes)
    min_shard_size: int | None = attrs.field(
        default=None, converter=attrs.converters.optional(integer("min_shard_size", 0))
    )
    reverse: bool = False
    reads_index = "no"
    parts = ()
    named_axes = from_fields(lambda rule: rule.axis_names or ())

    def decide(self, leaf: Leaf) -> Decision:
        """Returns the decision for `leaf`."""
        sizes = leaf.sizes
        axes = tuple(sizes) if self.axis_names is None else self.axis_names
        least = math.prod(sizes.values()) if self.min_shard_size is None else self.min_shard_size
        if leaf.size < least:
            return leaf.skip(f"fewer than {least} elements")
        # An axis of size 1 splits nothing: with it a dimension would miss an axis that does.
        useful = [axis for axis in axes if leaf.axis_size(axis) > 1]
        decided = leaf.entries[: leaf.ndim]
        entries = auto_entries(leaf.shape, useful, sizes, reverse=self.reverse, decided=decided, used=leaf.used_axes)
        if entries == decided:
            return Decision(None, "no free axis divides a free dimension", blank=pad(PartitionSpec(), leaf.ndim))
        order = "smallest" if self.reverse else "largest"
        return Decision(make_spec(entries), f"{order} dims first")
