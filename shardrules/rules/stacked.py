"""`StackedShardingRule`: a rule written for one layer, applied to the layers stacked by `scan` or `filter_vmap`."""

from typing import final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.axes import Axis, as_axis
from shardrules.core.fields import integer
from shardrules.core.finding import Finding, shape_text
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.rule import LeavesShardingRule, ShardingRule, as_rule, decide
from shardrules.core.spec import Entries, axis_names, entries, make_spec


@final
@attrs.frozen
class StackedShardingRule(LeavesShardingRule):
    """Sets the leading dimensions of stacked arrays aside and lets another rule decide the rest.

    Arrays with fewer dimensions are left to other rules. The axes that split what is set aside are in use for the rule
    inside.

    **Arguments:**

    - `rule`: the rule for one layer. It sees the shape of one layer; a size limit of its own counts one layer.
    - `dims`: how many leading dimensions were stacked.
    - `axis`: the mesh axis to split the first of them over; by default they stay whole.

    ```python
    rule = sr.StackedShardingRule(sr.RegexShardingRule([("up", P(None, "model"))]))
    assert rule.apply({"up": np.ones((6, 4, 8))}) == {"up": P(None, None, "model")}
    ```
    """

    rule: ShardingRule = attrs.field(converter=as_rule("StackedShardingRule"))
    dims: int = attrs.field(default=1, converter=integer("dims", 1))
    axis: Axis | None = attrs.field(default=None, converter=attrs.converters.optional(as_axis))
    tree_budgets = ()  # a limit of the rule inside is for one layer

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns what the rule inside says of one layer, with the stacked dimensions before it.

        **Arguments:**

        - `leaves`: what to decide.

        **Returns:**

        A `Verdict`.
        """
        decisions: list[Decision] = []
        stacks: dict[int, tuple[Leaf, Entries]] = {}  # with what splits the leading dimensions
        for number, leaf in enumerate(leaves.items):
            if leaf.ndim < self.dims:
                few = f"fewer than {self.dims} dimension{'s' * (self.dims > 1)} to set aside"
                decisions.append(leaf.skip(few))
                continue
            spec = leaf.spec
            if self.axis is not None:
                decisions.append(leaf.try_refine(PartitionSpec(self.axis), ""))
                spec = decisions[number].spec
                if spec is None:
                    continue
            else:
                decisions.append(leaf.skip(""))
            stacks[number] = leaf, () if spec is None else entries(spec, leaf.ndim)[: self.dims]
        layers = leaves.select(list(stacks)).replace([self._one_layer(*one) for one in stacks.values()])
        verdict = decide(self.rule, layers)
        for (number, stack), decision in zip(stacks.items(), verdict.decisions, strict=True):
            decisions[number] = self._stack(*stack, decision)
        whole = {leaf.path: leaf for leaf, _ in stacks.values()}
        findings = [self._of_the_stack(found, whole.get(found.path)) for found in verdict.findings]
        return Verdict(tuple(decisions), tuple(findings))

    def _one_layer(self, leaf: Leaf, before: Entries) -> Leaf:
        spec = None if leaf.spec is None else make_spec(leaf.entries[self.dims :])
        axes = None if leaf.axes is None else leaf.axes[self.dims :]
        aside = (*leaf.aside, *axis_names(make_spec(before)))
        return attrs.evolve(leaf, shape=leaf.shape[self.dims :], spec=spec, axes=axes, aside=aside)

    def _stack(self, leaf: Leaf, before: Entries, decision: Decision) -> Decision:
        findings = tuple([self._of_the_stack(found, leaf) for found in decision.findings])
        decision = attrs.evolve(decision, findings=findings) if findings else decision
        if decision.spec is None and self.axis is None:
            return decision
        inner = () if decision.spec is None else entries(decision.spec)
        over = "" if self.axis is None else f", stacked over {self.axis!r}"
        if not inner and all(entry == () for entry in before):
            return decision  # P(): replicated on purpose stays as short as it was said
        before += ((),) * (self.dims - len(before))
        return Decision(make_spec((*before, *inner)), f"{decision.reason}{over}", decision.rule or self, findings)

    def _of_the_stack(self, found: Finding, leaf: Leaf | None) -> Finding:
        """A finding about one layer as one about the stack of them."""
        if leaf is None or found.shape is None:
            return found
        dim = found.dim if found.dim is None or found.dim < 0 else found.dim + self.dims
        message = f"in one layer, {shape_text(found.shape)}: {found.message}"
        return attrs.evolve(found, message=message, shape=leaf.shape, dim=dim)
