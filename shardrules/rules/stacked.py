"""`StackedShardingRule`: a rule written for one layer, applied to the layers stacked by `scan` or `filter_vmap`."""

from typing import final

import attrs

from shardrules.core.axes import Axis, as_axis, axis_tuple
from shardrules.core.fields import integer
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.rule import LeavesShardingRule, ShardingRule, decide, derived
from shardrules.core.spec import entries, make_spec
from shardrules.core.tree import ReadsIndex


@final
@attrs.frozen
class StackedShardingRule(LeavesShardingRule):
    """Sets the leading dimensions of stacked arrays aside and lets another rule decide the rest.

    Arrays with fewer dimensions are left to other rules.

    **Arguments:**

    - `rule`: the rule for one layer. It sees the shape of one layer; a size limit of its own counts one layer.
    - `dims`: how many leading dimensions were stacked.
    - `axis`: the mesh axis to split the first of them over; by default they stay whole.

    ```python
    rule = sr.StackedShardingRule(sr.RegexShardingRule([("up", P(None, "model"))]))
    assert rule.apply({"up": np.ones((6, 4, 8))}) == {"up": P(None, None, "model")}
    ```
    """

    rule: ShardingRule
    dims: int = attrs.field(default=1, converter=integer("dims", 1))
    axis: Axis | None = attrs.field(default=None, converter=attrs.converters.optional(as_axis))
    parts: tuple[ShardingRule, ...] = derived(lambda self: (self.rule,))
    reads_index: ReadsIndex = derived(lambda self: self.rule.reads_index)

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns what the rule inside says of one layer, with the stacked dimensions before it.

        **Arguments:**

        - `leaves`: what to decide.

        **Returns:**

        A `Verdict`.
        """
        deep = [number for number, leaf in enumerate(leaves.items) if leaf.ndim >= self.dims]
        chosen = leaves.select(deep)
        verdict = decide(self.rule, chosen.replace(map(self._one_layer, chosen.items)))
        stacked = dict(zip(deep, map(self._stack, chosen.items, verdict.decisions), strict=True))
        few = f"fewer than {self.dims} dimension{'s' * (self.dims > 1)} to set aside"
        decisions = [stacked.get(number) or leaf.skip(few) for number, leaf in enumerate(leaves.items)]
        return Verdict(tuple(decisions), verdict.findings, verdict.idle)

    def _one_layer(self, leaf: Leaf) -> Leaf:
        spec = None if leaf.spec is None else make_spec(entries(leaf.spec, leaf.ndim)[self.dims :])
        axes = None if leaf.axes is None else leaf.axes[self.dims :]
        return attrs.evolve(leaf, shape=leaf.shape[self.dims :], spec=spec, axes=axes)

    def _stack(self, leaf: Leaf, decision: Decision) -> Decision:
        if decision.spec is None and self.axis is None:
            return decision
        before = leaf.entries[: self.dims]
        if self.axis is not None:
            before = (axis_tuple(self.axis), *before[1:])
        inner = () if decision.spec is None else entries(decision.spec)
        over = "" if self.axis is None else f", stacked over {self.axis!r}"
        if not inner and all(entry == () for entry in before):
            return decision  # P(): replicated on purpose stays as short as it was said
        return Decision(
            make_spec((*before, *inner)), f"{decision.reason}{over}", decision.rule or self, decision.findings
        )
