"""`RegexShardingRule`: path patterns, in order; the first that matches decides."""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.errors import PatternError, SpecError
from shardrules.core.fields import integer, one_of
from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.rule import LeavesShardingRule, ShardingRule, decide, from_fields
from shardrules.core.spec import checked_spec, spec_code, spec_key
from shardrules.core.tree import ReadsIndex, widest
from shardrules.rules.pattern import Match, check_beginning, compile_pattern, reads_index
from shardrules.rules.text import parse_rule

PatternValue: TypeAlias = PartitionSpec | ShardingRule | str | None
"""What a pattern stands for: a spec, a rule, a rule in text form, or `None` for no opinion."""

Unmatched: TypeAlias = Literal["skip", "replicate", "error"]
"""What becomes of a leaf that no pattern matches."""


def _as_pattern_pairs(
    rules: Iterable[tuple[str | re.Pattern[str], PatternValue]],
) -> tuple[tuple[str, PatternValue], ...]:
    try:
        given = [(pattern, value) for pattern, value in rules]
    except (TypeError, ValueError):
        raise PatternError(
            "RegexShardingRule takes (pattern, value) pairs in order, [('norm', P()), ('.*', P('data'))]; "
            f"got {rules!r}"
        ) from None
    pairs = tuple((_text(pattern), parse_rule(value) if isinstance(value, str) else value) for pattern, value in given)
    for pattern, value in pairs:
        if not (value is None or isinstance(value, PartitionSpec | ShardingRule)):
            raise PatternError(
                f"RegexShardingRule: {pattern!r} stands for {value!r}, which is neither a PartitionSpec, a rule, a "
                "rule in text form, nor None"
            )
        compile_pattern(pattern, "RegexShardingRule")
        if isinstance(value, PartitionSpec):
            try:
                checked_spec(value)
            except SpecError as error:
                raise PatternError(f"RegexShardingRule: {pattern!r}: {error}") from error
    return pairs


def _text(pattern: object) -> str:
    if isinstance(pattern, re.Pattern) and pattern.flags == re.UNICODE:
        return pattern.pattern
    if not isinstance(pattern, str):
        raise PatternError(
            f"RegexShardingRule: {pattern!r} is not a pattern as text. Flags go into it, '(?i)norm' for instance"
        )
    return pattern


def _check_beginnings(rule: "RegexShardingRule", field: object, match: Match) -> None:
    for pattern, _ in rule.rules if match != "search" else ():
        check_beginning(pattern, "RegexShardingRule")


def _reads_index(rule: "RegexShardingRule") -> ReadsIndex:
    own: list[ReadsIndex] = [reads_index(re.compile(pattern)) for pattern, _ in rule.rules]
    return widest([*own, *[part.reads_index for part in rule.parts]])


