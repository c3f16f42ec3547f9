"""Sums over devices inside a loop that adds them up: once per microbatch, where once per step would do.

The sum over devices of a sum over rounds is the sum over rounds of sums over devices. A loop that only adds up what it
gets from all devices can add up its own part instead, and ask the others once, after the last round:

    body:  %all = f32[64] all-reduce(%gradient)
           %sum = f32[64] add(%carried, %all)

So can one that stacks what it gets, if all that is used of the stack is its sum:

    body:  %stack = f32[4,64] dynamic-update-slice(%carried, %all, %round, %zero)
    after: %sum = f32[64] reduce(%stack, %none), dimensions={0}, to_apply=%plus
"""

from collections.abc import Iterator, Mapping
from typing import TypeAlias, final

import attrs

from shardrules.core.finding import Finding
from shardrules.core.text import bytes_text
from shardrules.programs.audits.movement import MovedArrays, Movement, grouped, place_of, share_of
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.flow import Value
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.compiled.text import LOOP, ArrayType, Instruction
from shardrules.programs.compiled.uses import is_move, uses

_LINEAR = (
    "add",
    "subtract",
    "negate",
    "convert",
    "multiply",
    "divide",
    "dynamic-update-slice",
    "slice",
    "dynamic-slice",
)
"""Operations through which a sum may be taken before or after, if the other operand is the same in all rounds."""

_REDUCTIONS = ("all-reduce", "reduce-scatter")


@final
@attrs.frozen
class _Total:
    """The operation that adds up the rounds of a loop."""

    rounds: int
    is_stacked: bool = False
    """Added up after the loop."""


_Totals: TypeAlias = Mapping[tuple[str, str], _Total]
"""By computation and name."""


def check_accumulation(movement: Movement) -> Iterator[Finding]:
    """Sums over devices of which a loop uses nothing but the total."""
    timing = movement.timing
    groups = grouped(_repeated_sums(movement), lambda each: (place_of(each[0]), each[2]))
    for ((kind, _, line), total), group in groups.items():
        moved, rounds = MovedArrays(movement, [(collective, array) for collective, array, _ in group]), total.rounds
        seconds = sum(share_of(collective, array) * timing.seconds(collective) for collective, array in moved.arrays)
        # One of the sums remains, after the loop.
        saved = seconds * (rounds - 1) / rounds
        whole_bytes = 0
        if kind == "reduce-scatter":
            # Gradients that every device keeps a slice of are summed in each round to save the memory of whole ones.
            whole_bytes = sum(
                array.nbytes * collective.times.count // rounds * (collective.group_size - 1)
                for collective, array in moved.arrays
            )
            saved = min(saved, timing.exposed_seconds(timing.round_of(group[0][0])))
        if saved <= 0 or not movement.has_room_for(whole_bytes):
            continue
        memory = f" It takes {bytes_text(whole_bytes)} more memory." if whole_bytes else ""
        place = "which are stacked and only added up" if total.is_stacked else "of a loop that only adds them up"
        yield moved.finding(
            timing.severity(saved),
            "reduced-in-loop",
            f"{moved}: {moved.on_wire}, in each of the {rounds} rounds {place}. Once after the loop would be enough: "
            f"{timing.cost_text(saved)}" + f". By shape the gradients of {moved.parameters}" * bool(moved.parameters),
            "Add up each device's own gradients in the loop, inside jax.shard_map over the axis of the batch, "
            f"and sum over devices (jax.lax.psum) after it.{memory}",
            line,
        )


def _repeated_sums(movement: Movement) -> Iterator[tuple[Collective, ArrayType, _Total]]:
    """Yields the sums over devices that flow into nothing but the total of a loop around them."""
    program = movement.program
    totals = dict(_totals(program))
    if not totals:
        return
    for collective in movement.collectives:
        if collective.kind not in _REDUCTIONS or collective.group_size < 2:
            continue
        for array, values in zip(collective.arrays, movement.results_of(collective), strict=True):
            total = _total(program, values, totals)
            # A collective that runs less often than the loop is not inside of it.
            if total is not None and array.size > 1 and collective.times.count >= total.rounds:
                yield collective, array, total


