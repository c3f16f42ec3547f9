"""Arrays that go over the wire in a wider dtype than anything computes with, or than they have been rounded to.

A weight that is gathered and then cast to 8 bits sends twice the bytes of one that is cast and then gathered. Scaling
by a factor, and clipping, come before the cast: they can come before the gather too. So does one that is quantised to 8
bits and widened again before it is gathered: the 8 bits, and the factor, are all that the others need.
"""

from collections.abc import Iterable, Iterator
from typing import final

import attrs

from shardrules.core.finding import Finding
from shardrules.core.source import user_line
from shardrules.core.text import bytes_text
from shardrules.programs.audits.movement import MovedArrays, Movement, grouped, place_of, share_of
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.flow import Value
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.compiled.text import ArrayType, Instruction
from shardrules.programs.compiled.uses import Use, is_elementwise, is_move, uses
from shardrules.programs.compiling.roundings import QUANTISED_BITS, Rounding
from shardrules.programs.machine.measured import KINDS

_COPIES = ("all-gather", "all-to-all", "collective-permute", "collective-broadcast")
"""Collectives that only copy: a cast before them gives what a cast after them gives."""


@final
@attrs.frozen
class _WideMove:
    collective: Collective
    array: ArrayType
    narrow: Rounding
    """The narrower dtype, and the line that casts."""
    is_widened: bool
    """Rounded to the narrow dtype before it is sent, instead of cast to it afterwards."""

    @property
    def excess(self) -> float:
        """The share of the collective that the narrow dtype would save."""
        return share_of(self.collective, self.array) * (1 - self.narrow.array.bits / self.array.bits)


def check_wire_dtypes(movement: Movement) -> Iterator[Finding]:
    """Arrays that are sent, and then used in a narrower dtype only, or that were widened just before."""
    timing = movement.timing
    for (*_, dtype, narrow, is_widened, line), group in grouped(_wide_moves(movement), _group_key).items():
        moved = MovedArrays(movement, [(move.collective, move.array) for move in group])
        # Latencies stay as they are.
        seconds = sum(
            (timing.seconds(move.collective) - timing.latency_seconds(move.collective)) * move.excess for move in group
        )
        excess = round(sum(move.collective.total_wire_bytes * move.excess for move in group))
        yield moved.finding(
            timing.severity(seconds),
            "wide-on-the-wire",
            f"{moved}, sends {dtype}, "
            + (f"which the function rounds to {narrow} before" if is_widened else f"and only {narrow} of it is used")
            + f": {bytes_text(excess)} more on the wire per device and step than {narrow} takes: "
            f"{timing.cost_text(seconds)}" + f". Arrays: {moved.names}" * bool(moved.names),
            f"Move the {narrow} array and its scale, and cast to {dtype} after that: constrain it whole, "
            f"with_sharding_constraint(x, spec), before it is cast to {dtype}"
            if is_widened
            else f"Cast (and scale) before the move: split the {narrow} array as the {dtype} array is, "
            "with_sharding_constraint(x.astype(...), spec), and constrain it whole after that",
            line,
        )


def _group_key(move: _WideMove) -> tuple[str, str, str, str, bool, str]:
    kind, axes, line = place_of(move.collective)
    return kind, axes, move.array.dtype, move.narrow.array.dtype, move.is_widened, move.narrow.line or line


def _wide_moves(movement: Movement) -> Iterator[_WideMove]:
    # CPUs compute in float32 what is written in a narrower dtype, and their compiler casts where it likes.
    if movement.arguments.is_on_cpu:
        return
    for collective in movement.collectives:
        if collective.kind not in _COPIES or not collective.total_wire_bytes:
            continue
        for index, (array, values) in enumerate(zip(collective.arrays, movement.results_of(collective), strict=True)):
            casts = list(_casts(movement.program, array, values))
            narrow = [cast for cast in casts if cast is not None]
            # All uses have to be narrow, and the widest of them is what has to be sent.
            if casts and len(narrow) == len(casts):
                yield _WideMove(collective, array, max(narrow, key=lambda cast: cast.array.bits), is_widened=False)
                continue
            rounding = _widened_from(movement, collective, index)
            if rounding is not None:
                yield _WideMove(collective, array, rounding, is_widened=True)


