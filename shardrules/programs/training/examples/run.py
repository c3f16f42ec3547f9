"""Running single equations of a program."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun


def evaluated(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Runs one equation, and keeps which line of the user's code it is from."""
    invars = [var if isinstance(var, Literal) else Var(var.aval) for var in equation.invars]
    outvars = [Var(var.aval) for var in equation.outvars]
    jaxpr = _no_program().replace(
        invars=[var for var in invars if isinstance(var, Var)],
        outvars=outvars,
        eqns=[equation.replace(invars=invars, outvars=outvars)],
        effects=equation.effects,
    )
    values = [value for var, value in zip(invars, operands, strict=True) if isinstance(var, Var)]
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*values)


@functools.cache
def _no_program() -> Jaxpr:
    return jax.make_jaxpr(lambda: ())().jaxpr
