"""`RegexShardingRule`: path patterns, in order; the first that matches decides."""

import functools
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.errors import PatternError, SpecError
from shardrules.core.fields import integer, one_of
from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.patterns import Matcher, compile_pattern, names
from shardrules.core.rule import LeavesShardingRule, ShardingRule, decide, from_fields, inner_values
from shardrules.core.spec import checked_spec, spec_code, spec_key
from shardrules.core.tree import ReadsIndex, widest
from shardrules.rules.pattern import Match, check_beginning, reads_index
from shardrules.rules.pattern_index import MIN_PATTERNS, PatternIndex
from shardrules.rules.text import parse_rule

PatternValue: TypeAlias = PartitionSpec | ShardingRule | str | None
"""The value of a pattern: a spec, a rule, a rule in text form, or `None` for no opinion."""

Unmatched: TypeAlias = Literal["skip", "replicate", "error"]
"""The treatment of a leaf that no pattern matches."""


def _as_pattern_pairs(
    rules: Iterable[tuple[str | re.Pattern[str], PatternValue]],
) -> tuple[tuple[str, PatternValue], ...]:
    parse = functools.cache(parse_rule)  # of thousands of texts, most are equal
    try:
        patterns = [(pattern, value) for pattern, value in rules]
    except (TypeError, ValueError):
        raise PatternError(
            "RegexShardingRule takes (pattern, value) pairs in order, [('norm', P()), ('.*', P('data'))]; "
            f"got {rules!r}"
        ) from None
    pairs = tuple(
        [(_pattern_text(pattern), parse(value) if isinstance(value, str) else value) for pattern, value in patterns]
    )
    for pattern, value in pairs:
        if not (value is None or isinstance(value, PartitionSpec | ShardingRule)):
            raise PatternError(
                f"RegexShardingRule: {pattern!r} has the value {value!r}, which is not a PartitionSpec, a rule, a rule "
                "in text form, or None"
            )
        if isinstance(value, PartitionSpec):
            try:
                checked_spec(value)
            except SpecError as error:
                raise PatternError(f"RegexShardingRule: {pattern!r}: {error}") from error
    return pairs


def _pattern_text(pattern: object) -> str:
    if isinstance(pattern, re.Pattern) and pattern.flags == re.UNICODE:
        return pattern.pattern
    if not isinstance(pattern, str):
        raise PatternError(
            f"RegexShardingRule: a pattern must be a string, got {pattern!r}. Flags go into it, '(?i)norm' for instance"
        )
    return pattern


def _matcher(pattern: str, match: Match) -> Matcher:
    # Searching a text needs no regular expression, and compiling thousands takes longer than all the rest.
    if match == "search" and names(pattern) == (pattern,):
        return lambda path: pattern in path
    return getattr(compile_pattern(pattern, "RegexShardingRule"), match)


def _check_patterns(rule: "RegexShardingRule", field: object, match: Match) -> None:
    assert rule._matchers is not None  # compiles all patterns, which raises for the first that is invalid
    for pattern, _ in rule.rules if match != "search" else ():
        check_beginning(pattern, "RegexShardingRule")


