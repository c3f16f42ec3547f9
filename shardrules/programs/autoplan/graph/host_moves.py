"""The moves of a function between devices and their hosts, and the time that devices wait for them."""

from typing import final

import attrs

from shardrules.programs.autoplan.graph.machine import Assumptions
from shardrules.programs.traced.program import Operation, TracedProgram, changes_memory

EXPOSED_ARGUMENTS = 0.9
"""The part of the time that a device waits for arguments from the host and results to it. They are moved around the
update at the end of a step, which has little to hide them behind: of AdamW's state, moved a few arrays at a time,
between 0.77 and 0.97 in steps compiled for H100s."""


@final
@attrs.frozen
class HostMove:
    """A move of one array, each time that it runs."""

    op_index: int
    array: int
    """The index of the array that is moved, where it goes."""
    nbytes: int
    """Of the whole array."""
    count: int
    """The number of runs in a call."""
    to_host: bool
    exposed: float
    """The part of its time that the device waits."""
    is_lasting: bool
    """An argument is fetched, or a result sent, instead of an array that the function keeps in between."""


def host_move(program: TracedProgram, op_index: int, assumptions: Assumptions) -> HostMove | None:
    operation = program.operations[op_index]
    if not changes_memory(operation):
        return None
    (result,) = operation.results
    is_lasting = _is_lasting(program, operation)
    return HostMove(
        op_index,
        result,
        program.arrays[result].nbytes,
        operation.run_count,
        program.arrays[result].on_host,
        EXPOSED_ARGUMENTS if is_lasting else 1 - assumptions.hidden,
        is_lasting,
    )


def _is_lasting(program: TracedProgram, operation: Operation) -> bool:
    (operand,), (result,) = operation.operands, operation.results
    # What others wait for goes through barriers.
    while operand is not None and operand in program.producers:
        barrier = program.operations[program.producers[operand]]
        if barrier.name != "optimization_barrier":
            break
        operand = barrier.operands[barrier.results.index(operand)]
    if operand in program.arguments:
        return True
    readers = [program.operations[reader] for reader, _ in program.users.get(result, ())]
    return any(reader.role == "return" for reader in readers)
