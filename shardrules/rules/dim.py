"""`DimShardingRule`: one dimension, one axis."""

from typing import final

import attrs

from shardrules.core.axes import Axis, as_axis, axis_tuple
from shardrules.core.fields import integer
from shardrules.core.finding import Finding, template
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.rule import LeafShardingRule, from_fields
from shardrules.core.spec import make_spec


@final
@attrs.frozen
class DimShardingRule(LeafShardingRule):
    """Splits dimension `dim`, which may be negative, over mesh axis `axis`.

    It does not check that the size is divisible: the plan reports that as an error, with the numbers.

    **Arguments:**

    - `axis`: a mesh axis, or a tuple of them.
    - `dim`: the dimension.
    - `ignore_ndim_error`: whether to skip arrays without that dimension, with a warning, instead of raising.

    ```python
    rule = sr.DimShardingRule("model", -1)
    assert rule.apply({"w": np.ones((4, 8))}) == {"w": P(None, "model")}
    ```
    """

    axis: Axis = attrs.field(converter=as_axis)
    dim: int = attrs.field(converter=integer("dim"))
    ignore_ndim_error: bool = False
    reads_index = "no"
    parts = ()
    named_axes = from_fields(lambda rule: (rule.axis,))

    def decide(self, leaf: Leaf) -> Decision:
        """Returns the decision for `leaf`."""
        dim = self.dim
        if not -leaf.ndim <= dim < leaf.ndim:
            why = f"Cannot {self._describe_call(leaf)}: it has {leaf.ndim} dimensions"
            hint = "Apply the rule to fewer leaves with RegexShardingRule, or pass ignore_ndim_error=True"
            if not self.ignore_ndim_error:
                raise leaf.error(self, why, hint)
            finding = Finding("warning", "no-such-dim", why, leaf.path, hint, leaf.shape, dim, rule=repr(self))
            return Decision(None, f"it has no dim {dim}", findings=(finding,))
        # The plan could report this as a conflict too, but big_vision's users know this message.
        if leaf.entries[dim % leaf.ndim] != ():
            raise leaf.error(
                self, f"Already sharded: {self._describe_call(leaf)}", "Let the earlier rule split another dimension"
            )
        return leaf.shard(dim, self.axis)

    def _describe_call(self, leaf: Leaf) -> str:
        so_far = tuple(make_spec(leaf.entries).partitions)
        name = template(leaf.path)  # without indices, so that equal layers give the same text and become one finding
        return f"shard_dim({'+'.join(axis_tuple(self.axis))}, {self.dim}): name={name} cur_spec={so_far}"
