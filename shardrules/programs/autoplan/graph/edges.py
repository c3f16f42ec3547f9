"""The edges of the graph: arrays on their way from the layout that they have to the layouts that operations need."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import attrs
import numpy as np

from shardrules.programs.autoplan.graph.home import Home, project
from shardrules.programs.autoplan.graph.layouts import Moves, moves, shard_counts
from shardrules.programs.autoplan.graph.machine import Machine
from shardrules.programs.autoplan.graph.problem import Edge, Node, read_region
from shardrules.programs.compilers.kernels import is_matmul
from shardrules.programs.compilers.waiting import Waiting
from shardrules.programs.costs.memory import traffic_seconds
from shardrules.programs.traced.program import Operation, TracedProgram


@final
class _Timing(NamedTuple):
    """The facts of an edge that follow from the time at which its array is moved."""

    exposed: float
    is_between: bool


@final
@attrs.define(eq=False)
class EdgeBuilder:
    """Finds the edges between homes, and adds a node for a copy of an array that several operations read."""

    program: TracedProgram
    machine: Machine
    nodes: list[Node]
    homes: Mapping[int, Home]
    operand_homes: Mapping[tuple[int, int], Home]
    edges: list[Edge] = attrs.field(factory=list)
    edge_indices: dict[tuple[int, int], int] = attrs.field(factory=dict)
    equal_homes: list[tuple[Home, Home]] = attrs.field(factory=list)
    group_counts: dict[tuple[int, ...], int] = attrs.field(factory=dict)
    _indices_by_key: dict[Any, int] = attrs.field(factory=dict)
    _copy_nodes: dict[tuple[Home, ...], int] = attrs.field(factory=dict)
    _moves: dict[Any, Moves] = attrs.field(factory=dict)

    def add_operands(self, share_copies: bool) -> None:
        """Adds the edges of all operands. `share_copies`: equal reads of an array by equal operations read one copy."""
        program = self.program
        # First by array and region, since one copy serves all that need an array in one layout there; then by how often
        # and as what it is read.
        groups: dict[tuple[int, int], dict[Any, list[tuple[int, int]]]] = {}
        for op_index, operation in enumerate(program.operations):
            for operand_index, operand in enumerate(operation.operands):
                home = self.operand_homes.get((op_index, operand_index))
                if home is None or operand is None or home == self.homes[operand]:
                    continue
                if share_copies and operation.role == "compute":
                    reader = (operation.name, operand_index, operation.factors.operands[operand_index])
                else:
                    reader = (op_index, operand_index)
                readers = groups.setdefault((operand, read_region(program, op_index, operand_index)), {})
                key = (operation.read_counts[operand_index], reader)
                readers.setdefault(key, []).append((op_index, operand_index))
        for (array, region), readers in groups.items():
            by_count: dict[int, dict[int, None]] = {}
            # A copy that several read is there for all of them once the first needs it: they share its timing, too.
            reads = [operand for operands in readers.values() for operand in operands]
            timing = self._timing([op_index for op_index, _ in reads], array)
            is_alone = self._is_alone(reads, array)
            for (count, _), operands in readers.items():
                home = self._copy_home(operands)
                edge_index = self._edge_index(array, self.homes[array], home, count, region, timing, is_alone)
                by_count.setdefault(count, {})[edge_index] = None
                self.edge_indices.update(dict.fromkeys(operands, edge_index))
            for count, edge_indices in by_count.items():
                self._count_group(tuple(sorted(edge_indices)), count)

    def add_results(self, produced_homes: Mapping[tuple[int, int], Home]) -> None:
        for (op_index, result_index), produced in produced_homes.items():
            operation = self.program.operations[op_index]
            array = operation.results[result_index]
            home, count = self.homes[array], operation.run_count
            timing = self._timing([op_index], array)
            edge_index = self._edge_index(array, produced, home, count, operation.region, timing, is_alone=False)
            self.edge_indices[op_index, -1 - result_index] = edge_index
            self._count_group((edge_index,), operation.run_count)

    def _reordered_bytes(self, array: int) -> int:
        """The bytes of what is read in the order of an array: on GPUs, of a dot with a vector the larger operand."""
        operation = self._producer(array)
        # Dims keep their order in memory in what is computed from it one by one.
        while operation is not None and operation.role == "compute" and len(operation.operands) == 1:
            (operand,) = operation.operands
            operation = None if operand is None else self._producer(operand)
        if operation is None or operation.name != "dot_general" or is_matmul(operation):
            return 0
        sizes = (self.program.arrays[operand].nbytes for operand in operation.operands if operand is not None)
        return max(sizes) if self.machine.compiler.reads_in_order else 0

    def _producer(self, array: int) -> Operation | None:
        op_index = self.program.producers.get(array)
        return None if op_index is None else self.program.operations[op_index]

    def _count_group(self, group: tuple[int, ...], count: int) -> None:
        self.group_counts[group] = self.group_counts.get(group, 0) + count

    def _copy_home(self, operands: Sequence[tuple[int, int]]) -> Home:
        """The home of the copy of an array that some operations read; a node of its own if they have several."""
        ends = tuple(dict.fromkeys(self.operand_homes[operand] for operand in operands))
        if len(ends) == 1:
            return ends[0]
        dims = tuple(range(len(ends[0].dims)))
        if ends not in self._copy_nodes:
            # The copy can have the layouts that all of its readers have, and each reader then has the copy's.
            rows = [np.unique(project(self.nodes[end.node].layouts, end), axis=0) for end in ends]
            common = [row for row in rows[0].tolist() if all((other == row).all(axis=1).any() for other in rows[1:])]
            self.nodes.append(Node(np.array(common, np.int8), np.zeros(len(common)), np.zeros(len(common)), "copy"))
            self._copy_nodes[ends] = len(self.nodes) - 1
            self.equal_homes += [(Home(self._copy_nodes[ends], dims), end) for end in ends]
        return Home(self._copy_nodes[ends], dims)

    @functools.cached_property
    def _waiting(self) -> Waiting:
        return Waiting.of(self.program)

    def _timing(self, op_indices: Sequence[int], array: int) -> _Timing:
        has_time = all(self._waiting.has_time(op_index, array) for op_index in op_indices)
        return _Timing(
            exposed=1.0 - self.machine.assumptions.hidden * has_time,
            is_between=any(self._waiting.is_between(op_index, array) for op_index in op_indices),
        )

    def _is_alone(self, reads: Sequence[tuple[int, int]], array: int) -> bool:
        """Operations wait for an array that is computed from the batch: they add it up, broadcast it or need a dim of
        it whole. Most gradients and updates of parameters, which are moved many at once, are taken only by elementwise
        operations."""
        factors = [(self.program.operations[op_index].factors, operand) for op_index, operand in reads]
        is_waited_for = any(each.reduced or None in each.operands[operand] for each, operand in factors)
        return array in self._waiting.behind and is_waited_for

    def _edge_index(
        self,
        array: int,
        start: Home,
        end: Home,
        count: int,
        region: int,
        timing: _Timing,
        is_alone: bool,
    ) -> int:
        """The index of an edge, which equal moves of equal arrays share."""
        nbytes = self.program.arrays[array].nbytes
        is_alone = is_alone or timing.is_between or self.program.regions[region].run_count > 1
        read_bytes = self._reordered_bytes(array)
        key = (start, end, nbytes, count, is_alone, timing, read_bytes)
        if key not in self._indices_by_key:
            self._indices_by_key[key] = len(self.edges)
            edge = self._edge(start, end, nbytes, count, is_alone, timing)
            if read_bytes:
                edge = attrs.evolve(edge, relayout_seconds=self._relayout_seconds(edge, read_bytes))
            self.edges.append(edge)
        return self._indices_by_key[key]

    def _relayout_seconds(self, edge: Edge, read_bytes: int) -> np.ndarray:
        """The time of copies for a collective along a dim other than the first, which wants that dim first in memory,
        if the kernel that computes the array reads its operands in the same order."""
        before, after = edge.from_layouts[:, None, :], edge.to_layouts[None, :, :]
        sends_inner = ((before > 0) & (before != after)).any(axis=2)
        copied = 2 * read_bytes / shard_counts(edge.from_layouts, self.machine)[:, None]
        return np.where(sends_inner, copied * traffic_seconds(1, self.machine.hardware), 0.0)

    def _edge(self, start: Home, end: Home, nbytes: int, count: int, is_alone: bool, timing: _Timing) -> Edge:
        # Many layouts of a node are one layout of the array. The tables of moves, which are most of the memory of a
        # problem, are over these few, and edges between the same layouts share them.
        first, from_codes = np.unique(project(self.nodes[start.node].layouts, start), axis=0, return_inverse=True)
        last, to_codes = np.unique(project(self.nodes[end.node].layouts, end), axis=0, return_inverse=True)
        key = (first.tobytes(), first.shape, last.tobytes(), last.shape)
        if key not in self._moves:
            self._moves[key] = moves(first, last, self.machine)
        return Edge(
            start.node,
            end.node,
            nbytes,
            count,
            from_codes.ravel(),
            to_codes.ravel(),
            first,
            last,
            self._moves[key],
            # Few collectives in a loop, or that something waits for, can wait for each other: they are combined below
            # 64 KiB by default, and most pay their latency alone, such as the moves of one token's activations.
            self.machine.assumptions.combined_bytes // (128 if is_alone else 1),
            **timing._asdict(),
        )
