"""The calls between computations of a program, the number of runs of each, and the origins of values.

A loop is an instruction that calls two computations, and hands a tuple from round to round:

    %body (s: (s32[], f32[8,8])) -> (s32[], f32[8,8]) { ... }
    %while.1 = (s32[], f32[8,8]) while(%init), condition=%cond, body=%body

Counts and origins take the same walk back through a program: from a value through copies, casts, tuples, fusions and
loops to the instruction that made it. It finds a loop's limit where the compiler does not print how often the loop
runs, and the argument of the program that a collective moves.
"""

import functools
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from typing import final

import attrs

from shardrules.programs.compiled.text import LOOP, Computation, Instruction

_PASSES_ON = (
    *("copy", "copy-start", "copy-done", "bitcast", "bitcast-convert", "reshape", "transpose", "convert"),
    *("slice", "slice-start", "slice-done", "dynamic-slice", "optimization-barrier"),
)
"""Operations whose result is their first operand, or a part of it, in another layout, dtype or memory."""

_PASSES_ON_TARGETS = ("ConcatBitcast", "MoveToHost", "MoveToDevice", "Sharding")
"""Targets of custom calls that do the same."""

_CARRIERS = ("get-tuple-element", "tuple", "fusion", "call", LOOP, "parameter", "optimization-barrier")
"""Instructions whose result is the very value of another instruction."""

CALL_ROLES = (
    *("calls", "to_apply", "called_computations"),
    *("branch_computations", "true_computation", "false_computation"),
)
"""The attributes by which operations other than loops name the computations that they call."""

LOOP_ROLES = ("body", "condition")
"""The attributes by which a loop names the computations that it repeats."""


@final
@attrs.frozen
class Times:
    """The number of runs of something in one call of the program: `count`, loops included.

    Every branch of a conditional counts as taken, and `conditional` says so. A loop without a known number of rounds
    counts as one round, and `unknown` says so.
    """

    count: int
    conditional: bool = False
    unknown: bool = False


@final
@attrs.frozen
class Value:
    """A value in a program: the result of an instruction, or with `index` one element of a result that is a tuple."""

    computation: str
    instruction: str
    index: int | None = None


@final
@attrs.frozen
class CallSite:
    """An instruction in the computation `caller` that calls another computation."""

    caller: str
    instruction: Instruction
    role: str  # the attribute with the called computation: "calls", "body", "branch_computations"


