"""Gradients that are zeros, read off their programs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardrules.programs.training.zeros import zero_results

W, X = jnp.ones((3, 4, 4)), jnp.ones((8, 4))


def stop(w: Any, x: Any) -> Any:
    return jnp.sum(x @ jax.lax.stop_gradient(w[0]))


def in_scan(w: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, Any]:
        return jnp.tanh(x), x @ w

    return jnp.sum(jax.lax.scan(layer, x, w)[0])


def stopped_in_scan(w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ jax.lax.stop_gradient(w)), None), x, w)[0])


def carried(w: Any, x: Any) -> Any:
    def layer(carry: Any, w: Any) -> tuple[Any, None]:
        used, unused = carry
        return (jnp.tanh(used), unused @ w), None

    return jnp.sum(jax.lax.scan(layer, (x, x), w)[0][0])


ZERO = {
    "unused": lambda w, x: jnp.sum(x),
    "stopped": stop,
    "rounded": lambda w, x: jnp.sum(jnp.round(x @ w[0])),
    "compared": lambda w, x: jnp.sum(jnp.where(w[0] > 0, 1.0, 2.0)) * x.sum(),
    "times zero": lambda w, x: jnp.sum(x) + 0.0 * jnp.sum(w),
    "mean times zero": lambda w, x: jnp.sum(x) + 0.0 * jnp.mean(w),
    "results of a loop": in_scan,
    "stopped in a loop": stopped_in_scan,
    "carried in a loop": carried,
    "in a checkpoint": lambda w, x: jax.checkpoint(stop)(w, x),
    "in branches": lambda w, x: jax.lax.cond(x[0, 0] > 0, stop, lambda w, x: jnp.sum(x), w, x),
}

NOT_ZERO = {
    "matmul": lambda w, x: jnp.sum(x @ w[0]),
    "sum": lambda w, x: jnp.sum(w),
    "loop": lambda w, x: jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]),
    "carried in the end": lambda w, x: jnp.sum(jax.lax.scan(lambda c, w: ((c[1], c[1] @ w), None), (x, x), w)[0][0]),
    "one branch": lambda w, x: jax.lax.cond(x[0, 0] > 0, stop, lambda w, x: jnp.sum(w), w, x),
    "while": lambda w, x: (
        jnp.sum(w) + jax.lax.stop_gradient(jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: x + 1, x)).sum()
    ),
}


@pytest.mark.parametrize("name", [*ZERO, *NOT_ZERO])
def test_gradients_that_are_zeros(name: str) -> None:
    assert zero_results(jax.make_jaxpr(jax.grad((ZERO | NOT_ZERO)[name]))(W, X)) == [name in ZERO]
