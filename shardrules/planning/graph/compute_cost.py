"""What an operation takes on one device: computing, or reading and writing memory, whichever is longer."""

from collections.abc import Mapping

import numpy as np

from shardrules.planning.graph.layouts import shard_counts
from shardrules.planning.graph.machine import Machine
from shardrules.planning.graph.problem import Home, project
from shardrules.planning.traced.fusion import reads_operands, writes_result
from shardrules.planning.traced.program import TracedProgram


def compute_seconds(
    program: TracedProgram,
    machine: Machine,
    op_index: int,
    node: int,
    layouts: np.ndarray,
    operand_homes: Mapping[tuple[int, int], Home],
) -> np.ndarray:
    """The seconds that all runs of an operation take, for each of the `layouts` of its node."""
    operation, arrays = program.operations[op_index], program.arrays
    factors = operation.factors
    computing = 0.0
    if operation.flops:
        computing = operation.flops / machine.flops_per_second(operation.dtype) / shard_counts(layouts, machine)
    moved_bytes = np.zeros(len(layouts))
    for operand_index, operand in enumerate(operation.operands):
        if (op_index, operand_index) in operand_homes and operand is not None and reads_operands(operation):
            rows = project(layouts, operand_homes[op_index, operand_index])
            moved_bytes += arrays[operand].nbytes / shard_counts(rows, machine)
    for result_index, result in enumerate(operation.results):
        if not arrays[result].shape or not writes_result(program, op_index, result):
            continue
        # A node of one result has the layouts of that result; one over the loops of an operation has to be projected.
        rows = layouts
        if len(operation.results) > 1 or factors.reduced:
            rows = project(layouts, Home(node, factors.results[result_index], factors.reduced))
        # What leaves a loop is written piece by piece, one in each round.
        written = operation.operands[0] if operation.role == "leave" else result
        assert written is not None, "constants of the program do not leave a loop"
        moved_bytes += arrays[written].nbytes / shard_counts(rows, machine)
    return np.maximum(computing, moved_bytes / machine.memory_bytes_per_second) * operation.run_count
