"""The choice with the least cost, with proof: a linear program over all layouts of all nodes, and of all moves.

One variable says whether a node takes a label, one for each edge whether an array goes from one layout to another. The
linear program is nearly always solved by whole numbers, which then is the optimum. Where it is not, what came out whole
is kept, the rest is searched, and the linear program says how far from the optimum this can be at the most.
"""

import time
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, final

import attrs
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array, vstack

from shardrules.planning.solve.formulation import MICRO, Formulation, Row, sparse

Status: TypeAlias = Literal["optimal", "feasible", "infeasible"]
"""What is known of a choice: that none is better, that one may be, or that there is none."""

SMALL = 20_000
"""With fewer variables, whole numbers are searched for all of them."""

CLOSE = 1e-3
"""By what part a choice may cost more than every choice does at least, and count as the best."""

_WHOLE = 1e-5
_INFEASIBLE = 2


@final
@attrs.frozen(eq=False)
class Solution:
    """What was found.

    **Arguments:**

    - `choice`: for each node the number of its label; `None` where there is none.
    - `cost`, `bound`: what it costs, and what every choice costs at least.
    - `status`: what is known of it.
    - `prices`: for each row what one more byte would save.
    """

    choice: tuple[int, ...] | None
    cost: float
    bound: float
    status: Status
    prices: tuple[float, ...]


def solve(formulation: Formulation, rows: Sequence[Row] = (), deadline: float = float("inf")) -> Solution:
    """Finds the choice with the least cost.

    **Arguments:**

    - `formulation`: the problem.
    - `rows`: bounds on memory.
    - `deadline`: when to stop, as `time.monotonic` has it.

    **Returns:**

    A `Solution`.
    """
    if not formulation.problem.nodes:
        return Solution((), 0.0, 0.0, "optimal", ())
    program = _program(formulation, rows)
    answer = _answer(formulation, program, deadline)
    bound = (answer.bound - formulation.slack) / MICRO
    prices = tuple(-price / scale / MICRO for price, scale in zip(answer.prices, program.scales, strict=False))
    if answer.choice is None:
        return Solution(None, np.inf, max(0.0, bound), "infeasible" if answer.is_infeasible else "feasible", prices)
    cost = formulation.problem.cost(answer.choice)
    status = "optimal" if cost <= bound * (1 + CLOSE) + 1e-9 else "feasible"
    return Solution(answer.choice, cost, min(bound, cost), status, prices)


def least_memory(
    formulation: Formulation, rows: Sequence[Row], deadline: float = float("inf")
) -> tuple[tuple[int, ...] | None, float]:
    """Finds a choice of which the fullest of some moments is as empty as can be.

    **Arguments:**

    - `formulation`: the problem.
    - `rows`: the moments; their limits do not matter.
    - `deadline`: when to stop, as `time.monotonic` has it.

    **Returns:**

    For each node the number of its label, or `None` where the time was up before any was found; and the bytes that the
    fullest moment takes at the least.
    """
    program = _emptiest(formulation, rows)
    answer = _answer(formulation, program, deadline)
    return answer.choice, max(0.0, answer.bound * program.scales[0])


@final
@attrs.frozen(eq=False)
class Cheapest:
    """What is cheapest at some prices of memory.

    **Arguments:**

    - `choice`: for each node the number of its label; `None` where the time was up before any was found.
    - `bound`: what every choice costs at least that keeps all bounds on memory.
    - `extra`: for each node and label how much above `bound` each of them is that takes it.
    """

    choice: tuple[int, ...] | None
    bound: float
    extra: tuple[np.ndarray, ...]


def cheapest(
    formulation: Formulation, rows: Sequence[Row], prices: Sequence[float], deadline: float = float("inf")
) -> Cheapest:
    """Finds the choice that costs least where memory has a price.

    **Arguments:**

    - `formulation`: the problem.
    - `rows`: bounds on memory.
    - `prices`: for each of them what a byte costs, in seconds.
    - `deadline`: when to stop, as `time.monotonic` has it.

    **Returns:**

    What was found.
    """
    program = _program(formulation, ())
    cost = program.cost.copy()
    spare = 0.0
    for row, price in zip(rows, prices, strict=True):
        columns, sizes, left = formulation.memory(row)
        np.add.at(cost, columns, sizes * price * MICRO)
        spare += left * price
    answer = _answer(formulation, attrs.evolve(program, cost=cost), deadline)
    bound = (answer.bound - formulation.slack) / MICRO - spare
    edges = formulation.offsets[1:-1]
    return Cheapest(answer.choice, bound, tuple(np.split(answer.extra[: formulation.offsets[-1]] / MICRO, edges)))


@final
@attrs.frozen(eq=False)
class _Answer:
    """What is known of a program: whole numbers, what all of them cost at least, what each row is worth, and how much
    above the bound everything is that takes each variable."""

    choice: tuple[int, ...] | None
    bound: float
    prices: tuple[float, ...] = ()
    extra: np.ndarray = attrs.field(factory=lambda: np.zeros(0))
    is_infeasible: bool = False


def _answer(formulation: Formulation, program: "_Program", deadline: float) -> _Answer:
    relaxed = _relaxed(program, deadline)
    if relaxed.x is None:
        infeasible = relaxed.status == _INFEASIBLE
        return _Answer(None, np.inf if infeasible else -np.inf, is_infeasible=infeasible)
    bound, prices = float(relaxed.fun), tuple(map(float, relaxed.ineqlin.marginals[formulation.above_count :]))
    chosen, loose = _whole(formulation, relaxed.x)
    if loose:
        everything = [*range(len(chosen))]
        few = formulation.count <= SMALL
        found, least = _search(formulation, program, chosen, everything if few else loose, deadline)
        if few and least is not None:
            bound = max(bound, least)
        if found is None and not few:
            found, _ = _search(formulation, program, chosen, everything, deadline)
        if found is None:
            return _Answer(None, bound, prices, is_infeasible=time.monotonic() <= deadline)
        chosen = found
    return _Answer(tuple(chosen), bound, prices, relaxed.lower.marginals - (bound - relaxed.fun))


