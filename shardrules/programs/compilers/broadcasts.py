"""Arrays that are computed element by element from a smaller array, or reduced to one.

They share an order of dims in memory: a compiler that changes the smaller array's may change the larger's, and copy it
back for whatever needs the old order.
"""

import functools
import math
from typing import final

import attrs

from shardrules.programs.compilers.kernels import PARTIAL_READS, WHOLE, is_matmul
from shardrules.programs.traced.program import Operation, TracedProgram


@final
@attrs.frozen(eq=False)
class Broadcasts:
    """The larger arrays that share their order of dims with smaller ones."""

    program: TracedProgram

    def larger_bytes(self, array: int) -> int:
        """The bytes of the largest array that an array is broadcast to, or that is reduced to it; 0 if none is."""
        return max(self._broadcast_bytes.get(array, 0), self._reduced_bytes.get(array, 0))

    @functools.cached_property
    def _broadcast_bytes(self) -> dict[int, int]:
        """For each array the bytes of the largest that it is broadcast to."""
        largest: dict[int, int] = {}
        for operation in reversed(self.program.operations):
            if not _is_elementwise(operation):
                continue
            for result in operation.results:
                for operand in operation.operands:
                    if operand is None:
                        continue
                    # The first larger array on the way: a still larger one after it is copied for its sake.
                    nbytes = self._bytes_if_larger(result, operand) or largest.get(result, 0)
                    largest[operand] = max(largest.get(operand, 0), nbytes)
        return largest

    @functools.cached_property
    def _reduced_bytes(self) -> dict[int, int]:
        """For each array the bytes of the largest that is reduced to it."""
        largest: dict[int, int] = {}
        for operation in self.program.operations:
            if not (_is_elementwise(operation) or operation.name.startswith("reduce_")):
                continue
            for operand in operation.operands:
                for result in operation.results:
                    if operand is None:
                        continue
                    nbytes = self._bytes_if_larger(operand, result) or largest.get(operand, 0)
                    largest[result] = max(largest.get(result, 0), nbytes)
        return largest

    def _bytes_if_larger(self, array: int, other: int) -> int:
        """The bytes of an array with more elements than another, if both have at least two long dims; else 0."""
        shape, other_shape = self.program.arrays[array].shape, self.program.arrays[other].shape
        # A single long dim has only one order.
        have_orders = min(_long_dim_count(shape), _long_dim_count(other_shape)) > 1
        is_larger = have_orders and math.prod(shape) > math.prod(other_shape)
        return self.program.arrays[array].nbytes if is_larger else 0


def _long_dim_count(shape: tuple[int, ...]) -> int:
    return sum(size > 1 for size in shape)


def _is_elementwise(operation: Operation) -> bool:
    if operation.role != "compute" or is_matmul(operation) or operation.name in WHOLE | PARTIAL_READS:
        return False
    return operation.name not in ("dot_general", "concatenate") and not operation.factors.reduced
