"""A lower bound for the cost of every choice, for problems too large to be solved at once.

Costs are moved between nodes and edges without changing the cost of any choice, so as to raise what each node and each
edge costs at its cheapest. The sum of these minima is a bound, and no sweep lowers it. This is message passing for the
dual of the linear program (MPLP, Globerson and Jaakkola 2007), which needs no matrix.
"""

from typing import final

import attrs
import numpy as np

from shardrules.planning.graph.problem import Problem, project
from shardrules.planning.solve.deadline import Deadline

_MAX_ENTRIES = 4e7
"""How many entries of cost tables are visited, which takes about a second. It is a count rather than a time, so that
all hosts find the same bound. Doubled, large problems get a slightly higher bound in twice the time."""

_MIN_SWEEPS, _MAX_SWEEPS = 20, 400
"""How often all edges are visited: often enough for messages to get across a program, and in small problems no more
often than anything changes."""

_MIN_GAIN = 1e-5
"""The part by which a sweep has to raise the bound. Smaller gains do not matter for a proof, which takes 1e-3."""

_IMPOSSIBLE = 1e3
"""The cost, in seconds, of what is impossible: infinite costs could not be moved. Far above any call, and small enough
that microseconds added to it are not rounded away."""


@final
@attrs.frozen(eq=False)
class Bound:
    """What choices cost at least, in seconds."""

    seconds: float
    """The bound for all choices."""
    layouts: tuple[np.ndarray, ...]
    """For each node the bounds for the choices that take each of its layouts."""


def lower_bound(problem: Problem, deadline: Deadline) -> Bound:
    """Finds a cost that no choice is below."""
    beliefs = [np.array(node.seconds, float) for node in problem.nodes]
    factors = _factors(problem)
    messages = [(np.zeros(cost.shape[0]), np.zeros(cost.shape[1])) for *_, cost in factors]
    total = best = -np.inf
    entries = sum(cost.size for *_, cost in factors)
    for sweep in range(int(min(_MAX_SWEEPS, max(_MIN_SWEEPS, _MAX_ENTRIES / max(1, entries))))):
        # Back and forth, so that what is decided at either end of a program reaches the other in one sweep.
        order = range(len(factors)) if sweep % 2 == 0 else range(len(factors) - 1, -1, -1)
        for factor_index in order:
            start, from_codes, end, to_codes, cost = factors[factor_index]
            rows, columns = messages[factor_index]
            # Take back what this edge gave its nodes, see what each pair of layouts costs with both of them at their
            # cheapest, and give either node half of that.
            first, second = beliefs[start] - rows[from_codes], beliefs[end] - columns[to_codes]
            cheapest_rows = np.full(cost.shape[0], _IMPOSSIBLE)
            np.minimum.at(cheapest_rows, from_codes, first)
            cheapest_columns = np.full(cost.shape[1], _IMPOSSIBLE)
            np.minimum.at(cheapest_columns, to_codes, second)
            joint = cost + cheapest_rows[:, None] + cheapest_columns[None, :]
            rows = joint.min(axis=1) / 2 - cheapest_rows
            columns = joint.min(axis=0) / 2 - cheapest_columns
            messages[factor_index] = (rows, columns)
            beliefs[start], beliefs[end] = first + rows[from_codes], second + columns[to_codes]
        total = _total(beliefs, factors, messages)
        has_converged = total - best < _MIN_GAIN * abs(total)
        best = max(total, best)
        if has_converged or deadline.is_over:
            break
    return Bound(max(0.0, best), tuple(total - belief.min() + belief for belief in beliefs))


def _total(beliefs: list[np.ndarray], factors: list[tuple], messages: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Returns the bound: every node and every edge at its cheapest."""
    total = sum(float(belief.min()) for belief in beliefs)
    for (*_, cost), (rows, columns) in zip(factors, messages, strict=True):
        total += float((cost - rows[:, None] - columns[None, :]).min())
    return total


def _factors(problem: Problem) -> list[tuple]:
    """Returns what pairs of nodes cost: the nodes, their codes, and the cost of each pair of codes.

    Edges that share their cost are charged a part of it each: together at most the most expensive of them.
    """
    factors: list[tuple] = []
    for group, count in problem.edge_groups:
        for edge_index in group:
            edge = problem.edges[edge_index]
            cost = np.minimum(edge.seconds * count / len(group), _IMPOSSIBLE)
            # Without what a node's own layouts cost between themselves, the bound is lower but still one.
            if edge.start == edge.end:
                continue
            if (cost != 0).any():
                factors.append((edge.start, edge.from_codes, edge.end, edge.to_codes, cost))
    for first, second in problem.equal_homes:
        layouts = [project(problem.nodes[home.node].layouts, home) for home in (first, second)]
        distinct, codes = np.unique(np.concatenate(layouts), axis=0, return_inverse=True)
        codes = codes.ravel()
        cut = len(layouts[0])
        cost = np.where(np.eye(len(distinct), dtype=bool), 0.0, _IMPOSSIBLE)
        factors.append((first.node, codes[:cut], second.node, codes[cut:], cost))
    return factors
