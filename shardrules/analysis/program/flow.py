"""How often each computation of a program runs, and where a value in it comes from.

Both need the same walk back through a program: a value is followed through copies, casts, tuples, fusions and loops to
what made it. So a loop's limit is found where the compiler does not print how often it runs, and the argument that a
collective moves.
"""

import functools
import operator
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from typing import final

import attrs

from shardrules.analysis.program.text import Computation, Instruction

_PASSES_ON = (
    *("copy", "copy-start", "copy-done", "bitcast", "bitcast-convert", "reshape", "transpose", "convert"),
    *("slice", "slice-start", "slice-done", "dynamic-slice", "optimization-barrier"),
)
"""Operations whose result is their first operand, in another layout, type or place, or a part of it."""

_MOVES = ("ConcatBitcast", "MoveToHost", "MoveToDevice", "Sharding")
"""Custom calls of which the same is true."""

_CALLS = ("calls", "to_apply", "called_computations", "branch_computations", "true_computation", "false_computation")
LOOP = ("body", "condition")
"""How a loop calls: the roles of what it runs over and over."""


@final
@attrs.frozen
class Times:
    """How often something runs in one call of the program.

    **Arguments:**

    - `count`: how often, loops included. Every branch of a conditional counts as if it were taken.
    - `conditional`: whether a conditional decides if it runs.
    - `unknown`: whether a loop around it runs until something happens, so that `count` is for one round of that loop.
    """

    count: int
    conditional: bool = False
    unknown: bool = False


@final
@attrs.frozen
class Value:
    """A value somewhere in a program.

    **Arguments:**

    - `computation`, `instruction`: the names of both.
    - `index`: which element, where the instruction's result is a tuple and one element of it is meant.
    """

    computation: str
    instruction: str
    index: int | None = None


@final
@attrs.frozen
class CallSite:
    """One computation calling another.

    **Arguments:**

    - `caller`: the name of the computation that calls.
    - `instruction`: the instruction that does it.
    - `role`: the attribute that names the called one: `"calls"`, `"body"`, `"branch_computations"`.
    """

    caller: str
    instruction: Instruction
    role: str


