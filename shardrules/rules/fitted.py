"""`FittedShardingRule`: the only place where a misfit is forgiven, and never in silence."""

from collections.abc import Iterator
from typing import final

import attrs
from jax.sharding import AbstractMesh

from shardrules.core.axes import mesh_sizes
from shardrules.core.errors import suggest
from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.rule import LeavesShardingRule, ShardingRule, as_rule, decide
from shardrules.core.spec import UNCONSTRAINED, divisible_prefix, entries, make_spec, spec_repr


@final
@attrs.frozen
class FittedShardingRule(LeavesShardingRule):
    """Fits what another rule decides to the mesh and the shapes at hand; each thing it drops is a finding.

    Axes that the mesh lacks are dropped, then those at the end of a dimension's tuple until the rest divides it. Where
    nothing is left of a spec the rule has no opinion. In a chain, what the rules before have decided stays as it is.

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
        """Returns the fitted decisions of the rule inside.

        **Arguments:**

        - `leaves`: what to decide.

        **Returns:**

        A `Verdict`.
        """
        verdict, lacking = self._ask(leaves)
        fitted = [_fit(leaf, one) for leaf, one in zip(leaves.items, verdict.decisions, strict=True)]
        told = dict.fromkeys(found.axis for one in fitted for found in one.findings)
        unseen = [_unseen(name, leaves.items[0]) for name in lacking if name not in told]
        return Verdict(tuple(fitted), (*verdict.findings, *unseen))

    def _ask(self, leaves: Leaves) -> tuple[Verdict, list[str]]:
        """What the rule inside says, and the axes that it asked for and the mesh lacks.

        A rule that looks at the size of an axis refuses one that is not there. So it is asked again about a mesh where
        that axis has size 1, until there is no such refusal.
        """
        sizes = mesh_sizes(leaves.items[0].mesh)
        lacking: list[str] = []
        asked = leaves
        while True:
            trial = attrs.evolve(asked, calls=[])
            verdict = decide(self.rule, trial)
            refused = (found.axis for found in verdict.findings if found.code == "conflict" and found.axis is not None)
            more = [name for name in dict.fromkeys(refused) if name not in sizes and name not in lacking]
            if not more:
                leaves.calls.extend(trial.calls)
                return verdict, lacking
            lacking += more
            known = {**sizes, **dict.fromkeys(lacking, 1)}
            mesh = AbstractMesh(tuple(known.values()), tuple(known))
            asked = leaves.replace(attrs.evolve(leaf, mesh=mesh) for leaf in leaves.items)


def _unseen(name: str, leaf: Leaf) -> Finding:
    why = f"the mesh has no axis {name!r}{suggest(name, leaf.sizes)}: the rule inside goes without it"
    remedy = "Correct the rule inside, if this is not what is meant"
    return Finding("warning", "fitted", why, remedy=remedy, axis=name, rule="FittedShardingRule")


def _fit(leaf: Leaf, decision: Decision) -> Decision:
    if decision.spec is None:
        return decision
    asked, before = entries(decision.spec), leaf.entries
    findings: list[Finding] = []
    if len(asked) > leaf.ndim:
        why = f"{spec_repr(decision.spec)} has {len(asked)} entries for {leaf.ndim} dimensions: the last were cut"
        findings.append(
            Finding("warning", "fitted", why, leaf.path, "Correct the spec", leaf.shape, rule="FittedShardingRule")
        )
    kept = []
    for dim, entry in enumerate(asked[: leaf.ndim]):
        if entry is UNCONSTRAINED or entry == before[dim]:
            kept.append(entry)
            continue
        known = tuple(name for name in entry if name in leaf.sizes)
        fits = divisible_prefix(known, leaf.shape[dim], leaf.sizes)
        kept.append(fits)
        findings += _dropped(leaf, dim, entry, known, fits)
    if not findings:
        return decision
    reason = f"{decision.reason}; fitted from {spec_repr(decision.spec)}"
    found = (*decision.findings, *findings)
    if all(entry == () for entry in kept) and not all(entry == () for entry in asked):
        return Decision(None, f"{reason}, of which nothing is left", None, found)
    return Decision(make_spec(tuple(kept)), reason, decision.rule, found)


def _dropped(
    leaf: Leaf, dim: int, asked: tuple[str, ...], known: tuple[str, ...], fits: tuple[str, ...]
) -> Iterator[Finding]:
    for name in asked:
        if name in fits:
            continue
        if name not in known:
            why = f"the mesh has no axis {name!r}{suggest(name, leaf.sizes)}"
        else:
            why = f"axis {name!r} of size {leaf.sizes[name]} does not divide what is left of {leaf.shape[dim]}"
        yield Finding(
            "warning",
            "fitted",
            f"{why}: dropped from dimension {dim}",
            leaf.path,
            "Correct the rule inside, if this is not what is meant",
            leaf.shape,
            dim,
            name,
            rule="FittedShardingRule",
        )
