"""A problem as a linear program: variables for the labels of nodes, and for the ways that arrays go along edges."""

import functools
from collections.abc import Sequence
from typing import final

import attrs
import numpy as np
from scipy.sparse import coo_array, csr_array

from shardrules.planning.graph.problem import Home, Problem, project

MICRO = 1e6
"""Costs are in microseconds, which suits the tolerances of solvers."""


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

    def taken(self, problem: Problem, choice: Sequence[int]) -> float:
        """Returns what lies in memory under a choice.

        **Arguments:**

        - `problem`: what was to be chosen.
        - `choice`: for each node the number of its label.

        **Returns:**

        Bytes.
        """
        total = self.constant + sum(float(sizes[choice[node]]) for node, sizes in self.labels.items())
        for number, sizes in self.copies.items():
            edge = problem.edges[number]
            row, column = edge.from_codes[choice[edge.start]], edge.to_codes[choice[edge.end]]
            if (edge.from_layouts[row] != edge.to_layouts[column]).any():
                total += float(sizes[column])
        return total


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
        sizes = [len(node.layouts) for node in problem.nodes]
        self.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.count = int(self.offsets[-1])
        self.costs: list[np.ndarray] = [
            np.asarray(node.seconds, float) * MICRO + extra
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
        for first, second in problem.equal_homes:
            self.same(first, second)
        for group, count in problem.edge_groups:
            self.group(group, count)

    def same(self, first: Home, second: Home) -> None:
        """Makes two nodes give an array the same layout.

        **Arguments:**

        - `first`, `second`: the array at either node.
        """
        rows = [project(self.problem.nodes[home.node].layouts, home) for home in (first, second)]
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
        priced = [edge.seconds * MICRO * count for edge in edges]
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

    @functools.cached_property
    def matrices(self) -> tuple[np.ndarray, csr_array, np.ndarray, csr_array]:
        """Everything as arrays: what variables cost; equations and their right sides; what is at most 0."""
        cost = np.concatenate(self.costs)
        equal = sparse(self.equal, self.equal_count, self.count)
        above = sparse(self.above, self.above_count, self.count)
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


def sparse(parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], rows: int, columns: int) -> csr_array:
    """Returns a matrix of which few entries are not 0.

    **Arguments:**

    - `parts`: rows, columns and values, part by part.
    - `rows`, `columns`: its size.

    **Returns:**

    A `scipy.sparse.csr_array`.
    """
    if not parts:
        return csr_array((0, columns))
    r, c, v = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return csr_array(coo_array((v, (r, c)), shape=(rows, columns)))
