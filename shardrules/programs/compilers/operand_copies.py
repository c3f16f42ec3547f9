"""Operands of dots and convolutions that compilers for GPUs copy first, because of the order of their dims in memory.

A kernel for matmuls takes matrices: the dims of the batch have to be next to each other in memory and in their order,
and so have the dims that are summed over, and all others; the batch must not come last. An operand in another order is
copied into the order of batch, sums, others. Keys of attention, (batch, length, heads, size), are such an operand, as
long as a device has several rows of the batch and several heads.

The elementwise result of a kernel is written in the order that the dot takes, which costs nothing. A dot with a vector
is no matmul: it is computed like a reduction, which reads any order.

cuDNN takes filters, and returns their gradients, with the features of the result first and the input's last.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import final

import attrs
import numpy as np

from shardrules.programs.compilers.fusion import FusedProgram
from shardrules.programs.compilers.kernels import IN_PLACE, is_matmul
from shardrules.programs.traced.program import Operation, TracedProgram


@final
@attrs.frozen(eq=False)
class DotOperand:
    """An operand of a dot: which dims go together in the dot, and in which order all dims are in memory."""

    order: tuple[int, ...]
    """Its dims, those first whose neighbors are farthest apart."""
    batch: tuple[int, ...]
    summed: tuple[int, ...]
    others: tuple[int, ...]
    copy_count: int
    """The number of copies, if it has to be copied."""
    is_updated: bool
    """It is updated in place: compilers then count dims of one element, too."""

    def is_copied(self, is_long: Sequence[bool]) -> bool:
        """It has to be copied, given the dims that have more than one element on a device."""
        # A dim of one element has no place in memory, so that it can be anywhere in the order.
        kept = [self.is_updated or long for long in is_long]
        groups = [[dim for dim in group if kept[dim]] for group in (self.batch, self.summed, self.others)]
        if _is_matrices([dim for dim in self.order if kept[dim]], groups):
            return False
        dot_order = [dim for dim in (*self.batch, *self.summed, *self.others) if is_long[dim]]
        return dot_order != [dim for dim in self.order if is_long[dim]]


def _is_matrices(order: list[int], groups: list[list[int]]) -> bool:
    """Each group is next to each other in memory, in its order, and the first, of the batch, not at the end."""
    batch, *_ = groups
    present = [group for group in groups if group]
    if batch and len(present) > 1 and order[-1] in batch:
        return False
    return any([*itertools.chain(*some)] == order for some in itertools.permutations(present))


@final
@attrs.frozen(eq=False)
class OperandCopies:
    """The operands of dots that have to be copied in some layouts. Dots that need the same copy share it: it is counted
    for the first of them."""

    fusion: FusedProgram

    def nbytes(self, op_index: int, sizes: Sequence[np.ndarray]) -> np.ndarray:
        """The bytes that a device reads and writes for copies, given for each operand its shape on a device in each
        layout."""
        operation, arrays = self.fusion.program.operations[op_index], self.fusion.program.arrays
        operands = self._operands.get(op_index, {})
        total = np.zeros(len(sizes[0]))
        is_vector = np.zeros(len(sizes[0]), bool)
        for (_, _, others), operand_sizes in zip(_groups(operation), sizes, strict=True):
            is_vector |= operand_sizes[:, list(others)].prod(axis=1) == 1
        for operand_index, operand in operands.items():
            patterns, codes = np.unique(sizes[operand_index] > 1, axis=0, return_inverse=True)
            is_copied = np.array([operand.is_copied(pattern) for pattern in patterns.tolist()])[codes.ravel()]
            array = operation.operands[operand_index]
            assert array is not None, "operands that are copied are arrays"
            itemsize = arrays[array].nbytes // max(1, int(np.prod(arrays[array].shape)))
            copied_bytes = 2 * operand.copy_count * itemsize * sizes[operand_index].prod(axis=1)
            total += np.where(is_copied & ~is_vector, copied_bytes, 0)
        return total

    @functools.cached_property
    def _operands(self) -> dict[int, dict[int, DotOperand]]:
        program, counted = self.fusion.program, set[tuple[object, ...]]()
        operands: dict[int, dict[int, DotOperand]] = {}
        for op_index, operation in enumerate(program.operations):
            if operation.name != "dot_general" or not is_matmul(operation):
                continue
            for operand_index, groups in enumerate(_groups(operation)):
                array = operation.operands[operand_index]
                operand = None if array is None else self._operand(array, groups)
                if array is None or operand is None:
                    continue
                key = (self.fusion.sources.get(array, array), operation.region, *groups)
                if key not in counted:
                    counted.add(key)
                    operands.setdefault(op_index, {})[operand_index] = operand
        return operands

    def _operand(self, array: int, groups: tuple[tuple[int, ...], ...]) -> DotOperand | None:
        """An operand that may have to be copied; `None` if a kernel writes it in any order."""
        fusion, program = self.fusion, self.fusion.program
        source = fusion.sources.get(array, array)
        producer = program.producers.get(source)
        operation = None if producer is None else program.operations[producer]
        batch, summed, others = groups
        order = self._order(array)
        if operation is None or operation.role != "compute":
            return DotOperand(order, batch, summed, others, 1, is_updated=False)
        if operation.name in IN_PLACE:
            first = operation.operands[0]
            root = None if first is None else fusion.sources.get(first, first)
            # An argument that is updated in place is copied into the dot's order, a second time to protect it from the
            # update, and back: XLA compiles decoders so for H100s.
            copy_count = 3 if root in program.arguments else 1
            return DotOperand(order, batch, summed, others, copy_count, is_updated=True)
        return DotOperand(order, batch, summed, others, 1, is_updated=False) if is_matmul(operation) else None

    def _order(self, array: int) -> tuple[int, ...]:
        """The order of an array's dims in memory: transposes that are views are the only ones that change it."""
        program = self.fusion.program
        producer = program.producers.get(array)
        operation = None if producer is None else program.operations[producer]
        order = tuple(range(len(program.arrays[array].shape)))
        if operation is None or array not in self.fusion.sources or operation.name != "transpose":
            return order
        (operand,) = operation.operands
        permutation = operation.equation.params["permutation"]
        return order if operand is None else tuple(permutation.index(dim) for dim in self._order(operand))


