"""`DimShardingRule`: one dimension, one axis."""

from typing import final

import attrs

from shardrules.core.axes import Axis, as_axis, axis_tuple
from shardrules.core.fields import integer
from shardrules.core.finding import Finding, template
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.rule import LeafShardingRule
from shardrules.core.spec import make_spec


@final
@attrs.frozen
class DimShardingRule(LeafShardingRule):
    """Splits dimension `dim`, which may be negative, over mesh axis `axis`.

    Whether the size divides is not asked: the plan reports it as an error, with the numbers.

    **Arguments:**

    - `axis`: a mesh axis, or a tuple of them.
    - `dim`: the dimension.
    - `ignore_ndim_error`: leave arrays without that dimension alone, with a warning, instead of refusing them.

    ```python
    rule = sr.DimShardingRule("model", -1)
    assert rule.apply({"w": np.ones((4, 8))}) == {"w": P(None, "model")}
    ```
    """

    axis: Axis = attrs.field(converter=as_axis)
    dim: int = attrs.field(converter=integer("dim"))
    ignore_ndim_error: bool = False
    reads_index = "no"

    def decide(self, leaf: Leaf) -> Decision:
        """Returns the decision for one leaf.

        **Arguments:**

        - `leaf`: the array.

        **Returns:**

        A `Decision`.
        """
        dim = self.dim
        if not -leaf.ndim <= dim < leaf.ndim:
            why = f"Cannot {self._call(leaf)}: it has {leaf.ndim} dimensions"
            hint = "Aim the rule at fewer leaves with RegexShardingRule, or pass ignore_ndim_error=True"
            if not self.ignore_ndim_error:
                raise leaf.error(self, why, hint)
            found = Finding("warning", "no-such-dim", why, leaf.path, hint, leaf.shape, dim, rule=repr(self))
            return Decision(None, f"there is no dim {dim}", findings=(found,))
        if leaf.entries[dim % leaf.ndim] != ():
            raise leaf.error(
                self, f"Already sharded: {self._call(leaf)}", "Let the rule that comes first take another dimension"
            )
        return leaf.shard(dim, self.axis)

    def _call(self, leaf: Leaf) -> str:
        so_far = tuple(make_spec(leaf.entries).partitions)
        name = template(leaf.path)  # equal layers say the same, and so become one finding
        return f"shard_dim({'+'.join(axis_tuple(self.axis))}, {self.dim}): name={name} cur_spec={so_far}"
