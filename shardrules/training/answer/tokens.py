"""How many tokens a batch has: arrays of integers that look something up, unlike images and keys of random numbers."""

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from shardrules.analysis.compiling.jaxprs import programs_in
from shardrules.planning.traced.calls import open_jaxpr
from shardrules.training.loss import TracedLoss

_LOOK_UPS = {"gather": 1, "dynamic_slice": 1, "eq": 0}
"""Primitives that tokens end in, and from which operand on. `jax.nn.one_hot` compares them."""


def token_count(trace: TracedLoss) -> int:
    """Returns the elements of the largest array of tokens, with positions beside its examples; 0 without any."""
    jaxpr = trace.jaxpr.jaxpr
    batched = jaxpr.invars[trace.trainable_count + trace.fixed_count :]
    return max(
        (
            math.prod(var.aval.shape)
            for var in batched
            if len(var.aval.shape) > 1 and _is_integer(var) and _looks_up(jaxpr, [var])
        ),
        default=0,
    )


def _looks_up(jaxpr: Jaxpr, variables: Iterable[Any]) -> bool:
    """Whether integers that are computed from some variables are indices, or compared."""
    reached = dict.fromkeys(variables)

    def is_reached(var: Any) -> bool:
        return not isinstance(var, Literal) and var in reached

    for equation in jaxpr.eqns:
        if not any(map(is_reached, equation.invars)):
            continue
        first = _LOOK_UPS.get(equation.primitive.name)
        if first is not None and any(map(is_reached, equation.invars[first:])):
            return True
        for program in map(open_jaxpr, programs_in(equation)):
            # Conditions and predicates come first, and bodies take what follows.
            pairs = zip(reversed(equation.invars), reversed(program.invars), strict=False)
            if _looks_up(program, [inner for var, inner in pairs if is_reached(var)]):
                return True
        reached.update(dict.fromkeys(filter(_is_integer, equation.outvars)))
    return False


def _is_integer(var: Any) -> bool:
    return jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.integer)  # tokens of effects have no dtype
