"""Operations that no rule covers: what a plan takes to have each of them whole on every device."""

from collections.abc import Iterator, Sequence
from typing import final

import attrs

from shardrules.core.check import bytes_text
from shardrules.core.finding import Finding
from shardrules.programs.autoplan.graph.compute_cost import ComputeCosts
from shardrules.programs.autoplan.graph.problem import Problem
from shardrules.programs.autoplan.traced.program import Operation
from shardrules.programs.costs.step_time import seconds_text

_CODE = "unknown-operation"


@final
@attrs.frozen
class WholeOperation:
    """All operations of one name that no rule covers."""

    name: str
    count: int
    seconds: float
    """The time of computing them on whole arrays in one call, as far as it is known: memory, and matmuls."""
    move_seconds: float
    gathered_bytes: float
    """The bytes that a device sends to have their operands whole."""


def whole_operations(problem: Problem, choice: Sequence[int]) -> Iterator[WholeOperation]:
    """Yields what no rule covers, by name."""
    program = problem.program
    indices: dict[str, list[int]] = {}
    for op_index, operation in enumerate(program.operations):
        if operation.lacks_rule:
            indices.setdefault(kernel_name(operation), []).append(op_index)
    costs = ComputeCosts(problem.fusion, problem.region_costs.device, {})
    for name, op_indices in sorted(indices.items()):
        moves = [move for op_index in op_indices for move in _moves(problem, choice, op_index)]
        yield WholeOperation(
            name,
            len(op_indices),
            sum(costs.seconds_of_one(op_index) for op_index in op_indices),
            sum(seconds for seconds, _ in moves),
            sum(nbytes for _, nbytes in moves),
        )


def _moves(problem: Problem, choice: Sequence[int], op_index: int) -> Iterator[tuple[float, float]]:
    """Yields what bringing each operand to all devices takes in one call: seconds, and bytes that a device sends."""
    operation = problem.program.operations[op_index]
    for position, count in enumerate(operation.read_counts):
        edge_index = problem.edge_indices.get((op_index, position))
        if edge_index is not None:
            edge = problem.edges[edge_index]
            row, column = edge.codes(choice)
            sent = float(edge.moves.sent[:, row, column].sum()) * edge.nbytes
            yield float(edge.seconds[row, column]) * count, sent * count


def kernel_name(operation: Operation) -> str:
    """The name of a primitive, and that of the kernel that it runs where it says one."""
    params, name = operation.equation.params, operation.equation.primitive.name
    function = getattr(getattr(params.get("jaxpr"), "debug_info", None), "func_name", None)
    kernel = params.get("name") or params.get("target_name") or function
    return f"{name} {kernel}" if isinstance(kernel, str) else name


def whole_findings(problem: Problem, choice: Sequence[int], seconds: float) -> Iterator[Finding]:
    """Yields what is computed whole in a call that takes `seconds`: a warning where it takes much of it."""
    for whole in whole_operations(problem, choice):
        whole_seconds, cost = whole.seconds + whole.move_seconds, ""
        if whole_seconds > 0.01 * seconds:  # chosen by hand
            sent = f" and sends {bytes_text(int(whole.gathered_bytes))} for it" if whole.gathered_bytes else ""
            cost = f", which takes at least {seconds_text(whole_seconds)} of the {seconds_text(seconds)}{sent}"
        yield Finding(
            "warning" if cost else "note",
            _CODE,
            f"no rule for {whole.name}, used {whole.count} time{'s' * (whole.count > 1)}: every device holds its "
            f"operands and results whole{cost}",
            remedy="Declare how it is split (shardrules.region), or put it in jax.shard_map, where you can split it by "
            "hand",
        )


def first_line(line: str, findings: Sequence[Finding]) -> str:
    """Returns the first line of a plan, with what is computed whole and takes much of the time."""
    large = [finding for finding in findings if finding.code == _CODE and finding.severity == "warning"]
    return "; ".join([line, *(finding.message for finding in large)])