@final
@attrs.frozen
class RegexShardingRule(LeavesShardingRule):
    """Gives each leaf what the first pattern that matches its path stands for.

    Patterns are searched, not anchored: `w` is found in `down`. The plan tells how many leaves are left, which patterns
    match nothing, and which can never win.

    **Arguments:**

    - `rules`: (pattern, value) pairs. A value is a PartitionSpec, a rule (chains included), a rule in text form such as
        `"shard_dim('model', -1)|fsdp('data')"`, or `None`, which has no opinion and stops the search.
    - `match`: `"search"`, `"fullmatch"` or `"match"`, as in the `re` module.
    - `unmatched`: what becomes of a leaf that no pattern matches: `"skip"` (no opinion), `"replicate"`, or `"error"`.
    - `min_size`: arrays of fewer elements are replicated when a pattern matches them.

    ```python
    rule = sr.RegexShardingRule([("norm|bias", P()), ("_proj/weight", P("model", "data"))])
    specs = rule.apply({"q_proj": {"weight": np.ones((8, 8)), "bias": np.ones(8)}})
    assert specs == {"q_proj": {"weight": P("model", "data"), "bias": P()}}
    ```
    """

    rules: tuple[tuple[str, PatternValue], ...] = attrs.field(converter=_as_pattern_pairs, repr=spec_code, eq=spec_key)
    match: Match = attrs.field(
        default="search", converter=one_of("match", "search", "fullmatch", "match"), validator=_check_beginnings
    )
    unmatched: Unmatched = attrs.field(default="skip", converter=one_of("unmatched", "skip", "replicate", "error"))
    min_size: int = attrs.field(default=0, converter=integer("min_size", 0))
    reads_index = from_fields(_reads_index)

    @functools.cached_property
    def _delegates(self) -> tuple[tuple[int, ShardingRule], ...]:
        """The rules among the values, each with the index of its pattern, in the order in which they are asked."""
        rules = [(index, value) for index, (_, value) in enumerate(self.rules) if isinstance(value, ShardingRule)]
        # A rule with a limit for the whole tree comes last, and sees what became of all other leaves.
        return tuple(sorted(rules, key=lambda pair: bool(pair[1].tree_budgets)))

    @functools.cached_property
    def _matchers(self) -> tuple[Callable[[str], object], ...]:
        return tuple(getattr(re.compile(pattern), self.match) for pattern, _ in self.rules)

    @functools.cached_property
    def _ready(self) -> tuple[Decision | None, ...]:
        """The decision of each pattern whose value is a spec or `None`."""
        return tuple(_ready(self, pattern, value) for pattern, value in self.rules)

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns what the patterns say, asking the rules among their values about the leaves that they won.

        **Arguments:**

        - `leaves`: what to decide.

        **Returns:**

        A `Verdict`, with a finding for each pattern that matches nothing or only what earlier ones took.
        """
        matchers, ready = self._matchers, self._ready
        decisions: list[Decision] = []
        delegated: dict[int, list[int]] = {}
        won: set[int] = set()
        findings: list[Finding] = []
        idle: list[tuple[int, Finding]] = []
        for place, leaf in enumerate(leaves.items):
            path = leaf.path
            number = 0
            for matches in matchers:
                if matches(path):
                    break
                number += 1
            else:
                decisions.append(self._unmatched(leaf))
                continue
            won.add(number)
            decision = ready[number]
            if self.min_size and leaf.size < self.min_size:
                decision = Decision(PartitionSpec(), f"fewer than {self.min_size} elements", self)
            elif decision is None:
                delegated.setdefault(number, []).append(place)
                decision = leaf.skip("")
            if leaf.spec is not None and decision.spec is not None:
                decision = leaf.try_refine(decision.spec, decision.reason)
            decisions.append(decision)
        for number, rule in self._delegates:
            pattern = self.rules[number][0]
            places = delegated.get(number, [])
            settled = [
                (attrs.evolve(leaf, spec=one.spec), count)
                for leaf, one, count in zip(leaves.items, decisions, leaves.counts, strict=True)
                if one.spec is not None
            ]
            verdict = decide(rule, leaves.select(places, settled))
            findings += verdict.findings
            for place, decision in zip(places, verdict.decisions, strict=True):
                reason = f"{pattern!r}: {decision.reason}"
                decisions[place] = attrs.evolve(decision, reason=reason)
        for number in range(len(self.rules)):
            if number not in won:
                finding = self._idle(number, matchers[number], leaves)
                idle += [] if finding is None else [(number, finding)]
        return Verdict(tuple(decisions), tuple(findings), tuple(idle))

    def _unmatched(self, leaf: Leaf) -> Decision:
        if self.unmatched == "replicate":
            return leaf.try_refine(PartitionSpec(), "no pattern matches")
        if self.unmatched == "error":
            why = "no pattern matches"
            hint = "Add a pattern for it; ('.*', P()) at the end replicates what is left"
            finding = Finding("error", "conflict", why, leaf.path, hint, leaf.shape, rule="RegexShardingRule")
            return Decision(None, why, findings=(finding,))
        return leaf.skip("no pattern matches")

    def _idle(self, number: int, matches: Callable[[str], object], leaves: Leaves) -> Finding | None:
        pattern = self.rules[number][0]
        if number == len(self.rules) - 1 and matches("\0"):
            return None  # it matches whatever it is shown: a safety net that caught nothing
        if any(matches(leaf.path) for leaf in leaves.items):
            why = f"every leaf that pattern {pattern!r} matches is taken by an earlier pattern"
            remedy = "Put it before the patterns that take its leaves, or take it out"
            return Finding("warning", "shadowed-pattern", why, remedy=remedy, rule="RegexShardingRule")
        why = f"pattern {pattern!r} matches none of the leaves that reach this rule"
        return Finding("warning", "dead-pattern", why, remedy="Correct it, or take it out", rule="RegexShardingRule")


def _ready(rule: RegexShardingRule, pattern: str, value: PatternValue) -> Decision | None:
    if isinstance(value, ShardingRule):
        return None
    assert not isinstance(value, str)
    if value is None:
        return Decision(None, f"{pattern!r} leaves it to other rules")
    return Decision(value, f"matches {pattern!r}", rule)
