"""A problem as a linear program: variables for the layouts of nodes, and for the ways that arrays go along edges."""

import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

import attrs
import numpy as np
from scipy.sparse import coo_array, csr_array

from shardrules.programs.autoplan.graph.home import Home, project
from shardrules.programs.autoplan.graph.problem import Problem

MICRO = 1e6
"""Costs are in microseconds. HiGHS calls anything below 1e-7 zero: a call of milliseconds would be ten thousand times
that in seconds, and each of its moves next to nothing."""

Entries: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows, columns and values of the entries of a sparse matrix that are not 0."""


@final
@attrs.frozen(eq=False)
class MemoryConstraint:
    """A bound on what is in memory at one moment."""

    layout_bytes: Mapping[int, np.ndarray]
    """For some nodes the bytes of each layout."""
    copy_bytes: Mapping[int, np.ndarray]
    """For some edges the bytes of the copies from each layout of the array to each."""
    constant_bytes: float
    limit_bytes: float

    def used_bytes(self, problem: Problem, choice: Sequence[int]) -> float:
        """Returns what is in memory under a choice."""
        total = self.constant_bytes + sum(float(sizes[choice[node]]) for node, sizes in self.layout_bytes.items())
        for edge_index, sizes in self.copy_bytes.items():
            total += float(sizes[problem.edges[edge_index].codes(choice)])
        return total


@final
class Formulation:
    """The linear program of a problem.

    `preference` is what the layouts of each node cost beyond their time, in microseconds. It decides between choices
    that take the same time.
    """

    def __init__(self, problem: Problem, preference: Sequence[np.ndarray]) -> None:
        self.problem = problem
        sizes = [len(node.layouts) for node in problem.nodes]
        # The variables of node `n` are the columns offsets[n] to offsets[n + 1]; the edges follow.
        self.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.column_count = int(self.offsets[-1])
        self.costs: list[np.ndarray] = [
            np.asarray(node.seconds, float) * MICRO + extra
            for node, extra in zip(problem.nodes, preference, strict=True)
        ]
        self.preference = preference
        # The bound of the program counts the preference too: a bound on time alone is lower by at most this.
        self.slack = float(sum(np.max(extra, initial=0.0) for extra in preference))
        self.equations: list[Entries] = []
        self.equation_count = 0
        self.right_sides: list[np.ndarray] = []
        self.inequalities: list[Entries] = []
        self.inequality_count = 0
        self.pairs: dict[int, tuple[int, int]] = {}
        """For edges with variables of their own: their entry of `costs`, and their first column."""
        for node_index in range(len(problem.nodes)):
            columns = np.arange(self.offsets[node_index], self.offsets[node_index + 1])
            self._add_equations((np.zeros(len(columns), int), columns, np.ones(len(columns))), np.ones(1))
        for first, second in problem.equal_homes:
            self._tie(first, second)
        for group, count in problem.edge_groups:
            self._add_group(group, count)

    def preferred(self, choice: Sequence[int]) -> float:
        """The cost of a choice beyond its time."""
        return sum(float(extra[layout_index]) for extra, layout_index in zip(self.preference, choice, strict=True))

    def _add_equations(self, entries: Entries, right: np.ndarray) -> None:
        """Adds one equation for each right side; the rows of the entries count from 0."""
        rows, columns, values = entries
        self.equations.append((rows + self.equation_count, columns, values))
        self.equation_count += len(right)
        self.right_sides.append(right)

    def _tie(self, first: Home, second: Home) -> None:
        """Makes two nodes give an array the same layout."""
        layouts = [project(self.problem.nodes[home.node].layouts, home) for home in (first, second)]
        # One equation for each layout: the first node takes one that gives it exactly if the second does.
        distinct, codes = np.unique(np.concatenate(layouts), axis=0, return_inverse=True)
        columns = [
            np.arange(len(rows)) + self.offsets[home.node] for rows, home in zip(layouts, (first, second), strict=True)
        ]
        signs = np.concatenate([np.ones(len(layouts[0])), -np.ones(len(layouts[1]))])
        self._add_equations((codes.ravel(), np.concatenate(columns), signs), np.zeros(len(distinct)))

    def _add_columns(self, costs: np.ndarray) -> int:
        """Adds variables, and returns the first column."""
        first = self.column_count
        self.costs.append(costs)
        self.column_count += len(costs)
        return first

    def _add_group(self, group: tuple[int, ...], count: int) -> None:
        """Adds the edges that bring an array to the same place; there are `count` such groups."""
        costs = {edge_index: self.problem.edges[edge_index].seconds * MICRO * count for edge_index in group}
        if len(group) > 1:
            costs = {edge_index: cost for edge_index, cost in costs.items() if (cost != 0).any()}
        if len(costs) == 1:
            ((edge_index, cost),) = costs.items()
            self._add_edge(edge_index, cost)
        else:
            self._add_shared_edges(costs)

    def _add_edge(self, edge_index: int, cost: np.ndarray) -> None:
        """Adds an edge that pays for itself; `cost` is from each layout to each."""
        edge = self.problem.edges[edge_index]
        if not (cost != 0).any():
            return
        # With one layout at either end, the layout of the other decides the cost: no variables are needed.
        if 1 in cost.shape:
            node, costs = edge.decided(cost)
            self.costs[node] = self.costs[node] + costs
        else:
            self._add_pairs(edge_index, cost)

    def _add_pairs(self, edge_index: int, cost: np.ndarray) -> None:
        """Gives an edge a variable for each pair of layouts, or charges more for them if it has them."""
        if edge_index in self.pairs:
            block, _ = self.pairs[edge_index]
            self.costs[block] = self.costs[block] + cost.ravel()
            return
        edge = self.problem.edges[edge_index]
        rows, columns = len(edge.from_layouts), len(edge.to_layouts)
        first = self._add_columns(cost.ravel())
        self.pairs[edge_index] = (len(self.costs) - 1, first)
        grid = first + np.arange(rows * columns).reshape(rows, columns)
        # What leaves a layout, over all targets, is what the start's layouts with that layout add up to; likewise at
        # the end. These equations, rather than products of layouts, are what makes the relaxation nearly always whole.
        for codes, node, lines in ((edge.from_codes, edge.start, grid), (edge.to_codes, edge.end, grid.T)):
            node_columns = np.arange(len(codes)) + self.offsets[node]
            entries = (
                np.concatenate([np.repeat(np.arange(len(lines)), lines.shape[1]), codes]),
                np.concatenate([lines.ravel(), node_columns]),
                np.concatenate([np.ones(lines.size), -np.ones(len(node_columns))]),
            )
            self._add_equations(entries, np.zeros(len(lines)))

    def _flow_columns(self, edge_index: int, row: int, column: int) -> np.ndarray:
        """Returns the variables that add up to whether an edge goes from one layout to another."""
        edge = self.problem.edges[edge_index]
        if len(edge.from_layouts) == 1:
            return np.flatnonzero(edge.to_codes == column) + self.offsets[edge.end]
        if len(edge.to_layouts) == 1:
            return np.flatnonzero(edge.from_codes == row) + self.offsets[edge.start]
        return np.array([self.pairs[edge_index][1] + row * len(edge.to_layouts) + column])

    def _add_shared_edges(self, costs: dict[int, np.ndarray]) -> None:
        """Adds edges that bring the same array somewhere: what goes to the same layout is sent, and paid, once."""
        moves: dict[tuple[int, bytes], tuple[float, list[tuple[int, int, int]]]] = {}
        for edge_index, cost in costs.items():
            edge = self.problem.edges[edge_index]
            # The edges themselves cost nothing, but what is impossible stays so.
            blocked = np.where(np.isfinite(cost), 0.0, np.inf)
            if len(edge.from_layouts) > 1 and len(edge.to_layouts) > 1:
                self._add_pairs(edge_index, blocked)
            elif not np.isfinite(cost).all():
                self._add_edge(edge_index, blocked)
            for row, column in np.argwhere((cost > 0) & np.isfinite(cost)).tolist():
                key = (row, edge.to_layouts[column].tobytes())
                price, members = moves.setdefault(key, (0.0, []))
                members.append((edge_index, row, column))
                moves[key] = (max(price, float(cost[row, column])), members)
        if not moves:
            return
        # One variable for each move, which is at least whether any of the edges makes it.
        first = self._add_columns(np.array([price for price, _ in moves.values()]))
        for move_column, (_, members) in enumerate(moves.values(), first):
            for edge_index, row, column in members:
                columns = self._flow_columns(edge_index, row, column)
                rows = np.full(len(columns) + 1, self.inequality_count)
                values = np.append(np.ones(len(columns)), -1.0)
                self.inequalities.append((rows, np.append(columns, move_column), values))
                self.inequality_count += 1

    @functools.cached_property
    def matrices(self) -> tuple[np.ndarray, csr_array, np.ndarray, csr_array]:
        """Everything as arrays: what variables cost; equations and their right sides; what is at most 0."""
        cost = np.concatenate(self.costs)
        equations = sparse(self.equations, self.equation_count, self.column_count)
        inequalities = sparse(self.inequalities, self.inequality_count, self.column_count)
        return cost, equations, np.concatenate(self.right_sides), inequalities

    def memory(self, constraint: MemoryConstraint) -> tuple[np.ndarray, np.ndarray, float]:
        """Returns a bound on memory over the variables: the columns, the bytes of each, and the limit."""
        columns: list[np.ndarray] = []
        values: list[np.ndarray] = []
        for node, sizes in constraint.layout_bytes.items():
            columns.append(np.arange(len(sizes)) + self.offsets[node])
            values.append(sizes)
        for edge_index, sizes in constraint.copy_bytes.items():
            edge = self.problem.edges[edge_index]
            if edge_index in self.pairs:
                columns.append(self.pairs[edge_index][1] + np.arange(sizes.size))
                values.append(sizes.ravel())
            elif 1 in sizes.shape:
                node, layout_sizes = edge.decided(sizes)
                columns.append(np.arange(len(layout_sizes)) + self.offsets[node])
                values.append(layout_sizes)
        return (
            np.concatenate(columns) if columns else np.zeros(0, int),
            np.concatenate(values) if values else np.zeros(0),
            constraint.limit_bytes - constraint.constant_bytes,
        )


def sparse(parts: Sequence[Entries], row_count: int, column_count: int) -> csr_array:
    """Returns a sparse matrix from its entries, part by part."""
    if not parts:
        return csr_array((0, column_count))
    rows, columns, values = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return csr_array(coo_array((values, (rows, columns)), shape=(row_count, column_count)))