@final
@attrs.frozen(eq=False)
class _Program:
    """A linear program: costs, equations, inequalities, and how much each variable may be."""

    cost: np.ndarray
    equal: csr_array
    right: np.ndarray
    above: csr_array
    limits: np.ndarray
    upper: np.ndarray
    scales: list[float]


def _program(formulation: Formulation, rows: Sequence[Row]) -> _Program:
    cost, equal, right, above = formulation.matrices
    cost, upper = _bounded(formulation, cost)
    limits = np.zeros(formulation.above_count)
    if not rows:
        return _Program(cost, equal, right, above, limits, upper, [])
    bounds = [formulation.memory(row) for row in rows]
    scales = [max(1.0, float(np.max(values, initial=1.0))) for _, values, _ in bounds]
    parts = [
        (np.full(len(columns), at), columns, values / scale)
        for at, ((columns, values, _), scale) in enumerate(zip(bounds, scales, strict=True))
    ]
    above = csr_array(vstack([above, sparse(parts, len(rows), formulation.count)]))
    extra = [limit / scale for (_, _, limit), scale in zip(bounds, scales, strict=True)]
    return _Program(cost, equal, right, above, np.concatenate([limits, extra]), upper, scales)


def _relaxed(program: _Program, deadline: float) -> Any:
    """The program without asking for whole numbers."""
    left = max(0.1, deadline - time.monotonic())
    return linprog(
        program.cost,
        A_ub=program.above if len(program.limits) else None,
        b_ub=program.limits if len(program.limits) else None,
        A_eq=program.equal,
        b_eq=program.right,
        bounds=np.stack([np.zeros(len(program.upper)), program.upper], axis=1),
        method="highs-ds",
        options={"time_limit": left} if np.isfinite(left) else {},
    )


def _bounded(formulation: Formulation, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What variables cost, and the most that they may be: what costs without end is not to be had."""
    upper = np.where(np.isfinite(cost), np.inf, 0.0)
    upper[: formulation.offsets[-1]] = np.minimum(upper[: formulation.offsets[-1]], 1.0)
    return np.where(np.isfinite(cost), cost, 0.0), upper


def _emptiest(formulation: Formulation, rows: Sequence[Row]) -> _Program:
    """The program of which one more variable says how full the fullest moment is."""
    cost, equal, right, above = formulation.matrices
    _, upper = _bounded(formulation, cost)
    count = formulation.count + 1
    bounds = [formulation.memory(row) for row in rows]
    scale = max([1.0, *(float(np.max(values, initial=1.0)) for _, values, _ in bounds)])
    parts = [
        (np.full(len(columns) + 1, at), np.append(columns, count - 1), np.append(values / scale, -1.0))
        for at, (columns, values, _) in enumerate(bounds)
    ]
    wider = csr_array((above.data, above.indices, above.indptr), shape=(formulation.above_count, count))
    target = np.zeros(count)
    target[-1] = 1.0
    return _Program(
        target,
        csr_array((equal.data, equal.indices, equal.indptr), shape=(formulation.equal_count, count)),
        right,
        csr_array(vstack([wider, sparse(parts, len(rows), count)])),
        np.append(np.zeros(formulation.above_count), [-row.constant / scale for row in rows]),
        np.append(upper, np.inf),
        [scale],
    )


def _whole(formulation: Formulation, x: np.ndarray) -> tuple[list[int], list[int]]:
    """For each node the label that it takes most of, and the nodes that do not take one wholly."""
    chosen, loose = [], []
    for number in range(len(formulation.problem.nodes)):
        part = x[formulation.offsets[number] : formulation.offsets[number + 1]]
        best = int(np.argmax(part))
        chosen.append(best)
        if part[best] < 1 - _WHOLE:
            loose.append(number)
    return chosen, loose


def _search(
    formulation: Formulation, program: _Program, chosen: Sequence[int], loose: Sequence[int], deadline: float
) -> tuple[list[int] | None, float | None]:
    """Whole numbers for some nodes, with all others as they are; and what these cost at least."""
    lower: Any = np.zeros(len(program.upper))
    upper: Any = program.upper.copy()
    whole = np.zeros(len(upper))
    free = dict.fromkeys(loose)
    for number, label in enumerate(chosen):
        start, end = formulation.offsets[number], formulation.offsets[number + 1]
        if number in free:
            whole[start:end] = 1
        else:
            upper[start:end] = 0
            upper[start + label] = lower[start + label] = 1
    right: Any = program.right
    constraints = [LinearConstraint(program.equal, right, right)]
    limits: Any = program.limits
    if len(limits):
        constraints.append(LinearConstraint(program.above, -np.inf, limits))
    left = max(0.5, deadline - time.monotonic())
    options: dict[str, Any] = {"mip_rel_gap": 1e-6 if formulation.count <= SMALL else 1e-4}
    if np.isfinite(left):
        options["time_limit"] = left
    bounds = Bounds(lower, upper)
    found = milp(program.cost, constraints=constraints, bounds=bounds, integrality=whole, options=options)
    if found.x is None:
        return None, None
    return _whole(formulation, found.x)[0], found.mip_dual_bound
