"""The checks of what rules return: a rule of a user's own may return anything, or raise."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.errors import ConfigTypeError, PlanError, RuleError, SpecError
from shardrules.core.finding import UNDECIDED_CODES, Finding
from shardrules.core.leaf import Decision, Leaf, conflict, rule_text, undecided
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.spec import canonical, checked_spec
from shardrules.core.tree import flatten_specs

_RAISED_BY = "raised by the rule "


def name_rule(error: Exception, rule: object, leaf: str = "") -> None:
    """Adds a note with the rule that raised, and the leaf if it is known, unless a rule inside has added its own."""
    if not any(note.startswith(_RAISED_BY) for note in getattr(error, "__notes__", ())):
        # A rule may hold many thousand specs; this many characters show which one it is.
        error.add_note(f"{_RAISED_BY}{rule_text(rule):.200}{leaf}")


def checked_verdict(rule: object, leaves: Leaves, ask: Callable[[Leaves], Verdict]) -> Verdict:
    """Returns what `ask` says for `rule`: each decision names a rule, and conflicts become findings of the verdict."""
    try:
        verdict = ask(leaves)
    except RuleError as error:
        findings = [attrs.evolve(conflict(error), rule=error.rule or rule_text(rule))]
        # What a mesh lacks it lacks for every leaf.
        if error.code == "unknown-axis":
            findings = [
                attrs.evolve(findings[0], path=leaf.path, shape=leaf.shape, count=count)
                for leaf, count in zip(leaves.items, leaves.counts, strict=True)
            ]
        return Verdict(tuple([leaf.skip(error.why) for leaf in leaves.items]), tuple(findings))
    except Exception as error:
        name_rule(error, rule)
        raise
    if not isinstance(verdict, Verdict):
        raise ConfigTypeError(
            f"{rule_text(rule)}: decide_all returned {verdict!r:.80}, not a Verdict(decisions, findings)"
        )
    if len(verdict.decisions) != len(leaves.items):
        raise PlanError(
            f"{rule_text(rule)}: decide_all returned {len(verdict.decisions)} decisions for {len(leaves.items)} leaves"
        )
    # Most decisions come from rules inside, and are complete: in a deep tree of rules every call here counts.
    decisions = tuple(
        [
            decision
            if isinstance(decision, Decision) and (decision.rule is not None or decision.spec is None)
            else _completed(rule, leaf, decision)
            for leaf, decision in zip(leaves.items, verdict.decisions, strict=True)
        ]
    )
    findings = verdict.findings
    if any(decision.findings for decision in decisions):
        # A composite may drop a decision without an opinion, so conflicts must not stay in decisions.
        findings = (*findings, *conflicts(rule, decisions, leaves.counts))
        decisions = tuple(map(_without_conflicts, decisions))
    return Verdict(decisions, findings, verdict.idle)


def conflicts(rule: object, decisions: Sequence[Decision], counts: Sequence[int]) -> Iterator[Finding]:
    for decision, count in zip(decisions, counts, strict=True):
        for finding in decision.findings:
            if finding.code in UNDECIDED_CODES:
                yield attrs.evolve(finding, count=finding.count * count, rule=finding.rule or rule_text(rule))


def _without_conflicts(decision: Decision) -> Decision:
    if not any(finding.code in UNDECIDED_CODES for finding in decision.findings):
        return decision
    findings = tuple([finding for finding in decision.findings if finding.code not in UNDECIDED_CODES])
    return attrs.evolve(decision, findings=findings)


def _completed(rule: object, leaf: Leaf, decision: Any) -> Decision:
    """The decision with the rule that made it; one that is invalid becomes a conflict."""
    if not isinstance(decision, Decision):
        why = f"decide returned {decision!r}, not a Decision"
        hint = "Return leaf.shard(dim, axis), leaf.replicate(why), leaf.skip(why) or Decision(spec, reason)"
        return undecided(leaf.error(rule, why, hint))
    try:
        return Decision(checked_spec(decision.spec), decision.reason, rule, decision.findings)
    except SpecError as error:
        return undecided(leaf.error(rule, str(error)))


def verdict_by_apply(rule: object, apply: Callable[[Any], Any], leaves: Leaves) -> Verdict:
    """Returns the verdict of a rule that only has `apply`: it gets the whole tree, and an empty spec means no opinion.

    Rules inside it find the mesh on the shapes, which takes precedence over the one in force.
    """
    # The rule sees the whole tree, with the leaves in question as other rules have changed them.
    kinds = list(leaves.survey.kinds)
    for leaf, kind_index in zip(leaves.items, leaves.kind_indices, strict=True):
        kinds[kind_index] = leaf
    tree = leaves.survey.structs(kinds, leaves.items[0].mesh)
    specs = flatten_specs(apply(tree), leaves.survey.treedef, f"what {rule_text(rule)} returned")
    # Of the leaves of a kind the last one decides. By default each leaf is a kind: such rules may read any index.
    kind_specs = dict(zip(leaves.survey.kind_of, specs, strict=True))
    decisions: list[Decision] = []
    for leaf, kind_index in zip(leaves.items, leaves.kind_indices, strict=True):
        kind_spec = kind_specs[kind_index]
        try:
            spec = PartitionSpec() if kind_spec is None else checked_spec(kind_spec)
        except SpecError as error:
            decisions.append(undecided(leaf.error(rule, f"apply returned an invalid spec: {error}")))
            continue
        if canonical(spec) == PartitionSpec():
            decisions.append(leaf.skip("apply returned an empty spec"))
        else:
            decisions.append(leaf.try_refine(spec, "from apply"))
    return Verdict(tuple(decisions))