@final
@attrs.frozen
class Flow:
    """The calls between the computations of a program, from `entry` on, and the flow of values through them."""

    computations: tuple[Computation, ...] = attrs.field(repr=False)
    entry: str

    @functools.cached_property
    def by_name(self) -> Mapping[str, Computation]:
        """The computations by name."""
        return {computation.name: computation for computation in self.computations}

    @functools.cached_property
    def callers(self) -> Mapping[str, tuple[CallSite, ...]]:
        """For each computation the instructions that call it; none for the entry."""
        callers: dict[str, list[CallSite]] = {computation.name: [] for computation in self.computations}
        for computation in self.computations:
            for name, call in _calls(computation):
                if name in callers:
                    callers[name].append(call)
        return {name: tuple(calls) for name, calls in callers.items()}

    @functools.cached_property
    def trips(self) -> Mapping[str, int | None]:
        """The rounds of each loop, by the name of its instruction; `None` if they depend on data."""
        trips: dict[str, int | None] = {}
        for computation in self.computations:
            for instruction in computation.instructions:
                if instruction.op == LOOP:
                    printed = printed_trips(instruction)
                    trips[instruction.name] = (
                        self._counted_trips(computation, instruction) if printed is None else printed
                    )
        return trips

    @functools.cached_property
    def times(self) -> Mapping[str, Times]:
        """The number of runs of each computation, by name; 0 if nothing calls it."""
        # HLO has no recursion, so callers can always come first.
        order = TopologicalSorter({name: [call.caller for call in calls] for name, calls in self.callers.items()})
        times: dict[str, Times] = {}
        for name in order.static_order():
            runs = [self._times_through(call, times[call.caller]) for call in self.callers[name]]
            runs = [run for run in runs if run.count]
            times[name] = Times(
                sum(run.count for run in runs) + (name == self.entry),
                any(run.conditional for run in runs),
                any(run.unknown for run in runs),
            )
        return times

    def _times_through(self, call: CallSite, caller: Times) -> Times:
        if call.role not in LOOP_ROLES:
            return attrs.evolve(caller, conditional=caller.conditional or call.instruction.op == "conditional")
        trips = self.trips[call.instruction.name]
        # The condition runs once more than the body: the last time it says no.
        rounds = 1 if trips is None else trips + (call.role == "condition")
        return Times(caller.count * rounds, caller.conditional, caller.unknown or trips is None)

    def origin(self, value: Value) -> Value:
        """Follows a value back through everything that only moves it or takes a part of it.

        Returns what made it: an operation, a constant, or a parameter of the entry.
        """
        while True:
            value = self.in_round(value)
            before = self._before_loop(value)
            if before is None:
                return value
            value = before

    def constant(self, value: Value) -> int | None:
        """Returns the integer that a value always is, or `None`."""
        maker = self._instruction(self.origin(value))
        try:
            return int(maker.literal) if maker.op == "constant" else None
        except ValueError:  # an array, or a float
            return None

    def _instruction(self, value: Value) -> Instruction:
        return self.by_name[value.computation].by_name[value.instruction]

    def source(self, value: Value) -> Value | None:
        """The same value one step back: in a tuple, outside of a call, or before a loop that does not change it."""
        if self._instruction(value).op not in _CARRIERS:
            return None
        return self._step_back(value) or self._before_loop(value)

    def in_round(self, value: Value) -> Value:
        """Like `origin`, but stops at the state of a loop when `value` is inside its body."""
        # A loop, not recursion: chains of copies and calls can be thousands of values long.
        while (source := self._step_back(value)) is not None:
            value = source
        return value

    def _step_back(self, value: Value) -> Value | None:
        """The value that this one was moved or taken from; `None` where its instruction made it."""
        instruction = self._instruction(value)
        operands = [Value(value.computation, name) for name in instruction.operands]
        # %e = get-tuple-element(%t), index=1: element 1 of %t. The next step finds what made that element.
        if instruction.op == "get-tuple-element" and value.index is None:
            return attrs.evolve(operands[0], index=int(instruction.attributes["index"]))
        if instruction.op == "tuple" and value.index is not None:
            return operands[value.index]
        # The result of a fusion or a call is the root of what it calls.
        if instruction.op in ("fusion", "call"):
            called = instruction.references("calls") or instruction.references("to_apply")
            return Value(called[0], self.by_name[called[0]].root, value.index)
        # A loop returns an element of its state that no round changes as it received it.
        if instruction.op == LOOP and value.index is not None:
            unchanged = self._is_unchanged(instruction.references("body")[0], value.index)
            return attrs.evolve(operands[0], index=value.index) if unchanged else None
        if instruction.op == "parameter":
            return self._argument(value, int(instruction.literal))
        passes_on = instruction.op == "custom-call" and instruction.custom_call_target in _PASSES_ON_TARGETS
        if instruction.op in _PASSES_ON or passes_on:
            # Only a barrier passes on a whole tuple. The tuple of a copy-start is (result, operand, context) instead.
            return attrs.evolve(operands[0], index=value.index if instruction.op == "optimization-barrier" else None)
        return None

    def _argument(self, value: Value, parameter_index: int) -> Value | None:
        """The operand that a fusion or a call passes as this parameter; `None` where several calls could have."""
        calls = self.callers[value.computation]
        if len(calls) != 1 or calls[0].instruction.op not in ("fusion", "call"):
            return None
        return Value(calls[0].caller, calls[0].instruction.operands[parameter_index], value.index)

    def _before_loop(self, value: Value) -> Value | None:
        """The initial value of an element of a loop's state that no round changes; `None` for any other value."""
        calls = self.callers[value.computation]
        # A computation with several callers has several origins, and no single value before a loop.
        if self._instruction(value).op != "parameter" or len(calls) != 1 or calls[0].role not in LOOP_ROLES:
            return None
        loop = calls[0].instruction
        if value.index is None or not self._is_unchanged(loop.references("body")[0], value.index):
            return None
        return Value(calls[0].caller, loop.operands[0], value.index)

    def _is_unchanged(self, body: str, index: int) -> bool:
        """A loop's body returns element `index` of its state as it received it."""
        # `origin` would leave the body, and ask this about the same loop again.
        origin = self.in_round(Value(body, self.by_name[body].root, index))
        is_same_element = origin.computation == body and origin.index == index
        return is_same_element and self._instruction(origin).op == "parameter"

    def _counted_trips(self, computation: Computation, loop: Instruction) -> int | None:
        """Counts the rounds of a loop whose counter starts, steps and ends at constants.

        The condition compares the counter, an element of the state, with its end; the body adds its step to it:

            ROOT %lt = pred[] compare(%i, %twelve), direction=LT
            %next = s32[] add(%i, %one)
        """
        (condition,), (body,) = loop.references("condition"), loop.references("body")
        root = self.in_round(Value(condition, self.by_name[condition].root))
        test = self._instruction(root)
        if test.op != "compare":
            return None
        sides = [Value(root.computation, name) for name in test.operands]
        ends = [self.constant(side) for side in sides]
        direction = test.attributes["direction"]
        if ends[0] is not None:  # written the other way around: 12 > i
            sides, ends, direction = sides[::-1], ends[::-1], _MIRRORED[direction]
        # The counter must be an element of the state that the condition receives, not the result of an operation.
        counter, end = self.in_round(sides[0]), ends[1]
        if end is None or counter.index is None or counter.computation != condition:
            return None
        start = self.constant(Value(computation.name, loop.operands[0], counter.index))
        step = self._counter_step(body, counter.index)
        return None if start is None or not step else _rounds(start, end, step, direction)

    def _counter_step(self, body: str, index: int) -> int | None:
        """The step that a loop's body adds to element `index` of its state in each round."""
        origin = self.in_round(Value(body, self.by_name[body].root, index))
        instruction = self._instruction(origin)
        if instruction.op not in ("add", "subtract"):
            return None
        sides = [Value(origin.computation, name) for name in instruction.operands]
        constants = [self.constant(side) for side in sides]
        # add(%one, %i) is add(%i, %one), but subtract does not commute.
        if instruction.op == "add" and constants[1] is None:
            sides, constants = sides[::-1], constants[::-1]
        counter, step = self.in_round(sides[0]), constants[1]
        if step is None or (counter.computation, counter.index) != (body, index):
            return None
        return -step if instruction.op == "subtract" else step


