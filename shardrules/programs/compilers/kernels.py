"""Kinds of operations, by what compilers make kernels of: see `fusion`."""

from collections.abc import Callable, Iterable, Iterator

from shardrules.programs.traced.program import Operation, TracedProgram, changes_memory

_WHOLE = """
scatter scatter-add scatter-mul scatter-min scatter-max sort top_k approx_top_k while fft dynamic_update_slice cumsum
cumprod cummax cummin cumlogsumexp reduce_window reduce_window_sum reduce_window_max reduce_window_min
select_and_scatter select_and_scatter_add triangular_solve cholesky qr lu eigh svd pallas_call
ffi_call custom_partitioning
"""
"""Primitives that are kernels of their own, although they are not matmuls. They read elements in another order than
they write them, so their operands have to be in memory."""

_ENDS = "transpose random_bits threefry2x32 rng_bit_generator random_split random_fold_in argmax argmin"
"""Primitives at which a chain ends, as it does at all reductions: their operands may be computed in the same kernel,
and their results are written."""

_VIEWS = "reshape squeeze copy copy_p name stop_gradient pvary device_put optimization_barrier reshard relayout"
"""Primitives whose results are their operands, in the same memory."""

_PARTIAL_READS = "gather dynamic_slice slice split"
"""Primitives that read only as many elements of their first operand as they return."""

_IN_PLACE = "scatter scatter-add scatter-mul scatter-min scatter-max dynamic_update_slice"
"""Primitives that write their result over their first operand, and only the elements that change."""

WHOLE, ENDS, VIEWS, PARTIAL_READS, IN_PLACE = (
    frozenset(names.split()) for names in (_WHOLE, _ENDS, _VIEWS, _PARTIAL_READS, _IN_PLACE)
)


def is_view(operation: Operation) -> bool:
    """The results of an operation are its operands, in the same memory."""
    if operation.role in ("exit", "fixed", "return"):
        return True
    if operation.role == "enter":
        return operation.factors.operands[0] == operation.factors.results[0]
    if operation.name == "reshape" and operation.equation.params.get("dimensions") is not None:
        return False  # it transposes first
    if changes_memory(operation):
        return False
    return operation.role == "compute" and (operation.name in VIEWS or _is_free_transpose(operation))


def _is_free_transpose(operation: Operation) -> bool:
    """A transpose only swaps two neighboring groups of dims, the last of all. That moves nothing: matmuls can read and
    write matrices with either dim first."""
    if operation.name != "transpose":
        return False
    permutation = operation.equation.params["permutation"]
    first = next((dim for dim, source in enumerate(permutation) if dim != source), len(permutation))
    rest = permutation[first:]
    return all((source - rest[0]) % len(rest) == dim for dim, source in enumerate(rest))


def view_pairs(operation: Operation) -> Iterator[tuple[int, int]]:
    for operand, result in zip(operation.operands, operation.results, strict=False):
        if operand is not None:
            yield operand, result


def with_views(program: TracedProgram, written: Iterable[int]) -> frozenset[int]:
    """Adds the views of arrays that are in memory, which are in memory, too."""
    kept = {*written}
    for operation in program.operations:
        if is_view(operation):
            kept.update(result for operand, result in view_pairs(operation) if operand in kept)
    return frozenset(kept)


def takes_whole(operation: Operation) -> bool:
    """The operands of an operation have to be in memory before it runs."""
    if operation.role in ("join", "opaque"):
        return True
    is_whole = operation.name in WHOLE or changes_memory(operation)
    return operation.role == "compute" and (is_matmul(operation) or is_whole)


def is_matmul(operation: Operation) -> bool:
    """An operation is a kernel for matmuls or convolutions. Of a dot with a vector, or of one that adds nothing up,
    compilers make elementwise operations and a reduction."""
    if operation.name != "dot_general":
        return bool(operation.flops)
    summed, batch = operation.equation.params["dimension_numbers"]
    shapes = [var.aval.shape for var in operation.equation.invars]
    others = [
        [size for dim, size in enumerate(shape) if dim not in (*summed[side], *batch[side]) and size > 1]
        for side, shape in enumerate(shapes)
    ]
    return all(others) and any(shapes[0][dim] > 1 for dim in summed[0])


def _reduces(operation: Operation) -> bool:
    """An operation adds up or compares elements. To reduce only dims of one element, as gradients of a mean that keeps
    its dims do, computes nothing."""
    if not operation.name.startswith("reduce_") or operation.name == "reduce_precision":
        return operation.name == "dot_general" and bool(operation.factors.reduced)
    shape = operation.equation.invars[0].aval.shape
    axes = operation.equation.params.get("axes", ())
    return not axes or any(shape[dim] != 1 for dim in axes)


def reduced_rows(operation: Operation) -> tuple[int, ...]:
    """The shape of what an operation reduces along its last dim; empty unless such rows are short enough for a chip."""
    if not operation.name.startswith("reduce_") or "axes" not in operation.equation.params:
        return ()
    # XLA for GPUs keeps rows of attention, of norms and of small vocabularies on chip, and reads longer ones again for
    # each reduction: of losses that were compiled for H100s with 16,384 scores or less all were kept, with 20,000 none.
    shape = operation.equation.invars[0].aval.shape
    return shape if operation.equation.params["axes"] == (len(shape) - 1,) and shape[-1] <= 16_384 else ()


def ends_chain(operation: Operation) -> bool:
    """The results of an operation are written, whatever uses them."""
    return takes_whole(operation) or operation.role == "leave" or operation.name in ENDS or _reduces(operation)


def find_kernels(
    program: TracedProgram,
    written: set[int],
    is_kept: Callable[[Operation], bool] = lambda operation: False,
) -> list[frozenset[int]]:
    """Returns for each operation the kernels in which it is computed, by the operations at which they end.

    An operation that would be computed in several kernels, and `is_kept`, ends one: its results are added to `written`.
    """
    taken_by: dict[int, frozenset[int]] = {}
    kernels_of: list[frozenset[int]] = [frozenset()] * len(program.operations)
    for op_index in range(len(program.operations) - 1, -1, -1):
        operation = program.operations[op_index]
        if is_view(operation):
            for operand, result in view_pairs(operation):
                taken_by[operand] = taken_by.get(operand, frozenset()) | taken_by.get(result, frozenset())
            continue
        kernels = frozenset((op_index,))
        if operation.role == "join":
            kernels = frozenset()  # moves nothing: what goes round stays in its memory
        elif not (ends_chain(operation) or any(result in written for result in operation.results)):
            users = frozenset[int]().union(*(taken_by.get(result, frozenset()) for result in operation.results))
            if len(users) > 1 and is_kept(operation):
                written.update(operation.results)
            else:
                kernels = users
        kernels_of[op_index] = kernels
        for operand in operation.operands:
            if operand is not None:
                taken_by[operand] = taken_by.get(operand, frozenset()) | kernels
    return kernels_of
