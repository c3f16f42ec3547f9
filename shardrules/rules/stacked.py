"""`StackedShardingRule`: a rule written for one layer, applied to the layers stacked by `scan` or `filter_vmap`."""

from typing import final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.axes import Axis, as_axis
from shardrules.core.fields import integer
from shardrules.core.finding import Finding, shape_text
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.rule import LeavesShardingRule, ShardingRule, as_rule, decide, from_fields
from shardrules.core.spec import Entries, axis_names, entries, make_spec


@final
@attrs.frozen
class StackedShardingRule(LeavesShardingRule):
    """Sets the leading dimensions of stacked arrays aside and lets another rule decide the others.

    It has no opinion on arrays with fewer dimensions. Axes that split the dimensions set aside are in use for the inner
    rule.

    **Arguments:**

    - `rule`: the rule for one layer. It sees the shape of one layer, so its size limits are for one layer.
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
    tree_budgets = ()  # a limit of the inner rule is for one layer
    named_axes = from_fields(lambda rule: (rule.axis,))

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns the inner rule's decisions for one layer of `leaves`, with the stacked dimensions before them."""
        decisions: list[Decision] = []
        stacks: dict[int, tuple[Leaf, Entries]] = {}  # by kind index, with the entries of the leading dimensions
        for kind_index, leaf in enumerate(leaves.items):
            if leaf.ndim < self.dims:
                decisions.append(leaf.skip(f"fewer than {self.dims} dimension{'s' * (self.dims > 1)} to set aside"))
                continue
            # The leading dimensions are decided first: their axes are in use for the inner rule.
            spec = leaf.spec
            if self.axis is not None:
                decisions.append(leaf.try_refine(PartitionSpec(self.axis), ""))
                spec = decisions[kind_index].spec
                if spec is None:
                    continue
            else:
                decisions.append(leaf.skip(""))
            stacks[kind_index] = leaf, () if spec is None else entries(spec, leaf.ndim)[: self.dims]
        layers = leaves.select(list(stacks)).replace([self._one_layer(*stack) for stack in stacks.values()])
        verdict = decide(self.rule, layers)
        for (kind_index, stack), decision in zip(stacks.items(), verdict.decisions, strict=True):
            decisions[kind_index] = self._stack(*stack, decision)
        leaf_by_path = {leaf.path: leaf for leaf, _ in stacks.values()}
        findings = [self._stack_finding(finding, leaf_by_path.get(finding.path)) for finding in verdict.findings]
        return Verdict(tuple(decisions), tuple(findings))

    def _one_layer(self, leaf: Leaf, leading: Entries) -> Leaf:
        spec = None if leaf.spec is None else make_spec(leaf.entries[self.dims :])
        # Layers that were mapped without a name for the new dimension have names for one layer.
        axes = leaf.axes
        if axes is not None and len(axes) != leaf.ndim - self.dims:
            axes = axes[self.dims :]
        outer_axes = (*leaf.outer_axes, *axis_names(make_spec(leading)))
        return attrs.evolve(leaf, shape=leaf.shape[self.dims :], spec=spec, axes=axes, outer_axes=outer_axes)

    def _stack(self, leaf: Leaf, leading: Entries, decision: Decision) -> Decision:
        findings = tuple([self._stack_finding(finding, leaf) for finding in decision.findings])
        decision = attrs.evolve(decision, findings=findings) if findings else decision
        # No opinion about a layer stays none, unless the stack itself is split.
        if decision.spec is None and self.axis is None:
            return decision
        inner = () if decision.spec is None else entries(decision.spec)
        over = "" if self.axis is None else f", stacked over {self.axis!r}"
        # An explicit P() stays as short as it is.
        if not inner and all(entry == () for entry in leading):
            return decision
        leading += ((),) * (self.dims - len(leading))
        return Decision(make_spec((*leading, *inner)), f"{decision.reason}{over}", decision.rule or self, findings)

    def _stack_finding(self, finding: Finding, leaf: Leaf | None) -> Finding:
        """A finding about one layer as a finding about the stack."""
        if leaf is None or finding.shape is None:
            return finding
        # A negative dimension counts from the end, which the stack shares with a layer.
        dim = finding.dim if finding.dim is None or finding.dim < 0 else finding.dim + self.dims
        message = f"in one layer, {shape_text(finding.shape)}: {finding.message}"
        return attrs.evolve(finding, message=message, shape=leaf.shape, dim=dim)
