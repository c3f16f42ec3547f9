"""`FSDPShardingRule`: splits large arrays along their largest free dimension."""

from typing import final

import attrs

from shardrules.core.axes import Axis, as_axis
from shardrules.core.fields import size_in_mb
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.rule import LeafShardingRule, from_fields


@final
@attrs.frozen
class FSDPShardingRule(LeafShardingRule):
    """Splits the largest dimension that is free and that `axis` divides; the last one of equal dimensions.

    **Arguments:**

    - `axis`: a mesh axis, or a tuple of them.
    - `min_size_mb`: arrays of this many MiB or fewer are skipped.

    ```python
    rule = sr.FSDPShardingRule("data", min_size_mb=0)
    assert rule.plan({"w": np.ones((8, 16))}, sr.mesh_shape("data:4")).specs == {"w": P(None, "data")}
    ```
    """

    axis: Axis = attrs.field(converter=as_axis)
    min_size_mb: float = attrs.field(default=4, converter=size_in_mb("min_size_mb"))
    reads_index = "no"
    parts = ()
    named_axes = from_fields(lambda rule: (rule.axis,))

    def decide(self, leaf: Leaf) -> Decision:
        """Returns the decision for `leaf`."""
        # An unknown axis is an error even where every leaf is small.
        leaf.axis_size(self.axis)
        if leaf.nbytes <= self.min_size_mb * 2**20:
            return leaf.skip(f"at most {self.min_size_mb} MiB")
        fitting = [dim for dim in range(leaf.ndim) if leaf.fits(dim, self.axis)]
        if not fitting:
            return leaf.skip(
                f"no free dimension is a multiple of {leaf.axis_size(self.axis)}, or {self.axis!r} is in use"
            )
        # The last of equal dimensions, as in big_vision, so that the same strategy gives the same shardings.
        dim = max(fitting, key=lambda dim: (leaf.shape[dim], dim))
        return leaf.shard(dim, self.axis, f"largest free dim over {self.axis!r}")
