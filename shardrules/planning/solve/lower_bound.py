"""What every choice costs at least, for problems too large to be solved at once.

Costs are moved between nodes and edges without changing the cost of any choice, so that each of them alone, at its
cheapest, is as dear as can be. The sum of these is a bound that only grows.
"""

import time
from typing import final

import attrs
import numpy as np

from shardrules.planning.graph.problem import Problem, project

_WORK = 4e7
"""How many entries of cost tables are looked at: a number rather than a time, so that all hosts find the same."""

_SWEEPS = (20, 400)
_STILL = 1e-5
_NEVER = 1e3
"""What costs as much, in seconds, is not to be had: infinity cannot be moved around."""


@final
@attrs.frozen(eq=False)
class Bound:
    """What choices cost at least.

    **Arguments:**

    - `seconds`: every one of them.
    - `labels`: for each node, and each of its labels, those that take it.
    """

    seconds: float
    labels: tuple[np.ndarray, ...]


def lower_bound(problem: Problem, deadline: float) -> Bound:
    """Finds a cost that no choice is below.

    **Arguments:**

    - `problem`: the problem.
    - `deadline`: when to stop, as `time.monotonic` has it.

    **Returns:**

    A `Bound`.
    """
    beliefs = [np.array(node.seconds, float) for node in problem.nodes]
    factors = _factors(problem)
    messages = [(np.zeros(cost.shape[0]), np.zeros(cost.shape[1])) for *_, cost in factors]
    total = best = -np.inf
    entries = sum(cost.size for *_, cost in factors)
    least, most = _SWEEPS
    for sweep in range(int(min(most, max(least, _WORK / max(1, entries))))):
        order = range(len(factors)) if sweep % 2 == 0 else range(len(factors) - 1, -1, -1)
        for number in order:
            start, from_codes, end, to_codes, cost = factors[number]
            rows, columns = messages[number]
            first, second = beliefs[start] - rows[from_codes], beliefs[end] - columns[to_codes]
            cheapest_rows = np.full(cost.shape[0], _NEVER)
            np.minimum.at(cheapest_rows, from_codes, first)
            cheapest_columns = np.full(cost.shape[1], _NEVER)
            np.minimum.at(cheapest_columns, to_codes, second)
            joint = cost + cheapest_rows[:, None] + cheapest_columns[None, :]
            rows = joint.min(axis=1) / 2 - cheapest_rows
            columns = joint.min(axis=0) / 2 - cheapest_columns
            messages[number] = (rows, columns)
            beliefs[start], beliefs[end] = first + rows[from_codes], second + columns[to_codes]
        total = _sum(beliefs, factors, messages)
        still = total - best < _STILL * abs(total)
        best = max(total, best)
        if still or time.monotonic() > deadline:
            break
    return Bound(max(0.0, best), tuple(total - belief.min() + belief for belief in beliefs))


def _sum(beliefs: list[np.ndarray], factors: list[tuple], messages: list[tuple[np.ndarray, np.ndarray]]) -> float:
    total = sum(float(belief.min()) for belief in beliefs)
    for (*_, cost), (rows, columns) in zip(factors, messages, strict=True):
        total += float((cost - rows[:, None] - columns[None, :]).min())
    return total


def _factors(problem: Problem) -> list[tuple]:
    """Everything that two nodes have to do with each other: the nodes, their codes, and what each pair of these costs.

    What several edges share costs each of them a part: together no more than the dearest.
    """
    found: list[tuple] = []
    for group, count in problem.edge_groups:
        for number in group:
            edge = problem.edges[number]
            cost = np.minimum(edge.seconds * count / len(group), _NEVER)
            if edge.start == edge.end:
                continue
            if (cost != 0).any():
                found.append((edge.start, edge.from_codes, edge.end, edge.to_codes, cost))
    for first, second in problem.equal_homes:
        rows = [project(problem.nodes[home.node].layouts, home) for home in (first, second)]
        known, codes = np.unique(np.concatenate(rows), axis=0, return_inverse=True)
        codes = codes.ravel()
        cost = np.where(np.eye(len(known), dtype=bool), 0.0, _NEVER)
        found.append((first.node, codes[: len(rows[0])], second.node, codes[len(rows[0]) :], cost))
    return found
