"""The parts of loops and branches: the programs in them, and the operands that these take."""

from collections.abc import Sequence
from typing import Any, Self, final

import attrs
from jax.extend.core import ClosedJaxpr, Jaxpr

from shardrules.programs.jaxprs.calls import SCAN, WHILE, InlinedCall, is_cond
from shardrules.programs.jaxprs.walk import closed_like


@final
@attrs.frozen(eq=False)
class Loop:
    """A loop of either primitive. Its operands are `test_consts`, `consts`, `carry`, `pieces`, in this order."""

    body: Any
    """From consts, carry and a row of each of the pieces to the next carry and a row of each stacked result."""
    test: Any
    """From test_consts and carry to whether another round runs; `None` where the number of rounds is known."""
    length: int | None
    unroll: int
    test_consts: slice
    consts: slice
    carry: slice
    pieces: slice
    """Arrays that each round reads a row of."""

    @classmethod
    def of(cls, equation: Any) -> Self | None:
        """The loop of an equation; `None` where it is no loop."""
        name, params, count = equation.primitive.name, equation.params, len(equation.invars)
        if name == SCAN:
            const_count, carry_count = _scan_counts(params)
            first, program, test, length, unroll = 0, params["jaxpr"], None, params["length"], params["unroll"]
        elif name == WHILE:
            first, const_count = params["cond_nconsts"], params["body_nconsts"]
            program, test, length, unroll = params["body_jaxpr"], params["cond_jaxpr"], None, 1
            carry_count = count - first - const_count
        else:
            return None
        ends = first, first + const_count, first + const_count + carry_count
        return cls(
            program, test, length, unroll, slice(0, first), slice(*ends[:2]), slice(*ends[1:]), slice(ends[2], count)
        )

    @property
    def const_count(self) -> int:
        return self.consts.stop - self.consts.start

    @property
    def carry_count(self) -> int:
        return self.carry.stop - self.carry.start

    @property
    def carry_inside(self) -> slice:
        """The places of the carry among the inputs of the body."""
        return slice(self.const_count, self.const_count + self.carry_count)


def _scan_counts(params: Any) -> tuple[int, int]:
    """The numbers of consts and of arrays in the carry of a scan."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # from JAX 0.11 on
    return len(list(consts)), len(list(carry))


def scan_of(equation: Any) -> Loop:
    """The loop of an equation that is a scan."""
    loop = Loop.of(equation)
    assert loop is not None, "a scan is a loop"
    return loop


def branches_of(equation: Any) -> tuple[ClosedJaxpr, ...]:
    """The branches of a conditional. Its first operand is the index of the branch, and each takes the others."""
    return equation.params["branches"]


@final
@attrs.frozen(eq=False)
class Body:
    """A program that an equation runs."""

    program: Any
    operands: tuple[int, ...]
    """The index of the operand that each of its inputs is at first."""
    fixed_count: int
    """The number of its first inputs that are the same in all rounds."""


def bodies_of(equation: Any) -> tuple[Body, ...]:
    """The programs that a call, a loop or a conditional runs, the body of a loop before its test; else none."""
    call, loop, indices = InlinedCall.of(equation), Loop.of(equation), range(len(equation.invars))
    if call is not None:
        return (Body(call.jaxpr, call.operands, len(call.operands)),)
    if loop is not None:
        carry = indices[loop.carry]
        consts, tested = indices[loop.consts], indices[loop.test_consts]
        # Constants come first among the operands: no round changes them.
        body = Body(loop.body, (*consts, *carry, *indices[loop.pieces]), len(consts))
        return (body,) if loop.test is None else (body, Body(loop.test, (*tested, *carry), len(tested)))
    if is_cond(equation):
        # The first operand of a conditional says which branch runs, and is not passed on.
        return tuple(Body(branch, tuple(indices[1:]), len(indices) - 1) for branch in branches_of(equation))
    return ()


def with_bodies(equation: Any, changed: Sequence[Jaxpr]) -> Any:
    """Returns an equation with other programs, without their constants, in the place of those of `bodies_of`."""
    programs = [closed_like(body.program, each) for body, each in zip(bodies_of(equation), changed, strict=True)]
    call, params = InlinedCall.of(equation), equation.params
    if call is not None:
        return equation.replace(params=call.params_with(programs[0]))
    if is_cond(equation):
        return equation.replace(params={**params, "branches": tuple(programs)})
    names = ("jaxpr",) if equation.primitive.name == SCAN else ("body_jaxpr", "cond_jaxpr")
    return equation.replace(params={**params, **dict(zip(names, programs, strict=True))})
