"""The choice with the least cost, with proof: a linear program over all layouts of all nodes, and of all moves.

One variable says whether a node takes a layout, one for each edge whether an array goes from one layout to another. The
solution of the linear program is nearly always in whole numbers, and then it is the optimum. Where it is not, it is
branched on, until its bound is near the best choice or a count of linear programs is reached.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from shardrules.core.deadline import NO_DEADLINE, Deadline
from shardrules.programs.autoplan.solve.formulation import MICRO, Formulation, MemoryConstraint, sparse

CLOSE = 1e-3
"""The part by which a choice may cost more than the lower bound and end a search: the cost model is off by far more."""

_GAP = 1e-6
"""The gap at which a search without limits of memory stops. With limits it is `CLOSE`: knapsacks close slowly."""

LIMIT_TOLERANCE = 1e-6
"""The part by which a choice may exceed a limit: HiGHS satisfies constraints to 1e-7, in units of the largest array."""

_INFEASIBLE = 2
"""The status of SciPy's `linprog` for a program without a solution."""


@final
@attrs.frozen(eq=False)
class Solution:
    """A choice with its proof."""

    choice: tuple[int, ...] | None
    """For each node the index of its layout; `None` if there is none."""
    cost: float
    bound: float
    """The least cost of every choice, in seconds."""


@final
@attrs.define
class Work:
    """The budget of a search: the number of variables that its linear programs may still have together."""

    left: int = 400_000  # takes seconds; chosen by hand


def solve(
    formulation: Formulation,
    constraints: Sequence[MemoryConstraint] = (),
    deadline: Deadline = NO_DEADLINE,
    work: Work | None = None,
) -> Solution:
    if not formulation.problem.nodes:
        return Solution((), 0.0, 0.0)
    problem, program = formulation.problem, _cost_program(formulation, constraints)

    def value(choice: tuple[int, ...]) -> float:
        for constraint in constraints:
            if constraint.used_bytes(problem, choice) > constraint.limit_bytes * (1 + LIMIT_TOLERANCE):
                return np.inf
        return problem.cost(choice) * MICRO + formulation.preferred(choice)

    answer = _whole_answer(formulation, program, deadline, value, CLOSE if constraints else _GAP, work or Work())
    bound = (answer.bound - formulation.slack) / MICRO
    if answer.choice is None:
        return Solution(None, np.inf, max(0.0, bound))
    cost = problem.cost(answer.choice)
    return Solution(answer.choice, cost, min(bound, cost))


def fractions(
    formulation: Formulation, constraints: Sequence[MemoryConstraint], deadline: Deadline = NO_DEADLINE
) -> list[np.ndarray] | None:
    """Returns which part of each layout each node takes if layouts may be mixed; `None` where no mixture fits."""
    program = _cost_program(formulation, constraints)
    root = _relaxed(program, program.upper, deadline)
    return None if root.x is None else np.split(root.x[: formulation.offsets[-1]], formulation.offsets[1:-1])


def least_memory(
    formulation: Formulation,
    constraints: Sequence[MemoryConstraint],
    deadline: Deadline = NO_DEADLINE,
    work: Work | None = None,
    enough_bytes: float | None = None,
) -> tuple[tuple[int, ...] | None, float]:
    """Finds a choice whose fullest moment is as empty as can be, among the moments of the constraints.

    Limits do not matter. With `enough_bytes`, it ends once it is known whether the moment may be as empty as that.
    Returns the choice, or `None` if the time was up before any was met, and the bytes that the fullest moment takes at
    least.
    """
    program = _memory_program(formulation, constraints)

    def value(choice: tuple[int, ...]) -> float:
        fullest = max(constraint.used_bytes(formulation.problem, choice) for constraint in constraints)
        return fullest / program.scales[0] if np.isfinite(formulation.problem.cost(choice)) else np.inf

    enough = None if enough_bytes is None else enough_bytes / program.scales[0]
    answer = _whole_answer(formulation, program, deadline, value, CLOSE, work or Work(), enough)
    return answer.choice, max(0.0, answer.bound * program.scales[0])


