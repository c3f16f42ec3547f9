"""Functions of JAX that are a primitive by themselves, such as `jnp.searchsorted`, as the operations that they run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Jaxpr

from shardrules.programs.jaxprs.rewrite import Writer, rewritten

_FUNCTION = "call_hi_primitive"
"""The primitive of all of them, from JAX 0.11 on."""


def expanded(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a program with such functions replaced by what they run, at any depth."""
    return rewritten(jaxpr, lambda equation: _steps(equation) if equation.primitive.name == _FUNCTION else None)


def _steps(equation: Any) -> list[Any]:
    function = equation.params["_prim"]
    return call_steps(
        equation, lambda *operands: jax.tree.leaves(function.expand(*jax.tree.unflatten(function.in_tree, operands)))
    )


def call_steps(equation: Any, run: Callable[..., list[Any]]) -> list[Any]:
    """Returns equations that run a function instead of an equation: a call, and a copy of each of its results."""

    def copied(*operands: jax.Array) -> list[jax.Array]:
        # A result may be an operand, or come twice: each copy is a variable of its own, and costs nothing.
        return [jnp.array(result, copy=True) for result in jax.jit(run)(*operands)]

    if not all(isinstance(var.aval, ShapedArray) for var in equation.invars):  # a reference or a token
        return [equation]
    program = jax.make_jaxpr(copied)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars))
    if program.consts:  # they would have to be arguments: such an equation stays as it is
        return [equation]
    writer = Writer()
    writer.splice(program, equation.invars, equation, equation.outvars)
    return writer.equations
