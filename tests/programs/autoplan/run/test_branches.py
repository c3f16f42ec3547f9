"""Branches as compilers run them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.autoplan.run.branches import without_branches
from shardrules.programs.autoplan.run.call import read_call
from shardrules.programs.jaxprs.walk import equations

X = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)


def branch_count(fn: Callable[..., Any], *args: Any) -> int:
    """The number of conds that are left, after checking that a function computes what it did."""
    call = read_call(fn, args, sr.mesh_shape("data:8"), "fn")
    actual, expected = jaxpr_as_fun(call.jaxpr)(*jax.tree.leaves(args)), jax.tree.leaves(fn(*args))
    for result, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(result, other)
    return sum(equation.primitive.name == "cond" for equation in equations(call.jaxpr))


def test_what_is_chosen_by_a_constant_is_all_that_is_left() -> None:
    def chosen(x: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            return carry + lax.cond(False, lambda row: row @ X, lambda row: jnp.sort(row), row), row

        return lax.scan(body, jnp.zeros(4), x)

    assert branch_count(chosen, X) == 0
    optimizer = optax.MultiSteps(optax.adam(0.1), 2)
    assert branch_count(optimizer.update, X, optimizer.init(X), X) == 0


def test_cheap_branches_are_computed_and_selected() -> None:
    def update(x: Any, y: Any) -> Any:
        def inner(x: Any, y: Any) -> Any:
            return lax.cond(y[0, 0] > 0, lambda: (x / jnp.linalg.norm(x), y), lambda: (0 * x, -y))

        return lax.cond(x.sum() > 0, inner, lambda x, y: (jnp.zeros_like(x), y), x, y)

    assert branch_count(update, X, X) == branch_count(update, -X, X + 2) == branch_count(update, X + 2, X) == 0
    optimizer = optax.apply_if_finite(optax.adam(0.1), 2)
    for gradient in (X, X / 0):
        assert branch_count(optimizer.update, gradient, optimizer.init(X), X) == 0


@pytest.mark.parametrize(
    "branches",
    [
        (jnp.sin, lambda x: x),
        (jnp.sin, lambda x: x @ x),
        (lambda x: x.T, jnp.sin),
        (lambda x: lax.fori_loop(0, 3, lambda _, x: x + 1, x), jnp.sin),
        (jnp.sin, jnp.cos, jnp.tan),
    ],
)
def test_other_branches_stay(branches: Any) -> None:
    assert branch_count(lambda x: lax.switch(jnp.int32(x.sum()), branches, x) + 1, X) == 1


def test_branches_of_kernels_stay() -> None:
    mesh = sr.create_mesh("data:8")

    def split(x: Any) -> Any:
        return jax.shard_map(
            lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), mesh=mesh, in_specs=P(), out_specs=P()
        )(x)

    program = jax.make_jaxpr(split)(X).jaxpr
    assert without_branches(program) is program


def test_gradients_are_those_of_the_branch_that_is_taken() -> None:
    def loss(x: Any) -> Any:
        return lax.cond(x.sum() > 0, lambda x: jnp.sqrt(x).sum(), lambda x: (x * 0).sum(), x)

    plan = sr.autoplan(loss, jnp.ones((8, 4)), mesh=sr.create_mesh("data:8"))
    for x in (jnp.zeros((8, 4)), jnp.ones((8, 4))):
        expected = jax.grad(loss)(x)
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(jax.grad(plan.jit(loss))(x), expected)
        branch_count(jax.grad(loss), x)  # which compares what is computed
