"""The memory of a device at every operation of a program, for any choice of layouts.

Arrays that are computed in the kernel that takes them are never written, so they take no room; the operands that they
are computed from have to stay until then. Arrays that enter a loop stay until its end. Arguments stay throughout;
results that are fed back as arguments are written over them, and so are updates in place.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax.numpy as jnp
import numpy as np

from shardrules.programs.autoplan.graph.home import Home, project
from shardrules.programs.autoplan.graph.layouts import shard_counts
from shardrules.programs.autoplan.graph.problem import Problem, read_region
from shardrules.programs.autoplan.solve.formulation import MemoryConstraint
from shardrules.programs.compilers.fusion import FusedProgram
from shardrules.programs.compilers.kernels import IN_PLACE
from shardrules.programs.compilers.ragged import expansions
from shardrules.programs.traced.program import TracedProgram

_Positions: TypeAlias = Sequence[int]
"""For each operation when it runs."""

_Spans: TypeAlias = Mapping[int, tuple[int, int]]
"""For each region the positions of its first and its last operation."""


@final
@attrs.frozen(eq=False)
class Stay:
    """An array that is in memory from one operation to another, both included."""

    home: Home
    """The node that decides its layout."""
    nbytes: int
    """The bytes of the whole array."""
    first: int
    last: int
    is_lasting: bool = False
    """It is an argument."""
    is_region: bool = False
    """It is the memory of a region while it runs."""


@final
@attrs.frozen(eq=False)
class Copy:
    """An array that is brought to another layout for an operation."""

    array: tuple[int, int]
    """The array and the region: copies of the same array to the same layout are one."""
    edge: int
    first: int
    last: int
    """The last operation at which the copy is needed here."""
    until: int
    """The last operation at which it may be needed, if others take the same copy."""
    is_fused: bool = False
    """It is read in the kernel that computes it: only the part that other devices send is in memory then."""
    width: int = 1
    """The bytes that it takes, over those of its dtype."""


@final
@attrs.frozen(eq=False)
class Occupancy:
    """The contents of memory over time, for any choice."""

    problem: Problem
    stays: tuple[Stay, ...]
    copies: tuple[Copy, ...]
    fixed_bytes: int
    """The bytes that are always there: arguments without a layout to choose, and constants."""
    temporaries: float
    """The memory of intermediate results, over their bytes: `Assumptions.temporaries`, or less where limits bind."""

    @classmethod
    def of(cls, problem: Problem, positions: _Positions, *, waits: bool = False) -> "Occupancy":
        """Returns the occupancy of a problem whose operations run at some positions.

        What may run as soon as its operands are there either does, or waits until its result is taken.
        """
        spans = _region_spans(problem.program, positions)
        last_uses = _last_uses(problem.fusion, positions, spans)
        overwritten = _overwritten(problem)
        updated = _updated(problem, overwritten)
        homeless = [array for array in problem.program.arguments if array not in problem.homes]
        # Arrays without a home, such as scalars, have no layout to choose.
        fixed = sum(problem.program.arrays[array].device_bytes for array in (*homeless, *problem.program.constants))
        stays = (
            *_argument_stays(problem),
            *_result_stays(problem, positions, spans, last_uses, overwritten, updated),
            *_expansion_stays(problem, positions),
            *_widened_stays(problem, positions),
            *_window_stays(problem, positions, spans, waits),
            *_region_stays(problem, positions),
        )
        copies = _copies(problem, positions, spans, last_uses, updated)
        return cls(problem, stays, copies, fixed, problem.machine.temporaries)

    def timeline(self, choice: Sequence[int]) -> np.ndarray:
        """Returns the bytes in memory under a choice, at each operation and at the end."""
        problem = self.problem
        # Changes at each operation, added up at the end: one pass, however long arrays stay.
        changes = np.zeros(len(problem.program.operations) + 2)
        for stay, sizes in zip(self.stays, self._stay_sizes, strict=True):
            nbytes = sizes[choice[stay.home.node]]
            changes[stay.first] += nbytes
            changes[stay.last + 1] -= nbytes
        for (first, last), nbytes in self._copy_spans(choice):
            changes[first] += nbytes * self.temporaries
            changes[last + 1] -= nbytes * self.temporaries
        return np.cumsum(changes)[:-1] + self.fixed_bytes

    def peak(self, choice: Sequence[int]) -> float:
        """Returns the most bytes in memory at once under a choice."""
        return float(self.timeline(choice).max())

    def argument_bytes(self, choice: Sequence[int]) -> float:
        """Returns the bytes of what is in memory from the beginning to the end, under a choice."""
        stays = zip(self.stays, self._stay_sizes, strict=True)
        return self.fixed_bytes + sum(float(sizes[choice[stay.home.node]]) for stay, sizes in stays if stay.is_lasting)

    @functools.cached_property
    def _stay_sizes(self) -> tuple[np.ndarray, ...]:
        """For each array that stays the bytes that it takes in each layout of its node."""
        homes = dict.fromkeys(stay.home for stay in self.stays)
        layouts = {home: project(self.problem.nodes[home.node].layouts, home) for home in homes}
        return tuple(self._layout_bytes(stay, layouts[stay.home]) for stay in self.stays)

    def _layout_bytes(self, stay: Stay, layouts: np.ndarray) -> np.ndarray:
        """Returns the bytes that an array takes in each of some layouts."""
        if stay.is_region:
            return np.array(self.problem.nodes[stay.home.node].temporary_bytes) * self.temporaries
        gaps = 1.0 if stay.is_lasting else self.temporaries
        return stay.nbytes * gaps / shard_counts(layouts, self.problem.machine)

    def _copy_spans(self, choice: Sequence[int]) -> list[tuple[tuple[int, int], float]]:
        """Returns the copies under a choice: from the first operation that takes each to the last, and its bytes."""
        problem = self.problem
        spans: dict[tuple[tuple[int, int], bytes], tuple[int, int, float]] = {}
        for copy in self.copies:
            edge = problem.edges[copy.edge]
            row, column = edge.codes(choice)
            target = edge.to_layouts[column]
            if not self._is_copied(copy)[row, column]:
                continue
            key = (copy.array, target.tobytes())
            first, last, _ = spans.get(key, (copy.first, copy.last, 0.0))
            nbytes = copy.width * edge.nbytes / float(shard_counts(target[None], problem.machine)[0])
            spans[key] = (min(first, copy.first), max(last, copy.last), nbytes)
        return [((first, last), nbytes) for first, last, nbytes in spans.values()]

    def _is_copied(self, copy: Copy) -> np.ndarray:
        """Returns from which layouts an edge copies an array to which."""
        edge = self.problem.edges[copy.edge]
        # In a kernel that reads it, it is not written where it is only split further.
        return edge.sends if copy.is_fused else edge.changes

    def constraint(self, op_index: int, limit_bytes: float, certain: bool = False) -> MemoryConstraint:
        """Returns a bound on what is in memory at an operation.

        Which copies live at an operation depends on products of choices, which no linear constraint has. With
        `certain`, it counts only what is there in any case, one copy of an array at most: it then rules out no choice
        that fits, and lower bounds hold. Without, it also counts copies that may be kept for other operations, and
        rules out every choice that does not fit.
        """
        problem = self.problem
        layout_bytes: dict[int, np.ndarray] = {}
        for stay, sizes in zip(self.stays, self._stay_sizes, strict=True):
            if stay.first <= op_index <= stay.last:
                node = stay.home.node
                layout_bytes[node] = layout_bytes.get(node, np.zeros(len(sizes))) + sizes
        # Operations alike share an edge, but each array has a copy of its own.
        copies: dict[tuple[tuple[int, int], int], np.ndarray] = {}
        for copy in self.copies:
            if copy.first <= op_index <= (copy.last if certain else copy.until):
                edge, key = problem.edges[copy.edge], (copy.array, copy.edge)
                sizes = copy.width * edge.nbytes * self.temporaries / shard_counts(edge.to_layouts, problem.machine)
                copies[key] = np.maximum(copies.get(key, 0.0), self._is_copied(copy) * sizes)
        if certain:  # one copy of each array
            copies = {key: copies[key] for key in dict([*copies]).items()}
        copy_bytes: dict[int, np.ndarray] = {}
        for (_, edge_index), sizes in copies.items():
            copy_bytes[edge_index] = copy_bytes.get(edge_index, 0.0) + sizes
        return MemoryConstraint(layout_bytes, copy_bytes, self.fixed_bytes, limit_bytes)


def peaks(timeline: np.ndarray, limit_bytes: float) -> list[int]:
    """Returns the operations at which memory is fullest: the fullest of all, and others above the limit that are higher
    than all around."""
    op_indices = [int(timeline.argmax())]
    # Each of 24 parts, chosen by hand, becomes a constraint: with more, linear programs are larger, with fewer, more
    # rounds are needed until all peaks are watched.
    size = max(1, len(timeline) // 24)
    for start in range(0, len(timeline), size):
        op_index = start + int(timeline[start : start + size].argmax())
        # The slope of a peak in the next window is not a peak: look as far to both sides.
        nearby = timeline[max(0, op_index - size) : op_index + size]
        is_peak = timeline[op_index] > limit_bytes and timeline[op_index] == nearby.max()
        if is_peak and op_index not in op_indices:
            op_indices.append(op_index)
    return op_indices


def _region_spans(program: TracedProgram, positions: _Positions) -> dict[int, tuple[int, int]]:
    """Returns when the first and the last operation of each region run, those inside of it included."""
    spans: dict[int, tuple[int, int]] = {}
    for op_index, operation in enumerate(program.operations):
        region, position = operation.region, positions[op_index]
        while region >= 0:
            first, last = spans.get(region, (position, position))
            spans[region] = (min(first, position), max(last, position))
            region = program.regions[region].parent
    return spans


def _last_uses(fusion: FusedProgram, positions: _Positions, spans: _Spans) -> dict[int, int]:
    """Returns for each array that anything takes the last position at which it has to be there."""
    program = fusion.program
    last_uses: dict[int, int] = {}
    branch_ends = _branch_ends(program, spans)
    # Backwards, so that the last use of what is computed from an array is known when the array's own is needed.
    for op_index in sorted(range(len(positions)), key=lambda op_index: -positions[op_index]):
        operation, here = program.operations[op_index], positions[op_index]
        until = here
        for result in operation.results:
            # A result that is not written is computed where it is taken, and a view is the same memory: either way the
            # operands have to last until then.
            if not fusion.writes(op_index, result):
                until = max(until, last_uses.get(result, here))
        if operation.role == "enter" and operation.results[0] in last_uses:
            # Compilers keep what any branch takes until the last has ended.
            until = max(until, branch_ends.get(operation.region, 0))
        for operand_index, operand in enumerate(operation.operands):
            if operand is None:
                continue
            if operation.joins_branches:
                # What branches return is in the same memory, and the result's after the last.
                branch = program.branch_of(op_index, operand)
                last_uses[operand] = max(last_uses.get(operand, 0), here if branch is None else spans[branch][1])
                continue
            if operand_index == 0 and until == here and (operation.name in IN_PLACE or operation.role == "join"):
                # The result takes its memory over: counted from here on, and the operand to just before.
                last_uses[operand] = max(last_uses.get(operand, 0), here - 1)
                continue
            loop_end = _loop_end(program, spans, operation.region, _birth_region(program, operand))
            last_uses[operand] = max(last_uses.get(operand, 0), until, loop_end)
    return last_uses


def _argument_stays(problem: Problem) -> Iterator[Stay]:
    """Yields the arguments, which are there throughout."""
    for array in problem.program.arguments:
        if array in problem.homes:
            nbytes = problem.program.arrays[array].device_bytes
            yield Stay(problem.homes[array], nbytes, 0, len(problem.program.operations), is_lasting=True)


def _result_stays(
    problem: Problem,
    positions: _Positions,
    spans: _Spans,
    last_uses: Mapping[int, int],
    overwritten: Mapping[int, int],
    updated: Mapping[int, int],
) -> Iterator[Stay]:
    """Yields the arrays that operations write, each from then to the last operation that takes it."""
    program, fusion = problem.program, problem.fusion
    zeros = _zeros(program, positions, spans)
    for op_index, operation in enumerate(program.operations):
        here = positions[op_index]
        for result_index, result in enumerate(operation.results):
            home = problem.homes.get(result)
            if home is None or result in problem.feedback:  # written over the argument, which is counted
                continue
            nbytes = program.arrays[result].device_bytes * fusion.gradients.widths.get(result, 1)
            nbytes *= _width(problem, result)
            if operation.role == "return":
                yield Stay(home, nbytes, here + 1, len(program.operations))  # until then the operand is counted
                continue
            if not fusion.writes(op_index, result):
                continue
            computed_home = problem.produced_homes.get((op_index, result_index))
            if computed_home is not None:  # a sum that is added up into another layout: both are there for a moment
                yield Stay(computed_home, nbytes, here, here)
            is_overwriting = _overwrites(problem, op_index, result, here, last_uses)
            first = here + 1 if computed_home is not None or is_overwriting else here
            if result in fusion.gradients.siblings:
                first = min(first, positions[fusion.gradients.siblings[result]])
            if zeros.get((op_index, result_index), here) < here:
                first = zeros[op_index, result_index]
            elif operation.joins_branches:
                # All results of branches are there from the end of the last on.
                branches = [program.branch_of(op_index, operand) for operand in operation.operands]
                first = max((spans[branch][1] + 1 for branch in branches if branch is not None), default=first)
            last = max(first, last_uses.get(result, here))
            argument = overwritten.get(result)
            if argument is not None and problem.homes.get(argument) != home:
                argument = None
            memory = updated.get(result, argument)
            if memory is not None:
                # Written over it from the start, unless something takes an argument as it was later.
                last = last_uses.get(memory, 0) if memory in program.arguments else first
                if last <= first:
                    continue
            yield Stay(home, nbytes, first, last)


def _overwrites(problem: Problem, op_index: int, result: int, here: int, last_uses: Mapping[int, int]) -> bool:
    """The kernel of a chain writes its result over an array of the same size that nothing else needs."""
    program, fusion = problem.program, problem.fusion
    if not fusion.is_elementwise(op_index):
        return False
    return any(
        array in program.producers  # otherwise an argument, or a scalar that enters a loop
        and array in problem.homes
        and problem.homes[array].node == problem.homes[result].node
        and max(last_uses.get(array, 0), last_uses.get(operand, 0)) == here
        and program.arrays[array].device_bytes == program.arrays[result].device_bytes
        and program.arrays[array].dtype.itemsize == program.arrays[result].dtype.itemsize
        for operand, array in fusion.taken(op_index)
    )


def _is_constant(program: TracedProgram, array: int | None) -> bool:
    """An array is computed from nothing, such as zeros."""
    producer = None if array is None else program.producers.get(array)
    return producer is not None and all(operand is None for operand in program.operations[producer].operands)


def _expansion_stays(problem: Problem, positions: _Positions) -> Iterator[Stay]:
    """Yields the masked copies of ragged matmuls."""
    if problem.machine.compiler.has_ragged_kernels:
        return
    program = problem.program
    for expansion in expansions(program):
        operand = program.operations[expansion.op_index].operands[expansion.operand_index]
        home = problem.operand_homes.get((expansion.op_index, expansion.operand_index))
        if operand is None or home is None:
            continue
        nbytes = expansion.group_count * program.arrays[operand].nbytes
        # The copies of one depth are made together, by the first matmul that takes any of them.
        first = min(positions[op_index] for op_index in expansion.alongside)
        yield Stay(home, nbytes, first, max(positions[op_index] for op_index in expansion.users))


def _width(problem: Problem, array: int) -> int:
    """Returns the bytes that a result of the compiler's takes, over those of its dtype."""
    is_narrow = problem.program.arrays[array].dtype == jnp.bfloat16
    return 2 if is_narrow and problem.machine.compiler.widens_bfloat16 else 1


