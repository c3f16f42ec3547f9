"""The arrays that compilers write for norms, losses and functions of activation, although other kernels could compute
them again."""

import itertools
import math
from collections.abc import Mapping
from typing import Self, final

import attrs

from shardrules.programs.compilers.kernels import (
    IN_PLACE,
    ends_chain,
    is_matmul,
    is_view,
    reduced_rows,
    reduced_runs,
    view_pairs,
)
from shardrules.programs.traced.program import Operation, TracedProgram

FEW_COLUMNS = 3000
"""The most results of the first step of a reduction over dims that are not the last, such as a norm of groups, for
whose kernels a device writes their operand: each kernel keeps 32 of them, and a GPU with fewer kernels than cores takes
long to compute. Of programs that were compiled for H100s, all with 2,048 wrote it, none with 4,096 did."""

_COSTLY = "exp exp2 log log1p expm1 tanh logistic erf erf_inv erfc pow sin cos tan atan2"

_EXPENSIVE = frozenset(_COSTLY.split())
"""Elementwise primitives that compilers do not compute twice."""

_SERIES = frozenset(("tanh", "erf", "erfc", "erf_inv", "log1p"))
"""Those of them that are computed from longer series. XLA for GPUs writes their results where several kernels take them
and all that they are computed from has `_NARROW` bytes or less for each element: reading that again would take little
time, but the series does. Of 22 functions of activation that were compiled for H100s, it kept these in bfloat16 alone,
and neither exponentials nor logistic functions."""

_NARROW = 2
"""The most bytes of an element of activations that are kept for a norm: XLA for GPUs computes float32 again."""


def with_norms(program: TracedProgram, written: frozenset[int]) -> tuple[frozenset[int], dict[int, int]]:
    """Adds the arrays that compilers keep for a norm over several dims, such as a group of channels, and its gradient.

    A reduction over several dims with the last among them is a kernel of its own, unlike a reduction of rows. An array
    that it and several other kernels take, some to compute much from it, is written once instead of being computed by
    each. The last result has for each such array the columns that decide whether it is: see `FEW_COLUMNS`. Rows less
    their maximum, as in the logarithm of a softmax, are written by the kernel that finds the maximum as soon as two
    others take them, and so is what takes long to compute from narrow arrays. Rows that are divided by their sum are
    written before a sum over more than rows.
    """
    kept, normalised = {*written, *summed_rows(program, written)}, dict[int, int]()
    shifted, widths = shifted_rows(program), _read_widths(program, written)
    taken_by: dict[int, frozenset[int]] = {}
    efforts: dict[int, int] = {}
    for op_index in range(len(program.operations) - 1, -1, -1):
        operation = program.operations[op_index]
        if is_view(operation):
            for operand, result in view_pairs(operation):
                taken_by[operand] = taken_by.get(operand, frozenset()) | taken_by.get(result, frozenset())
                efforts[operand] = max(efforts.get(operand, 0), efforts.get(result, 0))
            continue
        is_end = ends_chain(operation) or any(result in kept for result in operation.results)
        kernels = frozenset((op_index,)) if is_end and operation.role != "join" else frozenset[int]()
        effort = (operation.name in _EXPENSIVE) + (operation.name in _SERIES)
        if not is_end:
            kernels = kernels.union(*(taken_by.get(result, frozenset()) for result in operation.results))
            later = max((efforts.get(result, 0) for result in operation.results), default=0)
            is_shifted = len(kernels) > 1 and any(result in shifted for result in operation.results)
            is_series = operation.name in _SERIES and len(kernels) > 1 and widths[operation.results[0]] <= _NARROW
            is_normalised = later > 0 and _is_normalised(program, operation, kernels)
            if is_normalised and later == 1:
                columns = max(_columns(program.operations[kernel]) for kernel in kernels)
                normalised.update(dict.fromkeys(operation.results if columns else (), columns))
            if is_normalised or is_shifted or is_series:
                kept.update(operation.results)
                kernels = frozenset((op_index,))
            effort = max(effort, later)
        for operand in operation.operands:
            if operand is not None:
                taken_by[operand] = taken_by.get(operand, frozenset()) | kernels
                efforts[operand] = max(efforts.get(operand, 0), effort)
    for operation in program.operations:
        if is_view(operation):
            kept.update(result for operand, result in view_pairs(operation) if operand in kept)
    return frozenset(kept), normalised


