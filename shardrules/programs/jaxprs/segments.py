"""Stretches of equations as programs, and the signatures of equations."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from shardrules.programs.jaxprs.walk import open_jaxpr, programs_in, reads

_CONSTANT = "stop_gradient sign floor ceil round is_finite nextafter argmax argmin"
WITHOUT_DERIVATIVE = frozenset(_CONSTANT.split())
"""Primitives whose results are floats without a derivative."""


_INDICES = ("name", "start_indices", "limit_indices")
"""Parameters in which layers differ that are otherwise equal, such as the index of a layer among stacked weights."""


def segment_program(equations: Sequence[Any], results: Sequence[Any]) -> Jaxpr:
    """Returns equations as a program that takes what they read from outside, and returns `results`."""
    inner = dict.fromkeys(var for equation in equations for var in equation.outvars)
    inputs = [var for var in dict.fromkeys(reads(equations)) if var not in inner]
    effects = {effect for equation in equations for effect in equation.effects}
    return _empty_program().replace(
        constvars=[], invars=inputs, outvars=list(results), eqns=list(equations), effects=effects
    )


@functools.cache
def _empty_program() -> Jaxpr:
    """A program that others are made from: a new one would need names for its inputs."""
    return jax.make_jaxpr(lambda: ())().jaxpr


def evaluated(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Runs one equation, and keeps which line of the user's code it is from."""
    # A variable of its own for each operand: one that comes twice may have two values.
    invars = [var if isinstance(var, Literal) else Var(var.aval) for var in equation.invars]
    outvars = [Var(var.aval) for var in equation.outvars]
    program = segment_program([equation.replace(invars=invars, outvars=outvars)], outvars)
    values = [value for var, value in zip(invars, operands, strict=True) if isinstance(var, Var)]
    return jaxpr_as_fun(ClosedJaxpr(program, ()))(*values)


def in_operands(equation: Any, operands: Sequence[Any], indices: Sequence[int]) -> Callable[..., list[Any]]:
    """Returns an equation as a function of some operands, by index; the others have these values."""

    def run(*moved: Any) -> list[Any]:
        values = dict(zip(indices, moved, strict=True))
        return evaluated(equation, [values.get(index, operand) for index, operand in enumerate(operands)])

    return run


def segment_results(body: Jaxpr, start: int, stop: int) -> list[Any]:
    """Returns the results of equations of a program that others, or the program's caller, read."""
    later = dict.fromkeys(reads(body.eqns[stop:]))
    later.update(dict.fromkeys(var for var in body.outvars if not isinstance(var, Literal)))
    # A result that nobody reads is a `DropVar`, a subclass of `Var`.
    outputs = [var for equation in body.eqns[start:stop] for var in equation.outvars if type(var) is Var]
    return [var for var in outputs if var in later]


def signature(equation: Any, has_literals: bool = True) -> Any:
    """The computation of an equation, apart from its arrays, the index that it starts from, and its constants.

    Without literals also apart from the positions of constants among its operands, such as the 0 that a sum over layers
    begins with.
    """
    operands = tuple((str(var.aval), has_literals and isinstance(var, Literal)) for var in equation.invars)
    inner = tuple(tuple(map(signature, open_jaxpr(program).eqns)) for program in programs_in(equation))
    # Parameters of calls may hold functions, which no two calls share.
    kinds = (bool, int, str) if inner else (object,)
    params = tuple(
        (name, str(value))
        for name, value in sorted(equation.params.items())
        if isinstance(value, kinds) and not callable(value) and name not in _INDICES
    )
    return equation.primitive.name, operands, tuple(str(var.aval) for var in equation.outvars), params, inner


def is_float(var: Any) -> bool:
    """Tokens have no elements, and so no derivatives."""
    return jnp.issubdtype(getattr(var.aval, "dtype", np.dtype(int)), np.inexact)


def nbytes_of(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 4)


def struct(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, weak_type=getattr(var.aval, "weak_type", False))
