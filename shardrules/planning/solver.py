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
from scipy.sparse import coo_array, csr_array, vstack

from shardrules.planning.problem import Home, Problem, project

Status: TypeAlias = Literal["optimal", "feasible", "infeasible"]
"""What is known of a choice: that none is better, that one may be, or that there is none."""

_MICRO = 1e6
_WHOLE = 1e-5
_NEAR = 1e-3
_FEW = 20_000
_INFEASIBLE = 2


@final
@attrs.frozen(eq=False)
class Row:
    """A bound on what lies in memory at one moment.

    **Arguments:**

    - `labels`: for some nodes the bytes of each label.
    - `copies`: for some edges the bytes of each layout that the array is brought to, unless it is there already.
    - `constant`: bytes that are there in any case.
    - `limit`: the most there may be.
    """

    labels: dict[int, np.ndarray]
    copies: dict[int, np.ndarray]
    constant: float
    limit: float


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


@final
class Formulation:
    """The linear program of a problem.

    **Arguments:**

    - `problem`: what is to be chosen.
    - `preference`: for each node what its labels cost beyond their time, in millionths of a second. It decides between
        choices that take the same time.
    """

    def __init__(self, problem: Problem, preference: Sequence[np.ndarray]) -> None:
        self.problem = problem
        sizes = [len(node.labels) for node in problem.nodes]
        self.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.count = int(self.offsets[-1])
        self.costs: list[np.ndarray] = [
            np.asarray(node.seconds, float) * _MICRO + extra
            for node, extra in zip(problem.nodes, preference, strict=True)
        ]
        self.slack = float(sum(np.max(extra, initial=0.0) for extra in preference))
        self.equal: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.equal_count = 0
        self.right: list[np.ndarray] = []
        self.above: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.above_count = 0
        self.pairs: dict[int, tuple[int, int]] = {}
        for number in range(len(problem.nodes)):
            columns = np.arange(self.offsets[number], self.offsets[number + 1])
            self.equal.append((np.full(len(columns), self.equal_count), columns, np.ones(len(columns))))
            self.equal_count += 1
            self.right.append(np.ones(1))
        for first, second in problem.equal:
            self.same(first, second)
        for group, count in problem.shared:
            self.group(group, count)

    def same(self, first: Home, second: Home) -> None:
        """Makes two nodes give an array the same layout.

        **Arguments:**

        - `first`, `second`: the array at either node.
        """
        rows = [project(self.problem.nodes[home.node].labels, home) for home in (first, second)]
        known, codes = np.unique(np.concatenate(rows), axis=0, return_inverse=True)
        codes = codes.ravel()
        cut = len(rows[0])
        columns = np.concatenate(
            [np.arange(cut) + self.offsets[first.node], np.arange(len(rows[1])) + self.offsets[second.node]]
        )
        signs = np.concatenate([np.ones(cut), -np.ones(len(rows[1]))])
        self.equal.append((codes + self.equal_count, columns, signs))
        self.equal_count += len(known)
        self.right.append(np.zeros(len(known)))

    def fresh(self, costs: np.ndarray) -> int:
        """Adds variables.

        **Arguments:**

        - `costs`: what each of them costs.

        **Returns:**

        The number of the first.
        """
        at = self.count
        self.costs.append(costs)
        self.count += len(costs)
        return at

    def group(self, group: tuple[int, ...], count: int) -> None:
        """Adds edges that bring the same array to the same place.

        **Arguments:**

        - `group`: the numbers of the edges.
        - `count`: how many such groups there are.
        """
        edges = [self.problem.edges[number] for number in group]
        priced = [edge.seconds() * _MICRO * count for edge in edges]
        if len(group) == 1:
            self.lone(group[0], priced[0])
            return
        keep = [at for at, cost in enumerate(priced) if (cost != 0).any()]
        if len(keep) == 1:
            self.lone(group[keep[0]], priced[keep[0]])
            return
        self.together([group[at] for at in keep], [priced[at] for at in keep])

    def lone(self, number: int, cost: np.ndarray) -> None:
        """Adds an edge that pays for itself.

        **Arguments:**

        - `number`: of the edge.
        - `cost`: what it costs from each layout to each.
        """
        edge = self.problem.edges[number]
        if not (cost != 0).any():
            return
        if cost.shape[0] == 1:
            self.costs[edge.end] = self.costs[edge.end] + cost[0][edge.to_codes]
        elif cost.shape[1] == 1:
            self.costs[edge.start] = self.costs[edge.start] + cost[:, 0][edge.from_codes]
        else:
            self.pair(number, cost)

    def pair(self, number: int, cost: np.ndarray) -> int:
        """Returns the variables of an edge, one for each way to go, and makes them if there are none yet.

        **Arguments:**

        - `number`: of the edge.
        - `cost`: what it costs from each layout to each.

        **Returns:**

        The number of the first.
        """
        if number in self.pairs:
            block, at = self.pairs[number]
            self.costs[block] = self.costs[block] + cost.ravel()
            return at
        edge = self.problem.edges[number]
        rows, columns = len(edge.from_layouts), len(edge.to_layouts)
        at = self.fresh(cost.ravel())
        self.pairs[number] = (len(self.costs) - 1, at)
        grid = at + np.arange(rows * columns).reshape(rows, columns)
        for codes, node, lines in ((edge.from_codes, edge.start, grid), (edge.to_codes, edge.end, grid.T)):
            own = np.arange(len(codes)) + self.offsets[node]
            r = np.concatenate([np.repeat(np.arange(len(lines)), lines.shape[1]), codes])
            c = np.concatenate([lines.ravel(), own])
            v = np.concatenate([np.ones(lines.size), -np.ones(len(own))])
            self.equal.append((r + self.equal_count, c, v))
            self.equal_count += len(lines)
            self.right.append(np.zeros(len(lines)))
        return at

    def flow(self, number: int, row: int, column: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns what says whether an edge goes from one layout to another: variables that are added up.

        **Arguments:**

        - `number`: of the edge.
        - `row`, `column`: the two layouts.

        **Returns:**

        The variables, and what each counts.
        """
        edge = self.problem.edges[number]
        if len(edge.from_layouts) == 1:
            columns = np.flatnonzero(edge.to_codes == column) + self.offsets[edge.end]
        elif len(edge.to_layouts) == 1:
            columns = np.flatnonzero(edge.from_codes == row) + self.offsets[edge.start]
        else:
            columns = np.array([self.pairs[number][1] + row * len(edge.to_layouts) + column])
        return columns, np.ones(len(columns))

    def together(self, group: list[int], priced: list[np.ndarray]) -> None:
        """Adds edges that bring the same array somewhere: whatever goes to the same layout goes once.

        **Arguments:**

        - `group`: the numbers of the edges.
        - `priced`: what each costs from each layout to each.
        """
        edges = [self.problem.edges[number] for number in group]
        wanted: dict[tuple[int, bytes], tuple[float, list[tuple[int, int, int]]]] = {}
        for number, edge, cost in zip(group, edges, priced, strict=True):
            if len(edge.from_layouts) > 1 and len(edge.to_layouts) > 1:
                blocked = np.where(np.isfinite(cost), 0.0, np.inf)
                self.pair(number, blocked)
            elif not np.isfinite(cost).all():
                self.lone(number, np.where(np.isfinite(cost), 0.0, np.inf))
            for row, column in np.argwhere((cost > 0) & np.isfinite(cost)).tolist():
                key = (row, edge.to_layouts[column].tobytes())
                price, members = wanted.setdefault(key, (0.0, []))
                members.append((number, row, column))
                wanted[key] = (max(price, float(cost[row, column])), members)
        if not wanted:
            return
        at = self.fresh(np.array([price for price, _ in wanted.values()]))
        for place, (_, members) in enumerate(wanted.values()):
            for number, row, column in members:
                columns, values = self.flow(number, row, column)
                r = np.full(len(columns) + 1, self.above_count)
                self.above.append((r, np.append(columns, at + place), np.append(values, -1.0)))
                self.above_count += 1

    def matrices(self) -> tuple[np.ndarray, csr_array, np.ndarray, csr_array]:
        """Returns everything as arrays.

        **Returns:**

        What variables cost; equations and their right sides; what is at most 0.
        """
        cost = np.concatenate(self.costs)
        equal = _sparse(self.equal, self.equal_count, self.count)
        above = _sparse(self.above, self.above_count, self.count)
        return cost, equal, np.concatenate(self.right), above

    def memory(self, row: Row) -> tuple[np.ndarray, np.ndarray, float]:
        """Returns a bound on memory, over the variables.

        **Arguments:**

        - `row`: the bound.

        **Returns:**

        The variables, the bytes of each, and the limit.
        """
        columns: list[np.ndarray] = []
        values: list[np.ndarray] = []
        for node, sizes in row.labels.items():
            columns.append(np.arange(len(sizes)) + self.offsets[node])
            values.append(sizes)
        for number, sizes in row.copies.items():
            edge = self.problem.edges[number]
            if number in self.pairs:
                apart = (edge.from_layouts[:, None, :] != edge.to_layouts[None, :, :]).any(axis=2)
                columns.append(self.pairs[number][1] + np.arange(apart.size))
                values.append((apart * sizes[None, :]).ravel())
            elif len(edge.from_layouts) == 1:
                apart = (edge.to_layouts != edge.from_layouts[0]).any(axis=1)
                columns.append(np.arange(len(edge.to_codes)) + self.offsets[edge.end])
                values.append((apart * sizes)[edge.to_codes])
            elif len(edge.to_layouts) == 1:
                apart = (edge.from_layouts != edge.to_layouts[0]).any(axis=1)
                columns.append(np.arange(len(edge.from_codes)) + self.offsets[edge.start])
                values.append((apart * sizes[0])[edge.from_codes])
        return (
            np.concatenate(columns) if columns else np.zeros(0, int),
            np.concatenate(values) if values else np.zeros(0),
            row.limit - row.constant,
        )


def _sparse(parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], rows: int, columns: int) -> csr_array:
    if not parts:
        return csr_array((0, columns))
    r, c, v = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return csr_array(coo_array((v, (r, c)), shape=(rows, columns)))


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
        -float(price) / scale / _MICRO
        for price, scale in zip(relaxed.ineqlin.marginals[formulation.above_count :], program.scales, strict=True)
    )
    bound = (float(relaxed.fun) - formulation.slack) / _MICRO
    chosen, loose = _whole(formulation, relaxed.x)
    if loose:
        everything = [*range(len(chosen))]
        few = formulation.count <= _FEW
        found, least = _search(formulation, program, chosen, everything if few else loose, deadline)
        if few and least is not None:
            bound = max(bound, (least - formulation.slack) / _MICRO)
        if found is None and not few:
            found, _ = _search(formulation, program, chosen, everything, deadline)
        if found is None:
            return Solution(None, np.inf, bound, "infeasible", prices, time.monotonic() - begun)
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
    above = csr_array(vstack([above, _sparse(parts, len(rows), formulation.count)]))
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
        A_ub=csr_array(vstack([wider, _sparse(parts, len(rows), formulation.count + 1)])),
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
