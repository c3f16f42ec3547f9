"""Sums of which each device may hold a part for a while: what is added to them is added part by part.

A matmul whose summed dim is split leaves such parts. Where its result is only added to others of the kind, compilers
add up first, and let devices exchange the total once: in a row of additions, or over all rounds of a loop from 0.
"""

from typing import Any, final

import attrs
import numpy as np
from jax.extend.core import Literal

from shardrules.planning.traced.program import Operation, TracedProgram

_SUMS = ("dot_general", "conv_general_dilated", "reduce_sum", "scatter-add", "ragged_dot_general")
_ADDS = ("add_any", "add", "sub")
_LINEAR = ("neg", "transpose", "convert_element_type", "copy")


@final
@attrs.frozen(eq=False)
class Sums:
    """Sums that devices may hold in parts.

    **Arguments:**

    - `program`: the program.
    - `known`: arrays that are such sums.
    - `rounds`: for arrays that go round in a loop, and to which such sums are added there, the operation that adds.
    """

    program: TracedProgram
    known: dict[int, None]
    rounds: dict[int, int]

    @classmethod
    def of(cls, program: TracedProgram) -> "Sums":
        """Finds them.

        **Arguments:**

        - `program`: the program.

        **Returns:**

        The `Sums`.
        """
        found = cls(program, {}, {})
        found._find()
        for operation in program.operations:
            added = found._adds_up(operation)
            if added is not None:
                found.rounds[operation.results[0]] = added
                found.known[operation.results[0]] = None
        found._find()
        return found

    def _find(self) -> None:
        for operation in self.program.operations:
            arrays = self.program.arrays
            taken = [one for one in operation.operands if one is not None and arrays[one].shape]
            for result in operation.results:
                if operation.name in _SUMS and operation.factors.reduced:
                    self.known[result] = None
                elif operation.role == "compute" and len(taken) == len(operation.operands) > 0:
                    same = all(arrays[one].shape == arrays[result].shape for one in taken)
                    adds = (operation.name in _ADDS and same) or (operation.name in _LINEAR and len(taken) == 1)
                    if adds and all(one in self.known for one in taken):
                        self.known[result] = None

    def _adds_up(self, operation: Operation) -> int | None:
        """The operation in a loop that adds a sum to an array which goes round, starts at 0, and is not looked at."""
        if operation.role != "join" or len(operation.operands) != 2 or operation.results[0] in self.rounds:
            return None
        (first, last), array = operation.operands, operation.results[0]
        inside = [at for at, _ in self.program.users.get(array, ()) if self.program.operations[at].role != "exit"]
        if len(inside) != 1 or last is None or first is None or not self._is_zero(first):
            return None
        adding = self.program.operations[inside[0]]
        others = [one for one in adding.operands if one != array]
        if adding.name not in ("add_any", "add") or adding.results[0] != last or len(others) != 1:
            return None
        alone = (
            len(self.program.users.get(last, ())) == 1
            and others[0] is not None
            and len(self.program.users[others[0]]) == 1
        )
        return inside[0] if alone and others[0] in self.known else None

    def is_added(self, array: int) -> bool:
        """Whether all that is done with a sum is to add others to it.

        **Arguments:**

        - `array`: its number.

        **Returns:**

        Whether it is a sum, and no more is done with it.
        """
        if array not in self.known:
            return False
        if array in self.rounds:
            return True
        users = self.program.users.get(array, ())
        if len(users) != 1:
            return False
        user = self.program.operations[users[0][0]]
        if user.role == "join":
            return user.results[0] in self.rounds
        if user.role != "compute" or user.results[0] not in self.known:
            return False
        return user.name in _ADDS or (user.name in _LINEAR and self.is_added(user.results[0]))

    def is_partial(self, at: int) -> bool:
        """Whether an operation may work on parts of sums.

        **Arguments:**

        - `at`: the number of the operation.

        **Returns:**

        Whether it may.
        """
        operation = self.program.operations[at]
        if operation.role == "join":
            return operation.results[0] in self.rounds
        if operation.role != "compute" or operation.name not in (*_ADDS, *_LINEAR):
            return False
        if operation.results[0] not in self.known or operation.name in _SUMS:
            return False
        return all(one is not None and self.is_added(one) for one in operation.operands)

    def _is_zero(self, array: int) -> bool:
        """Whether an array is made as one of zeros."""
        maker = self.program.producers.get(array)
        equation = None if maker is None else self.program.operations[maker].equation
        if equation is None or equation.primitive.name != "broadcast_in_dim":
            return False
        value: Any = equation.invars[0]
        return isinstance(value, Literal) and not np.any(np.asarray(value.val))
