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
    """Applies rules in order: for each leaf the first with an opinion wins. Later rules see only the remaining leaves.

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
    empty_is_opinion: bool = True

    def __init__(self, *rules: ShardingRule, empty_is_opinion: bool = True) -> None:
        self.__attrs_init__(as_rules(rules, "CompositeShardingRule"), empty_is_opinion)  # pyright: ignore[reportAttributeAccessIssue]

    def __repr__(self) -> str:
        literal = [] if self.empty_is_opinion else ["empty_is_opinion=False"]
        return f"CompositeShardingRule({', '.join([*map(repr, self.rules), *literal])})"

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns the first opinion on each of `leaves`; where no rule has one, the reasons of all rules."""
        decisions: dict[int, Decision] = {}
        declined: list[list[str]] = [[] for _ in leaves.items]
        findings: list[Finding] = []
        # A rule with a limit for the whole tree counts the leaves that the rules before it have decided.
        settled: list[tuple[Leaf, int]] = []
        undecided = list(range(len(leaves.items)))
        for rule in self.rules:
            if not undecided and leaves.items:
                findings.append(_shadowed_rule(rule))
                continue
            verdict = decide(rule, leaves.select(undecided, settled))
            findings += verdict.findings
            remaining: list[int] = []
            for kind_index, decision in zip(undecided, verdict.decisions, strict=True):
                if self._wins(decision):
                    decisions[kind_index] = decision
                    leaf = attrs.evolve(leaves.items[kind_index], spec=decision.spec)
                    settled.append((leaf, leaves.counts[kind_index]))
                else:
                    declined[kind_index].append(decision.reason)
                    remaining.append(kind_index)
            undecided = remaining
        for kind_index in undecided:
            decisions[kind_index] = leaves.items[kind_index].skip("; ".join(dict.fromkeys(declined[kind_index])))
        return Verdict(tuple([decisions[index] for index in range(len(leaves.items))]), tuple(findings))

    # Other libraries know no `None`: there an empty spec is how a rule passes a leaf on.
    def _wins(self, decision: Decision) -> bool:
        return decision.spec is not None and (self.empty_is_opinion or bool(axis_names(decision.spec)))


def _shadowed_rule(rule: ShardingRule) -> Finding:
    return Finding(
        "note",
        "shadowed-rule",
        f"every leaf is decided before {type(rule).__name__} applies",
        remedy="Remove it, unless it is for other trees",
        rule="CompositeShardingRule",
    )
