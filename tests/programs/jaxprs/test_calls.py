"""Equations that only call another jaxpr."""

from collections.abc import Callable
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

import shardrules as sr
from shardrules.programs.autoplan.graph.machine import Machine
from shardrules.programs.autoplan.run.call import read_call
from shardrules.programs.autoplan.run.rewrite import chosen_layouts, with_layouts
from shardrules.programs.autoplan.solve.search import Task
from shardrules.programs.jaxprs.calls import InlinedCall
from shardrules.programs.jaxprs.walk import open_jaxpr
from shardrules.programs.traced.program import read_jaxpr

MATRICES = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 4)) + 8 * np.eye(4), jnp.float32)
VECTORS = jnp.asarray(np.random.default_rng(1).normal(size=(8, 4, 2)), jnp.float32)


def test_calls_are_recognized() -> None:
    (equation,) = jax.make_jaxpr(jax.jit(jnp.sin))(VECTORS).eqns
    call = InlinedCall.of(equation)
    assert call is not None
    assert isinstance(call.jaxpr, ClosedJaxpr)
    assert open_jaxpr(call.jaxpr) is open_jaxpr(open_jaxpr(call.jaxpr))
    assert call.operands == (0,)
    (sin,) = open_jaxpr(call.jaxpr).eqns
    assert InlinedCall.of(sin) is None


def doubled(x: jax.Array) -> jax.Array:
    return lax.composite(lambda x: 2 * x, "tests.doubled")(x)


def mapped(x: jax.Array) -> jax.Array:
    double = jax.custom_batching.custom_vmap(lambda x: 2 * x)
    double.def_vmap(lambda size, batched, x: (2 * x, batched[0]))
    return double(x)


def linear(x: jax.Array) -> jax.Array:
    return jax.custom_derivatives.linear_call(lambda r, x: r * x, lambda r, x: r * x, jnp.sin(x), x)


def solved(x: jax.Array) -> jax.Array:
    """The constants of the four functions are different ones: only those of `solve` count."""
    double, half = 2 * jnp.ones_like(x), 0.5 * jnp.ones_like(x)
    return lax.custom_linear_solve(lambda v: v * double, x, lambda _, b: b * half, lambda _, b: b * half)


@pytest.mark.sample(2)
@pytest.mark.parametrize("fn", [doubled, mapped, linear, solved, lambda x: jnp.linalg.solve(MATRICES, x)])
def test_what_is_called_is_planned(fn: Callable[..., Any]) -> None:
    """The body of a call is read, and keeps its meaning with layouts written into it."""
    mesh = sr.create_mesh("data:4,model:2")
    call = read_call(fn, (VECTORS,), mesh, "fn")
    program = read_jaxpr(call.jaxpr)
    assert not any(operation.lacks_rule for operation in program.operations)
    problem = Task.of(program, Machine.of(mesh), call.paths, call.feedback, {}).problem
    choice = tuple(len(node.layouts) - 1 for node in problem.nodes)  # as much split as possible
    (result,) = jax.jit(jaxpr_as_fun(with_layouts(call.jaxpr, chosen_layouts(problem, choice), mesh)))(VECTORS)
    np.testing.assert_allclose(result, fn(VECTORS), rtol=1e-5)
