"""Explanations of a plan: the rule that decided a leaf, and what every other rule would have decided."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from shardrules.core.errors import PatternError, ShardRulesError, TreeError, printable, suggest
from shardrules.core.finding import UNDECIDED_CODES, shape_text
from shardrules.core.leaf import Decision
from shardrules.core.leaves import Leaves, RuleCall, Verdict
from shardrules.core.patterns import compile_pattern
from shardrules.core.spec import spec_repr
from shardrules.core.text import bytes_text


def find_kinds(path: str, kind_by_path: Mapping[str, int]) -> dict[int, str]:
    """Returns the kinds that `path`, a path or else a regular expression, matches; each with its first path."""
    if path in kind_by_path:
        return {kind_by_path[path]: path}
    try:
        pattern = compile_pattern(path, "explain")
    except PatternError as error:
        why = f"it is not a valid pattern: {error.__cause__ or error}"
        raise PatternError(f"the plan has no leaf at {path!r:.200}, and {why}") from error
    matches: dict[int, str] = {}
    for leaf_path, kind in kind_by_path.items():
        if kind not in matches and pattern.search(leaf_path):
            matches[kind] = leaf_path
    if not matches:
        raise TreeError(
            f"the plan has no leaf at {path!r}{suggest(path, kind_by_path)}, and no path matches it as a pattern"
        )
    return matches


def explain_kind(
    leaves: Leaves,
    kind: int,
    path: str,
    decision: Decision,
    sizes: Mapping[str, int],
    decide: Callable[[Any, Leaves], Verdict],
) -> Iterator[str]:
    """Yields the lines about one kind of leaf, whose first match is at `path`.

    `leaves` holds the calls of the rules that decided the plan, if there are any; `decide` asks a rule.
    """
    leaf = leaves.items[kind]
    count = f"({leaves.counts[kind]} of this kind)"
    yield f"{printable(path) or '(the tree)'}  {shape_text(leaf.shape)} {leaf.dtype}  {count}"
    device_bytes = decision.device_bytes(leaf, sizes)
    yield f"  {spec_repr(decision.spec)}, {bytes_text(device_bytes)} of {bytes_text(leaf.nbytes)} per device"
    yield f"  decided by {printable(decision.rule_name)}: {printable(decision.reason)}"
    if leaves.calls:
        yield "  rule by rule:"
        yield from _call_lines(leaves.calls[0], kind, "    ", decide)


def _call_lines(call: RuleCall, kind: int, indent: str, decide: Callable[[Any, Leaves], Verdict]) -> Iterator[str]:
    name = type(call.rule).__name__
    decision = _decision_about(call, kind)
    if decision is None:
        yield f"{indent}{name}: not asked"
        return
    yield f"{indent}{name}: {spec_repr(decision.spec)}, {printable(decision.reason)}"
    for part in call.rule.parts:
        # By identity: an equal rule elsewhere may have been asked about other leaves.
        calls = [inner for inner in call.leaves.calls if inner.rule is part and _is_about(inner, kind)]
        if calls:
            yield from _call_lines(calls[0], kind, indent + "  ", decide)
        else:
            yield f"{indent}  {type(part).__name__}: not asked; {_alone(part, call.leaves, kind, decide)}"


def _is_about(call: RuleCall, kind: int) -> bool:
    return kind in call.leaves.kind_indices


def _decision_about(call: RuleCall, kind: int) -> Decision | None:
    if not _is_about(call, kind):
        return None
    return call.verdict.decisions[call.leaves.kind_indices.index(kind)]


def _alone(rule: Any, leaves: Leaves, kind: int, decide: Callable[[Any, Leaves], Verdict]) -> str:
    """Returns the decision of `rule`, had no rule before it decided."""
    # Without what others settled, and without adding to the record of the plan's own calls.
    alone = attrs.evolve(leaves.select([leaves.kind_indices.index(kind)]), settled=(), calls=[])
    try:
        verdict = decide(rule, alone)
    except ShardRulesError as error:
        return f"alone it fails: {error}"
    if verdict.findings and verdict.findings[0].code in UNDECIDED_CODES:
        return f"alone it would refuse: {printable(verdict.findings[0].message)}"
    decision = verdict.decisions[0]
    return f"alone it would decide {spec_repr(decision.spec)}, {printable(decision.reason)}"
