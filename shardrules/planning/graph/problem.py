"""The choice that a plan makes, as a graph: nodes that take one of several layouts, edges along which arrays move.

A node is an operation, or an array that comes out of one that sums. Its layouts are rows over its own dims, from which
those of the arrays that it takes and gives follow. An edge leads from the node that gives an array to one that takes
it, and costs what it takes to lay the array out anew. Operations alike, as those of repeated layers, are one node.
"""

import functools
from collections.abc import Sequence
from typing import final

import attrs
import numpy as np

from shardrules.planning.graph.layouts import PARTIAL, WHOLE, Moves
from shardrules.planning.graph.machine import Machine
from shardrules.planning.traced.program import TracedProgram

_SLICE = 1e-9
"""What it takes to slice, in seconds: next to nothing, but an array had better be where it is wanted."""


@final
@attrs.frozen
class Home:
    """Where the layout of an array is decided.

    **Arguments:**

    - `node`: the number of the node.
    - `dims`: for each dim of the array the dim of the node, or `None` where it is never split.
    - `sums`: the dims of the node over which the array is a sum.
    """

    node: int
    dims: tuple[int | None, ...]
    sums: tuple[int, ...] = ()


@final
@attrs.define(eq=False)
class Node:
    """A choice of one layout.

    **Arguments:**

    - `layouts`: the layouts that there are, over its own dims.
    - `seconds`: what each costs, all members together.
    - `name`: what it is, for people.
    """

    layouts: np.ndarray
    seconds: np.ndarray
    name: str


@final
@attrs.frozen(eq=False)
class Edge:
    """An array on its way from one node to another.

    **Arguments:**

    - `start`, `end`: the nodes.
    - `nbytes`: the bytes of all of the array.
    - `move_count`: how often it goes, all members together.
    - `from_codes`, `to_codes`: for each label of the nodes the number of the layout of the array.
    - `from_layouts`, `to_layouts`: these layouts.
    - `moves`: what it takes to go from each to each.
    - `combined`: collectives that send fewer bytes share what each takes at least with others.
    """

    start: int
    end: int
    nbytes: int
    move_count: int
    from_codes: np.ndarray
    to_codes: np.ndarray
    from_layouts: np.ndarray
    to_layouts: np.ndarray
    moves: Moves
    combined: int

    @functools.cached_property
    def seconds(self) -> np.ndarray:
        """What it costs each time to go from each layout to each.

        Compilers combine small collectives, so that they share what each takes at least.
        """
        moved = self.moves
        share = np.minimum(1.0, moved.sent.sum(axis=0) * self.nbytes / self.combined)
        differs = (self.from_layouts[:, None, :] != self.to_layouts[None, :, :]).any(axis=2)
        return np.where(moved.allowed, moved.seconds * self.nbytes + moved.fixed * share + _SLICE * differs, np.inf)


@final
@attrs.frozen(eq=False)
class Problem:
    """Everything that is to be chosen.

    **Arguments:**

    - `program`, `machine`: for what.
    - `nodes`, `edges`: see above.
    - `edge_groups`: groups of edges that bring the same array to the same place, so that what goes to one layout goes
        once; each with the number of times that there is such a group.
    - `equal_homes`: pairs of places at which an array has the same layout.
    - `homes`: for each array that has layouts to choose from, where that is decided.
    - `operand_homes`: for each operation and operand what it takes.
    - `produced_homes`: for each operation and result that is laid out anew, what it gives before that.
    - `edge_indices`: for each operation and operand its edge, or `None`.
    """

    program: TracedProgram
    machine: Machine
    nodes: list[Node]
    edges: list[Edge]
    edge_groups: list[tuple[tuple[int, ...], int]]
    equal_homes: list[tuple[Home, Home]]
    homes: dict[int, Home]
    operand_homes: dict[tuple[int, int], Home]
    produced_homes: dict[tuple[int, int], Home]
    edge_indices: dict[tuple[int, int], int]

    def layout(self, home: Home, choice: Sequence[int]) -> tuple[int, ...]:
        """Returns the layout of an array under a choice.

        **Arguments:**

        - `home`: where it is decided.
        - `choice`: for each node the number of its label.

        **Returns:**

        The layout.
        """
        row = self.nodes[home.node].layouts[choice[home.node]][None]
        return tuple(map(int, project(row, home)[0]))

    def highest_cost(self) -> float:
        """Returns what no choice costs more than.

        **Returns:**

        Seconds.
        """
        total = sum(float(node.seconds.max()) for node in self.nodes)
        for group, count in self.edge_groups:
            for edge in (self.edges[number] for number in group):
                total += count * float(np.max(edge.seconds, initial=0.0, where=np.isfinite(edge.seconds)))
        return total

    def cost(self, choice: Sequence[int]) -> float:
        """Returns what a choice costs.

        **Arguments:**

        - `choice`: for each node the number of its label.

        **Returns:**

        Seconds; infinitely many where arrays that have the same layout do not.
        """
        if any(self.layout(first, choice) != self.layout(second, choice) for first, second in self.equal_homes):
            return np.inf
        total = sum(float(node.seconds[label]) for node, label in zip(self.nodes, choice, strict=True))
        return total + sum(paid * count for paid, count, _ in self.chosen_moves(choice))

    def chosen_moves(self, choice: Sequence[int]) -> list[tuple[float, float, np.ndarray]]:
        """Returns every move under a choice.

        **Arguments:**

        - `choice`: for each node the number of its label.

        **Returns:**

        For each move its seconds, how often it happens, and the bytes that a device sends, by kind.
        """
        found = []
        for group, count in self.edge_groups:
            seen: dict[tuple[int, ...], tuple[float, float, np.ndarray]] = {}
            for number in group:
                edge = self.edges[number]
                row, column = edge.from_codes[choice[edge.start]], edge.to_codes[choice[edge.end]]
                target = tuple(edge.to_layouts[column])
                seconds = float(edge.seconds[row, column])
                if not seconds:
                    continue
                paid = (seconds, count, edge.moves.sent[:, row, column] * edge.nbytes)
                if target not in seen or paid[0] > seen[target][0]:
                    seen[target] = paid
            found += seen.values()
        return found


def read_region(program: TracedProgram, at: int, place: int) -> int:
    """Returns the region in which an operand is brought to where an operation needs it.

    **Arguments:**

    - `program`: the program.
    - `at`: the operation.
    - `place`: which operand.

    **Returns:**

    The number of the region: that around a loop for what enters it.
    """
    operation = program.operations[at]
    outside = program.regions[operation.region][0]
    if outside >= 0 and (
        operation.role == "enter" or (operation.role == "join" and operation.name != "cond" and place == 0)
    ):
        return outside
    return operation.region


def project(rows: np.ndarray, home: Home) -> np.ndarray:
    """Returns the layouts of an array that follow from those of the node where they are decided.

    **Arguments:**

    - `rows`: layouts of the node.
    - `home`: the array's place there.

    **Returns:**

    A layout for each.
    """
    highest = max([*rows.ravel().tolist(), *(dim for dim in home.dims if dim is not None), 0])
    table = np.full(highest + 3, WHOLE, np.int8)
    for dim, own in enumerate(home.dims):
        if own is not None:
            table[own] = dim
    for own in home.sums:
        if own <= highest:
            table[own] = PARTIAL
    table[PARTIAL] = PARTIAL
    return table[rows]
