"""Arrays that go over the wire in a wider dtype than anything computes with, or than they have been rounded to.

A weight that is gathered and then cast to 8 bits sends twice the bytes of one that is cast and then gathered. Scaling
by a factor, and clipping, come before the cast: they can come before the gather too. So does one that is quantised to 8
bits and widened again before it is gathered: the 8 bits, and the factor, are all that the others need.
"""

from collections.abc import Iterator
from typing import final

import attrs

from shardrules.core.check import bytes_text
from shardrules.core.finding import Finding
from shardrules.core.source import user_line
from shardrules.programs.audits.checks.costs import cost_text, latency_seconds, names_text, severity, share_of
from shardrules.programs.audits.facts import AuditFacts
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.flow import Value
from shardrules.programs.compiled.text import ArrayType, Instruction
from shardrules.programs.compiled.uses import Use, is_elementwise, is_move
from shardrules.programs.compiling.roundings import QUANTISED_BITS, Rounding
from shardrules.programs.costs.collective import collective_seconds
from shardrules.programs.machine.measured import KINDS

_COPIES = ("all-gather", "all-to-all", "collective-permute", "collective-broadcast")
"""Collectives that only copy: a cast before them gives what a cast after them gives."""


@final
@attrs.frozen
class _WideMove:
    collective: Collective
    array: ArrayType
    dtype: str
    """What it is cast to."""
    is_widened: bool
    """Whether it is rounded to the narrow dtype before it is sent, instead of cast to it afterwards."""
    wire_bytes: int
    """What it sends more than in that dtype."""
    seconds: float
    line: str