def _casts(program: CompiledProgram, array: ArrayType, values: Iterable[Value]) -> Iterator[Rounding | None]:
    """For each use of a sent array the narrower dtype that it is cast to first; `None` for a use of the wide one."""

    def passes_on(user: Instruction) -> bool:
        # A cast to a narrower dtype ends the search; other operations on every element keep the width.
        return is_move(user) or (is_elementwise(user) and not _is_narrowing(array, user))

    for use in uses(program, values, passes_on):
        if _is_narrowing(array, use.instruction):
            line = user_line(program.stack(program.cause(use.computation, use.instruction)))
            yield Rounding(use.instruction.types[0], line)
        elif not _is_statistic(array, use):
            yield None


def _widened_from(movement: Movement, collective: Collective, index: int) -> Rounding | None:
    """The rounding of a sent array before it was widened; `None` where it is made of anything else, too."""
    program = movement.program
    computation, array = program.find(collective.computation), collective.arrays[index]
    operands = computation.by_name[collective.name].operands
    if len(operands) != len(collective.arrays):
        return None
    # Compilers may leave the rounding out: then the lines of what they keep of the scaling are its trace.
    roundings = {
        each.line: each for each in movement.function.roundings if each.line and each.array.size % array.size == 0
    }
    trace: list[Rounding] = []
    value = Value(computation.name, operands[index])
    size = program.instruction(value).types[0].size
    for _ in range(_MAX_STEPS):
        source = program.flow.source(value)
        if source is not None:
            value = source
            continue
        instruction, inside = program.instruction(value), program.find(value.computation)
        factors = [name for name in instruction.operands if not _is_scale(program, Value(inside.name, name), size)]
        if len(factors) != 1 or not (is_move(instruction) or is_elementwise(instruction)):
            is_whole = instruction.op == "parameter" or instruction.op.startswith(KINDS)
            return trace[0] if trace and is_whole else None
        narrow = inside.by_name[factors[0]].types[0]
        line = user_line(program.stack(program.cause(inside, instruction)))
        if instruction.op == "convert" and narrow.bits <= QUANTISED_BITS and narrow.dtype != "pred":
            return Rounding(narrow, line)
        if is_elementwise(instruction) and line in roundings:
            trace.append(roundings[line])
        value = Value(inside.name, factors[0])
    return None


def _is_scale(program: CompiledProgram, value: Value, size: int) -> bool:
    """A few numbers, or these broadcast to the shape of an array of that size."""
    for _ in range(_MAX_STEPS):
        instruction = program.instruction(value)
        # So few numbers beside the array are its scale: one for each row or block.
        if not instruction.types or _MIN_REDUCTION * instruction.types[0].size <= size:
            return True
        source = program.flow.source(value)
        is_passed_on = instruction.op == "broadcast" or instruction.op == "convert" or is_move(instruction)
        if source is None and not (is_passed_on and instruction.operands):
            return False
        value = source if source is not None else Value(value.computation, instruction.operands[0])
    return False


_MAX_STEPS = 100
"""The operations back that an array is followed, chosen by hand: scaling and clipping are three to ten."""


def _is_narrowing(array: ArrayType, instruction: Instruction) -> bool:
    return instruction.op == "convert" and instruction.types[0].bits < array.bits


def _is_statistic(array: ArrayType, use: Use) -> bool:
    """A few numbers, such as the largest element: parts of the array give them. GPUs take two stages."""
    return use.instruction.op == "reduce" and _MIN_REDUCTION * use.instruction.types[0].size <= array.size


_MIN_REDUCTION = 16
"""A statistic is so many times smaller. Chosen by hand: scales are for 32 elements each or more."""
