"""The cost of ragged matmuls (`jax.lax.ragged_dot`) for a compiler that has no kernel for them.

XLA for TPUs has such a kernel. XLA for GPUs and CPUs runs a dense matmul instead: it copies the rows once for each
group, sets the rows of other groups in that copy to zero, and multiplies all copies. With n groups, that takes n times
the FLOPs, and n times the memory of the rows. Where rows are summed over, as in the gradient of the weights, both
operands are copied, and these copies transposed.
"""

from typing import final

import attrs

from shardrules.programs.traced.program import Operation, TracedProgram


@final
@attrs.frozen
class Expansion:
    """The masked copies of one operand. All ragged matmuls that take it (`users`) share them."""

    op_index: int
    operand_index: int
    group_count: int
    alongside: tuple[int, ...]
    """The ragged matmuls at the same depth of the same region: all their copies are made by one kernel, before the
    first of them runs."""
    users: tuple[int, ...]


def group_count(operation: Operation) -> int:
    """The factor by which a compiler makes an operation larger: 1 if it is not a ragged matmul."""
    if operation.name != "ragged_dot_general":
        return 1
    return operation.equation.invars[2].aval.shape[-1]


def copied_operands(operation: Operation) -> tuple[int, ...]:
    """The operands of a ragged matmul that have rows, and are copied."""
    return (0, 1) if sums_rows(operation) else (0,)


def group_factor(operation: Operation) -> int | None:
    """The factor of the groups of a ragged matmul, by which a device has fewer copies; `None` if they are whole."""
    if sums_rows(operation):
        return operation.factors.results[0][0]
    # Where the rows are a batch dim, there is one matmul for each, and no dim of groups.
    group_dims = operation.equation.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
    return operation.factors.operands[1][group_dims[0]] if group_dims else None


def expansions(program: TracedProgram) -> tuple[Expansion, ...]:
    """The masked copies that all ragged matmuls of a program make."""
    depths = _depths(program)
    alongside: dict[tuple[int, int], list[int]] = {}
    for op_index, depth in depths.items():
        alongside.setdefault((program.operations[op_index].region, depth), []).append(op_index)
    members: dict[tuple[int, bool], list[tuple[int, int]]] = {}
    for op_index in depths:
        operation = program.operations[op_index]
        for operand_index in copied_operands(operation):
            operand = operation.operands[operand_index]
            if operand is not None:
                members.setdefault((operand, sums_rows(operation)), []).append((op_index, operand_index))
    copies: list[Expansion] = []
    for uses in members.values():
        (op_index, operand_index), operation = uses[0], program.operations[uses[0][0]]
        group = alongside[operation.region, depths[op_index]]
        users = tuple(user for user, _ in uses)
        copies.append(Expansion(op_index, operand_index, group_count(operation), tuple(group), users))
    return tuple(copies)


def sums_rows(operation: Operation) -> bool:
    """A ragged matmul sums over its rows, which gives a result for each group."""
    numbers = operation.equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    return any(dim in contracted for dim in numbers.lhs_ragged_dimensions)


def _depths(program: TracedProgram) -> dict[int, int]:
    """For each ragged matmul how many others have to run before it, one after the other."""
    depths: dict[int, int] = {}
    behind: dict[int, int] = {}
    for op_index, operation in enumerate(program.operations):
        depth = max((behind.get(operand, 0) for operand in operation.operands if operand is not None), default=0)
        if operation.name == "ragged_dot_general":
            depths[op_index] = depth
            depth += 1
        behind.update(dict.fromkeys(operation.results, depth))
    return depths
