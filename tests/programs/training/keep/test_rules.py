"""Kernels with backward rules of their own: what they leave for these can be kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.programs.training.keep.programs import Traced, batch, layer_weights, norm


@jax.custom_vjp
def kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return forward(q, k, v)[0]


def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    sums = jax.nn.logsumexp(scores, -1)
    result = jnp.einsum("bqk,bkd->bqd", jnp.exp(scores - sums[..., None]), v)
    return result, (q, k, v, result, sums)


def backward(saved: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, result, sums = saved
    weights = jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k) - sums[..., None])
    inner = jnp.einsum("bqd,bkd->bqk", gradient, v) - jnp.sum(gradient * result, -1, keepdims=True)
    scores = weights * inner
    dq, dk = jnp.einsum("bqk,bkd->bqd", scores, k), jnp.einsum("bqk,bqd->bkd", scores, q)
    return dq, dk, jnp.einsum("bqk,bqd->bkd", weights, gradient)


kernel.defvjp(forward, backward)


def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        q, k, v = jnp.split(norm(x) @ weights["qkv"], 3, -1)
        return x + kernel(q, k, v) @ weights["out"], None

    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


@pytest.mark.slow
def test_what_the_forward_rule_returns_is_kept_inside_of_it() -> None:
    weights = {name: layer_weights()[name] for name in ("qkv", "out")}
    traced = Traced.of(loss, weights, batch(2, 64))
    choices = traced.choices(offload=False, count=100)
    plain, (_, gradients) = traced.matmul_count(), traced.gradient()
    most, least = choices[1], choices[-1]
    # The kernel and the projection are not computed again, and in the end all are.
    assert traced.matmul_count(most) == plain
    assert traced.matmul_count(least) == plain + 3
    (unit,) = most.units
    results = [result for _, result in unit.kept]
    assert max(results) > 1, "an array of the forward rule is kept"
    for keep in (most, least):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), traced.gradient(keep)[1], gradients
        )