def _widened_stays(problem: Problem, positions: _Positions) -> Iterator[Stay]:
    """Yields the wider copies of arguments that matmuls take."""
    program = problem.program
    for (op_index, operand_index), home in problem.operand_homes.items():
        operand, here = program.operations[op_index].operands[operand_index], positions[op_index]
        if operand is None or not program.operations[op_index].flops:
            continue
        source = problem.fusion.sources.get(operand, operand)
        width = _width(problem, source)
        if width > 1 and source in program.arguments:
            yield Stay(home, width * program.arrays[operand].nbytes, here, here)


def _window_stays(problem: Problem, positions: _Positions, spans: _Spans, waits: bool) -> Iterator[Stay]:
    """Yields where in windows the largest elements are, for gradients of pools: an index for each dim, and the element.

    A kernel of its own computes that, of the pool's operand alone.
    """
    program = problem.program
    if not problem.machine.compiler.writes_places:
        return
    for op_index, operation in enumerate(program.operations):
        home = problem.operand_homes.get((op_index, 0))
        if operation.name != "select_and_scatter_add" or home is None:
            continue
        gradient, operand = operation.operands
        if gradient is None or operand is None:
            continue
        last = positions[op_index]
        first = last if waits else spans[operation.region][0]
        producer = program.producers.get(problem.fusion.sources.get(operand, operand))
        if producer is not None and program.operations[producer].region == operation.region and not waits:
            first = positions[producer]
        array = program.arrays[gradient]
        width = max(4, array.dtype.itemsize) + 4 * len(array.shape)
        yield Stay(home, width * math.prod(array.shape), first, last)