@final
@attrs.frozen
class Flow:
    """How the computations of a program call each other, and how values flow through them.

    **Arguments:**

    - `computations`: all of them, in any order.
    - `entry`: the name of the one that runs first.
    """

    computations: tuple[Computation, ...] = attrs.field(repr=False)
    entry: str

    @functools.cached_property
    def by_name(self) -> Mapping[str, Computation]:
        """The computations by their names."""
        return {one.name: one for one in self.computations}

    @functools.cached_property
    def callers(self) -> Mapping[str, tuple[CallSite, ...]]:
        """Who calls a computation; nobody calls the entry."""
        callers: dict[str, list[CallSite]] = {one.name: [] for one in self.computations}
        for computation in self.computations:
            for called, call in _calls(computation):
                if called in callers:
                    callers[called].append(call)
        return {name: tuple(calls) for name, calls in callers.items()}

    @functools.cached_property
    def trips(self) -> Mapping[str, int | None]:
        """How often each loop goes round, by the name of its instruction; `None` where nobody can tell beforehand."""
        return {
            one.name: _printed_trips(one) if _printed_trips(one) is not None else self._counted_trips(computation, one)
            for computation in self.computations
            for one in computation.instructions
            if one.op == "while"
        }

    @functools.cached_property
    def times(self) -> Mapping[str, Times]:
        """How often each computation runs, by its name; those that nobody calls run 0 times."""
        order = TopologicalSorter({name: [call.caller for call in calls] for name, calls in self.callers.items()})
        times: dict[str, Times] = {}
        for name in order.static_order():  # callers first
            runs = [self._times_through(call, times[call.caller]) for call in self.callers[name]]
            runs = [one for one in runs if one.count]
            times[name] = Times(
                sum(one.count for one in runs) + (name == self.entry),
                any(one.conditional for one in runs),
                any(one.unknown for one in runs),
            )
        return times

    def _times_through(self, call: CallSite, caller: Times) -> Times:
        if call.role not in LOOP:
            return attrs.evolve(caller, conditional=caller.conditional or call.instruction.op == "conditional")
        trips = self.trips[call.instruction.name]
        rounds = 1 if trips is None else trips + (call.role == "condition")
        return Times(caller.count * rounds, caller.conditional, caller.unknown or trips is None)

    def origin(self, place: Value) -> Value:
        """Follows a value back to what made it, through everything that only moves it or takes a part of it.

        **Arguments:**

        - `place`: the value.

        **Returns:**

        Where it was made: an operation, a constant, or a parameter of the entry.
        """
        while True:
            place = self._local_origin(place)
            outside = self._before_loop(place)
            if outside is None:
                return place
            place = outside

    def constant(self, place: Value) -> int | None:
        """Returns the whole number that a value is known to be.

        **Arguments:**

        - `place`: the value.

        **Returns:**

        The number, or `None`.
        """
        made = self._instruction(self.origin(place))
        try:
            return int(made.literal) if made.op == "constant" else None
        except ValueError:
            return None

    def _instruction(self, place: Value) -> Instruction:
        return self.by_name[place.computation].by_name[place.instruction]

    def _local_origin(self, place: Value) -> Value:
        """Like `origin`, but never out of the body of a loop."""
        while (step := self._step(place)) is not None:
            place = step
        return place

    def _step(self, place: Value) -> Value | None:
        one = self._instruction(place)
        operands = [Value(place.computation, name) for name in one.operands]
        if one.op == "get-tuple-element" and place.index is None:
            return attrs.evolve(operands[0], index=int(one.attributes["index"]))
        if one.op == "tuple" and place.index is not None:
            return operands[place.index]
        if one.op in ("fusion", "call"):
            called = one.references("calls") or one.references("to_apply")
            return Value(called[0], self.by_name[called[0]].root, place.index)
        if one.op == "while" and place.index is not None:
            unchanged = self._unchanged(one.references("body")[0], place.index)
            return attrs.evolve(operands[0], index=place.index) if unchanged else None
        if one.op == "parameter":
            return self._argument(place, int(one.literal))
        if one.op in _PASSES_ON or _target(one) in _MOVES:
            # The copy that is under way is one of a tuple's elements.
            return attrs.evolve(operands[0], index=place.index if one.op == "optimization-barrier" else None)
        return None

    def _argument(self, place: Value, number: int) -> Value | None:
        """What a fusion or a call is handed as its parameter `number`; nothing where several hand in something."""
        calls = self.callers[place.computation]
        if len(calls) != 1 or calls[0].instruction.op not in ("fusion", "call"):
            return None
        return Value(calls[0].caller, calls[0].instruction.operands[number], place.index)

    def _before_loop(self, place: Value) -> Value | None:
        """What a loop starts with, where `place` is the state that it carries along and it leaves that part alone."""
        calls = self.callers[place.computation]
        if self._instruction(place).op != "parameter" or len(calls) != 1 or calls[0].role not in LOOP:
            return None
        loop = calls[0].instruction
        if place.index is None or not self._unchanged(loop.references("body")[0], place.index):
            return None
        return Value(calls[0].caller, loop.operands[0], place.index)

    def _unchanged(self, body: str, index: int) -> bool:
        """Whether a loop's body hands on element `index` of its state as it got it."""
        made = self._local_origin(Value(body, self.by_name[body].root, index))
        return made.computation == body and made.index == index and self._instruction(made).op == "parameter"

    def _counted_trips(self, computation: Computation, loop: Instruction) -> int | None:
        """Counts the rounds of a loop over a counter that starts, steps and ends at known numbers."""
        (condition,), (body,) = loop.references("condition"), loop.references("body")
        root = self._local_origin(Value(condition, self.by_name[condition].root))
        test = self._instruction(root)
        if test.op != "compare":
            return None
        sides = [Value(root.computation, name) for name in test.operands]
        ends = [self.constant(side) for side in sides]
        if ends[0] is not None:
            sides, ends = sides[::-1], ends[::-1]
            direction = _MIRRORED[test.attributes["direction"]]
        else:
            direction = test.attributes["direction"]
        counter = self._local_origin(sides[0])
        if ends[1] is None or counter.index is None or counter.computation != condition:
            return None
        start = self.constant(Value(computation.name, loop.operands[0], counter.index))
        step = self._step_of(body, counter.index)
        return None if start is None or not step else _rounds(start, ends[1], step, direction)

    def _step_of(self, body: str, index: int) -> int | None:
        """What a loop's body adds to element `index` of its state in each round."""
        made = self._local_origin(Value(body, self.by_name[body].root, index))
        one = self._instruction(made)
        if one.op not in ("add", "subtract"):
            return None
        sides = [Value(made.computation, name) for name in one.operands]
        numbers = [self.constant(side) for side in sides]
        if one.op == "add" and numbers[1] is None:
            sides, numbers = sides[::-1], numbers[::-1]
        counter = self._local_origin(sides[0])
        if numbers[1] is None or (counter.computation, counter.index) != (body, index):
            return None
        return -numbers[1] if one.op == "subtract" else numbers[1]


_RELATIONS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}


def _rounds(start: int, end: int, step: int, direction: str) -> int | None:
    """How many of `start, start + step, ...` come before the first that does not stand in that relation to `end`.

    `None` where there is no such one, as long as numbers do not overflow.
    """
    if not _RELATIONS[direction](start, end):
        return 0
    reach = end - start if step > 0 else start - end
    if direction == "EQ":
        return 1
    if direction == "NE":
        return reach // abs(step) if reach > 0 and reach % step == 0 else None
    if (direction in ("LT", "LE")) != (step > 0):
        return None
    return -(-(reach + (direction in ("LE", "GE"))) // abs(step))


def _printed_trips(loop: Instruction) -> int | None:
    known = loop.backend_config.get("known_trip_count", {}).get("n")
    if known is None:
        known = "".join(map(str, loop.dims("known_trip_count")))
    return int(known) if known else None


def _target(one: Instruction) -> str:
    return one.attributes.get("custom_call_target", "").strip('"') if one.op == "custom-call" else ""


def _calls(computation: Computation) -> Iterator[tuple[str, CallSite]]:
    """Yields every computation that one calls, with how. The end of an asynchronous call is not another call."""
    for one in computation.instructions:
        if "_computation" in one.text or any(f"{role}=" in one.text for role in ("calls", "to_apply", "body")):
            if one.op in ("async-done", "async-update"):
                continue
            for role in (*_CALLS, *LOOP):
                for called in one.references(role) if role in one.attributes else ():
                    yield called, CallSite(computation.name, one, role)