def check_wire_dtypes(facts: AuditFacts) -> Iterator[Finding]:
    """Arrays that are sent, and then used in a narrower dtype only, or that were widened just before."""
    groups: dict[tuple[str, str, str, str, bool, str], list[_WideMove]] = {}
    for move in _wide_moves(facts):
        key = (
            move.collective.kind,
            move.collective.axes_text,
            move.array.dtype,
            move.dtype,
            move.is_widened,
            move.line,
        )
        groups.setdefault(key, []).append(move)
    for (kind, axes, dtype, narrow, is_widened, line), group in groups.items():
        seconds = sum(move.seconds for move in group)
        runs = sum(move.collective.times.count for move in group)
        excess = sum(move.wire_bytes for move in group)
        largest = max((move.array for move in group), key=lambda array: array.nbytes)
        paths = facts.paths_of([name for move in group for name in move.collective.arguments])
        names = names_text(filter(None, paths))
        yield Finding(
            severity(facts, seconds),
            "wide-on-the-wire",
            f"{runs} x {kind} over {axes}, largest array {largest}, sends {dtype}, "
            + (f"which the function rounds to {narrow} before" if is_widened else f"and only {narrow} of it is used")
            + f": {bytes_text(excess)} more on the wire per device and step than {narrow} takes: "
            f"{cost_text(facts, seconds)}" + f". Arrays: {names}" * bool(names),
            remedy=f"Move the {narrow} array and its scale, and cast to {dtype} after that: constrain it whole, "
            f"with_sharding_constraint(x, spec), before it is cast to {dtype}"
            if is_widened
            else f"Cast (and scale) before the move: split the {narrow} array as the {dtype} array is, "
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
        for index, (array, values) in enumerate(zip(collective.arrays, facts.results_of(collective), strict=True)):
            casts = list(_casts(facts, array, values))
            is_cast = bool(casts) and all(cast is not None for cast in casts)
            narrow = (
                max((cast for cast in casts if cast is not None), key=lambda cast: cast.array.bits)
                if is_cast
                else _widened_from(facts, collective, index)
            )
            if narrow is None:
                continue
            share = share_of(collective, array) * (1 - narrow.array.bits / array.bits)
            # Latencies stay as they are.
            transfer = collective_seconds(collective, facts.hardware) - latency_seconds(facts, collective)
            yield _WideMove(
                collective,
                array,
                narrow.array.dtype,
                not is_cast,
                round(collective.total_wire_bytes * share),
                transfer * share,
                narrow.line or user_line(collective.stack),
            )


def _casts(facts: AuditFacts, array: ArrayType, values: tuple) -> Iterator[Rounding | None]:
    """For each use of a sent array the narrower dtype that it is cast to first; `None` for a use of the wide one."""

    def passes_on(user: Instruction) -> bool:
        # A cast to a narrower dtype ends the search; other operations on every element keep the width.
        return is_move(user) or (is_elementwise(user) and not _is_narrowing(array, user))

    for use in facts.uses_of(values, passes_on):
        if _is_narrowing(array, use.instruction):
            line = user_line(facts.program.stack(facts.program.cause(use.computation, use.instruction)))
            yield Rounding(use.instruction.types[0], line)
        elif not _is_statistic(array, use):
            yield None


def _widened_from(facts: AuditFacts, collective: Collective, index: int) -> Rounding | None:
    """What a sent array was rounded to before it was widened; `None` where it is made of anything else, too."""
    computation, array = facts.program.find(collective.computation), collective.arrays[index]
    operands = computation.by_name[collective.name].operands
    if len(operands) != len(collective.arrays):
        return None
    # Compilers may leave the rounding out: then the lines of what they keep of the scaling are its trace.
    roundings = {each.line: each for each in facts.roundings if each.line and each.array.size % array.size == 0}
    trace: list[Rounding] = []
    value = Value(computation.name, operands[index])
    size = facts.program.instruction(value).types[0].size
    for _ in range(_MAX_STEPS):
        source = facts.program.flow.source(value)
        if source is not None:
            value = source
            continue
        instruction, inside = facts.program.instruction(value), facts.program.find(value.computation)
        factors = [name for name in instruction.operands if not _is_scale(facts, Value(inside.name, name), size)]
        if len(factors) != 1 or not (is_move(instruction) or is_elementwise(instruction)):
            is_whole = instruction.op == "parameter" or instruction.op.startswith(KINDS)
            return trace[0] if trace and is_whole else None
        narrow = inside.by_name[factors[0]].types[0]
        line = user_line(facts.program.stack(facts.program.cause(inside, instruction)))
        if instruction.op == "convert" and narrow.bits <= QUANTISED_BITS and narrow.dtype != "pred":
            return Rounding(narrow, line)
        if is_elementwise(instruction) and line in roundings:
            trace.append(roundings[line])
        value = Value(inside.name, factors[0])
    return None


def _is_scale(facts: AuditFacts, value: Value, size: int) -> bool:
    """Whether a value is a few numbers, or these broadcast to the shape of an array of that size."""
    for _ in range(_MAX_STEPS):
        instruction = facts.program.instruction(value)
        if not instruction.types or _MIN_REDUCTION * instruction.types[0].size <= size:
            return True
        source = facts.program.flow.source(value)
        is_passed_on = instruction.op == "broadcast" or instruction.op == "convert" or is_move(instruction)
        if source is None and not (is_passed_on and instruction.operands):
            return False
        value = source if source is not None else Value(value.computation, instruction.operands[0])
    return False


_MAX_STEPS = 100
"""How many operations back an array is followed. Scaling and clipping are three to ten: half as many would do."""


def _is_narrowing(array: ArrayType, instruction: Instruction) -> bool:
    return instruction.op == "convert" and instruction.types[0].bits < array.bits


def _is_statistic(array: ArrayType, use: Use) -> bool:
    """Whether it is a few numbers, such as the largest element: parts of the array give them. GPUs take two stages."""
    return use.instruction.op == "reduce" and _MIN_REDUCTION * use.instruction.types[0].size <= array.size


_MIN_REDUCTION = 16
"""How many times smaller a statistic is. Scales are for 32 elements each or more: half as many change nothing, and
with twice as many those of 16 would be uses of all of it."""