_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}


def _rounds(start: int, end: int, step: int, direction: str) -> int | None:
    """The length of `start, start + step, ...` up to the first element that is not in this relation to `end`.

    `None` if the relation holds until integers overflow.
    """
    if direction == "EQ":
        return int(start == end)
    if direction == "NE":
        count, rest = divmod(end - start, step)
        return count if count >= 0 and not rest else None
    sign = 1 if direction in ("LT", "LE") else -1
    last = end + sign * (direction in ("LE", "GE"))
    if not range(start, last, sign):
        return 0
    # Steps in the wrong direction never end the loop.
    return -((start - last) // step) if step * sign > 0 else None


def printed_trips(loop: Instruction) -> int | None:
    """Returns the rounds that compilers for CPUs and GPUs print."""
    count = loop.backend_config.get("known_trip_count", {}).get("n")
    return int(count) if count else None


def _calls(computation: Computation) -> Iterator[tuple[str, CallSite]]:
    """Yields the computations that one calls, with the call."""
    for instruction in computation.instructions:
        # Splitting attributes is slow, and most instructions call nothing: look for the words first.
        text = instruction.text
        if "_computation" not in text and not any(f"{role}=" in text for role in ("calls", "to_apply", "body")):
            continue
        if instruction.op in ("async-done", "async-update"):  # these name the computation that async-start calls
            continue
        for role in (*CALL_ROLES, *LOOP_ROLES):
            for name in instruction.references(role) if role in instruction.attributes else ():
                yield name, CallSite(computation.name, instruction, role)
