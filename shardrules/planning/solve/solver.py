"""The choice with the least cost, with proof: a linear program over all layouts of all nodes, and of all moves.

One variable says whether a node takes a layout, one for each edge whether an array goes from one layout to another. The
solution of the linear program is nearly always in whole numbers, and then it is the optimum. Where it is not, the whole
part is kept, the rest is searched, and the linear program says how far from the optimum the result can be.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, final

import attrs
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array, vstack

from shardrules.planning.solve.deadline import NO_DEADLINE, Deadline
from shardrules.planning.solve.formulation import MICRO, Formulation, MemoryConstraint, sparse

Status: TypeAlias = Literal["optimal", "feasible", "infeasible"]
"""What is known about a choice: that no other is better, that another may be, or that there is none."""

SMALL = 20_000
"""With fewer variables, whole numbers are searched for all nodes; with more, only for those that the relaxation leaves
open. The search takes exponential time at worst: raised, large problems use up their time limit; lowered, fewer plans
come with a proof."""

CLOSE = 1e-3
"""By what part a choice may cost more than the lower bound and still count as optimal. What the cost model predicts is
off by far more. With a tenth of it, searches near full memory go on for much longer, to gain nothing that is real."""

_WHOLE = 1e-5
"""A layout counts as taken from 1 less this. HiGHS's own tolerance is 1e-6 for each row, and a few add up."""

_GAP_SMALL, _GAP_LARGE = 1e-6, 1e-4
"""At which gap the search for whole numbers stops: where it is exact, and where nodes are fixed already, so that the
last digits mean nothing. Both are far below `CLOSE`."""

_INFEASIBLE = 2
"""The status of SciPy's `linprog` for a program without a solution."""

_NANOSECOND = 1e-9
"""Two choices that differ by less, in seconds, cost the same, even if both are nearly free."""


@final
@attrs.frozen(eq=False)
class Solution:
    """A choice with its proof."""

    choice: tuple[int, ...] | None
    """For each node the index of its layout; `None` if there is none."""
    cost: float
    bound: float
    """What every choice costs at least, in seconds."""
    status: Status
    prices: tuple[float, ...]
    """For each memory constraint what one more byte would save."""


def solve(
    formulation: Formulation, constraints: Sequence[MemoryConstraint] = (), deadline: Deadline = NO_DEADLINE
) -> Solution:
    """Finds the choice with the least cost."""
    if not formulation.problem.nodes:
        return Solution((), 0.0, 0.0, "optimal", ())
    program = _cost_program(formulation, constraints)
    answer = _whole_answer(formulation, program, deadline)
    bound = (answer.bound - formulation.slack) / MICRO
    # Duals are microseconds for each scaled byte, and negative: a higher limit lowers the cost.
    prices = tuple(-price / scale / MICRO for price, scale in zip(answer.prices, program.scales, strict=False))
    if answer.choice is None:
        return Solution(None, np.inf, max(0.0, bound), "infeasible" if answer.is_infeasible else "feasible", prices)
    cost = formulation.problem.cost(answer.choice)
    status = "optimal" if cost <= bound * (1 + CLOSE) + _NANOSECOND else "feasible"
    return Solution(answer.choice, cost, min(bound, cost), status, prices)


def least_memory(
    formulation: Formulation, constraints: Sequence[MemoryConstraint], deadline: Deadline = NO_DEADLINE
) -> tuple[tuple[int, ...] | None, float]:
    """Finds a choice whose fullest moment is as empty as can be, among the moments of the constraints.

    Limits do not matter. Returns the choice, or `None` if the time was up before any was met, and the bytes that the
    fullest moment takes at least.
    """
    program = _memory_program(formulation, constraints)
    answer = _whole_answer(formulation, program, deadline)
    return answer.choice, max(0.0, answer.bound * program.scales[0])


@final
@attrs.frozen(eq=False)
class Cheapest:
    """What is cheapest at some prices of memory."""

    choice: tuple[int, ...] | None
    """For each node the index of its layout; `None` if the time was up before any was met."""
    bound: float
    """What every choice that satisfies the memory constraints costs at least."""
    extra: tuple[np.ndarray, ...]
    """For each node and layout how much above `bound` every choice is that takes it."""


def cheapest(
    formulation: Formulation,
    constraints: Sequence[MemoryConstraint],
    prices: Sequence[float],
    deadline: Deadline = NO_DEADLINE,
) -> Cheapest:
    """Finds the choice that costs least when a byte of each constraint costs its price, in seconds."""
    program = _cost_program(formulation, ())
    cost = program.cost.copy()
    refund = 0.0
    for constraint, price in zip(constraints, prices, strict=True):
        # Lagrangian relaxation: the constraint goes into the costs.
        columns, sizes, free_bytes = formulation.memory(constraint)
        np.add.at(cost, columns, sizes * price * MICRO)
        refund += free_bytes * price  # a choice that fits pays for no more than the limit
    answer = _whole_answer(formulation, attrs.evolve(program, cost=cost), deadline)
    bound = (answer.bound - formulation.slack) / MICRO - refund
    edges = formulation.offsets[1:-1]
    extra = np.split(answer.reduced_costs[: formulation.offsets[-1]] / MICRO, edges)
    return Cheapest(answer.choice, bound, tuple(extra))