def _region_stays(problem: Problem, positions: _Positions) -> Iterator[Stay]:
    """Yields what regions have in memory while they run."""
    for op_index, node in problem.region_nodes.items():
        if any(problem.nodes[node].temporary_bytes):
            yield Stay(Home(node, ()), 0, positions[op_index], positions[op_index], is_region=True)


def _zeros(program: TracedProgram, positions: _Positions, spans: _Spans) -> dict[tuple[int, int], int]:
    """Returns when the memory is filled with zeros that loops stack their results in, or that updates begin with.

    One kernel fills all of a shape in a loop, before the first of them is needed.
    """
    firsts: dict[tuple[Any, ...], int] = {}
    keys: dict[tuple[int, int], tuple[Any, ...]] = {}
    for op_index, operation in enumerate(program.operations):
        is_filled = operation.name in IN_PLACE and _is_constant(program, operation.operands[0])
        if not is_filled and operation.role != "leave":
            continue
        region = operation.region if is_filled else program.regions[operation.region].parent
        here = positions[op_index] if is_filled else spans[operation.region][0]
        for result_index, result in enumerate(operation.results):
            array = program.arrays[result]
            key = keys[op_index, result_index] = (_loop(program, region), array.shape, array.dtype)
            firsts[key] = min(firsts.get(key, here), here)
    return {result: firsts[key] for result, key in keys.items()}


