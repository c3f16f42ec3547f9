"""Branches as compilers run them.

XLA takes a branch that a constant chooses, and leaves the others out. Where two branches compute
element by element, it computes both and selects: what they return is then written in one kernel with what it is
computed from, over arrays that nothing else needs. Where one of them only passes on what it gets, or anything takes
more than passing over elements, one branch runs, and its results are arrays of their own.
"""

import functools
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, jaxpr_as_fun

from shardrules.programs.autoplan.run.expand import call_steps
from shardrules.programs.jaxprs.bodies import branches_of
from shardrules.programs.jaxprs.calls import OPEN, InlinedCall, is_cond
from shardrules.programs.jaxprs.rewrite import rewritten
from shardrules.programs.jaxprs.walk import open_jaxpr
from shardrules.programs.traced.factors.table import is_elementwise
from shardrules.programs.traced.program import is_on_host

_PASSES = """
broadcast_in_dim concatenate dynamic_slice pad reduce_and reduce_max reduce_min reduce_or reduce_prod
reduce_sum sharding_constraint slice squeeze
"""
"""Primitives that XLA computes in both branches, besides elementwise ones and reshapes."""

_LOOPS = "igamma igamma_grad_a igammac random_clone random_seed regularized_incomplete_beta threefry2x32"
"""Primitives that go element by element, but in a loop or a kernel of their own."""

_CHEAP, _LONG = frozenset(_PASSES.split()), frozenset(_LOOPS.split())


def without_branches(jaxpr: Jaxpr, has_derivatives: bool = True) -> Jaxpr:
    """Returns a program without the branches that compilers leave out or compute all of, at any depth.

    Gradients of the program are its branches' gradients, also where an element of the branch that is not taken has
    none. A program that is never differentiated needs none: `has_derivatives` is false.
    """
    steps_of = functools.partial(_steps, has_derivatives)
    return rewritten(jaxpr, steps_of, lambda equation: equation.primitive.name in OPEN)


def _steps(has_derivatives: bool, equation: Any) -> list[Any] | None:
    variables = (*equation.invars, *equation.outvars)
    if not is_cond(equation) or any(is_on_host(var.aval) for var in variables):
        return None
    branches, index = branches_of(equation), equation.invars[0]
    if isinstance(index, Literal):
        branch = branches[max(0, min(int(index.val), len(branches) - 1))]
        return call_steps(equation, lambda index, *operands: jaxpr_as_fun(branch)(*operands))
    if not _is_selected(equation):
        return None

    def select(index: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        first, second = (jaxpr_as_fun(branch)(*operands) for branch in branches)
        return [jax.lax.select_n(index > 0, *pair) for pair in zip(first, second, strict=True)]

    # The derivative of a selection is not that of a branch: what is not selected may have none, and 0 times that.
    def select_jvp(primals: Any, tangents: Any) -> Any:
        return jax.jvp(lambda *operands: equation.primitive.bind(*operands, **equation.params), primals, tangents)

    differentiable = jax.custom_jvp(select)
    differentiable.defjvp(select_jvp)
    return call_steps(equation, differentiable if has_derivatives else select)


def _is_selected(equation: Any) -> bool:
    """XLA computes both branches and selects: they are cheap, and neither only passes on its operands."""
    branches = branches_of(equation)
    return (
        len(branches) == 2
        and not equation.effects
        and all(_is_cheap(branch.jaxpr) and _computes(branch.jaxpr) for branch in branches)
    )


def _computes(branch: Jaxpr) -> bool:
    return bool(branch.eqns) or any(isinstance(var, Literal) for var in branch.outvars)


def _is_cheap(jaxpr: Jaxpr) -> bool:
    for equation in jaxpr.eqns:
        name, call = equation.primitive.name, InlinedCall.of(equation)
        if call is not None:
            is_cheap = _is_cheap(open_jaxpr(call.jaxpr))
        elif is_cond(equation):
            is_cheap = _is_selected(equation)
        elif name == "reshape":
            is_cheap = equation.params["dimensions"] is None
        else:
            is_cheap = name not in _LONG and (name in _CHEAP or is_elementwise(name))
        if not is_cheap:
            return False
    return True
