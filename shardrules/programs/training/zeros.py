"""Results of a program that are zeros, whatever its arguments are: gradients by what a loss does not depend on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardrules.programs.jaxprs.bodies import branches_of, scan_of
from shardrules.programs.jaxprs.calls import InlinedCall, is_cond, is_scan
from shardrules.programs.jaxprs.walk import open_jaxpr
from shardrules.programs.training.examples.rules import ADDING, LINEAR

_PRODUCTS = ("mul", "dot_general", "ragged_dot_general", "conv_general_dilated")
"""Primitives whose results are zeros where one of the first two operands is."""


def zero_results(program: ClosedJaxpr | Jaxpr, zero_inputs: Sequence[bool] = ()) -> list[bool]:
    """Returns for each result of a program whether it is zeros, where some of its inputs are.

    ```python
    from shardrules.programs.training.zeros import zero_results

    gradient = jax.grad(lambda a, b, x: jnp.sum(a * x), (0, 1))
    assert zero_results(jax.make_jaxpr(gradient)(1.0, 2.0, jnp.ones(4))) == [False, True]
    ```
    """
    jaxpr = open_jaxpr(program)
    zeros = {var for var, flag in zip(jaxpr.invars, zero_inputs, strict=False) if flag}

    def is_zero(var: Any) -> bool:
        return not np.asarray(var.val).any() if isinstance(var, Literal) else var in zeros

    for equation in jaxpr.eqns:
        flags = _zeros_of(equation, [is_zero(var) for var in equation.invars])
        zeros.update(var for var, flag in zip(equation.outvars, flags, strict=True) if flag)
    return [is_zero(var) for var in jaxpr.outvars]


def _zeros_of(equation: Any, operands: Sequence[bool]) -> Sequence[bool]:
    name, none = equation.primitive.name, [False] * len(equation.outvars)
    if not any(operands):
        return none
    if is_scan(equation):
        return _zeros_of_loop(equation, operands)
    if is_cond(equation):
        branches = [zero_results(branch, operands[1:]) for branch in branches_of(equation)]
        return [all(flags) for flags in zip(*branches, strict=True)]
    call = InlinedCall.of(equation)
    if call is not None:
        return zero_results(call.jaxpr, [operands[index] for index in call.operands])
    # Zeros divided by anything count as zeros; a divisor of zeros makes none.
    if name == "div":
        return [operands[0]]
    # One factor of zeros is enough for a product; a sum or a linear operation takes all.
    is_zero = any(operands[:2]) if name in _PRODUCTS else (name in LINEAR or name in ADDING) and all(operands)
    return [is_zero] * len(equation.outvars)


def _zeros_of_loop(equation: Any, operands: Sequence[bool]) -> Sequence[bool]:
    # What goes round is zeros if it starts so and each round leaves it so.
    loop = scan_of(equation)
    carry = list(operands[loop.carry])
    while True:
        results = zero_results(loop.body, [*operands[loop.consts], *carry, *operands[loop.pieces]])
        ends = [start and end for start, end in zip(carry, results, strict=False)]
        if ends == carry:
            return [*carry, *results[loop.carry_count :]]
        carry = ends
