"""A problem with fewer layouts to choose from, to solve a part of what is too large to solve as a whole."""

from collections.abc import Sequence

import attrs
import numpy as np

from shardrules.programs.autoplan.graph.layouts import Moves
from shardrules.programs.autoplan.graph.problem import Edge, Problem


def restrict(problem: Problem, keep: Sequence[np.ndarray]) -> Problem:
    """The problem with only some layouts of each node, which get new indices in the order of `keep`."""
    nodes = [
        attrs.evolve(
            node,
            layouts=node.layouts[indices],
            seconds=node.seconds[indices],
            memory_seconds=node.memory_seconds[indices],
            alternatives=[node.alternatives[index] for index in indices] if node.alternatives else (),
            temporary_bytes=[node.temporary_bytes[index] for index in indices] if node.temporary_bytes else (),
        )
        for node, indices in zip(problem.nodes, keep, strict=True)
    ]
    return attrs.evolve(problem, nodes=nodes, edges=[_restrict_edge(edge, keep) for edge in problem.edges])


def _restrict_edge(edge: Edge, keep: Sequence[np.ndarray]) -> Edge:
    rows, from_codes = np.unique(edge.from_codes[keep[edge.start]], return_inverse=True)
    columns, to_codes = np.unique(edge.to_codes[keep[edge.end]], return_inverse=True)
    # Most edges keep all layouts of their array: these share the tables of moves, which are large.
    if len(rows) == len(edge.from_layouts) and len(columns) == len(edge.to_layouts):
        return attrs.evolve(edge, from_codes=from_codes.ravel(), to_codes=to_codes.ravel())
    cut = np.ix_(rows, columns)
    moves, relayout = edge.moves, edge.relayout_seconds
    return attrs.evolve(
        edge,
        from_codes=from_codes.ravel(),
        to_codes=to_codes.ravel(),
        from_layouts=edge.from_layouts[rows],
        to_layouts=edge.to_layouts[columns],
        moves=Moves(moves.seconds[cut], moves.fixed[cut], moves.sent[:, rows][:, :, columns], moves.allowed[cut]),
        relayout_seconds=relayout[cut] if relayout.size > 1 else relayout,
    )


def variable_count(problem: Problem) -> int:
    """About how many variables the linear program of a problem has: one for each move along each edge."""
    return sum(len(edge.from_layouts) * len(edge.to_layouts) for edge in problem.edges)