@final
@attrs.frozen(eq=False)
class _Answer:
    """The bounds of a program, in its own units."""

    choice: tuple[int, ...] | None
    bound: float
    """The least value of all whole numbers."""


@final
@attrs.frozen(order=True)
class _Branch:
    """A part of the choices: the program with some layouts ruled out."""

    bound: float
    index: int
    upper: np.ndarray = attrs.field(order=False, eq=False)
    x: np.ndarray = attrs.field(order=False, eq=False)
    """The solution of its relaxation."""


def _whole_answer(
    formulation: Formulation,
    program: "_Program",
    deadline: Deadline,
    value: Callable[[tuple[int, ...]], float],
    gap: float,
    work: Work,
    enough: float | None = None,
) -> _Answer:
    """Solves a program in whole numbers by branch and bound; `value` is what a choice costs in it.

    It ends where a choice costs no more than is `enough`, or none can.
    """
    root = _relaxed(program, program.upper, deadline)
    if root.x is None:
        # Infeasible is a proof that nothing fits; anything else, above all the time limit, proves nothing.
        infeasible = root.status == _INFEASIBLE
        return _Answer(None, np.inf if infeasible else -np.inf)
    best, least = None, np.inf
    count = 1
    work.left -= formulation.column_count
    branches = [_Branch(float(root.fun), 0, program.upper, root.x)]
    while branches and work.left > 0 and not deadline.is_over:
        if enough is not None and (least <= enough or branches[0].bound > enough):
            break
        branch = heapq.heappop(branches)
        # From the most promising branch straight down, to a choice; what is left aside on the way waits its turn.
        while branch is not None and branch.bound < least * (1 - gap):
            choice, open_node = _rounded(formulation, branch.x)
            cost = value(choice)
            if cost < least:
                best, least = choice, cost
            if open_node is None:
                break
            if work.left <= 0 or deadline.is_over:
                heapq.heappush(branches, branch)
                break
            below: list[_Branch] = []
            for is_taken in (True, False):
                upper = _branched(formulation, branch.upper, open_node, choice[open_node], is_taken)
                part = _relaxed(program, upper, deadline)
                count += 1
                work.left -= formulation.column_count
                if part.x is not None:
                    below.append(_Branch(float(part.fun), count, upper, part.x))
                elif part.status != _INFEASIBLE:  # out of time: what it costs at least is what the whole branch does
                    below.append(attrs.evolve(branch, index=count, upper=upper))
            for other in below[1:]:
                heapq.heappush(branches, other)
            branch = below[0] if below else None
    bound = min([least, *(branch.bound for branch in branches)])
    return _Answer(best, bound)


def _branched(formulation: Formulation, upper: np.ndarray, node: int, layout_index: int, is_taken: bool) -> np.ndarray:
    start, end = formulation.offsets[node], formulation.offsets[node + 1]
    branched = upper.copy()
    if is_taken:
        branched[start:end] = 0.0
    branched[start + layout_index] = 1.0 if is_taken else 0.0
    return branched


@final
@attrs.frozen(eq=False)
class _Program:
    """A linear program: costs, equations, inequalities, and how large each variable may be."""

    cost: np.ndarray
    equations: csr_array
    right_sides: np.ndarray
    inequalities: csr_array
    limits: np.ndarray
    upper: np.ndarray
    scales: Sequence[float]
    """The bytes that 1 means in each memory constraint."""