@final
@attrs.frozen(eq=False)
class _Answer:
    """What is known about a program, in its own units."""

    choice: tuple[int, ...] | None
    bound: float
    """What all whole numbers cost at least."""
    prices: tuple[float, ...] = ()
    """What each memory constraint is worth."""
    reduced_costs: np.ndarray = attrs.field(factory=lambda: np.zeros(0))
    """How much above the bound everything is that takes each variable."""
    is_infeasible: bool = False


def _whole_answer(formulation: Formulation, program: "_Program", deadline: Deadline) -> _Answer:
    """Solves a program in whole numbers, or nearly: by its relaxation, and a search where that is not whole."""
    relaxed = _relaxed(program, deadline)
    if relaxed.x is None:
        # Infeasible is a proof that nothing fits; anything else, above all the time limit, proves nothing.
        infeasible = relaxed.status == _INFEASIBLE
        return _Answer(None, np.inf if infeasible else -np.inf, is_infeasible=infeasible)
    prices = tuple(map(float, relaxed.ineqlin.marginals[formulation.inequality_count :]))
    bound = float(relaxed.fun)
    layout_indices, open_nodes = _rounded(formulation, relaxed.x)
    if open_nodes:
        # Searching only the nodes that are not whole is fast, and nearly always good. Small problems can do better.
        every_node = range(len(layout_indices))
        is_small = formulation.column_count <= SMALL
        whole, least = _search(formulation, program, layout_indices, every_node if is_small else open_nodes, deadline)
        if is_small and least is not None:  # only a search over everything bounds everything
            bound = max(bound, least)
        if whole is None and not is_small and not deadline.is_over:  # what was fixed may be what does not fit
            whole, _ = _search(formulation, program, layout_indices, every_node, deadline)
        if whole is None:
            return _Answer(None, bound, prices, is_infeasible=not deadline.is_over)
        layout_indices = whole
    # Reduced costs are above the relaxation's bound; a higher bound leaves less on top of it.
    return _Answer(tuple(layout_indices), bound, prices, relaxed.lower.marginals - (bound - relaxed.fun))


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
    scales: list[float]
    """The bytes that 1 means in each memory constraint."""


def _cost_program(formulation: Formulation, constraints: Sequence[MemoryConstraint]) -> _Program:
    """Returns the program of the least cost within memory constraints."""
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


def _relaxed(program: _Program, deadline: Deadline) -> Any:
    """Solves a program without asking for whole numbers."""
    has_limits = len(program.limits) > 0
    return linprog(
        program.cost,
        A_ub=program.inequalities if has_limits else None,
        b_ub=program.limits if has_limits else None,
        A_eq=program.equations,
        b_eq=program.right_sides,
        bounds=np.stack([np.zeros(len(program.upper)), program.upper], axis=1),
        method="highs-ds",  # a simplex ends at a corner, which is nearly always whole; an interior point does not
        options=deadline.solver_options(),
    )


def _bounded(formulation: Formulation, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns what variables cost, and how large they may be: what costs infinitely much is fixed to 0."""
    upper = np.where(np.isfinite(cost), np.inf, 0.0)
    # The equations keep moves at 1; an explicit bound on them too would only make the dual larger.
    upper[: formulation.offsets[-1]] = np.minimum(upper[: formulation.offsets[-1]], 1.0)
    return np.where(np.isfinite(cost), cost, 0.0), upper


def _rounded(formulation: Formulation, x: np.ndarray) -> tuple[list[int], list[int]]:
    """Returns for each node the layout that it takes most of, and the nodes that do not take it wholly."""
    layout_indices, open_nodes = [], []
    for node_index in range(len(formulation.problem.nodes)):
        parts = x[formulation.offsets[node_index] : formulation.offsets[node_index + 1]]
        layout_index = int(np.argmax(parts))
        layout_indices.append(layout_index)
        if parts[layout_index] < 1 - _WHOLE:
            open_nodes.append(node_index)
    return layout_indices, open_nodes


def _search(
    formulation: Formulation,
    program: _Program,
    layout_indices: Sequence[int],
    open_nodes: Sequence[int],
    deadline: Deadline,
) -> tuple[list[int] | None, float | None]:
    """Searches whole numbers for some nodes, with all others as they are; returns them and what they cost at least."""
    lower: Any = np.zeros(len(program.upper))
    upper: Any = program.upper.copy()
    is_whole = np.zeros(len(upper))
    searched = dict.fromkeys(open_nodes)
    for node_index, layout_index in enumerate(layout_indices):
        start, end = formulation.offsets[node_index], formulation.offsets[node_index + 1]
        # Fixed by bounds rather than left out: HiGHS's presolve removes them, and matrices stay as they are.
        if node_index in searched:
            is_whole[start:end] = 1  # moves need not be: with whole layouts at both ends they are
        else:
            upper[start:end] = 0
            upper[start + layout_index] = lower[start + layout_index] = 1
    right_sides: Any = program.right_sides
    constraints = [LinearConstraint(program.equations, right_sides, right_sides)]
    limits: Any = program.limits
    if len(limits):
        constraints.append(LinearConstraint(program.inequalities, -np.inf, limits))
    gap = _GAP_SMALL if formulation.column_count <= SMALL else _GAP_LARGE
    options: dict[str, Any] = {"mip_rel_gap": gap, **deadline.solver_options()}
    bounds = Bounds(lower, upper)
    result = milp(program.cost, constraints=constraints, bounds=bounds, integrality=is_whole, options=options)
    if result.x is None:
        return None, None
    return _rounded(formulation, result.x)[0], result.mip_dual_bound
