"""Which matmuls wait for which arrays: what a compiler can move while it multiplies.

The parameters that a matmul takes can be brought to it while others run, and gradients can be sent while the rest of
them is computed. What lies between two matmuls cannot be, unless there are matmuls that nothing waits for, such as
those of gradients, to run meanwhile.
"""

from typing import Self, final

import attrs

from shardrules.planning.traced.program import Operation, TracedProgram

_BEGINNING = ("gather", "random_bits")
"""Primitives that what is computed from the batch begins with, as embeddings do, although they multiply nothing."""


@final
@attrs.frozen(eq=False)
class Waiting:
    """What lies between matmuls."""

    behind: frozenset[int]
    """The arrays that are computed from the result of a matmul."""
    before: frozenset[int]
    """The operations whose results a matmul is computed from."""
    matmuls: tuple[int, ...]
    """The operations that multiply, in order."""

    @classmethod
    def of(cls, program: TracedProgram) -> Self:
        """Finds what lies between the matmuls of a program."""
        behind: set[int] = set()
        needed: set[int] = set()
        before: set[int] = set()
        # What goes round a loop is known at its end: the second walk takes it to the beginning.
        for _ in range(2):
            for operation in program.operations:
                if _begins(operation) or any(operand in behind for operand in operation.operands):
                    behind.update(operation.results)
            for op_index in range(len(program.operations) - 1, -1, -1):
                operation = program.operations[op_index]
                if any(result in needed for result in operation.results):
                    before.add(op_index)
                if operation.flops or op_index in before:
                    needed.update(operand for operand in operation.operands if operand is not None)
        matmuls = tuple(op_index for op_index, operation in enumerate(program.operations) if operation.flops)
        return cls(frozenset(behind), frozenset(before), matmuls)

    def is_between(self, op_index: int, array: int) -> bool:
        """Whether an array that an operation takes or returns comes from a matmul, and another waits for it."""
        return array in self.behind and op_index in self.before

    def has_time(self, op_index: int, array: int) -> bool:
        """Whether compilers can move an array that an operation takes or returns while other operations multiply."""
        if len(self.matmuls) < 2:
            return False
        if array not in self.behind:  # a parameter, on its way to a matmul that is not the first
            return op_index > self.matmuls[0]
        if op_index not in self.before:  # a gradient, of which others are computed later
            return op_index < self.matmuls[-1]
        return sum(matmul not in self.before for matmul in self.matmuls) > 1


def _begins(operation: Operation) -> bool:
    return bool(operation.flops) or operation.name in _BEGINNING
