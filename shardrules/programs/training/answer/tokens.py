"""Tokens of a batch: arrays of integers that look something up, unlike images and keys of random numbers."""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from shardrules.programs.jaxprs.walk import open_jaxpr, programs_in
from shardrules.programs.training.loss import TracedLoss

_GATHERS = ("gather", "dynamic_slice")
"""Primitives whose operands after the first are indices."""

_SAME_VALUES = ("broadcast_in_dim", "reshape", "convert_element_type")
"""Primitives that may follow an iota before `jax.nn.one_hot` compares it with tokens."""


def token_count(trace: TracedLoss) -> int:
    """Returns the elements of the largest array of tokens, with positions beside its examples; 0 without any.

    Where arrays are indices, those that are only made one-hot are not tokens.
    """
    jaxpr = trace.jaxpr.jaxpr
    batched = jaxpr.invars[trace.trainable_count + trace.fixed_count :]
    arrays = [var for var in batched if len(var.aval.shape) > 1 and _is_integer(var)]
    for is_look_up in (_gathers, _is_one_hot):
        if counts := [math.prod(var.aval.shape) for var in arrays if _looks_up(jaxpr, [var], (), is_look_up)]:
            return max(counts)
    return 0


_Test: TypeAlias = Callable[[JaxprEqn, Callable[[Any], bool], Callable[[Any], bool]], bool]
"""A test for equations that look up tokens, given whether a variable is computed from them, and whether it is an
iota."""


def _gathers(equation: JaxprEqn, is_reached: Callable[[Any], bool], is_iota: Callable[[Any], bool]) -> bool:
    return equation.primitive.name in _GATHERS and any(map(is_reached, equation.invars[1:]))


def _is_one_hot(equation: JaxprEqn, is_reached: Callable[[Any], bool], is_iota: Callable[[Any], bool]) -> bool:
    return (
        equation.primitive.name == "eq" and any(map(is_reached, equation.invars)) and any(map(is_iota, equation.invars))
    )


def _looks_up(jaxpr: Jaxpr, variables: Iterable[Any], iotas: Iterable[Any], is_look_up: _Test) -> bool:
    """Returns whether integers that are computed from some variables are looked up."""
    reached, counters = dict.fromkeys(variables), dict.fromkeys(iotas)

    def is_reached(var: Any) -> bool:
        return not isinstance(var, Literal) and var in reached

    def is_iota(var: Any) -> bool:
        return not isinstance(var, Literal) and var in counters

    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "iota" or (name in _SAME_VALUES and is_iota(equation.invars[0])):
            counters.update(dict.fromkeys(equation.outvars))
        if not any(map(is_reached, equation.invars)):
            continue
        if is_look_up(equation, is_reached, is_iota):
            return True
        for program in map(open_jaxpr, programs_in(equation)):
            # Conditions and predicates come first, and bodies take what follows.
            pairs = list(zip(reversed(equation.invars), reversed(program.invars), strict=False))
            inner_reached = [inner for var, inner in pairs if is_reached(var)]
            inner_iotas = [inner for var, inner in pairs if is_iota(var)]
            if _looks_up(program, inner_reached, inner_iotas, is_look_up):
                return True
        # Integers that follow from tokens, such as shifted ones, may be what is looked up.
        reached.update(dict.fromkeys(filter(_is_integer, equation.outvars)))
    return False


def _is_integer(var: Any) -> bool:
    return jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.integer)  # tokens of effects have no dtype
