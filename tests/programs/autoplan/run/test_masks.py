"""Masks that loops compute where they read them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

import shardrules as sr
from shardrules.programs.autoplan.run.masks import with_masks_inside
from shardrules.programs.jaxprs.walk import equations, without_dead_code

LENGTH = 1024
WEIGHTS = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 16)), jnp.float32) / 4
X = jnp.asarray(np.random.default_rng(1).normal(size=(LENGTH, 16)), jnp.float32) / 4


def causal() -> jax.Array:
    return jnp.tril(jnp.ones((LENGTH, LENGTH), bool))


def attention(x: jax.Array, w: jax.Array, mask: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.where(mask, (x @ w) @ x.T, -1e9)) @ x


def scanned(layer: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[Any, Any], Any]:
    return lambda weights, x: jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0].sum()


def rewritten(fn: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    before = jax.make_jaxpr(fn)(*args)
    after = ClosedJaxpr(with_masks_inside(before.jaxpr), before.consts)
    return before, without_dead_code(after)


def masks_outside(program: ClosedJaxpr) -> int:
    """The number of arrays as large as the mask that a program computes in front of its loops or between them."""
    steps = [equation for equation in program.eqns if equation.primitive.name != "scan"]
    return sum(var.aval.shape[-2:] == (LENGTH, LENGTH) for equation in steps for var in equation.outvars)


def scan_of(program: ClosedJaxpr) -> Any:
    return next(equation for equation in program.eqns if equation.primitive.name == "scan")


LAYERS = {
    "in the layer": lambda x, w: attention(x, w, causal()),
    "checkpointed": jax.checkpoint(lambda x, w: attention(x, w, causal())),
    "checkpointed, matmuls kept": jax.checkpoint(
        lambda x, w: attention(x, w, causal()), policy=jax.checkpoint_policies.dots_saveable
    ),
    "in a call": jax.jit(lambda x, w: attention(x, w, causal())),
    "in a loop of the layer": lambda x, w: jax.lax.scan(lambda x, _: (attention(x, w, causal()), None), x, length=2)[0],
}


@pytest.mark.parametrize("name", LAYERS)
def test_loops_compute_masks_and_the_same_values(name: str) -> None:
    before, after = rewritten(jax.value_and_grad(scanned(LAYERS[name])), WEIGHTS, X)
    assert (masks_outside(before) > 0, masks_outside(after)) == (True, 0)
    for old, new in zip(jaxpr_as_fun(before)(WEIGHTS, X), jaxpr_as_fun(after)(WEIGHTS, X), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_mask_in_front_of_the_loop_is_computed_in_it() -> None:
    def loss(weights: Any, x: Any) -> Any:
        mask = causal()
        return scanned(lambda x, w: attention(x, w, mask))(weights, x)

    _, after = rewritten(jax.grad(loss), WEIGHTS, X)
    assert masks_outside(after) == 0


def unchanged(fn: Callable[..., Any], *args: Any) -> bool:
    before = jax.make_jaxpr(fn)(*args).jaxpr
    return with_masks_inside(before) is before


def test_what_loops_read_otherwise_stays() -> None:
    ones = np.ones((LENGTH, LENGTH), np.float32)

    def by_argument(mask: Any, weights: Any, x: Any) -> Any:
        return scanned(lambda x, w: attention(x, w, mask > 0))(weights, x)

    def by_matmul(weights: Any, x: Any) -> Any:
        mean = jnp.full((LENGTH, LENGTH), 1 / LENGTH)
        return scanned(lambda x, w: mean @ x @ w)(weights, x)

    def small(weights: Any, x: Any) -> Any:
        mask = jnp.tril(jnp.ones((16, 16), bool))
        return scanned(lambda x, w: x @ jnp.where(mask, w, 0.0))(weights, x)

    def carried(x: Any) -> Any:
        return jax.lax.scan(lambda sums, _: (sums + x.sum(), None), jnp.zeros((LENGTH, LENGTH)), length=2)[0]

    def dear(x: Any) -> Any:
        table = jnp.sin(jnp.arange(LENGTH**2, dtype=jnp.float32).reshape(LENGTH, LENGTH))
        return jax.lax.scan(lambda x, _: (x * table, None), x, length=2)[0]

    assert unchanged(by_argument, ones, WEIGHTS, X)
    assert unchanged(by_matmul, WEIGHTS, X)
    assert unchanged(small, WEIGHTS, X)
    assert unchanged(carried, X)
    assert unchanged(dear, ones)


def test_a_mask_that_is_read_in_passing_and_returned_stays_as_well() -> None:
    def fn(weights: Any, x: Any) -> Any:
        mask = causal()
        return scanned(lambda x, w: attention(x, w, mask))(weights, x), mask

    before, after = rewritten(fn, WEIGHTS, X)
    assert masks_outside(after) > 0
    assert len(scan_of(after).invars) < len(scan_of(before).invars)
    np.testing.assert_array_equal(jaxpr_as_fun(after)(WEIGHTS, X)[1], causal())


@pytest.mark.slow
def test_plans_run_with_masks_inside() -> None:
    step = jax.value_and_grad(scanned(LAYERS["in the layer"]))
    planned = sr.autoplan(step, WEIGHTS, X, mesh=sr.create_mesh("data:4,model:2"))
    scans = [each for each in equations(planned.call.jaxpr) if each.primitive.name == "scan"]
    assert all("iota" in str(scan.params["jaxpr"]) for scan in scans)
    for old, new in zip(jax.tree.leaves(step(WEIGHTS, X)), jax.tree.leaves(planned.jit(step)(WEIGHTS, X)), strict=True):
        np.testing.assert_allclose(old, new, rtol=1e-4, atol=1e-5)
