"""A problem with fewer layouts to choose from: to solve a part of what is too large to be solved at once."""

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from shardrules.planning.graph.layouts import Moves
from shardrules.planning.graph.problem import Edge, Node, Problem


def restrict(problem: Problem, keep: Sequence[np.ndarray]) -> Problem:
    """Returns a problem of which some labels are left out.

    **Arguments:**

    - `problem`: the problem.
    - `keep`: for each node the numbers of the labels that stay.

    **Returns:**

    The `Problem`; the labels of a node are numbered anew, in the order of `keep`.
    """
    nodes = [
        Node(node.layouts[kept], node.seconds[kept], node.name) for node, kept in zip(problem.nodes, keep, strict=True)
    ]
    return attrs.evolve(problem, nodes=nodes, edges=[_edge(edge, keep) for edge in problem.edges])


def _edge(edge: Edge, keep: Sequence[np.ndarray]) -> Edge:
    rows, from_codes = np.unique(edge.from_codes[keep[edge.start]], return_inverse=True)
    columns, to_codes = np.unique(edge.to_codes[keep[edge.end]], return_inverse=True)
    if len(rows) == len(edge.from_layouts) and len(columns) == len(edge.to_layouts):
        return attrs.evolve(edge, from_codes=from_codes.ravel(), to_codes=to_codes.ravel())
    cut = np.ix_(rows, columns)
    moves = edge.moves
    return attrs.evolve(
        edge,
        from_codes=from_codes.ravel(),
        to_codes=to_codes.ravel(),
        from_layouts=edge.from_layouts[rows],
        to_layouts=edge.to_layouts[columns],
        moves=Moves(moves.seconds[cut], moves.fixed[cut], moves.sent[:, rows][:, :, columns], moves.allowed[cut]),
    )


def variable_count(problem: Problem) -> int:
    """About how many variables the linear program of a problem has.

    **Arguments:**

    - `problem`: the problem.

    **Returns:**

    Their number.
    """
    return sum(len(edge.from_layouts) * len(edge.to_layouts) for edge in problem.edges)


def layouts_where(problem: Problem, wanted: Callable[[np.ndarray, int], np.ndarray]) -> list[np.ndarray]:
    """Returns the labels of each node that are as wanted; all of them where none is.

    **Arguments:**

    - `problem`: the problem.
    - `wanted`: for the labels of a node, and its number, whether each is.

    **Returns:**

    For each node the numbers of labels.
    """
    found = []
    for number, node in enumerate(problem.nodes):
        kept = np.flatnonzero(wanted(node.layouts, number))
        found.append(kept if len(kept) else np.arange(len(node.layouts)))
    return found
