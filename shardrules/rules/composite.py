"""`CompositeShardingRule`: the first rule with an opinion wins."""

from typing import final

import attrs

from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.rule import LeavesShardingRule, ShardingRule, as_rules, decide, from_fields
from shardrules.core.spec import axis_names


@final
@attrs.frozen(init=False, repr=False)
class CompositeShardingRule(LeavesShardingRule):
    """Applies rules in order. For each leaf the first rule with an opinion wins; later rules do not see the leaf.

    **Arguments:**

    - `rules`: any rules.
    - `empty_is_opinion`: whether `P()`, an explicit *replicate*, wins. With `False` the first spec that names an axis
        wins, as in other libraries.

    ```python
    rule = sr.CompositeShardingRule(sr.RegexShardingRule([("norm", P())]), sr.DimShardingRule("model", 0))
    assert rule.apply({"norm": np.ones(8), "w": np.ones((8, 4))}) == {"norm": P(), "w": P("model", None)}
    ```
    """

    rules: tuple[ShardingRule, ...]
    parts = from_fields(lambda rule: rule.rules)
    empty_is_opinion: bool = True

    def __init__(self, *rules: ShardingRule, empty_is_opinion: bool = True) -> None:
        self.__attrs_init__(as_rules(rules, "CompositeShardingRule"), empty_is_opinion)  # pyright: ignore[reportAttributeAccessIssue]

    def __repr__(self) -> str:
        keywords = [] if self.empty_is_opinion else ["empty_is_opinion=False"]
        return f"CompositeShardingRule({', '.join([*map(repr, self.rules), *keywords])})"

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns the first opinion on each of `leaves`; where no rule has one, the reasons of all rules."""
        decisions: dict[int, Decision] = {}
        declined: list[list[str]] = [[] for _ in leaves.items]
        findings: list[Finding] = []
        # Decided by earlier rules: a later rule with a budget for the whole tree counts these leaves, too.
        settled: list[tuple[Leaf, int]] = []
        undecided = list(range(len(leaves.items)))
        for rule in self.rules:
            if not undecided and leaves.items:
                why = f"every leaf is decided before {type(rule).__name__} applies"
                remedy = "Remove it, unless it is for other trees"
                findings.append(Finding("note", "shadowed-rule", why, remedy=remedy, rule="CompositeShardingRule"))
                continue
            verdict = decide(rule, leaves.select(undecided, settled))
            findings += verdict.findings
            remaining: list[int] = []
            for position, decision in zip(undecided, verdict.decisions, strict=True):
                if self._wins(decision):
                    decisions[position] = decision
                    leaf = attrs.evolve(leaves.items[position], spec=decision.spec)
                    settled.append((leaf, leaves.counts[position]))
                else:
                    declined[position].append(decision.reason)
                    remaining.append(position)
            undecided = remaining
        for position in undecided:
            decisions[position] = leaves.items[position].skip("; ".join(dict.fromkeys(declined[position])))
        return Verdict(tuple([decisions[position] for position in range(len(leaves.items))]), tuple(findings))

    def _wins(self, decision: Decision) -> bool:
        # Rules of other libraries cannot return `None`: they leave an array to the next rule by an empty spec.
        return decision.spec is not None and (self.empty_is_opinion or bool(axis_names(decision.spec)))
