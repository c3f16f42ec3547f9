"""What lies in the memory of a device at every operation of a program, for any choice of layouts.

Arrays that are computed along with what takes them are never written, so they take no room; what they are computed from
has to stay until then. Arrays that come into a loop stay until its end. Arguments stay throughout; results that are fed
back as arguments are written over these.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, final

import attrs
import numpy as np

from shardrules.planning.graph.layouts import shard_counts
from shardrules.planning.graph.problem import Home, Problem, project, read_region
from shardrules.planning.solve.formulation import Row
from shardrules.planning.traced.fusion import reads_operands, writes_result
from shardrules.planning.traced.program import TracedProgram

_IN_PLACE = ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "dynamic_update_slice")
"""What writes its result over its first operand, if nobody else needs that."""

_Spans: TypeAlias = Mapping[int, tuple[int, int]]


@final
@attrs.frozen(eq=False)
class Stay:
    """An array that lies in memory for a while.

    **Arguments:**

    - `home`: what decides its layout.
    - `nbytes`: the bytes of all of it.
    - `first`, `last`: the first and the last operation at which it is there.
    """

    home: Home
    nbytes: int
    first: int
    last: int


@final
@attrs.frozen(eq=False)
class Copy:
    """An array that is brought to another layout for an operation.

    **Arguments:**

    - `array`: its number, with that of the region: copies of the same to the same layout are one.
    - `edge`: the way that it goes.
    - `at`: the operation.
    - `last`: the last operation at which the copy is there.
    - `until`: the last one at which it may be there, if others take the same copy.
    """

    array: tuple[int, int]
    edge: int
    at: int
    last: int
    until: int


@final
@attrs.frozen(eq=False)
class Occupancy:
    """Who lies in memory when.

    **Arguments:**

    - `problem`: what is to be chosen.
    - `stays`, `copies`: see above.
    - `fixed`: bytes that are there in any case.
    """

    problem: Problem
    stays: tuple[Stay, ...]
    copies: tuple[Copy, ...]
    fixed: int

    @classmethod
    def of(cls, problem: Problem) -> "Occupancy":
        """Finds out who lies in memory when.

        **Arguments:**

        - `problem`: what is to be chosen.

        **Returns:**

        An `Occupancy`.
        """
        spans = _spans(problem.program)
        last = _last_uses(problem.program, spans)
        lying = [number for number in problem.program.arguments if number not in problem.homes]
        fixed = sum(problem.program.arrays[number].nbytes for number in (*lying, *problem.program.constants))
        stays = (*_arguments(problem), *_results(problem, spans, last))
        return cls(problem, stays, _copies(problem, spans), fixed)

    def room(self, stay: Stay) -> float:
        """How much more room an array takes than its bytes: what is temporary overlaps with what comes next.

        **Arguments:**

        - `stay`: the array.

        **Returns:**

        A factor.
        """
        lasting = stay.first == 0 and stay.last == len(self.problem.program.operations)
        return 1.0 if lasting else self.problem.machine.assumptions.temporaries

    def timeline(self, choice: Sequence[int]) -> np.ndarray:
        """Returns what lies in memory under a choice.

        **Arguments:**

        - `choice`: for each node the number of its label.

        **Returns:**

        Bytes, for each operation and the end.
        """
        problem = self.problem
        steps = np.zeros(len(problem.program.operations) + 2)
        for stay in self.stays:
            layout = problem.layout(stay.home, choice)
            amount = stay.nbytes * self.room(stay) / _pieces(layout, problem)
            steps[stay.first] += amount
            steps[stay.last + 1] -= amount
        for (first, last), amount in self._copied(choice):
            steps[first] += amount * problem.machine.assumptions.temporaries
            steps[last + 1] -= amount * problem.machine.assumptions.temporaries
        return np.cumsum(steps)[:-1] + self.fixed

    def _copied(self, choice: Sequence[int]) -> list[tuple[tuple[int, int], float]]:
        """Copies under a choice: from the first operation that takes one to the last, and its bytes."""
        problem = self.problem
        found: dict[tuple[tuple[int, int], bytes], tuple[int, int, float]] = {}
        for copy in self.copies:
            edge = problem.edges[copy.edge]
            row, column = edge.from_codes[choice[edge.start]], edge.to_codes[choice[edge.end]]
            target = edge.to_layouts[column]
            if (edge.from_layouts[row] == target).all():
                continue
            key = (copy.array, target.tobytes())
            first, last, _ = found.get(key, (copy.at, copy.last, 0.0))
            amount = edge.nbytes / float(shard_counts(target[None], problem.machine)[0])
            found[key] = (min(first, copy.at), max(last, copy.last), amount)
        return [((first, last), amount) for first, last, amount in found.values()]

    def row(self, at: int, limit: float, sure: bool = False) -> Row:
        """Returns a bound on what lies in memory at an operation.

        **Arguments:**

        - `at`: the operation.
        - `limit`: the most there may be.
        - `sure`: whether only what is there in any case counts, of copies of an array one; otherwise copies count that
            may be kept for others, too.

        **Returns:**

        A `Row`.
        """
        problem = self.problem
        seen: dict[tuple[int, int], None] = {}
        labels: dict[int, np.ndarray] = {}
        for stay in self.stays:
            if stay.first <= at <= stay.last:
                node = stay.home.node
                rows = project(problem.nodes[node].layouts, stay.home)
                sizes = stay.nbytes * self.room(stay) / shard_counts(rows, problem.machine)
                labels[node] = labels.get(node, np.zeros(len(sizes))) + sizes
        copies: dict[int, np.ndarray] = {}
        for copy in self.copies:
            if copy.at <= at <= (copy.last if sure else copy.until) and not (copy.edge in copies and copy.at != at):
                if sure and copy.array in seen:
                    continue
                seen[copy.array] = None
                edge = problem.edges[copy.edge]
                sizes = edge.nbytes / shard_counts(edge.to_layouts, problem.machine)
                sizes = sizes * problem.machine.assumptions.temporaries
                copies[copy.edge] = copies.get(copy.edge, 0.0) + sizes
        return Row(labels, copies, self.fixed, limit)


def peaks(timeline: np.ndarray, limit: float) -> list[int]:
    """Returns the operations at which memory is fullest: the first of them, and others that are higher than all around.

    **Arguments:**

    - `timeline`: what lies in memory, for each operation.
    - `limit`: only the first may be below that.

    **Returns:**

    Their numbers.
    """
    found = [int(timeline.argmax())]
    size = max(1, len(timeline) // 24)
    for start in range(0, len(timeline), size):
        part = timeline[start : start + size]
        at = start + int(part.argmax())
        nearby = timeline[max(0, at - size) : at + size]
        if timeline[at] > limit and timeline[at] == nearby.max() and at not in found:
            found.append(at)
    return found


def _pieces(layout: Sequence[int], problem: Problem) -> float:
    return float(shard_counts(np.array([layout], np.int8), problem.machine)[0])


def _spans(program: TracedProgram) -> dict[int, tuple[int, int]]:
    """The first and the last operation of each region, those inside of it too."""
    found: dict[int, tuple[int, int]] = {}
    for at, operation in enumerate(program.operations):
        region = operation.region
        while region >= 0:
            found[region] = (found.get(region, (at, at))[0], at)
            region = program.regions[region][0]
    return found


def _last_uses(program: TracedProgram, spans: _Spans) -> dict[int, int]:
    """For each array that anything takes, the last operation at which it has to be there."""
    last: dict[int, int] = {}
    for at in range(len(program.operations) - 1, -1, -1):
        operation = program.operations[at]
        until = at
        for result in operation.results:
            if not writes_result(program, at, result):  # computed only where it is taken
                until = max(until, last.get(result, at))
        for place, operand in enumerate(operation.operands):
            if operand is None:
                continue
            if place == 0 and operation.name in _IN_PLACE and until == at:
                last[operand] = max(last.get(operand, 0), at - 1)
                continue
            maker = program.producers.get(operand)
            born = 0 if maker is None else program.operations[maker].region
            last[operand] = max(last.get(operand, 0), until, _leaves(program, spans, operation.region, born))
    return last


def _arguments(problem: Problem) -> Iterator[Stay]:
    """Arguments, which are there throughout."""
    for number in problem.program.arguments:
        if number in problem.homes:
            nbytes = problem.program.arrays[number].nbytes
            yield Stay(problem.homes[number], nbytes, 0, len(problem.program.operations))


def _results(problem: Problem, spans: _Spans, last: Mapping[int, int]) -> Iterator[Stay]:
    """What operations write, from then to the last that takes it."""
    program = problem.program
    for at, operation in enumerate(program.operations):
        for place, result in enumerate(operation.results):
            home = problem.homes.get(result)
            if home is None or result in problem.feedback:
                continue
            nbytes = program.arrays[result].nbytes
            own = problem.produced_homes.get((at, place))
            if own is not None:
                yield Stay(own, nbytes, at, at)
            begun = at if own is None else at + 1
            if operation.role == "return":
                yield Stay(home, nbytes, at + 1, len(program.operations))  # till then what is returned is there
            elif operation.role in ("leave", "join") or writes_result(program, at, result):
                first = spans[operation.region][0] if operation.role == "leave" else begun
                yield Stay(home, nbytes, first, max(first, last.get(result, at)))


def _copies(problem: Problem, spans: _Spans) -> tuple[Copy, ...]:
    """Arrays that are brought to another layout; those that come into a loop stay to its end."""
    program = problem.program
    found: list[Copy] = []
    kept: dict[tuple[int, int], int] = {}
    for at, operation in enumerate(program.operations):
        for place, operand in enumerate(operation.operands):
            if (at, place) not in problem.edge_indices or not (reads_operands(operation) or operation.role == "enter"):
                continue
            region = read_region(program, at, place)
            until = len(program.operations) if operation.role == "return" else at
            if region != operation.region:
                until = max(until, spans[operation.region][1])
            array = (operand or 0, region)
            found.append(Copy(array, problem.edge_indices[at, place], at, until, until))
            kept[array] = max(kept.get(array, 0), until)
    return tuple(attrs.evolve(copy, until=kept[copy.array]) for copy in found)


def _leaves(program: TracedProgram, spans: _Spans, region: int, born: int) -> int:
    """When the outermost loop ends that an operation is in and an array is not."""
    found = 0
    while region >= 0 and region != born:
        outside, times = program.regions[region]
        if outside >= 0 and times != program.regions[outside][1]:
            found = max(found, spans[region][1])
        region = outside
    return found
