"""The time of an operation on one device: of computing, or of reading and writing memory, whichever is longer.

The figures are an audit's: the rates that hardware reaches for matmuls of a shape, here of the shapes of each
layout, for memory traffic, and the launch of a kernel.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np

from shardrules.programs.autoplan.graph.home import Home, nest_home, project
from shardrules.programs.autoplan.graph.host_moves import host_move
from shardrules.programs.autoplan.graph.layouts import shard_counts
from shardrules.programs.autoplan.graph.machine import Machine
from shardrules.programs.compilers.fusion import FusedProgram
from shardrules.programs.compilers.kernels import IN_PLACE, is_matmul
from shardrules.programs.compilers.ragged import copied_operands, group_count, group_factor
from shardrules.programs.compiling.fused_calls import fused_matmul
from shardrules.programs.costs.attention import attention_seconds, is_attention
from shardrules.programs.costs.kernels import READS_PER_WRITE
from shardrules.programs.costs.matmul import flops_seconds, matmul_seconds
from shardrules.programs.costs.memory import host_seconds, traffic_seconds
from shardrules.programs.traced.program import Operation


@final
@attrs.define(eq=False)
class ComputeCosts:
    """The times of the operations of a program. Equal matmuls in equal layouts are priced once."""

    fusion: FusedProgram
    machine: Machine
    _matmuls: dict[Any, np.ndarray] = attrs.field(factory=dict, init=False)

    def seconds(
        self, op_index: int, node: int, layouts: np.ndarray, operand_homes: Mapping[tuple[int, int], Home]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The seconds that all runs of an operation take, for each of the `layouts` of its node; and these seconds
        again where memory limits it, else 0."""
        operation, hardware = self.fusion.program.operations[op_index], self.machine.hardware
        seconds = self._traffic_seconds(op_index, node, layouts, operand_homes)
        is_memory_bound = np.ones(len(layouts), bool)
        if is_matmul(operation):
            homes = [operand_homes.get((op_index, operand_index)) for operand_index in range(2)]
            multiplying = self._matmul_seconds(operation, layouts, homes)
            is_memory_bound = seconds >= multiplying
            seconds = np.maximum(seconds, multiplying)
        # A kernel of each round counts rounds, except on TPUs, which have a core for scalars.
        loop_kernels = 0 if hardware.clock_hertz else 1
        seconds = seconds + self._host_seconds(op_index, node, layouts)
        launches = (op_index in self.fusion.kernels) + loop_kernels * (op_index in self._loop_heads)
        seconds = (seconds + launches * hardware.launch_seconds) * operation.run_count
        return seconds, seconds * is_memory_bound

    def seconds_of_one(self, op_index: int) -> float:
        """The seconds that all runs of an operation take on a machine of one device, where nothing is split."""
        program = self.fusion.program
        homes = {
            (op_index, index): Home(0, (None,) * len(program.arrays[operand].shape))
            for index, operand in enumerate(program.operations[op_index].operands)
            if operand is not None
        }
        return float(self.seconds(op_index, 0, np.zeros((1, 0), np.int8), homes)[0][0])

    def _host_seconds(self, op_index: int, node: int, layouts: np.ndarray) -> np.ndarray:
        """The time of sending to the host, or fetching from there, beside the computing meanwhile."""
        move = host_move(self.fusion.program, op_index, self.machine.assumptions)
        if move is None:
            return np.zeros(len(layouts))
        exposed = move.exposed * host_seconds(move.nbytes, self.machine.hardware)
        return exposed / self._result_counts(self.fusion.program.operations[op_index], node, layouts, 0)

    @functools.cached_property
    def _loop_heads(self) -> frozenset[int]:
        program = self.fusion.program
        heads: dict[int, int] = {}
        for op_index, operation in enumerate(program.operations):
            if operation.role == "join" and operation.name == "join" and program.arrays[operation.results[0]].shape:
                heads.setdefault(operation.region, op_index)
        return frozenset(heads.values())

    def _traffic_seconds(
        self, op_index: int, node: int, layouts: np.ndarray, operand_homes: Mapping[tuple[int, int], Home]
    ) -> np.ndarray:
        read, written = self._traffic_bytes(op_index, node, layouts, operand_homes)
        hardware = self.machine.hardware
        # A kernel that begins at another operation may read less than it writes there.
        only_reads = (op_index in self.fusion.kernels) & (read >= READS_PER_WRITE * written)
        access = np.where(only_reads, traffic_seconds(1, hardware, "read"), traffic_seconds(1, hardware))
        return (read + written) * access

    def _traffic_bytes(
        self, op_index: int, node: int, layouts: np.ndarray, operand_homes: Mapping[tuple[int, int], Home]
    ) -> tuple[np.ndarray, np.ndarray]:
        fusion, machine = self.fusion, self.machine
        operation = fusion.program.operations[op_index]
        copies = self._masked_copies(operation, layouts)
        read, written = np.zeros(len(layouts)), np.zeros(len(layouts))
        for operand_index in range(len(operation.operands)):
            home, nbytes = operand_homes.get((op_index, operand_index)), fusion.read_bytes(op_index, operand_index)
            if home is not None and nbytes:
                # However a part is looked up, and whatever splits it, each device touches its piece of it.
                is_part = bool(operation.factors.reduced) and fusion.touches_part(op_index, operand_index)
                pieces = shard_counts(layouts if is_part else project(layouts, home), machine)
                read += nbytes * copies.get(operand_index, 1) / pieces
        for result_index, result in enumerate(operation.results):
            nbytes = fusion.written_bytes(op_index, result_index)
            if not fusion.program.arrays[result].shape or not nbytes:
                continue
            written += nbytes / self._result_counts(operation, node, layouts, result_index)
        return read, written

    def _masked_copies(self, operation: Operation, layouts: np.ndarray) -> dict[int, np.ndarray]:
        if operation.name != "ragged_dot_general" or self.machine.compiler.has_ragged_kernels:
            return {}
        factor = group_factor(operation)
        is_split = np.zeros(layouts.shape, bool) if factor is None else layouts == factor
        pieces = np.where(is_split, self.machine.sizes, 1).prod(axis=1)
        copies: np.ndarray = group_count(operation) / pieces
        return dict.fromkeys(copied_operands(operation), copies)

    def _result_counts(self, operation: Operation, node: int, layouts: np.ndarray, result_index: int) -> np.ndarray:
        """The number of pieces of a result, in each layout."""
        # A node of one result has the layouts of that result; one over the loops of an operation has to be projected.
        rows, factors = layouts, operation.factors
        is_part = bool(factors.reduced) and operation.name in IN_PLACE
        if operation.is_nest and not is_part:
            rows = project(
                layouts, nest_home(node, factors, factors.results[result_index], factors.summed(result_index))
            )
        return shard_counts(rows, self.machine)

    def _matmul_seconds(self, operation: Operation, layouts: np.ndarray, homes: Sequence[Home | None]) -> np.ndarray:
        shapes = [
            self.fusion.program.arrays[operand].shape for operand in operation.operands[:2] if operand is not None
        ]
        precision = _precision(operation)
        fused = fused_matmul(operation.equation)
        if fused is not None and is_attention(fused):
            return attention_seconds(fused, self.machine.hardware) / shard_counts(layouts, self.machine)
        if operation.name != "dot_general" or len(shapes) < 2:
            flops = operation.flops * (1 if self.machine.compiler.has_ragged_kernels else group_count(operation))
            large = flops_seconds(flops, operation.dtype, precision, self.machine.hardware)
            return large / shard_counts(layouts, self.machine)
        numbers = operation.equation.params["dimension_numbers"]
        dims = tuple(None if home is None else home.dims for home in homes)
        key = (*shapes, numbers, dims, operation.dtype, precision, layouts.shape, layouts.tobytes())
        if key not in self._matmuls:
            left, right = (self._local_shapes(shape, layouts, home) for shape, home in zip(shapes, homes, strict=True))
            (left_sum, right_sum), (left_batch, right_batch) = numbers
            sizes = np.stack(
                [
                    left[:, list(left_batch)].prod(axis=1),
                    np.delete(left, [*left_sum, *left_batch], axis=1).prod(axis=1),
                    np.delete(right, [*right_sum, *right_batch], axis=1).prod(axis=1),
                    left[:, list(left_sum)].prod(axis=1),
                ],
                axis=1,
            )
            # Many layouts have the same shapes on a device.
            distinct, codes = np.unique(sizes, axis=0, return_inverse=True)
            hardware = self.machine.hardware
            prices = [
                matmul_seconds(batch, m, n, k, operation.dtype, precision, hardware)
                for batch, m, n, k in distinct.tolist()
            ]
            self._matmuls[key] = np.array(prices)[codes.ravel()]
        return self._matmuls[key]

    def _local_shapes(self, shape: tuple[int, ...], layouts: np.ndarray, home: Home | None) -> np.ndarray:
        sizes = np.tile(np.array(shape, np.int64), (len(layouts), 1))
        if home is not None:
            for column, size in zip(project(layouts, home).T, self.machine.sizes, strict=True):
                split = np.flatnonzero(column >= 0)
                sizes[split, column[split]] //= size
        return np.maximum(sizes, 1 if math.prod(shape) else 0)


def _precision(operation: Operation) -> str:
    """The precision of a matmul, as compiled programs print it."""
    precision = operation.equation.params.get("precision")
    first = precision[0] if isinstance(precision, tuple) else precision
    return "default" if first is None else str(getattr(first, "name", first)).lower()
