"""What compilers without a kernel for ragged matmuls make of them: a dense matmul over masked copies of the rows.

There is a copy of the rows for each group, so both the FLOPs and these copies are as many times larger as there are
groups. XLA for GPUs and CPUs does that; TPUs have a kernel.
"""

from typing import final

import attrs

from shardrules.planning.traced.program import Operation, TracedProgram


@final
@attrs.frozen
class Expansion:
    """The masked copies of an operand of some ragged matmuls, which share them."""

    op_index: int
    operand_index: int
    group_count: int
    alongside: tuple[int, ...]
    """The ragged matmuls that run side by side with them: their copies are made in one kernel, before the first."""
    users: tuple[int, ...]


def group_count(operation: Operation) -> int:
    """How many times larger a compiler makes an operation: 1 if it is not a ragged matmul."""
    if operation.name != "ragged_dot_general":
        return 1
    return operation.equation.invars[2].aval.shape[-1]


def expansions(program: TracedProgram) -> tuple[Expansion, ...]:
    """The masked copies that all ragged matmuls of a program make."""
    depths = _depths(program)
    alongside: dict[tuple[int, int], list[int]] = {}
    for op_index, depth in depths.items():
        alongside.setdefault((program.operations[op_index].region, depth), []).append(op_index)
    members: dict[tuple[int, bool], list[tuple[int, int]]] = {}
    for op_index in depths:
        operation = program.operations[op_index]
        sums_rows = _sums_rows(operation)
        # Where rows are summed over, both operands have them.
        for operand_index in (0, 1) if sums_rows else (0,):
            operand = operation.operands[operand_index]
            if operand is not None:
                members.setdefault((operand, sums_rows), []).append((op_index, operand_index))
    copies: list[Expansion] = []
    for uses in members.values():
        (op_index, operand_index), operation = uses[0], program.operations[uses[0][0]]
        group = alongside[operation.region, depths[op_index]]
        users = tuple(user for user, _ in uses)
        copies.append(Expansion(op_index, operand_index, group_count(operation), tuple(group), users))
    return tuple(copies)


def _sums_rows(operation: Operation) -> bool:
    numbers = operation.equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    return any(dim in contracted for dim in numbers.lhs_ragged_dimensions)


def _depths(program: TracedProgram) -> dict[int, int]:
    """For each ragged matmul how many others in a row it waits for."""
    depths: dict[int, int] = {}
    behind: dict[int, int] = {}
    for op_index, operation in enumerate(program.operations):
        depth = max((behind.get(operand, 0) for operand in operation.operands if operand is not None), default=0)
        if operation.name == "ragged_dot_general":
            depths[op_index] = depth
            depth += 1
        behind.update(dict.fromkeys(operation.results, depth))
    return depths
