"""The arrays that compilers write although other kernels could compute them again: what is costly to compute, what one
kernel would compute many times, and what gradients of norms over several dims add up."""

import itertools
import math
from collections.abc import Mapping
from typing import Self, final

import attrs

from shardrules.programs.compilers.kernels import ends_chain, find_kernels, is_matmul, is_view, with_views
from shardrules.programs.traced.program import Operation, TracedProgram

_SERIES = frozenset(("tanh", "erf", "erfc", "erf_inv", "log1p"))
"""Elementwise primitives that are computed from long series. XLA for GPUs writes their results where several kernels
take them and all that they are computed from has `_NARROW` bytes or less for each element: reading that again would
take little time, but the series does."""

_NARROW = 2

_COSTLY = _SERIES | {"exp", "exp2", "expm1", "log", "logistic", "div", "rem", "pow", "sqrt", "rsqrt", "sin", "cos"}
"""Elementwise primitives that XLA for CPUs never computes in several kernels."""

_MOVES = frozenset(("broadcast_in_dim", "concatenate", "dynamic_slice", "gather", "pad", "rev", "slice", "split"))
"""Primitives of chains that read elements at other places than they write them."""

FEW_COLUMNS = 3000
"""The most results of the first step of such a sum on a device for which its operand is written: each kernel keeps 32
of them, and a GPU with fewer kernels than cores takes long to compute. Of programs that were compiled for H100s, all
with 2,048 wrote it, none with 4,096 did."""


def with_costly(program: TracedProgram, written: frozenset[int], keeps_costly: bool) -> frozenset[int]:
    """Adds what several kernels take that is costly to compute in each: values of long series, or all of it."""
    kept, widths = {*written}, {} if keeps_costly else _read_widths(program, written)

    def is_kept(operation: Operation) -> bool:
        if keeps_costly:
            return operation.name in _COSTLY
        return operation.name in _SERIES and widths[operation.results[0]] <= _NARROW

    find_kernels(program, kept, is_kept)
    return with_views(program, kept)


def with_copied(program: TracedProgram, written: frozenset[int], most: int) -> frozenset[int]:
    """Adds what a kernel would have more than `most` copies of, such as the first rounds of an associative scan.

    Elements that are read at two places, as by two slices, are computed by two copies of the code, and so is all that
    they are computed from.
    """
    kept = {*written}
    readers: dict[int, dict[int, frozenset[int]]] = {}  # of each array, in each kernel: operations, by their places
    copies: dict[tuple[int, int], int] = {}
    for op_index in range(len(program.operations) - 1, -1, -1):
        operation = program.operations[op_index]
        in_kernels: dict[int, frozenset[int]] = {}
        for result in operation.results:
            for kernel, indices in readers.get(result, {}).items():
                in_kernels[kernel] = in_kernels.get(kernel, frozenset()) | indices
        if not is_view(operation):
            counts = {kernel: sum(copies[each, kernel] for each in indices) for kernel, indices in in_kernels.items()}
            is_array = any(program.arrays[result].shape for result in operation.results)
            if is_array and max(counts.values(), default=0) > most:
                kept.update(operation.results)
            if ends_chain(operation) or not kept.isdisjoint(operation.results):
                in_kernels, counts = {op_index: frozenset((op_index,))}, {op_index: 1}
            if operation.name in _MOVES:
                in_kernels = dict.fromkeys(in_kernels, frozenset((op_index,)))
            copies.update(((op_index, kernel), count) for kernel, count in counts.items())
        for operand in operation.operands:
            if operand is not None:
                mine = readers.setdefault(operand, {})
                for kernel, indices in in_kernels.items():
                    mine[kernel] = mine.get(kernel, frozenset()) | indices
    return with_views(program, kept)