@final
@attrs.frozen
class RegexShardingRule(LeavesShardingRule):
    """Gives each leaf the value of the first pattern that matches its path.

    Patterns are searched, not anchored: `w` matches `down`. The plan reports how many leaves no pattern matches, which
    patterns match nothing, and which can never win.

    **Arguments:**

    - `rules`: (pattern, value) pairs. A value is a PartitionSpec, a rule (chains included), a rule in text form such as
        `"shard_dim('model', -1)|fsdp('data')"`, or `None`, which has no opinion and stops the search.
    - `match`: `"search"`, `"fullmatch"` or `"match"`, as in the `re` module.
    - `unmatched`: what to do with a leaf that no pattern matches: `"skip"` (no opinion), `"replicate"`, or `"error"`.
    - `min_size`: arrays of fewer elements are replicated when a pattern matches them.

    ```python
    rule = sr.RegexShardingRule([("norm|bias", P()), ("_proj/weight", P("model", "data"))])
    specs = rule.apply({"q_proj": {"weight": np.ones((8, 8)), "bias": np.ones(8)}})
    assert specs == {"q_proj": {"weight": P("model", "data"), "bias": P()}}
    ```
    """

    rules: tuple[tuple[str, PatternValue], ...] = attrs.field(converter=_as_pattern_pairs, repr=spec_code, eq=spec_key)
    match: Match = attrs.field(
        default="search", converter=one_of("match", "search", "fullmatch", "match"), validator=_check_patterns
    )
    unmatched: Unmatched = attrs.field(default="skip", converter=one_of("unmatched", "skip", "replicate", "error"))
    min_size: int = attrs.field(default=0, converter=integer("min_size", 0))
    parts = from_fields(lambda rule: rule._inner_rules)
    named_axes = from_fields(lambda rule: tuple(value for _, value in rule.rules if isinstance(value, PartitionSpec)))
    reads_index = from_fields(lambda rule: widest([rule._patterns_read_index, *inner_values(rule, "reads_index")]))

    @functools.cached_property
    def _inner_rules(self) -> tuple[ShardingRule, ...]:
        return tuple([value for _, value in self.rules if isinstance(value, ShardingRule)])

    @functools.cached_property
    def _patterns_read_index(self) -> ReadsIndex:
        return widest(reads_index(pattern) for pattern, _ in self.rules)

    @functools.cached_property
    def _index(self) -> PatternIndex | None:
        if len(self.rules) < MIN_PATTERNS:
            return None
        return PatternIndex.of([names(pattern) for pattern, _ in self.rules])

    @functools.cached_property
    def _delegates(self) -> tuple[tuple[int, ShardingRule], ...]:
        """The rules among the values, each with the index of its pattern, in the order in which they decide."""
        rules = [(index, value) for index, (_, value) in enumerate(self.rules) if isinstance(value, ShardingRule)]
        # A rule with a limit for the whole tree comes last, and counts what is decided about all other leaves.
        return tuple(sorted(rules, key=lambda pair: bool(pair[1].tree_budgets)))

    @functools.cached_property
    def _matchers(self) -> tuple[Matcher, ...]:
        return tuple([_matcher(pattern, self.match) for pattern, _ in self.rules])

    @functools.cached_property
    def _fixed_decisions(self) -> tuple[Decision | None, ...]:
        """The decision of each pattern whose value is a spec or `None`."""
        return tuple(_fixed_decision(self, pattern, value) for pattern, value in self.rules)

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns the value of the first pattern for each of `leaves`; rules among the values decide what they won."""
        paths = [leaf.path for leaf in leaves.items]
        matchers, fixed_decisions = self._matchers, self._fixed_decisions
        decisions: list[Decision] = []
        delegated: dict[int, list[int]] = {}
        winners = self.winners(paths)
        for kind_index, (leaf, pattern_index) in enumerate(zip(leaves.items, winners, strict=True)):
            if pattern_index == len(matchers):
                decisions.append(self._unmatched(leaf))
                continue
            decision = fixed_decisions[pattern_index]
            # Small arrays are replicated only if a pattern matches: an unmatched one stays visible in the plan.
            if self.min_size and leaf.size < self.min_size:
                decision = Decision(PartitionSpec(), f"fewer than {self.min_size} elements", self)
            elif decision is None:
                delegated.setdefault(pattern_index, []).append(kind_index)
                decision = leaf.skip("")
            if leaf.spec is not None and decision.spec is not None:
                decision = leaf.try_refine(decision.spec, decision.reason)
            decisions.append(decision)
        findings = self._delegate(leaves, decisions, delegated) if delegated else []
        idle = tuple(self._idle_findings(paths, matchers, set(winners)))
        return Verdict(tuple(decisions), tuple(findings), idle)

    def winners(self, paths: Iterable[str]) -> list[int]:
        """Returns the index of the first pattern that matches each of `paths`, or the number of patterns."""
        index, matchers = self._index, self._matchers
        winners: list[int] = []
        # The loop that every leaf of a large tree goes through: `enumerate` would make a tuple for each pattern tried.
        for path in paths:
            if index is not None:
                matching = (candidate for candidate in index.candidates(path) if matchers[candidate](path))
                winners.append(next(matching, len(matchers)))
                continue
            pattern_index = 0
            for matches in matchers:
                if matches(path):
                    break
                pattern_index += 1
            winners.append(pattern_index)
        return winners

    def _delegate(
        self, leaves: Leaves, decisions: list[Decision], delegated: Mapping[int, Sequence[int]]
    ) -> list[Finding]:
        """Lets the rules among the values decide the leaves that they won, in place; returns their findings."""
        findings: list[Finding] = []
        # A limit for the tree counts what is decided already, by the rules before it too.
        settled = [
            (attrs.evolve(leaf, spec=decision.spec), count)
            for leaf, decision, count in zip(leaves.items, decisions, leaves.counts, strict=True)
            if decision.spec is not None
        ]
        for pattern_index, rule in self._delegates:
            pattern = self.rules[pattern_index][0]
            kind_indices = delegated.get(pattern_index)
            if kind_indices is None:
                continue
            verdict = decide(rule, leaves.select(kind_indices, settled))
            findings += verdict.findings
            for kind_index, decision in zip(kind_indices, verdict.decisions, strict=True):
                decisions[kind_index] = attrs.evolve(decision, reason=f"{pattern!r}: {decision.reason}")
                if decision.spec is not None:
                    leaf = attrs.evolve(leaves.items[kind_index], spec=decision.spec)
                    settled.append((leaf, leaves.counts[kind_index]))
        return findings

    def _unmatched(self, leaf: Leaf) -> Decision:
        if self.unmatched == "replicate":
            return leaf.try_refine(PartitionSpec(), "no pattern matches")
        if self.unmatched == "error":
            why = "no pattern matches"
            hint = "Add a pattern for it; ('.*', P()) at the end replicates the rest"
            finding = Finding("error", "conflict", why, leaf.path, hint, leaf.shape, rule="RegexShardingRule")
            return Decision(None, why, findings=(finding,))
        return leaf.skip("no pattern matches")

    def _idle_findings(
        self, paths: Sequence[str], matchers: Sequence[Matcher], winners: Container[int]
    ) -> Iterator[tuple[int, Finding]]:
        """The index of each pattern that won no leaf, and the finding that says why."""
        idle = [pattern_index for pattern_index in range(len(matchers)) if pattern_index not in winners]
        # A last pattern that matches any path is a default: it may well have nothing to do.
        if idle and idle[-1] == len(matchers) - 1 and matchers[-1]("\0"):
            idle.pop()
        shadowed = self._matching(paths, matchers, idle)
        for pattern_index in idle:
            pattern = self.rules[pattern_index][0]
            code, remedy = "dead-pattern", "Correct it, or remove it"
            why = f"pattern {pattern!r} matches none of the leaves that reach this rule"
            if pattern_index in shadowed:
                code, remedy = "shadowed-pattern", "Move it before the patterns that match its leaves, or remove it"
                why = f"every leaf that pattern {pattern!r} matches is matched by an earlier pattern"
            yield pattern_index, Finding("warning", code, why, remedy=remedy, rule="RegexShardingRule")

    def _matching(self, paths: Sequence[str], matchers: Sequence[Matcher], patterns: Sequence[int]) -> Container[int]:
        """The patterns among `patterns` that match any path."""
        index = self._index
        if index is None:
            return {pattern for pattern in patterns if any(map(matchers[pattern], paths))}
        open_patterns = set(patterns)
        for path in paths:
            # A pattern is tried until the first path that it matches, and no longer.
            candidates = [candidate for candidate in index.candidates(path) if candidate in open_patterns]
            open_patterns.difference_update(candidate for candidate in candidates if matchers[candidate](path))
        return {pattern for pattern in patterns if pattern not in open_patterns}


def _fixed_decision(rule: RegexShardingRule, pattern: str, value: PatternValue) -> Decision | None:
    if isinstance(value, ShardingRule):
        return None
    assert not isinstance(value, str)
    if value is None:
        return Decision(None, f"{pattern!r} leaves it to other rules")
    return Decision(value, f"matches {pattern!r}", rule)
