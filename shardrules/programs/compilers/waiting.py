"""The arrays that a compiler can send to other devices while matmuls run, so that sending takes no extra time.

- A parameter: it can be gathered while earlier matmuls run.
- A gradient of a parameter: it can be summed over devices while later matmuls run.
- An array between two matmuls, computed from one and needed by the other: neither of the two can run meanwhile. Other
  matmuls can, if no matmul needs their results, such as the matmuls of parameters' gradients.
"""

import functools
from typing import Self, final

import attrs

from shardrules.programs.traced.program import Operation, TracedProgram

_BEGINNING = ("gather", "random_bits")
"""Primitives with which computing from the batch often starts, such as the lookup of embeddings. Their results count as
results of matmuls: they are not parameters, so they cannot be sent early."""


@final
@attrs.frozen(eq=False)
class Waiting:
    """The arrays and operations before and after matmuls."""

    behind: frozenset[int]
    """The arrays that are computed from the result of a matmul."""
    before: frozenset[int]
    """The operations whose results a matmul needs, directly or through other operations."""
    matmuls: tuple[int, ...]
    """The operations that multiply, in order."""

    @classmethod
    def of(cls, program: TracedProgram) -> Self:
        behind: set[int] = set()
        needed: set[int] = set()
        before: set[int] = set()
        # A loop's body uses values of its last round, which are found only at the body's end: hence a second walk.
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
        """An array that an operation takes or returns is computed from a matmul and needed by another."""
        return array in self.behind and op_index in self.before

    def has_time(self, op_index: int, array: int) -> bool:
        """Compilers can send an array that an operation takes or returns while matmuls run."""
        if len(self.matmuls) < 2:
            return False
        if array not in self.behind:  # a parameter, on its way to a matmul that is not the first
            return op_index > self.matmuls[0]
        if op_index not in self.before:  # a gradient, of which others are computed later
            return op_index < self.matmuls[-1]
        return self._has_others

    @functools.cached_property
    def _has_others(self) -> bool:
        """There are several matmuls that no other needs."""
        return sum(matmul not in self.before for matmul in self.matmuls) > 1


def _begins(operation: Operation) -> bool:
    return bool(operation.flops) or operation.name in _BEGINNING
