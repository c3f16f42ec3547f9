"""What compilers fuse: which operations read memory, and which results they write there.

An elementwise operation is computed along with the operation that uses it, so its operands and its result never reach
memory. This is a model: XLA decides by heuristics of its own, which differ between backends.
"""

from shardrules.planning.traced.program import Operation, TracedProgram

_RECOMPUTE_DISTANCE = 48
"""A result whose next use is this many operations away is kept in memory instead of being computed again.

On the order of a transformer block. With half of it, short-lived activations count as written; with twice as much,
what the backward pass needs counts as recomputed, although compilers keep it.
"""

_NEVER_FUSED = (
    "gather",
    "scatter",
    "scatter-add",
    "sort",
    "top_k",
    "cumsum",
    "while",
    "reduce_window",
    "select_and_scatter_add",
    "fft",
    "dynamic_update_slice",
)
"""Primitives without FLOPs that are kernels of their own all the same: they look at elements in another order."""


def reads_operands(operation: Operation) -> bool:
    """Whether an operation reads its operands from memory, instead of being fused with what computes them."""
    return bool(operation.flops) or operation.role == "return" or not _is_fused(operation)


def writes_result(program: TracedProgram, op_index: int, result: int) -> bool:
    """Whether a result is written to memory."""
    operation = program.operations[op_index]
    # What enters or goes round a loop is the same memory as before; what leaves it is stacked somewhere else.
    if operation.role in ("enter", "join", "leave"):
        return operation.role == "leave"
    if not _is_fused(operation) or operation.role == "return":
        return True
    return any(
        not _is_fused(program.operations[user]) or user - op_index > _RECOMPUTE_DISTANCE
        for user, _ in program.users.get(result, ())
    )


def _is_fused(operation: Operation) -> bool:
    """Whether an operation is computed along with those that use its result."""
    if operation.role in ("enter", "join", "fixed"):
        return True
    return operation.role == "compute" and not operation.flops and operation.name not in _NEVER_FUSED