def _cost_program(formulation: Formulation, constraints: Sequence[MemoryConstraint]) -> _Program:
    cost, equations, right_sides, inequalities = formulation.matrices
    cost, upper = _bounded(formulation, cost)
    limits = np.zeros(formulation.inequality_count)
    if not constraints:
        return _Program(cost, equations, right_sides, inequalities, limits, upper, [])
    bounds = [formulation.memory(constraint) for constraint in constraints]
    # Gigabytes beside the ones of other rows are more than HiGHS's tolerances are made for.
    scales = [max(1.0, float(np.max(sizes, initial=1.0))) for _, sizes, _ in bounds]
    parts = [
        (np.full(len(columns), row), columns, sizes / scale)
        for row, ((columns, sizes, _), scale) in enumerate(zip(bounds, scales, strict=True))
    ]
    memory_rows = sparse(parts, len(constraints), formulation.column_count)
    memory_limits = [limit / scale for (_, _, limit), scale in zip(bounds, scales, strict=True)]
    return _Program(
        cost,
        equations,
        right_sides,
        csr_array(vstack([inequalities, memory_rows])),
        np.concatenate([limits, memory_limits]),
        upper,
        scales,
    )


def _memory_program(formulation: Formulation, constraints: Sequence[MemoryConstraint]) -> _Program:
    """Returns the program with one more variable, the only one that costs: how full the fullest moment is."""
    cost, equations, right_sides, inequalities = formulation.matrices
    _, upper = _bounded(formulation, cost)
    # Minimise z, with z at least as large as each moment: the last column.
    count = formulation.column_count + 1
    bounds = [formulation.memory(constraint) for constraint in constraints]
    scale = max([1.0, *(float(np.max(sizes, initial=1.0)) for _, sizes, _ in bounds)])
    parts = [
        (np.full(len(columns) + 1, row), np.append(columns, count - 1), np.append(sizes / scale, -1.0))
        for row, (columns, sizes, _) in enumerate(bounds)
    ]
    memory_limits = [-constraint.constant_bytes / scale for constraint in constraints]
    cost = np.zeros(count)
    cost[-1] = 1.0
    return _Program(
        cost,
        _widened(equations, (formulation.equation_count, count)),
        right_sides,
        csr_array(
            vstack(
                [
                    _widened(inequalities, (formulation.inequality_count, count)),
                    sparse(parts, len(constraints), count),
                ]
            )
        ),
        np.append(np.zeros(formulation.inequality_count), memory_limits),
        np.append(upper, np.inf),
        [scale],
    )


def _widened(matrix: csr_array, shape: tuple[int, int]) -> csr_array:
    return csr_array((matrix.data, matrix.indices, matrix.indptr), shape=shape)


def _relaxed(program: _Program, upper: np.ndarray, deadline: Deadline) -> Any:
    has_limits = len(program.limits) > 0
    return linprog(
        program.cost,
        A_ub=program.inequalities if has_limits else None,
        b_ub=program.limits if has_limits else None,
        A_eq=program.equations,
        b_eq=program.right_sides,
        bounds=np.stack([np.zeros(len(upper)), upper], axis=1),
        method="highs-ds",  # a simplex ends at a corner, which is nearly always whole; an interior point does not
        options=deadline.solver_options(),
    )


def _bounded(formulation: Formulation, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns what variables cost, and how large they may be: what costs infinitely much is fixed to 0."""
    upper = np.where(np.isfinite(cost), np.inf, 0.0)
    # The equations keep moves at 1; an explicit bound on them too would only make the dual larger.
    upper[: formulation.offsets[-1]] = np.minimum(upper[: formulation.offsets[-1]], 1.0)
    return np.where(np.isfinite(cost), cost, 0.0), upper


def _rounded(formulation: Formulation, x: np.ndarray) -> tuple[tuple[int, ...], int | None]:
    """Returns for each node the layout that it takes most of, and the node that takes it least wholly, if any."""
    choice: list[int] = []
    # HiGHS's own tolerance is 1e-6 for each row, and a few add up.
    open_node, least = None, 1 - 1e-5
    for node_index in range(len(formulation.problem.nodes)):
        parts = x[formulation.offsets[node_index] : formulation.offsets[node_index + 1]]
        layout_index = int(np.argmax(parts))
        choice.append(layout_index)
        if parts[layout_index] < least:
            open_node, least = node_index, float(parts[layout_index])
    return tuple(choice), open_node
