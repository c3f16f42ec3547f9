"""What an operation takes on one device: computing, or reading and writing memory, whichever is longer.

The figures are those of an audit: the rates that hardware reaches for matmuls of a shape, here of the shapes of each
layout, for memory traffic, and the launch of a kernel.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np

from shardrules.analysis.costs.matmul import flops_seconds, matmul_seconds
from shardrules.analysis.costs.memory import traffic_seconds
from shardrules.planning.graph.layouts import shard_counts
from shardrules.planning.graph.machine import Machine
from shardrules.planning.graph.problem import Home, project
from shardrules.planning.traced.fusion import FusedProgram
from shardrules.planning.traced.program import Operation
from shardrules.planning.traced.ragged import group_count

_LOOP_KERNELS = 2
"""The kernels of a round that the function does not write: one counts rounds, one compares. Loops of small rounds, as
over time steps, would be too fast without them."""


@final
@attrs.define(eq=False)
class ComputeCosts:
    """What the operations of a program take. Equal matmuls in equal layouts are priced once."""

    fusion: FusedProgram
    machine: Machine
    _matmuls: dict[Any, np.ndarray] = attrs.field(factory=dict, init=False)

    def seconds(
        self, op_index: int, node: int, layouts: np.ndarray, operand_homes: Mapping[tuple[int, int], Home]
    ) -> np.ndarray:
        """The seconds that all runs of an operation take, for each of the `layouts` of its node."""
        operation, hardware = self.fusion.program.operations[op_index], self.machine.hardware
        seconds = self._traffic_bytes(op_index, node, layouts, operand_homes) * traffic_seconds(1, hardware)
        if operation.flops:
            homes = [operand_homes.get((op_index, operand_index)) for operand_index in range(2)]
            seconds = np.maximum(seconds, self._matmul_seconds(operation, layouts, homes))
        loop_kernels = 0 if hardware.clock_hertz else _LOOP_KERNELS  # TPUs have a core for scalars
        launches = int(op_index in self.fusion.kernels) + loop_kernels * (op_index in self._loop_heads)
        return (seconds + launches * hardware.launch_seconds) * operation.run_count

    @functools.cached_property
    def _loop_heads(self) -> frozenset[int]:
        """The first array that goes round each loop."""
        program = self.fusion.program
        heads: dict[int, int] = {}
        for op_index, operation in enumerate(program.operations):
            if operation.role == "join" and operation.name == "join" and program.arrays[operation.results[0]].shape:
                heads.setdefault(operation.region, op_index)
        return frozenset(heads.values())

    def _traffic_bytes(
        self, op_index: int, node: int, layouts: np.ndarray, operand_homes: Mapping[tuple[int, int], Home]
    ) -> np.ndarray:
        """What a device reads and writes."""
        fusion, machine = self.fusion, self.machine
        operation = fusion.program.operations[op_index]
        expanded = 1 if machine.has_ragged_kernels else group_count(operation)
        total = np.zeros(len(layouts))
        for operand_index in range(len(operation.operands)):
            home, nbytes = operand_homes.get((op_index, operand_index)), fusion.read_bytes(op_index, operand_index)
            if home is not None and nbytes:
                # The masked copies of a ragged operand are written first, then read.
                nbytes *= 2 * expanded if expanded > 1 and operand_index == 0 else 1
                total += nbytes / shard_counts(project(layouts, home), machine)
        for result_index, result in enumerate(operation.results):
            nbytes = fusion.written_bytes(op_index, result_index)
            if not fusion.program.arrays[result].shape or not nbytes:
                continue
            # A node of one result has the layouts of that result; one over the loops of an operation has to be
            # projected.
            rows, factors = layouts, operation.factors
            if len(operation.results) > 1 or factors.reduced:
                rows = project(layouts, Home(node, factors.results[result_index], factors.reduced))
            total += nbytes / shard_counts(rows, machine)
        return total

    def _matmul_seconds(self, operation: Operation, layouts: np.ndarray, homes: Sequence[Home | None]) -> np.ndarray:
        """What multiplying takes in each layout, at the rate of the shapes that a device has."""
        shapes = [
            self.fusion.program.arrays[operand].shape for operand in operation.operands[:2] if operand is not None
        ]
        precision = _precision(operation)
        if operation.name != "dot_general" or len(shapes) < 2:
            flops = operation.flops * (1 if self.machine.has_ragged_kernels else group_count(operation))
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
        """The shape of an operand on a device, for each layout."""
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
