"""Sums that each device may hold a part of for a while: what is added to them is added part by part.

A matmul whose summed dim is split leaves such parts. Where its result is only added to other sums, compilers add first
and let the devices exchange the total once: in a row of additions, or over all rounds of a loop that starts from zero,
as the gradients of repeated layers do.
"""

from typing import Any, final

import attrs
import numpy as np
from jax.extend.core import Literal

from shardrules.programs.traced.program import Operation, TracedProgram

_SUMMING = ("dot_general", "conv_general_dilated", "reduce_sum", "scatter-add", "ragged_dot_general")
_ADDING = ("add_any", "add", "sub")
_LINEAR = ("neg", "transpose", "convert_element_type", "copy")
"""Primitives of one operand that do to the parts of a sum what they do to the sum."""


@final
@attrs.define(eq=False)
class PartialSums:
    """The arrays of a program that devices may hold in parts."""

    program: TracedProgram
    sums: dict[int, None] = attrs.field(factory=dict)
    loop_sums: dict[int, int] = attrs.field(factory=dict)
    """Sums that go round a loop, and the operation in it that adds to each."""

    @classmethod
    def of(cls, program: TracedProgram) -> "PartialSums":
        sums = cls(program)
        sums._find_sums()
        # Gradients of layers in a scan: each round adds its own to a total that starts at zero.
        for operation in program.operations:
            adding = sums._loop_addition(operation)
            if adding is not None:
                sums.loop_sums[operation.results[0]] = adding
                sums.sums[operation.results[0]] = None
        sums._find_sums()  # once more: what is added to a sum that goes round a loop is a sum, too
        return sums

    def is_only_added(self, array: int) -> bool:
        """An array is a sum that is only added to other sums."""
        if array not in self.sums:
            return False
        if array in self.loop_sums:
            return True
        users = self.program.users.get(array, ())
        # With a second use the sum has to be completed anyway, and then adding its parts saves nothing.
        if len(users) != 1:
            return False
        user = self.program.operations[users[0][0]]
        # Into the next round of a loop, where it is added to again.
        if user.role == "join":
            return user.results[0] in self.loop_sums
        if user.role != "compute" or user.results[0] not in self.sums:
            return False
        return user.name in _ADDING or (user.name in _LINEAR and self.is_only_added(user.results[0]))

    def may_add_parts(self, op_index: int) -> bool:
        operation = self.program.operations[op_index]
        if operation.role == "join":
            return operation.results[0] in self.loop_sums
        if operation.role != "compute" or operation.name not in (*_ADDING, *_LINEAR):
            return False
        if operation.results[0] not in self.sums:
            return False
        return all(operand is not None and self.is_only_added(operand) for operand in operation.operands)

    def _find_sums(self) -> None:
        arrays = self.program.arrays
        for operation in self.program.operations:
            operands = [operand for operand in operation.operands if operand is not None and arrays[operand].shape]
            for result in operation.results:
                if operation.name in _SUMMING and operation.factors.reduced:
                    self.sums[result] = None
                elif operation.role == "compute" and len(operands) == len(operation.operands) > 0:
                    # A broadcast operand would be added once per part, so all have to have the shape of the result.
                    same_shape = all(arrays[operand].shape == arrays[result].shape for operand in operands)
                    adds = operation.name in _ADDING and same_shape
                    passes_on = operation.name in _LINEAR and len(operands) == 1
                    if (adds or passes_on) and all(operand in self.sums for operand in operands):
                        self.sums[result] = None

    def _loop_addition(self, operation: Operation) -> int | None:
        """The operation that adds a sum to a value which goes round a loop, starts at zero and has no other use."""
        if operation.role != "join" or len(operation.operands) != 2 or operation.results[0] in self.loop_sums:
            return None
        (first, last), array = operation.operands, operation.results[0]
        users = self.program.users
        inside = [op_index for op_index, _ in users.get(array, ()) if self.program.operations[op_index].role != "exit"]
        if len(inside) != 1 or last is None or first is None or not self._is_zero(first):
            return None
        adding = self.program.operations[inside[0]]
        addends = [operand for operand in adding.operands if operand != array]
        if adding.name not in ("add_any", "add") or adding.results[0] != last or len(addends) != 1:
            return None
        addend = addends[0]
        # The total may go only to the next round, and the addend only into the total.
        if addend is None or len(users.get(last, ())) != 1 or len(users[addend]) != 1:
            return None
        return inside[0] if addend in self.sums else None

    def _is_zero(self, array: int) -> bool:
        producer = self.program.producers.get(array)
        equation = None if producer is None else self.program.operations[producer].equation
        if equation is None or equation.primitive.name != "broadcast_in_dim":
            return False
        value: Any = equation.invars[0]
        return isinstance(value, Literal) and not np.any(np.asarray(value.val))