def _overwritten(problem: Problem) -> dict[int, int]:
    """Returns the arguments over which arrays are written that the caller passes again, by array."""
    program, sources = problem.program, problem.fusion.sources
    arguments: dict[int, int] = {}
    for operation in program.operations:
        if operation.role == "return" and operation.results[0] in problem.feedback:
            (operand,) = operation.operands
            assert operand is not None, "a result of the function is an array"
            array = sources.get(operand, operand)
            producer = program.producers.get(array)
            # What branches return is copied to the argument after them.
            if producer is None or not program.operations[producer].joins_branches:
                arguments[array] = problem.feedback[operation.results[0]]
    return arguments


def _updated(problem: Problem, overwritten: Mapping[int, int]) -> dict[int, int]:
    """Returns by array in whose memory updates in place write it: of an argument, or of what goes round a loop."""
    program, sources = problem.program, problem.fusion.sources
    rounds = {
        end: operation.results[0]
        for operation in program.operations
        if operation.joins_rounds and (end := operation.operands[1]) is not None
    }
    updated: dict[int, int] = {}
    # From the last value back to the memory: a chain that comes from anywhere else is written to memory of its own.
    for end, memory in (*overwritten.items(), *rounds.items()):
        array, updates = sources.get(end, end), list[int]()
        while array != memory and array in program.producers:
            operation = program.operations[program.producers[array]]
            first = operation.operands[0] if operation.joins_rounds or operation.name in IN_PLACE else None
            if first is None:
                break
            updates.append(array)
            array = sources.get(first, first)
        if array == memory:
            updated.update(dict.fromkeys(updates, memory))
    return updated


