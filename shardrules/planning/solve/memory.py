"""What is in the memory of a device at every operation of a program, for any choice of layouts.

Arrays that are computed together with what takes them are never written, so they take no room; what they are computed
from has to stay until then. Arrays that enter a loop stay until its end. Arguments stay throughout; results that are
fed back as arguments are written over them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, final

import attrs
import numpy as np

from shardrules.planning.graph.layouts import shard_counts
from shardrules.planning.graph.problem import Home, Problem, project, read_region
from shardrules.planning.solve.formulation import MemoryConstraint
from shardrules.planning.traced.fusion import reads_operands, writes_result
from shardrules.planning.traced.program import TracedProgram

_IN_PLACE = ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "dynamic_update_slice")
"""Operations that write their result over their first operand, if nothing else needs it."""

_PEAK_WINDOWS = 24
"""Into how many parts a program is cut to look for operations at which memory is full. Each becomes a constraint: with
twice as many, linear programs are larger, with half as many, more rounds are needed until all peaks are watched."""

_Spans: TypeAlias = Mapping[int, tuple[int, int]]
"""For each region the indices of its first and its last operation."""


@final
@attrs.frozen(eq=False)
class Stay:
    """An array that is in memory from one operation to another, both included."""

    home: Home
    """What decides its layout."""
    nbytes: int
    """The bytes of the whole array."""
    first: int
    last: int


@final
@attrs.frozen(eq=False)
class Copy:
    """An array that is brought to another layout for an operation."""

    array: tuple[int, int]
    """The array and the region: copies of the same array to the same layout are one."""
    edge: int
    op_index: int
    last: int
    """The last operation at which the copy is needed here."""
    until: int
    """The last operation at which it may be needed, if others take the same copy."""


@final
@attrs.frozen(eq=False)
class Occupancy:
    """What is in memory when, for any choice."""

    problem: Problem
    stays: tuple[Stay, ...]
    copies: tuple[Copy, ...]
    fixed_bytes: int
    """What is there in any case: arguments without a layout to choose, and constants."""

    @classmethod
    def of(cls, problem: Problem) -> "Occupancy":
        """Returns the occupancy of a problem."""
        spans = _region_spans(problem.program)
        last_uses = _last_uses(problem.program, spans)
        homeless = [array for array in problem.program.arguments if array not in problem.homes]
        # Arrays without a home, such as scalars, have no layout to choose.
        fixed = sum(problem.program.arrays[array].nbytes for array in (*homeless, *problem.program.constants))
        stays = (*_argument_stays(problem), *_result_stays(problem, spans, last_uses))
        return cls(problem, stays, _copies(problem, spans), fixed)

    def overhead(self, stay: Stay) -> float:
        """Returns how many times its bytes an array takes: temporaries overlap with what comes next."""
        lasting = stay.first == 0 and stay.last == len(self.problem.program.operations)
        return 1.0 if lasting else self.problem.machine.assumptions.temporaries

    def timeline(self, choice: Sequence[int]) -> np.ndarray:
        """Returns the bytes in memory under a choice, at each operation and at the end."""
        problem = self.problem
        # Changes at each operation, added up at the end: one pass, however long arrays stay.
        changes = np.zeros(len(problem.program.operations) + 2)
        for stay in self.stays:
            layout = np.array([problem.layout(stay.home, choice)], np.int8)
            nbytes = stay.nbytes * self.overhead(stay) / float(shard_counts(layout, problem.machine)[0])
            changes[stay.first] += nbytes
            changes[stay.last + 1] -= nbytes
        for (first, last), nbytes in self._copy_spans(choice):
            changes[first] += nbytes * problem.machine.assumptions.temporaries
            changes[last + 1] -= nbytes * problem.machine.assumptions.temporaries
        return np.cumsum(changes)[:-1] + self.fixed_bytes

    def _copy_spans(self, choice: Sequence[int]) -> list[tuple[tuple[int, int], float]]:
        """Returns the copies under a choice: from the first operation that takes each to the last, and its bytes."""
        problem = self.problem
        spans: dict[tuple[tuple[int, int], bytes], tuple[int, int, float]] = {}
        for copy in self.copies:
            edge = problem.edges[copy.edge]
            row, column = edge.from_codes[choice[edge.start]], edge.to_codes[choice[edge.end]]
            target = edge.to_layouts[column]
            if (edge.from_layouts[row] == target).all():
                continue
            key = (copy.array, target.tobytes())
            first, last, _ = spans.get(key, (copy.op_index, copy.last, 0.0))
            nbytes = edge.nbytes / float(shard_counts(target[None], problem.machine)[0])
            spans[key] = (min(first, copy.op_index), max(last, copy.last), nbytes)
        return [((first, last), nbytes) for first, last, nbytes in spans.values()]

    def constraint(self, op_index: int, limit_bytes: float, certain: bool = False) -> MemoryConstraint:
        """Returns a bound on what is in memory at an operation.

        Which copies live at an operation depends on products of choices, which no linear constraint has. With
        `certain`, it counts only what is there in any case, one copy of an array at most: it then rules out no choice
        that fits, and lower bounds hold. Without, it also counts copies that may be kept for other operations, and
        rules out every choice that does not fit.
        """
        problem = self.problem
        counted_arrays: dict[tuple[int, int], None] = {}
        layout_bytes: dict[int, np.ndarray] = {}
        for stay in self.stays:
            if stay.first <= op_index <= stay.last:
                node = stay.home.node
                layouts = project(problem.nodes[node].layouts, stay.home)
                sizes = stay.nbytes * self.overhead(stay) / shard_counts(layouts, problem.machine)
                layout_bytes[node] = layout_bytes.get(node, np.zeros(len(sizes))) + sizes
        copy_bytes: dict[int, np.ndarray] = {}
        for copy in self.copies:
            if not copy.op_index <= op_index <= (copy.last if certain else copy.until):
                continue
            # Operations alike share an edge: of their copies, only the one made right here may come on top.
            if copy.edge in copy_bytes and copy.op_index != op_index:
                continue
            if certain and copy.array in counted_arrays:
                continue
            counted_arrays[copy.array] = None
            edge = problem.edges[copy.edge]
            sizes = edge.nbytes / shard_counts(edge.to_layouts, problem.machine)
            sizes = sizes * problem.machine.assumptions.temporaries
            copy_bytes[copy.edge] = copy_bytes.get(copy.edge, 0.0) + sizes
        return MemoryConstraint(layout_bytes, copy_bytes, self.fixed_bytes, limit_bytes)


def peaks(timeline: np.ndarray, limit_bytes: float) -> list[int]:
    """Returns the operations at which memory is fullest: the fullest of all, and others above the limit that are higher
    than all around."""
    op_indices = [int(timeline.argmax())]
    size = max(1, len(timeline) // _PEAK_WINDOWS)
    for start in range(0, len(timeline), size):
        op_index = start + int(timeline[start : start + size].argmax())
        # The slope of a peak in the next window is not a peak: look as far to both sides.
        nearby = timeline[max(0, op_index - size) : op_index + size]
        is_peak = timeline[op_index] > limit_bytes and timeline[op_index] == nearby.max()
        if is_peak and op_index not in op_indices:
            op_indices.append(op_index)
    return op_indices


def _region_spans(program: TracedProgram) -> dict[int, tuple[int, int]]:
    """Returns the first and the last operation of each region, those inside of it included."""
    spans: dict[int, tuple[int, int]] = {}
    for op_index, operation in enumerate(program.operations):
        region = operation.region
        while region >= 0:
            spans[region] = (spans.get(region, (op_index, op_index))[0], op_index)
            region = program.regions[region][0]
    return spans


def _last_uses(program: TracedProgram, spans: _Spans) -> dict[int, int]:
    """Returns for each array that anything takes the last operation at which it has to be there."""
    last_uses: dict[int, int] = {}
    # Backwards, so that the last use of what is computed from an array is known when the array's own is needed.
    for op_index in range(len(program.operations) - 1, -1, -1):
        operation = program.operations[op_index]
        until = op_index
        for result in operation.results:
            # A result that is not written is computed where it is taken: its operands have to last until then.
            if not writes_result(program, op_index, result):
                until = max(until, last_uses.get(result, op_index))
        for position, operand in enumerate(operation.operands):
            if operand is None:
                continue
            if position == 0 and operation.name in _IN_PLACE and until == op_index:
                # The result takes its memory over: counted from here on, and the operand to just before.
                last_uses[operand] = max(last_uses.get(operand, 0), op_index - 1)
                continue
            producer = program.producers.get(operand)
            birth_region = 0 if producer is None else program.operations[producer].region
            loop_end = _loop_end(program, spans, operation.region, birth_region)
            last_uses[operand] = max(last_uses.get(operand, 0), until, loop_end)
    return last_uses


def _argument_stays(problem: Problem) -> Iterator[Stay]:
    """Yields the arguments, which are there throughout."""
    for array in problem.program.arguments:
        if array in problem.homes:
            nbytes = problem.program.arrays[array].nbytes
            yield Stay(problem.homes[array], nbytes, 0, len(problem.program.operations))


def _result_stays(problem: Problem, spans: _Spans, last_uses: Mapping[int, int]) -> Iterator[Stay]:
    """Yields what operations write, from then to the last operation that takes it."""
    program = problem.program
    for op_index, operation in enumerate(program.operations):
        for position, result in enumerate(operation.results):
            home = problem.homes.get(result)
            if home is None or result in problem.feedback:  # written over the argument, which is counted
                continue
            nbytes = program.arrays[result].nbytes
            computed_home = problem.produced_homes.get((op_index, position))
            if computed_home is not None:  # a sum that is added up into another layout: both are there for a moment
                yield Stay(computed_home, nbytes, op_index, op_index)
            first = op_index if computed_home is None else op_index + 1
            if operation.role == "return":
                yield Stay(home, nbytes, op_index + 1, len(program.operations))  # until then the operand is counted
            elif operation.role in ("leave", "join") or writes_result(program, op_index, result):
                if operation.role == "leave":  # a stacked result is allocated before the loop begins
                    first = spans[operation.region][0]
                yield Stay(home, nbytes, first, max(first, last_uses.get(result, op_index)))


def _copies(problem: Problem, spans: _Spans) -> tuple[Copy, ...]:
    """Returns the arrays that are brought to another layout; those that enter a loop stay to its end."""
    program = problem.program
    copies: list[Copy] = []
    kept_until: dict[tuple[int, int], int] = {}
    for op_index, operation in enumerate(program.operations):
        for position, operand in enumerate(operation.operands):
            if (op_index, position) not in problem.edge_indices:
                continue
            if not (reads_operands(operation) or operation.role == "enter"):
                continue
            assert operand is not None, "an operand that has an edge is an array"
            region = read_region(program, op_index, position)
            until = len(program.operations) if operation.role == "return" else op_index
            if region != operation.region:
                until = max(until, spans[operation.region][1])
            array = (operand, region)
            copies.append(Copy(array, problem.edge_indices[op_index, position], op_index, until, until))
            kept_until[array] = max(kept_until.get(array, 0), until)
    return tuple(attrs.evolve(copy, until=kept_until[copy.array]) for copy in copies)


def _loop_end(program: TracedProgram, spans: _Spans, region: int, birth_region: int) -> int:
    """Returns when the outermost loop ends that an operation is in and its operand is not; 0 if there is none."""
    # Each round of a loop reads it again, so it stays until the last: of the outermost loop, if loops are nested.
    # Branches and recomputed parts are regions too, but run once for each round of the region around them.
    end = 0
    while region >= 0 and region != birth_region:
        outside, times = program.regions[region]
        if outside >= 0 and times != program.regions[outside][1]:
            end = max(end, spans[region][1])
        region = outside
    return end