def _is_normalised(program: TracedProgram, operation: Operation, kernels: frozenset[int]) -> bool:
    """Many kernels take the result of an operation, and one of them reduces several dims."""
    # Fitted to U-Nets that XLA for GPUs compiled: four kernels, and no values in float32, which it computes again.
    return (
        len(kernels) >= 4
        and sum(len(program.users.get(result, ())) for result in operation.results) > 1
        and _computes_as_much(program, operation)
        and all(program.arrays[result].dtype.itemsize <= _NARROW for result in operation.results)
        and any(_reduces_several_dims(program, kernel) for kernel in kernels)
    )


@final
@attrs.frozen(eq=False)
class NormGradients:
    """The arrays that XLA for GPUs writes for gradients of norms over several dims.

    A sum over several dims of values from two large arrays or more is not computed in the kernel that adds up: the
    products are written first, all that share a factor by one kernel. It is so up to twice as many columns as for
    anything else: with 4,096, not with 8,192.
    """

    products: Mapping[int, int]
    """The products, and half of their columns: see `FEW_COLUMNS`."""
    siblings: Mapping[int, int]
    """For each product the operation of the first that the same kernel writes."""
    inputs: Mapping[int, int]
    """The inputs of such norms, and their columns. Where a device has few, they are kept in float32 less their mean."""
    widths: Mapping[int, int]
    """For each of these inputs how many times its bytes that takes, with the input itself if a matmul needs it, too."""

    @classmethod
    def of(cls, program: TracedProgram, written: frozenset[int]) -> Self:
        products, siblings, inputs = dict[int, int](), dict[int, int](), dict[int, int]()
        firsts: dict[int, int] = {}
        for operation in program.operations:
            columns = _columns(operation) if operation.name == "reduce_sum" else 0
            product = _added_up(program, operation) if columns else None
            if product is None or product in written:
                continue
            op_index, size = program.producers[product], math.prod(program.arrays[product].shape)
            factors = program.operations[op_index].operands
            sides = [_read_arrays(program, factor, written, size) for factor in factors]
            if len({**sides[0], **sides[1]}) < 2:
                continue
            products[product] = max(1, columns // 2)
            earliest = (firsts.setdefault(factor, op_index) for factor in factors if factor is not None)
            siblings[product] = min(earliest, default=op_index)
            for factor, side in zip(factors, sides, strict=True):
                producer = None if factor is None else program.producers.get(factor)
                if len(side) == 1 and producer is not None and program.operations[producer].name == "sub":
                    inputs.update(dict.fromkeys(side, columns))
        return cls(products, siblings, inputs, {array: _centered_width(program, array) for array in inputs})


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
    """The number of results of the first step of a reduction over several dims: over all but the last of them. 0 for
    reductions of rows, for those with results of the first dims alone, and for all other operations."""
    axes = operation.equation.params.get("axes", ()) if operation.name.startswith("reduce_") else ()
    if not axes or 0 in axes:
        return 0
    shape = operation.equation.invars[0].aval.shape
    runs = [[*run] for is_axis, run in itertools.groupby(range(len(shape)), key=lambda dim: dim in axes) if is_axis]
    if runs[-1][-1] == len(shape) - 1:
        runs.pop()
    return math.prod(shape) // math.prod(shape[dim] for run in runs for dim in run) if runs else 0


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


def is_updated(program: TracedProgram, array: int) -> bool:
    """An update in place returns an array: compilers fuse nothing with it that keeps rows on chip."""
    producer = program.producers.get(array)
    return producer is not None and program.operations[producer].name in IN_PLACE


def is_looked_up(program: TracedProgram, array: int) -> bool:
    """Single elements of an array, or of its elementwise functions, are looked up."""
    shape, chain, visited = program.arrays[array].shape, [array], set[int]()
    while chain:
        link = chain.pop()
        for reader, operand_index in program.users.get(link, ()) if link not in visited else ():
            operation = program.operations[reader]
            if operation.name == "gather" and operand_index == 0:
                return True
            if not ends_chain(operation):
                chain += [result for result in operation.results if program.arrays[result].shape == shape]
        visited.add(link)
    return False


def shifted_rows(program: TracedProgram) -> dict[int, None]:
    """The rows less their maximum that a loss looks elements up in, if a kernel keeps such rows on chip."""
    shifted: dict[int, None] = {}
    for operation in program.operations:
        if operation.name != "sub" or None in operation.operands:
            continue
        rows, link = operation.operands
        assert rows is not None, "compared above"
        while link is not None and (index := program.producers.get(link)) is not None:
            producer = program.operations[index]
            if producer.name == "reduce_max":
                is_row = producer.operands[0] == rows and reduced_rows(producer)
                if is_row and is_looked_up(program, operation.results[0]):
                    shifted[operation.results[0]] = None
                break
            arrays = [operand for operand in producer.operands if operand is not None]
            # What is between broadcasts the maximum, or compares it with a number.
            link = arrays[0] if len(arrays) == 1 and producer.role == "compute" else None
    return shifted


def summed_rows(program: TracedProgram, written: frozenset[int]) -> dict[int, None]:
    """The arrays that a kernel with rows on chip computes from them and from their reductions, such as the logarithm of
    a softmax, for a sum over more than rows: as in the mean of a loss, which adds up all rows at once."""
    summed: dict[int, None] = {}
    needed: set[int | None] = {*program.scalars}
    for operation in reversed(program.operations):
        # Gradients are traced together with the loss, of which nothing is computed where only they are returned.
        if operation.role == "compute" and not any(result in needed for result in operation.results):
            continue
        needed.update(operation.operands)
        operand = operation.operands[0] if operation.operands else None
        if operand is None or not _sums_more_than_rows(program, operation):
            continue
        shape, chain, visited = program.arrays[operand].shape, [operand], set[int]()
        while chain:
            link = chain.pop()
            producer = program.producers.get(link)
            if producer is None or link in visited or link in written or program.arrays[link].shape != shape:
                continue
            visited.add(link)
            if any(_is_from_rows(program, source, shape) for source in program.operations[producer].operands):
                summed[link] = None
            else:
                chain += [source for source in program.operations[producer].operands if source is not None]
    return summed


def _sums_more_than_rows(program: TracedProgram, operation: Operation) -> bool:
    """An operation adds up the last dim and others, or rows whose sums the next operation adds up."""
    if operation.name != "reduce_sum":
        return False
    ndim, axes = len(operation.equation.invars[0].aval.shape), operation.equation.params["axes"]
    if ndim - 1 not in axes or len(axes) > 1:
        return ndim - 1 in axes
    while len(users := program.users.get(operation.results[0], ())) == 1:
        operation = program.operations[users[0][0]]
        if operation.role != "compute" or not (operation.name in ("reduce_sum", "neg") or is_view(operation)):
            return False
        if operation.name == "reduce_sum":
            return reduced_runs(operation) > 0
    return False


def _is_from_rows(program: TracedProgram, array: int | None, shape: tuple[int, ...]) -> bool:
    """An array broadcasts reductions of short rows of some shape."""
    chain, visited = [array], dict[int | None, None]()
    while chain:
        link = chain.pop()
        producer = None if link is None or link in visited else program.producers.get(link)
        visited[link] = None
        operation = None if producer is None else program.operations[producer]
        if link is None or operation is None or operation.role != "compute":
            continue
        if reduced_rows(operation) == shape:
            return True
        is_whole = program.arrays[link].shape == shape and operation.name != "broadcast_in_dim"
        if not is_whole and not ends_chain(operation):
            chain += operation.operands
    return False


def _computes_as_much(program: TracedProgram, operation: Operation) -> bool:
    """An operation computes no more elements than it takes: repeating a small array is never written."""
    elements = [math.prod(program.arrays[operand].shape) for operand in operation.operands if operand is not None]
    results = [math.prod(program.arrays[result].shape) for result in operation.results]
    return operation.role == "compute" and max(elements, default=0) >= max(results, default=1)


def _reduces_several_dims(program: TracedProgram, op_index: int) -> bool:
    """An operation reduces several dims of an array with the last among them."""
    operation = program.operations[op_index]
    operand = operation.operands[0] if operation.operands else None
    if operand is None or not operation.name.startswith("reduce_") or "axes" not in operation.equation.params:
        return False
    axes = operation.equation.params["axes"]
    return (
        len(axes) > 1
        and len(program.arrays[operand].shape) - 1 in axes
        and len(axes) < len(program.arrays[operand].shape)
    )