def _totals(program: CompiledProgram) -> Iterator[tuple[tuple[str, str], _Total]]:
    """Yields the additions of loops that add to an element of the state, and the reductions that add up one dim."""
    scalings = frozenset(_scalings(program))
    for computation, loop in program.walk():
        if loop.op == "reduce" and _adds(program, loop):
            shape = computation.by_name[loop.operands[0]].types[0].shape
            dims = loop.dims("dimensions")
            if len(dims) == 1 and shape[dims[0]] > 1 and program.times(computation.name).count:
                yield (computation.name, loop.name), _Total(shape[dims[0]], is_stacked=True)
        rounds = program.flow.trips.get(loop.name) if loop.op == LOOP else None
        if not rounds or rounds < 2 or not program.times(computation.name).count:
            continue
        (body,) = loop.references("body")
        root = program.find(body).by_name[program.find(body).root]
        for index in range(len(root.operands)):
            for addition in _additions_to(program, body, index, scalings):
                yield (addition.computation, addition.instruction), _Total(rounds)


def _adds(program: CompiledProgram, reduction: Instruction) -> bool:
    """A reduction of one array that adds up."""
    adders = [program.find(name) for name in reduction.references("to_apply")]
    return len(reduction.operands) == 2 and all(each.by_name[each.root].op == "add" for each in adders)


def _scalings(program: CompiledProgram) -> Iterator[str]:
    """Yields the names of multiplications and divisions by the same scalar for all elements."""
    for computation, instruction in program.walk():
        if instruction.op in ("multiply", "divide"):
            factors = instruction.operands if instruction.op == "multiply" else instruction.operands[1:]
            makers = [program.instruction(program.flow.in_round(Value(computation.name, name))) for name in factors]
            if any(
                maker.op == "constant" or (maker.op == "broadcast" and not maker.dims("dimensions")) for maker in makers
            ):
                yield instruction.name


def _additions_to(program: CompiledProgram, body: str, index: int, scalings: frozenset[str]) -> Iterator[Value]:
    """Yields the additions by which a round changes element `index` of the state, from the last to the first."""
    pending = [program.flow.in_round(Value(body, program.find(body).root, index))]
    additions: list[Value] = []
    while pending:
        value = pending.pop()
        instruction = program.instruction(value)
        if instruction.op == "parameter" and (value.computation, value.index) == (body, index):
            # The sum so far goes round the loop, and is a total if a round does nothing else with it.
            names = [addition.instruction for addition in additions]

            def passes_on(user: Instruction, names: list[str] = names) -> bool:
                # A running mean adds (gradient - mean) / count.
                is_scaled = user.op in ("subtract", "negate", "convert") or user.name in scalings
                return _is_kept(user) or (is_scaled and user.name not in names)

            others = [use for use in uses(program, [value], passes_on) if use.instruction.name not in names]
            yield from () if others else additions
            return
        if instruction.op == "add" and len(additions) < _MAX_ADDITIONS:
            additions.append(value)
            pending += [program.flow.in_round(Value(value.computation, name)) for name in instruction.operands]
        elif instruction.op == "select":
            pending += [program.flow.in_round(Value(value.computation, name)) for name in instruction.operands[1:]]


def _is_kept(instruction: Instruction) -> bool:
    # TPUs start from zero by a choice in the first round: `select(first, 0, x)`.
    return is_move(instruction) or instruction.op == "select"


_MAX_ADDITIONS = 8
"""The additions in a row that are followed, chosen by hand: a loop rarely adds more to an element in one round."""


def _total(program: CompiledProgram, values: tuple[Value, ...], totals: _Totals) -> _Total | None:
    """The operation that adds up these values, if nothing else uses them."""
    largest: _Total | None = None

    def passes_on(user: Instruction) -> bool:
        # Walks end at additions to a total, and go through all that is linear on the way.
        return is_move(user) or (user.op in _LINEAR and user.name not in names)

    names = {name for _, name in totals}
    for use in uses(program, values, passes_on):
        total = totals.get((use.computation.name, use.instruction.name))
        if total is None:
            return None
        if largest is None or total.rounds > largest.rounds:
            largest = total
    return largest
