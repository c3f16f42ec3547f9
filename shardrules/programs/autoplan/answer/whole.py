"""Operations that no rule covers: what a plan takes to have each of them whole on every device."""

from collections.abc import Iterator, Sequence

from shardrules.core.finding import Finding
from shardrules.core.text import bytes_text
from shardrules.programs.autoplan.graph.compute_cost import ComputeCosts
from shardrules.programs.autoplan.graph.problem import Problem
from shardrules.programs.costs.step_time import seconds_text
from shardrules.programs.traced.program import Operation

_CODE = "unknown-operation"


def whole_findings(problem: Problem, choice: Sequence[int], seconds: float) -> Iterator[Finding]:
    """Yields what is computed whole in a call that takes `seconds`: a warning where it takes much of it."""
    indices: dict[str, list[int]] = {}
    for op_index, operation in enumerate(problem.program.operations):
        if operation.lacks_rule:
            indices.setdefault(kernel_name(operation), []).append(op_index)
    costs = ComputeCosts(problem.fusion, problem.region_costs.device)
    for name, op_indices in sorted(indices.items()):
        # Equal operations share edges: each counts its own moves.
        moves = [
            (count, *problem.operand_move(choice, op_index, position)[:2])
            for op_index in op_indices
            for position, count in enumerate(problem.program.operations[op_index].read_counts)
        ]
        # Of computing as far as it is known: memory, and matmuls.
        whole_seconds = sum(costs.seconds_of_one(op_index) for op_index in op_indices)
        whole_seconds += sum(count * move_seconds for count, move_seconds, _ in moves)
        sent_bytes, cost = int(sum(count * sent.sum() for count, _, sent in moves)), ""
        if whole_seconds > 0.01 * seconds:  # chosen by hand
            sent = f" and sends {bytes_text(sent_bytes)} for it" if sent_bytes else ""
            cost = f", which takes at least {seconds_text(whole_seconds)} of the {seconds_text(seconds)}{sent}"
        count = len(op_indices)
        yield Finding(
            "warning" if cost else "note",
            _CODE,
            f"no rule for {name}, used {count} time{'s' * (count > 1)}: every device holds its operands and results "
            f"whole{cost}",
            remedy="Declare how it is split (shardrules.region), or put it in jax.shard_map, where you can split it by "
            "hand",
        )


def kernel_name(operation: Operation) -> str:
    """The name of a primitive, and that of the kernel that it runs where it says one."""
    params, name = operation.equation.params, operation.equation.primitive.name
    function = getattr(getattr(params.get("jaxpr"), "debug_info", None), "func_name", None)
    kernel = params.get("name") or params.get("target_name") or function
    return f"{name} {kernel}" if isinstance(kernel, str) else name


def first_line(line: str, findings: Sequence[Finding]) -> str:
    """Returns the first line of a plan, with what is computed whole and takes much of the time."""
    large = [finding for finding in findings if finding.code == _CODE and finding.severity == "warning"]
    return "; ".join([line, *(finding.message for finding in large)])