def _copies(
    problem: Problem,
    positions: _Positions,
    spans: _Spans,
    last_uses: Mapping[int, int],
    updated: Mapping[int, int],
) -> tuple[Copy, ...]:
    """Returns the arrays that are brought to another layout.

    Those that enter a loop stay to its end, and those that are updated in place until nothing takes the last update.
    """
    program, fusion = problem.program, problem.fusion
    last_updates: dict[int, int] = {}
    for result, memory in updated.items():
        last_updates[memory] = max(last_updates.get(memory, 0), last_uses.get(result, 0))
    copies: list[Copy] = []
    kept_until: dict[tuple[int, int], int] = {}
    for op_index, operation in enumerate(program.operations):
        if operation.role == "return":  # counted as a result
            continue
        for operand_index, operand in enumerate(operation.operands):
            if (op_index, operand_index) not in problem.edge_indices:
                continue
            is_fused = not fusion.read_counts.get((op_index, operand_index)) and operation.role != "enter"
            assert operand is not None, "an operand that has an edge is an array"
            region = read_region(program, op_index, operand_index)
            here = until = positions[op_index]
            if region != operation.region:
                until = max(until, spans[operation.region][1])
            if operand_index == 0 and operation.results and operation.results[0] in updated:
                until = max(until, last_updates[updated[operation.results[0]]])
            array = (operand, region)
            edge_index = problem.edge_indices[op_index, operand_index]
            copies.append(Copy(array, edge_index, here, until, until, is_fused, _width(problem, operand)))
            kept_until[array] = max(kept_until.get(array, 0), until)
    for op_index, result_index in problem.produced_homes:
        result, here = program.operations[op_index].results[result_index], positions[op_index]
        if not fusion.writes(op_index, result):  # otherwise counted as a result
            edge_index = problem.edge_indices[op_index, -1 - result_index]
            copies.append(Copy((result, -1), edge_index, here, here, here, True, _width(problem, result)))
            kept_until[result, -1] = here
    return tuple(attrs.evolve(copy, until=kept_until[copy.array]) for copy in copies)


