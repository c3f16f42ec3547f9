"""The planner's problem as a graph: every node takes one of several layouts, and arrays move along the edges.

A node is an operation, or an array that is laid out by itself. Its layouts are rows over its own dims, and the layouts
of the arrays that it reads and writes follow from them. An edge leads from the node that produces an array to a node
that reads it, and costs what changing the layout between the two takes. Equal operations, as in repeated layers,
share one node.

All positions are indices: of nodes, edges, operations and arrays. A key `(op_index, operand_index)` is one operand of
one operation, and `(op_index, result_index)` one of its results.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Protocol, final

import attrs
import numpy as np
from jax.extend.core import ClosedJaxpr

from shardrules.programs.autoplan.graph.home import Home, project
from shardrules.programs.autoplan.graph.layouts import WHOLE, Moves
from shardrules.programs.autoplan.graph.machine import COLLECTIVE_KINDS, Machine
from shardrules.programs.compilers.fusion import FusedProgram
from shardrules.programs.traced.program import Operation, TracedProgram

_NOTHING = np.zeros((1, 1))
"""A table of no seconds, for any number of layouts."""


@final
@attrs.define(eq=False)
class Node:
    """A choice of one layout. `seconds` is what computing costs in each, for all operations that share the node."""

    layouts: np.ndarray
    seconds: np.ndarray
    memory_seconds: np.ndarray
    """The part of `seconds` in operations that memory limits."""
    name: str  # for people
    alternatives: Sequence[int] = ()
    """For a region the index of the alternative that each layout is of."""
    temporary_bytes: Sequence[float] = ()
    """For a region what a device has in memory while it runs in each layout, beside operands and results."""


@final
@attrs.frozen(eq=False)
class Edge:
    """An array on its way from the node `start` to the node `end`.

    Several layouts of a node may be the same layout of the array: `from_codes` and `to_codes` say for each layout of
    the nodes which of `from_layouts` and `to_layouts` it is.
    """

    start: int
    end: int
    nbytes: int  # of the whole array
    move_count: int  # in one call
    from_codes: np.ndarray
    to_codes: np.ndarray
    from_layouts: np.ndarray
    to_layouts: np.ndarray
    moves: Moves
    combined_bytes: int  # collectives that send fewer bytes are combined, and share their fixed cost
    exposed: float = 1.0  # the fraction of a move's time that compilers do not hide behind computing
    is_between: bool = False  # the array comes from a matmul, and another waits for it
    relayout_seconds: np.ndarray = _NOTHING
    """The time of copies that a move makes the compiler insert before the array is computed: a table like `seconds`."""

    def codes(self, choice: Sequence[int]) -> tuple[int, int]:
        """The layouts before and after the move under a choice: indices of `from_layouts` and of `to_layouts`."""
        return self.from_codes[choice[self.start]], self.to_codes[choice[self.end]]

    @functools.cached_property
    def changes(self) -> np.ndarray:
        return (self.from_layouts[:, None, :] != self.to_layouts[None, :, :]).any(axis=2)

    @functools.cached_property
    def sends(self) -> np.ndarray:
        """The moves for which devices need more of the array than they have: it is not only split further."""
        sources = self.from_layouts[:, None, :]
        return ((sources >= 0) & (sources != self.to_layouts[None, :, :])).any(axis=2)

    def decided(self, table: np.ndarray) -> tuple[int, np.ndarray]:
        """The node that alone decides what an edge with one layout at either end costs, and what for its layouts.

        `table` is from each layout of the array to each.
        """
        if table.shape[0] == 1:
            return self.end, table[0][self.to_codes]
        return self.start, table[:, 0][self.from_codes]

    @functools.cached_property
    def seconds(self) -> np.ndarray:
        """The time of one move, from each of `from_layouts` to each of `to_layouts`; infinite for impossible ones."""
        moves = self.moves
        fixed_share = np.minimum(1.0, moves.sent.sum(axis=0) * self.nbytes / self.combined_bytes)
        # Compilers combine no exchanges.
        exchanged = moves.sent[[COLLECTIVE_KINDS.index("all-to-all"), COLLECTIVE_KINDS.index("collective-permute")]]
        fixed_share[exchanged.any(axis=0)] = 1.0
        sending = np.where(moves.allowed, moves.seconds, 0.0) * self.nbytes + moves.fixed * fixed_share
        # Slicing sends nothing, but of equal plans the one that changes no layout is better: a nanosecond is far below
        # any collective.
        sending = sending + self.relayout_seconds + 1e-9 * self.changes
        return np.where(moves.allowed, sending, np.inf)


@final
@attrs.frozen(eq=False)
class ChosenMove:
    """A move that a choice makes."""

    seconds: float
    """The time that links or networks are busy, in each run."""
    exposed_seconds: float
    """The part of it that compilers do not hide behind computing."""
    count: float
    sent: np.ndarray
    """The bytes that a device sends each time, by kind of collective."""
    is_between: bool
    """It is between two matmuls."""


@final
@attrs.frozen(eq=False)
class RegionPrice:
    """The price of one call of a region on a device."""

    alternative: int
    """The index of the alternative with this price."""
    name: str
    compute_seconds: float
    exchange_seconds: float
    program: ClosedJaxpr
    """The program that the device runs."""
    sent: tuple[float, ...]
    """The bytes that a device sends, by kind of collective (`COLLECTIVE_KINDS`)."""

    @property
    def seconds(self) -> float:
        """All of it, if nothing overlaps."""
        return self.compute_seconds + self.exchange_seconds


class RegionPrices(Protocol):
    """The prices of regions on a machine."""

    device: Machine
    """A device of the machine by itself."""

    def price(self, operation: Operation, layout: Sequence[int], alternative: int) -> RegionPrice:
        """Returns the price of an alternative of a region in a layout of its node."""
        ...

    def prices(self, operation: Operation, layout: Sequence[int]) -> Sequence[RegionPrice]:
        """Returns the prices of all alternatives that are possible in a layout."""
        ...


@final
@attrs.frozen(eq=False)
class Problem:
    """Everything that is chosen, and what each choice costs. A choice is the index of a layout for each node."""

    program: TracedProgram
    machine: Machine
    fusion: FusedProgram
    nodes: Sequence[Node]
    edges: Sequence[Edge]
    edge_groups: Sequence[tuple[tuple[int, ...], int]]
    """Edges that bring the same array to the same region, and how often: to each layout it is brought only once."""
    equal_homes: Sequence[tuple[Home, Home]]
    """Pairs of homes that have to give an array the same layout."""
    homes: Mapping[int, Home]
    """For each array with layouts to choose from."""
    operand_homes: Mapping[tuple[int, int], Home]
    """The source of the layout in which an operation reads an operand."""
    produced_homes: Mapping[tuple[int, int], Home]
    """For results that change their layout right after the operation: what gives the layout before that."""
    edge_indices: Mapping[tuple[int, int], int]
    """The edge along which an operand comes, at `(op_index, operand_index)`; a result of `produced_homes` moves along
    the one at `(op_index, -1 - result_index)`."""
    feedback: Mapping[int, int]
    """For results that a caller passes again, the argument that each becomes: they share its memory."""
    ignored_specs: tuple[str, ...]
    """Constraints in the function that no layout of this mesh satisfies."""
    region_nodes: Mapping[int, int]
    """For each call of a `shardrules.region` the node of its splits."""
    region_costs: RegionPrices

    def layout(self, home: Home, choice: Sequence[int]) -> tuple[int, ...]:
        row = self.nodes[home.node].layouts[choice[home.node]][None]
        return tuple(map(int, project(row, home)[0]))

    def region_layout(self, op_index: int, choice: Sequence[int]) -> tuple[int, ...]:
        node = self.region_nodes.get(op_index)
        if node is None:  # it has only scalars
            return (WHOLE,) * len(self.machine.axes)
        return tuple(map(int, self.nodes[node].layouts[choice[node]]))

    def region_price(self, op_index: int, choice: Sequence[int]) -> RegionPrice:
        node = self.region_nodes[op_index]
        alternative = self.nodes[node].alternatives[choice[node]]
        return self.region_costs.price(
            self.program.operations[op_index], self.region_layout(op_index, choice), alternative
        )

    def operand_move(self, choice: Sequence[int], op_index: int, position: int) -> tuple[float, np.ndarray, int]:
        """The seconds of one move of an operand to an operation, the bytes by kind, and the moves in a call: all that
        share its edge."""
        edge_index = self.edge_indices.get((op_index, position))
        if edge_index is None:
            return 0.0, np.zeros(len(COLLECTIVE_KINDS)), 0
        edge = self.edges[edge_index]
        row, column = edge.codes(choice)
        return float(edge.seconds[row, column]), edge.moves.sent[:, row, column] * edge.nbytes, edge.move_count

    def exchanges(self, choice: Sequence[int]) -> list["ChosenMove"]:
        """The exchanges that regions send by hand. `cost` counts them as their computing."""
        exchanges = []
        for op_index in self.region_nodes:
            price, count = self.region_price(op_index, choice), self.program.operations[op_index].run_count
            if price.exchange_seconds:
                seconds, sent = price.exchange_seconds, np.array(price.sent)
                exchanges.append(ChosenMove(seconds, seconds, count, sent, is_between=False))
        return exchanges

    def highest_cost(self) -> float:
        """Seconds that no choice exceeds."""
        total = sum(float(node.seconds.max()) for node in self.nodes)
        for group, count in self.edge_groups:
            for edge in (self.edges[index] for index in group):
                total += count * float(np.max(edge.seconds, initial=0.0, where=np.isfinite(edge.seconds)))
        return total

    def cost(self, choice: Sequence[int]) -> float:
        """The seconds of a choice; infinite where `equal_homes` differ."""
        if any(self.layout(first, choice) != self.layout(second, choice) for first, second in self.equal_homes):
            return np.inf
        total = sum(float(node.seconds[index]) for node, index in zip(self.nodes, choice, strict=True))
        return total + sum(move.seconds * move.count for move in self.chosen_moves(choice))

    def chosen_moves(self, choice: Sequence[int]) -> list["ChosenMove"]:
        moves: list[ChosenMove] = []
        for group, count in self.edge_groups:
            by_target: dict[tuple[int, ...], ChosenMove] = {}
            for edge_index in group:
                edge = self.edges[edge_index]
                row, column = edge.codes(choice)
                seconds = float(edge.seconds[row, column])
                if not seconds:
                    continue
                # Edges of a group that go to one layout are one move: the most expensive of them covers the others.
                target = tuple(edge.to_layouts[column])
                if target not in by_target or seconds > by_target[target].seconds:
                    sent = edge.moves.sent[:, row, column] * edge.nbytes
                    exposed = seconds * edge.exposed
                    by_target[target] = ChosenMove(seconds, exposed, count, sent, edge.is_between)
            moves += by_target.values()
        return moves


def read_region(program: TracedProgram, op_index: int, operand_index: int) -> int:
    """The region in which an operand gets the layout that an operation needs: for what enters a loop, outside of it."""
    operation = program.operations[op_index]
    parent = program.regions[operation.region].parent
    # Of what goes round a loop, the first operand is the value before the loop. Branches of a `cond` are joined
    # outside of their regions already.
    starts_loop = operation.joins_rounds and operand_index == 0
    if parent >= 0 and (operation.role == "enter" or starts_loop):
        return parent
    return operation.region
