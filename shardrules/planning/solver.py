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

from shardrules.planning.formulation import MICRO, Formulation, Row, sparse

Status: TypeAlias = Literal["optimal", "feasible", "infeasible"]
"""What is known of a choice: that none is better, that one may be, or that there is none."""

_WHOLE = 1e-5
_NEAR = 1e-3
_FEW = 20_000
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
    - `seconds`: how long it took.
    """

    choice: tuple[int, ...] | None
    cost: float
    bound: float
    status: Status
    prices: tuple[float, ...]
    seconds: float


def solve(formulation: Formulation, rows: Sequence[Row] = (), deadline: float = float("inf")) -> Solution:
    """Finds the choice with the least cost.

    **Arguments:**

    - `formulation`: the problem.
    - `rows`: bounds on memory.
    - `deadline`: when to stop, as `time.monotonic` has it.

    **Returns:**

    A `Solution`.
    """
    begun = time.monotonic()
    if not formulation.problem.nodes:
        return Solution((), 0.0, 0.0, "optimal", (), 0.0)
    program = _program(formulation, rows)
    relaxed = _relaxed(program, deadline)
    if relaxed.x is None:
        infeasible = relaxed.status == _INFEASIBLE
        bound, status = (np.inf, "infeasible") if infeasible else (0.0, "feasible")
        return Solution(None, np.inf, bound, status, (), time.monotonic() - begun)
    prices = tuple(
        -float(price) / scale / MICRO
        for price, scale in zip(relaxed.ineqlin.marginals[formulation.above_count :], program.scales, strict=True)
    )
    bound = (float(relaxed.fun) - formulation.slack) / MICRO
    chosen, loose = _whole(formulation, relaxed.x)
    if loose:
        everything = [*range(len(chosen))]
        few = formulation.count <= _FEW
        found, least = _search(formulation, program, chosen, everything if few else loose, deadline)
        if few and least is not None:
            bound = max(bound, (least - formulation.slack) / MICRO)
        if found is None and not few:
            found, _ = _search(formulation, program, chosen, everything, deadline)
        if found is None:
            late = time.monotonic() > deadline
            return Solution(None, np.inf, bound, "feasible" if late else "infeasible", prices, time.monotonic() - begun)
        chosen = found
    cost = formulation.problem.cost(chosen)
    status = "optimal" if cost <= bound * (1 + _NEAR) + 1e-9 else "feasible"
    return Solution(tuple(chosen), cost, min(bound, cost), status, prices, time.monotonic() - begun)


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
    cost, equal, right, above = formulation.matrices()
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


def least_memory(formulation: Formulation, rows: Sequence[Row]) -> list[int]:
    """Finds a choice of which the fullest moment is as empty as can be.

    **Arguments:**

    - `formulation`: the problem.
    - `rows`: the moments.

    **Returns:**

    For each node the number of its label; nothing without rows.
    """
    if not rows:
        return []
    cost, equal, right, above = formulation.matrices()
    _, upper = _bounded(formulation, cost)
    parts = []
    limits = np.zeros(formulation.above_count + len(rows))
    scale = max(
        1.0, *(row.constant for row in rows), *(float(sizes.max()) for row in rows for sizes in row.labels.values())
    )
    for at, row in enumerate(rows):
        columns, values, _ = formulation.memory(row)
        parts.append(
            (
                np.full(len(columns) + 1, at),
                np.append(columns, formulation.count),
                np.append(values / scale, -1.0),
            )
        )
        limits[formulation.above_count + at] = -row.constant / scale
    wider = csr_array((above.data, above.indices, above.indptr), shape=(formulation.above_count, formulation.count + 1))
    equal = csr_array((equal.data, equal.indices, equal.indptr), shape=(formulation.equal_count, formulation.count + 1))
    target = np.zeros(formulation.count + 1)
    target[-1] = 1.0
    relaxed = linprog(
        target,
        A_ub=csr_array(vstack([wider, sparse(parts, len(rows), formulation.count + 1)])),
        b_ub=limits,
        A_eq=equal,
        b_eq=right,
        bounds=np.stack([np.zeros(len(target)), np.append(upper, np.inf)], axis=1),
        method="highs",
    )
    return [] if relaxed.x is None else _whole(formulation, relaxed.x)[0]


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
    options: dict[str, Any] = {"mip_rel_gap": 1e-6 if formulation.count <= _FEW else 1e-4}
    if np.isfinite(left):
        options["time_limit"] = left
    bounds = Bounds(lower, upper)
    found = milp(program.cost, constraints=constraints, bounds=bounds, integrality=whole, options=options)
    if found.x is None:
        return None, None
    return _whole(formulation, found.x)[0], found.mip_dual_bound
