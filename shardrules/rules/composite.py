"""`CompositeShardingRule`: the first rule with an opinion wins."""

from typing import final

import attrs

from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.rule import LeavesShardingRule, ShardingRule, as_rules, decide
from shardrules.core.spec import axis_names


@final
@attrs.frozen(init=False, repr=False)
class CompositeShardingRule(LeavesShardingRule):
    """Asks rules in order; for each leaf the first with an opinion wins. Later rules see only what is left.

    **Arguments:**

    - `rules`: any rules.
    - `empty_is_opinion`: whether `P()`, *replicate on purpose*, wins. `False` gives the reading of other libraries, in
        which the first spec that names an axis wins.

    ```python
    rule = sr.CompositeShardingRule(sr.RegexShardingRule([("norm", P())]), sr.DimShardingRule("model", 0))
    assert rule.apply({"norm": np.ones(8), "w": np.ones((8, 4))}) == {"norm": P(), "w": P("model", None)}
    ```
    """

    rules: tuple[ShardingRule, ...]
    empty_is_opinion: bool = True

    def __init__(self, *rules: ShardingRule, empty_is_opinion: bool = True) -> None:
        self.__attrs_init__(as_rules(rules, "CompositeShardingRule"), empty_is_opinion)  # pyright: ignore[reportAttributeAccessIssue]

    def __repr__(self) -> str:
        literal = [] if self.empty_is_opinion else ["empty_is_opinion=False"]
        return f"CompositeShardingRule({', '.join([*map(repr, self.rules), *literal])})"

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns the first opinion on each leaf.

        **Arguments:**

        - `leaves`: what to decide.

        **Returns:**

        A `Verdict`; a leaf on which no rule has an opinion keeps what each of them said.
        """
        decided: dict[int, Decision] = {}
        declined: list[list[str]] = [[] for _ in leaves.items]
        findings: list[Finding] = []
        settled: list[tuple[Leaf, int]] = []
        left = list(range(len(leaves.items)))
        for rule in self.rules:
            if not left and leaves.items:
                findings.append(_never_asked(rule))
                continue
            verdict = decide(rule, leaves.select(left, settled))
            findings += verdict.findings
            still: list[int] = []
            for number, decision in zip(left, verdict.decisions, strict=True):
                if self._wins(decision):
                    decided[number] = decision
                    settled.append((attrs.evolve(leaves.items[number], spec=decision.spec), leaves.counts[number]))
                else:
                    declined[number].append(decision.reason)
                    still.append(number)
            left = still
        for number in left:
            decided[number] = leaves.items[number].skip("; ".join(dict.fromkeys(declined[number])))
        return Verdict(tuple([decided[number] for number in range(len(leaves.items))]), tuple(findings))

    def _wins(self, decision: Decision) -> bool:
        return decision.spec is not None and (self.empty_is_opinion or bool(axis_names(decision.spec)))


def _never_asked(rule: ShardingRule) -> Finding:
    return Finding(
        "note",
        "shadowed-rule",
        f"every leaf is decided before {type(rule).__name__} is asked",
        remedy="Take it out, unless it stands there for other trees",
        rule="CompositeShardingRule",
    )