@final
@attrs.frozen(eq=False)
class NormGradients:
    """The arrays that XLA for GPUs writes for gradients of norms over several dims.

    A sum over several dims of values from two large arrays or more is not computed in the kernel that adds up: the
    products are written first, all that share a factor by one kernel.
    """

    siblings: Mapping[int, int]
    """For each product the operation of the first that the same kernel writes."""
    widths: Mapping[int, int]
    """For each input of such norms how many times its bytes that takes: it is kept in float32 less its mean, and as it
    was if a matmul needs that, too."""

    @classmethod
    def of(cls, program: TracedProgram, written: frozenset[int], device_count: int) -> Self:
        """Returns what is written if the sums are split over all devices."""
        siblings, widths, firsts = dict[int, int](), dict[int, int](), dict[int, int]()
        for operation in program.operations:
            is_written = 0 < _columns(operation) <= FEW_COLUMNS * device_count
            product = _added_up(program, operation) if is_written else None
            if product is None or product in written:
                continue
            op_index, size = program.producers[product], math.prod(program.arrays[product].shape)
            factors = program.operations[op_index].operands
            sides = [_read_arrays(program, factor, written, size) for factor in factors]
            if len({**sides[0], **sides[1]}) < 2:
                continue
            earliest = (firsts.setdefault(factor, op_index) for factor in factors if factor is not None)
            siblings[product] = min(earliest, default=op_index)
            for factor, side in zip(factors, sides, strict=True):
                producer = None if factor is None else program.producers.get(factor)
                if len(side) == 1 and producer is not None and program.operations[producer].name == "sub":
                    widths.update((array, _centered_width(program, array)) for array in side)
        return cls(siblings, widths)


def _added_up(program: TracedProgram, operation: Operation) -> int | None:
    """The product that an operation adds up, perhaps with another sign; `None` if it adds up anything else."""
    array = operation.operands[0]
    while array is not None and (op_index := program.producers.get(array)) is not None:
        producer = program.operations[op_index]
        if producer.name == "mul":
            return array
        array = producer.operands[0] if is_view(producer) or producer.name == "neg" else None
    return None


def _centered_width(program: TracedProgram, array: int) -> int:
    """The bytes that the input of a norm takes if it is kept in float32, over its own."""
    width = max(1, 4 // program.arrays[array].dtype.itemsize)
    # A matmul that takes it has a gradient that takes it again.
    matmuls = [user for user, _ in program.users.get(array, ()) if is_matmul(program.operations[user])]
    return width + (len(matmuls) > 1)


def _columns(operation: Operation) -> int:
    """The number of results of the first step of a sum over dims other than the first and the last, perhaps with the
    last; 0 for all other operations."""
    axes = operation.equation.params.get("axes", ()) if operation.name == "reduce_sum" else ()
    if not axes or 0 in axes:
        return 0
    shape = operation.equation.invars[0].aval.shape
    last_run = len([*itertools.takewhile(axes.__contains__, range(len(shape) - 1, -1, -1))])
    summed = [shape[dim] for dim in axes if dim < len(shape) - last_run]
    return math.prod(shape) // math.prod(summed) if summed else 0


def _read_arrays(program: TracedProgram, array: int | None, written: frozenset[int], size: int) -> dict[int, None]:
    """The arrays in memory of at least some size that computing an array reads."""
    read, chain, visited = dict[int, None](), [array], set[int | None]()
    while chain:
        link = chain.pop()
        if link is None or link in visited or math.prod(program.arrays[link].shape) < size:
            continue
        visited.add(link)
        producer = program.producers.get(link)
        if producer is None or (link in written and not is_view(program.operations[producer])):
            read[link] = None
        else:
            chain += program.operations[producer].operands
    return read


def _read_widths(program: TracedProgram, written: frozenset[int]) -> dict[int, int]:
    """For each array the most bytes for an element that computing it from memory reads, small arrays aside."""
    widths: dict[int, int] = {}
    for operation in program.operations:
        for result in operation.results:
            size = math.prod(program.arrays[result].shape)
            widest = program.arrays[result].dtype.itemsize if result in written else 0
            for operand in operation.operands if result not in written else ():
                if operand is not None and math.prod(program.arrays[operand].shape) >= size:
                    widest = max(widest, widths.get(operand, program.arrays[operand].dtype.itemsize))
            widths[result] = widest
    return widths
