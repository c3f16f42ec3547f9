"""Arrays that go over the wire in a wider dtype than anything computes with.

A weight that is gathered and then cast to 8 bits sends twice the bytes of one that is cast and then gathered. Scaling
by a factor, and clipping, come before the cast: they can come before the gather too.
"""

from collections.abc import Iterator
from typing import final

import attrs

from shardrules.analysis.audits.checks.costs import cost_text, latency_seconds, names_text, severity, share_of
from shardrules.analysis.audits.facts import AuditFacts
from shardrules.analysis.compiling.source import user_line
from shardrules.analysis.costs.collective import collective_seconds
from shardrules.analysis.program.collectives import Collective
from shardrules.analysis.program.text import ArrayType, Instruction
from shardrules.analysis.program.uses import Use, is_elementwise, is_move
from shardrules.core.check import bytes_text
from shardrules.core.finding import Finding

_COPIES = ("all-gather", "all-to-all", "collective-permute", "collective-broadcast")
"""Collectives that only copy: a cast before them gives what a cast after them gives."""


@final
@attrs.frozen
class _WideMove:
    collective: Collective
    array: ArrayType
    dtype: str
    """What it is cast to."""
    wire_bytes: int
    """What it sends more than in that dtype."""
    seconds: float
    line: str


def check_wire_dtypes(facts: AuditFacts) -> Iterator[Finding]:
    """Arrays that are sent, and then used in a narrower dtype only."""
    groups: dict[tuple[str, str, str, str, str], list[_WideMove]] = {}
    for move in _wide_moves(facts):
        key = (move.collective.kind, move.collective.axes_text, move.array.dtype, move.dtype, move.line)
        groups.setdefault(key, []).append(move)
    for (kind, axes, dtype, narrow, line), group in groups.items():
        seconds = sum(move.seconds for move in group)
        runs = sum(move.collective.times.count for move in group)
        excess = sum(move.wire_bytes for move in group)
        largest = max((move.array for move in group), key=lambda array: array.nbytes)
        paths = facts.paths_of([name for move in group for name in move.collective.arguments])
        names = names_text(filter(None, paths))
        yield Finding(
            severity(facts, seconds),
            "wide-on-the-wire",
            f"{runs} x {kind} over {axes}, largest array {largest}, sends {dtype}, and only {narrow} of it is used: "
            f"{bytes_text(excess)} more on the wire per device and step than {narrow} takes: "
            f"{cost_text(facts, seconds)}" + f". Arrays: {names}" * bool(names),
            remedy=f"Cast (and scale) before the move: split the {narrow} array as the {dtype} array is, "
            "with_sharding_constraint(x.astype(...), spec), and constrain it whole after that",
            axis=axes if axes in facts.sizes else None,
            source=line,
        )


def _wide_moves(facts: AuditFacts) -> Iterator[_WideMove]:
    # CPUs compute in float32 what is written in a narrower dtype, and their compiler casts where it likes.
    if facts.is_on_cpu:
        return
    for collective in facts.collectives:
        if collective.kind not in _COPIES or not collective.total_wire_bytes:
            continue
        for array, values in zip(collective.arrays, facts.results_of(collective), strict=True):
            casts = list(_casts(facts, array, values))
            if not casts or any(cast is None for cast in casts):
                continue
            narrow = max((cast for cast in casts if cast is not None), key=lambda cast: cast.array.bits)
            share = share_of(collective, array) * (1 - narrow.array.bits / array.bits)
            # Latencies stay as they are.
            transfer = collective_seconds(collective, facts.hardware) - latency_seconds(facts, collective)
            yield _WideMove(
                collective,
                array,
                narrow.array.dtype,
                round(collective.total_wire_bytes * share),
                transfer * share,
                narrow.line or user_line(collective.stack),
            )


@final
@attrs.frozen
class _Cast:
    array: ArrayType
    line: str


def _casts(facts: AuditFacts, array: ArrayType, values: tuple) -> Iterator[_Cast | None]:
    """For each use of a sent array the narrower dtype that it is cast to first; `None` for a use of the wide one."""

    def passes_on(user: Instruction) -> bool:
        # A cast to a narrower dtype ends the search; other operations on every element keep the width.
        return is_move(user) or (is_elementwise(user) and not _is_narrowing(array, user))

    for use in facts.uses_of(values, passes_on):
        if _is_narrowing(array, use.instruction):
            line = user_line(facts.program.stack(facts.program.cause(use.computation, use.instruction)))
            yield _Cast(use.instruction.types[0], line)
        elif not _is_statistic(array, use):
            yield None


def _is_narrowing(array: ArrayType, instruction: Instruction) -> bool:
    return instruction.op == "convert" and instruction.types[0].bits < array.bits


def _is_statistic(array: ArrayType, use: Use) -> bool:
    """Whether it is a few numbers, such as the largest element: parts of the array give them. GPUs take two stages."""
    return use.instruction.op == "reduce" and _MIN_REDUCTION * use.instruction.types[0].size <= array.size


_MIN_REDUCTION = 16
"""How many times smaller a statistic is. Scales are for 32 elements each or more: half as many change nothing, and
with twice as many those of 16 would be uses of all of it."""
