"""Arrays that compilers copy, because an operation would overwrite them and they are still needed.

An update (`scatter`, `dynamic_update_slice`) and a loop write over their first operand where they can. They cannot
where that is

- an argument that is not donated, or a constant of the function;
- needed again by something that waits for the update, or returned as it was;
- for an update in a loop: an array from outside of the loop, which the next round needs as it was.

What branches return is an array of its own: a branch that passes on what it gets copies it, and what replaces an
argument is copied there after the branches.
"""

from collections.abc import Collection, Mapping
from typing import final

from shardrules.programs.traced.program import Operation, TracedProgram


def copy_counts(
    program: TracedProgram, sources: Mapping[int, int], feedback: Mapping[int, int] | None, updates: Collection[str]
) -> dict[int, float]:
    """The number of copies that operations make of their operands, in each run; operations without are left out.

    `sources` has for each view the array in whose memory it is, and `feedback` for each result the argument that it
    replaces (`None`: any argument may be overwritten). `updates` are primitives that write over their first operand.
    """
    copies = _Copies(program, sources, feedback)
    counts: dict[int, float] = {}
    for op_index, operation in enumerate(program.operations):
        count = 0.0
        if operation.joins_branches:
            count = copies.of_branches(op_index)
        elif operation.joins_rounds:
            if copies.before_loop(op_index):
                # A loop copies what it starts with once, not in each round.
                count = operation.read_counts[0] / operation.run_count
        elif operation.role == "compute" and operation.name in updates and copies.before_update(op_index):
            count = 1.0
        if count:
            counts[op_index] = count
    return counts


@final
class _Copies:
    """The operations that copy their first operand."""

    def __init__(self, program: TracedProgram, sources: Mapping[int, int], feedback: Mapping[int, int] | None) -> None:
        self.program = program
        self.sources: dict[int, int] = {}
        """As given, but what comes out of a loop is an array of its own: in the loop each round overwrites it."""
        for operation in program.operations:
            for operand, result in zip(operation.operands, operation.results, strict=False):
                if operand is not None and result in sources and operation.role != "exit":
                    self.sources[result] = self.source(operand)
        arguments = () if feedback is None else program.arguments
        donated = frozenset(() if feedback is None else feedback.values())
        self.read_only = frozenset((*program.constants, *(array for array in arguments if array not in donated)))
        """Constants, and arguments that are not donated: nothing may overwrite them."""
        self.replacing = frozenset(() if feedback is None else feedback)
        """The results that replace an argument."""
        self.readers: dict[int, list[int]] = {}
        """For each array in memory the operations that read it, or a view of it."""
        for array, users in program.users.items():
            self.readers.setdefault(self.source(array), []).extend(op_index for op_index, _ in users)

    def source(self, array: int) -> int:
        return self.sources.get(array, array)

    def before_update(self, op_index: int) -> bool:
        operation = self.program.operations[op_index]
        array = self._first(operation)
        if array is None:
            return False
        producer = self.program.producers.get(array)
        region = 0 if producer is None else self.program.operations[producer].region
        # An array from outside of a loop: the next round needs it as it was.
        if self._run_count(operation.region) > self._run_count(region):
            return True
        return array in self.read_only or self._is_needed_after(array, op_index)

    def before_loop(self, op_index: int) -> bool:
        operation = self.program.operations[op_index]
        array, result = self._first(operation), operation.results[0]
        _, end = operation.operands  # what the loop starts with, and what a round ends with
        if array is None or end is None or self.source(end) == result:
            return False  # it goes round as it is
        readers = [self.program.operations[reader] for reader in self.readers.get(array, ())]
        is_read_inside = any(reader.role == "enter" and reader.region == operation.region for reader in readers)
        return array in self.read_only or is_read_inside or self._is_needed_after(array, op_index)

    def of_branches(self, op_index: int) -> int:
        """The number of copies in branches and after them, each counted as if it were taken."""
        program, operation = self.program, self.program.operations[op_index]
        sources = [None if operand is None else self.source(operand) for operand in operation.operands]
        pairs = list(zip(operation.operands, sources, strict=True))
        passed_on = sum(
            program.branch_of(op_index, array) != program.branch_of(op_index, source) for array, source in pairs
        )
        readers = [program.operations[reader] for reader in self.readers.get(operation.results[0], ())]
        return passed_on + any(reader.role == "return" and reader.results[0] in self.replacing for reader in readers)

    def _first(self, operation: Operation) -> int | None:
        return None if operation.operands[0] is None else self.source(operation.operands[0])

    def _run_count(self, region: int) -> int:
        return self.program.regions[region].run_count

    def _is_needed_after(self, array: int, op_index: int) -> bool:
        """An operation that waits for this one reads an array, or the function returns it."""
        operations = self.program.operations
        later = [reader for reader in self.readers.get(array, ()) if reader > op_index]
        if any(operations[reader].role == "return" for reader in later):
            return True
        if not later:
            return False
        # A reader that does not wait for this operation can run before it.
        dependent = dict.fromkeys(operations[op_index].results)
        for operation in operations[op_index + 1 : max(later) + 1]:
            if any(operand in dependent for operand in operation.operands):
                dependent.update(dict.fromkeys(operation.results))
        return any(any(operand in dependent for operand in operations[reader].operands) for reader in later)
