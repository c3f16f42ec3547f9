"""Functions of JAX that are a primitive by themselves, such as `jnp.searchsorted`, as the operations that they run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_FUNCTION = "call_hi_primitive"
"""The primitive of all of them, from JAX 0.11 on."""


def expanded(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a program with such functions replaced by what they run, at any depth.

    ```python
    from shardrules.programs.autoplan.run.expand import expanded

    program = jax.make_jaxpr(jnp.searchsorted)(jnp.ones(8), jnp.ones(4)).jaxpr
    assert all(equation.primitive.name != "call_hi_primitive" for equation in expanded(program).eqns)
    ```
    """
    return replaced(jaxpr, lambda equation: _steps(equation) if equation.primitive.name == _FUNCTION else [equation])


def replaced(
    jaxpr: Jaxpr, steps_of: Callable[[Any], list[Any]], is_open: Callable[[Any], bool] = lambda equation: True
) -> Jaxpr:
    """Returns a program with other equations in the place of some, at any depth of those that are open."""
    equations: list[Any] = []
    for equation in jaxpr.eqns:
        for step in steps_of(equation):
            params = step.params
            if is_open(step):
                params = {name: _replaced_value(value, steps_of, is_open) for name, value in params.items()}
            is_same = all(params[name] is value for name, value in step.params.items())
            equations.append(step if is_same else step.replace(params=params))
    is_same = len(equations) == len(jaxpr.eqns) and all(map(lambda new, old: new is old, equations, jaxpr.eqns))
    return jaxpr if is_same else jaxpr.replace(eqns=equations)


def _replaced_value(value: Any, *rules: Any) -> Any:
    if isinstance(value, Jaxpr):
        return replaced(value, *rules)
    if isinstance(value, ClosedJaxpr):
        body = replaced(value.jaxpr, *rules)
        return value if body is value.jaxpr else ClosedJaxpr(body, value.consts)
    if type(value) in (tuple, list):
        items = [_replaced_value(item, *rules) for item in value]
        return value if all(map(lambda new, old: new is old, items, value)) else type(value)(items)
    return value


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
    current: dict[Any, Any] = dict(zip(program.jaxpr.invars, equation.invars, strict=True))
    current |= dict(zip(program.jaxpr.outvars, equation.outvars, strict=True))
    return [
        step.replace(
            invars=[var if isinstance(var, Literal) else current.get(var, var) for var in step.invars],
            outvars=[current.get(var, var) for var in step.outvars],
            source_info=equation.source_info,
        )
        for step in program.jaxpr.eqns
    ]
