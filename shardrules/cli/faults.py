"""The faults of a plan: one wrong size shows in many arrays, and in an optimizer's state again."""

from collections.abc import Iterable, Iterator, Sequence

import attrs

from shardrules.core.finding import Finding, merged, shape_text

STATE = "optimizer"
"""The beginning of the paths of an optimizer's state."""

_SHOWN = 3
"""The further arrays that a fault names, chosen by hand: a line stays a line."""


def faults(findings: Iterable[Finding], state: Iterable[Finding] = ()) -> tuple[Finding, ...]:
    """Returns the findings of a plan and of its optimizer's state, one for each fault, with the arrays counted.

    Dimensions of one size that one axis does not divide are one fault. What a state has of its weights counts with
    them. What JAX would make of a spec that does not divide is left out: the spec has to change.
    """
    groups: dict[object, list[Finding]] = {}
    for finding in _with_moments(merged(_without_weaker(findings)), merged(_without_weaker(state))):
        groups.setdefault(_fault(finding), []).append(finding)
    return tuple(group[0] if len(group) == 1 else _joined(group) for group in groups.values())


def _without_weaker(findings: Iterable[Finding]) -> Iterator[Finding]:
    return (finding for finding in findings if finding.code != "weakened")


def _with_moments(findings: Sequence[Finding], state: Sequence[Finding]) -> Iterator[Finding]:
    """Yields findings, with the same about a state's copies of their arrays counted in, and then the others."""
    rest = list(state)
    for finding in findings:
        # Each copy belongs to the first finding that it repeats, and leaves the rest.
        copies = [other for other in rest if _is_copy(other, finding)]
        rest = [other for other in rest if other not in copies]
        count = sum(copy.count for copy in copies) if _is_about_arrays(finding) else 0
        yield attrs.evolve(finding, count=finding.count + count)
    yield from rest


def _is_copy(other: Finding, finding: Finding) -> bool:
    """It is the same finding about an array of the state that mirrors the other's."""
    if attrs.evolve(other, path=finding.path, count=finding.count) != finding:
        return False
    if not finding.path:  # of the whole plan, or of a model that is one array
        return other.path.startswith(STATE) if _is_about_arrays(finding) else other.path == STATE
    return f"{other.path}/".endswith(f"/{finding.path}/")


def _is_about_arrays(finding: Finding) -> bool:
    return bool(finding.path) or finding.shape is not None


def _fault(finding: Finding) -> object:
    """The common part of findings of one fault."""
    if finding.code != "indivisible" or finding.shape is None or finding.dim is None:
        return finding
    # The message names the axes and their size: "Array shape (8, 6) not divisible by mesh axis model size 4: ..."
    axes = finding.message.partition(" not divisible by ")[2].partition(":")[0]
    return finding.code, finding.shape[finding.dim], axes


def _joined(group: Sequence[Finding]) -> Finding:
    first, *others = group
    named = [f"dimension {other.dim} of {other.path} {shape_text(other.shape or ())}" for other in others[:_SHOWN]]
    more = len(others) - _SHOWN
    also = ", ".join([*named, f"{more} more"] if more > 0 else named)
    return attrs.evolve(first, message=f"{first.message}; also {also}", count=sum(each.count for each in group))
