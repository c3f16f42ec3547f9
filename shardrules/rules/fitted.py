"""`FittedShardingRule`: the only place where specs are adapted to a mesh, and never silently."""

from typing import final

import attrs
from jax.sharding import AbstractMesh

from shardrules.core.axes import mesh_sizes
from shardrules.core.errors import suggest
from shardrules.core.finding import UNDECIDED_CODES, Finding
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.rule import LeavesShardingRule, ShardingRule, as_rule, decide
from shardrules.core.spec import UNCONSTRAINED, divisible_prefix, entries, make_spec, spec_repr


@final
@attrs.frozen
class FittedShardingRule(LeavesShardingRule):
    """Fits the specs of another rule to the mesh and the shapes; each axis that it drops is a finding.

    It drops axes that the mesh lacks, then axes at the end of a dimension's tuple until the rest divides it. Where
    nothing remains of a spec the rule has no opinion. In a chain, earlier decisions stay as they are.

    **Arguments:**

    - `rule`: the rule whose specs are fitted.

    ```python
    rule = sr.FittedShardingRule(sr.RegexShardingRule([(".*", P(("data", "expert"), "model"))]))
    plan = rule.plan({"w": np.ones((8, 7))}, sr.mesh_shape("data:4,model:2"))
    assert plan.specs == {"w": P("data", None)}
    assert [finding.code for finding in plan.findings if finding.code == "fitted"] == ["fitted", "fitted"]
    ```
    """

    rule: ShardingRule = attrs.field(converter=as_rule("FittedShardingRule"))

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns the inner rule's decisions for `leaves`, fitted."""
        verdict, missing = self._decide_inside(leaves)
        fitted = [_fit(leaf, decision) for leaf, decision in zip(leaves.items, verdict.decisions, strict=True)]
        # An axis that a decision lost has its finding there; the rest are axes that the rule only asked for.
        reported = dict.fromkeys(finding.axis for decision in fitted for finding in decision.findings)
        findings = [_missing_axis(name, leaves.items[0]) for name in missing if name not in reported]
        return Verdict(tuple(fitted), (*verdict.findings, *findings))

    def _decide_inside(self, leaves: Leaves) -> tuple[Verdict, list[str]]:
        """The verdict of the inner rule, and the axes that it needs and the mesh lacks.

        A rule that reads the size of a missing axis raises. So it decides again on a mesh where that axis has size 1,
        until it raises for no missing axis.
        """
        sizes = mesh_sizes(leaves.items[0].mesh)
        missing: list[str] = []
        attempt = leaves
        while True:
            # Only the calls of the last attempt count: what the others found is about a mesh without the axis.
            trial = attrs.evolve(attempt, calls=[])
            verdict = decide(self.rule, trial)
            axes = [finding.axis for finding in verdict.findings if finding.code in UNDECIDED_CODES and finding.axis]
            new = [name for name in dict.fromkeys(axes) if name not in sizes and name not in missing]
            if not new:
                leaves.calls.extend(trial.calls)
                return verdict, missing
            missing += new
            extended = {**sizes, **dict.fromkeys(missing, 1)}
            mesh = AbstractMesh(tuple(extended.values()), tuple(extended))
            attempt = leaves.replace(attrs.evolve(leaf, mesh=mesh) for leaf in leaves.items)


_REMEDY = "Correct the inner rule if this is not intended"


def _missing_axis(name: str, leaf: Leaf) -> Finding:
    why = f"unknown axis {name!r}{suggest(name, leaf.sizes)}: the inner rule ignores it"
    return Finding("warning", "fitted", why, remedy=_REMEDY, axis=name, rule="FittedShardingRule")


def _fit(leaf: Leaf, decision: Decision) -> Decision:
    if decision.spec is None:
        return decision
    requested, before = entries(decision.spec), leaf.entries
    findings: list[Finding] = []
    if len(requested) > leaf.ndim:
        why = f"{spec_repr(decision.spec)} has {len(requested)} entries for {leaf.ndim} dimensions: the last were cut"
        findings.append(
            Finding("warning", "fitted", why, leaf.path, "Correct the spec", leaf.shape, rule="FittedShardingRule")
        )
    kept = []
    for dim, entry in enumerate(requested[: leaf.ndim]):
        # Earlier decisions stay as they are.
        if entry is UNCONSTRAINED or entry == before[dim]:
            kept.append(entry)
            continue
        # Axes that the mesh lacks go first, so that the others of the entry may still split the dim.
        available = tuple(name for name in entry if name in leaf.sizes)
        fits = divisible_prefix(available, leaf.shape[dim], leaf.sizes)
        kept.append(fits)
        findings += [_dropped(leaf, dim, name) for name in entry if name not in fits]
    if not findings:
        return decision
    reason = f"{decision.reason}; fitted from {spec_repr(decision.spec)}"
    all_findings = (*decision.findings, *findings)
    # A spec that fitting empties is no opinion, and later rules may decide. A `P()` of the rule itself stays.
    if all(entry == () for entry in kept) and not all(entry == () for entry in requested):
        return Decision(None, f"{reason}, which leaves nothing", None, all_findings)
    return Decision(make_spec(tuple(kept)), reason, decision.rule, all_findings)


def _dropped(leaf: Leaf, dim: int, name: str) -> Finding:
    if name not in leaf.sizes:
        why = f"unknown axis {name!r}{suggest(name, leaf.sizes)}"
    else:
        why = f"axis {name!r} of size {leaf.sizes[name]} does not divide what remains of {leaf.shape[dim]}"
    why = f"{why}: dropped from dimension {dim}"
    return Finding("warning", "fitted", why, leaf.path, _REMEDY, leaf.shape, dim, name, rule="FittedShardingRule")