def copied_filter(program: TracedProgram, operation: Operation) -> int | None:
    """The filter that a convolution needs in another order, or its gradient, which it returns in another order."""
    if operation.name != "conv_general_dilated":
        return None
    numbers = operation.equation.params["dimension_numbers"]
    is_gradient = numbers.lhs_spec[0] > numbers.lhs_spec[1]  # JAX swaps the batch and the features of the input
    if is_gradient:
        (array,), (inside, outside, *_) = operation.results, numbers.out_spec
    else:
        array, (outside, inside, *_) = operation.operands[1], numbers.rhs_spec
    producer = None if array is None else program.producers.get(array)
    # The copy that reverses a filter for the gradient of the input puts it into that order, too.
    is_reversed = not is_gradient and producer is not None and program.operations[producer].name == "rev"
    last = len(operation.equation.outvars[0].aval.shape) - 1
    return None if is_reversed or (outside, inside) == (0, last) else array


def _groups(operation: Operation) -> Iterable[tuple[tuple[int, ...], ...]]:
    """For both operands of a dot the dims of the batch, those that are summed over, and the others."""
    summed, batch = operation.equation.params["dimension_numbers"]
    # Compilers put the pairs of dims that are summed over into the order of the first operand.
    pairs = sorted(zip(*summed, strict=True))
    for side in range(2):
        here, sums = tuple(batch[side]), tuple(pair[side] for pair in pairs)
        ndim = len(operation.equation.invars[side].aval.shape)
        yield here, sums, tuple(dim for dim in range(ndim) if dim not in (*here, *sums))