def _birth_region(program: TracedProgram, array: int) -> int:
    producer = program.producers.get(array)
    return 0 if producer is None else program.operations[producer].region


def _branch_ends(program: TracedProgram, spans: _Spans) -> dict[int, int]:
    """Returns for each region that is a branch when the last of the branches ends that it is one of."""
    branches: dict[int, dict[int, None]] = {}
    for op_index, operation in enumerate(program.operations):
        for operand in operation.operands if operation.joins_branches else ():
            branch = program.branch_of(op_index, operand)
            if branch is not None:
                branches.setdefault(operation.equation_index, {})[branch] = None
    return {region: max(spans[each][1] for each in group) for group in branches.values() for region in group}


def _is_loop(program: TracedProgram, region: int) -> bool:
    """A region inside of another runs several times for each time that the other does.

    Branches and recomputed parts are regions too, but run once for each round of the region around them.
    """
    outside, times, _ = program.regions[region]
    return outside >= 0 and times != program.regions[outside].run_count


def _loop(program: TracedProgram, region: int) -> int:
    """Returns the innermost loop around what is in a region; -1 if there is none."""
    while region >= 0 and not _is_loop(program, region):
        region = program.regions[region].parent
    return region


def _loop_end(program: TracedProgram, spans: _Spans, region: int, birth_region: int) -> int:
    """Returns when the outermost loop ends that an operation is in and its operand is not; 0 if there is none."""
    around: list[int] = []
    while birth_region >= 0:
        around.append(birth_region)
        birth_region = program.regions[birth_region].parent
    # Each round of a loop reads it again, so it stays until the last: of the outermost loop, if loops are nested.
    end = 0
    while region >= 0 and region not in around:
        if _is_loop(program, region):
            end = max(end, spans[region][1])
        region = program.regions[region].parent
    return end
