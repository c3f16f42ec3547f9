"""The backward pass of a region reads what the forward pass keeps, split as it is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardrules as sr
from shardrules.analysis.compiling.model_flops import without_dead_code
from shardrules.errors import ConfigError
from shardrules.regions.derivative import _backward_pass
from tests.regions.test_region import close, gradients, normalise, real


def residual_terms(region: Any, *arrays: jax.Array) -> list[tuple[str, ...]] | None:
    kinds = tuple((array.shape, array.dtype, False) for array in arrays)
    residuals = _backward_pass(region.on_shards({}), kinds, None).residuals
    return None if residuals is None else [residual.term for residual in residuals]


def test_residuals_have_the_letters_of_what_they_come_from() -> None:
    @jax.custom_vjp
    def attention(q: Any, k: Any) -> Any:
        return jax.nn.softmax(q @ k.mT) @ k

    def forward(q: Any, k: Any) -> Any:
        scores = q @ k.mT
        return attention(q, k), (q, k, jax.nn.logsumexp(scores, axis=-1))

    def backward(saved: Any, cotangent: Any) -> Any:
        q, k, total = saved
        weights = jnp.exp(q @ k.mT - total[..., None])
        changed = weights * (cotangent @ k.mT)
        changed = changed - weights * changed.sum(-1, keepdims=True)
        return changed @ k, changed.mT @ q + weights.mT @ cotangent

    attention.defvjp(forward, backward)
    region = sr.region("b s d, b t d -> b s d", split="b")(lambda q, k: attention(q, k))
    q, k = real(4, 6, 8), real(4, 5, 8, seed=1)
    assert residual_terms(region, q, k) == [("b", "s", "d"), ("b", "t", "d"), ("b", "residual2_1")]
    close(gradients(region, 2)(q, k), gradients(lambda q, k: jax.nn.softmax(q @ k.mT) @ k, 2)(q, k))
    sr.check_region(region, q, k)


def test_a_residual_that_mixes_shards_is_computed_again() -> None:
    """The largest element of all rows is another on each device."""

    @jax.custom_vjp
    def cube(x: Any) -> Any:
        return x**3

    cube.defvjp(lambda x: (x**3, (x, jnp.abs(x).max())), lambda saved, g: (3 * saved[0] ** 2 * g + 0 * saved[1],))
    region = sr.region("r d -> r d", split="r")(lambda x: cube(x))
    assert residual_terms(region, real(4, 2)) is None
    sr.check_region(region, real(4, 2))


def test_a_dim_of_two_letters_is_computed_again() -> None:
    region = sr.region("a b d -> a b d", split="a b")(
        lambda x: jnp.tanh(x.reshape(-1, x.shape[-1])).reshape(x.shape) ** 2
    )
    assert residual_terms(region, real(4, 6, 2)) is None
    sr.check_region(region, real(4, 6, 2))


def test_what_all_shards_share_is_computed_once() -> None:
    region = sr.region("r d, d e -> r e", split="r")(lambda x, w: x @ jnp.tanh(w).astype(x.dtype))
    x, w = real(4, 6), real(6, 3, seed=1)
    terms = residual_terms(region, x, w)
    assert terms is not None
    text = str(jax.make_jaxpr(lambda x, w: jax.vjp(region, x, w)[1](jnp.ones((4, 3))))(x, w))
    assert "r" in [letter for term in terms for letter in term]
    assert text.count("region[") == 2
    sr.check_region(region, x, w)


def test_whole_numbers_have_no_gradient() -> None:
    region = sr.region("r d, k -> k d", whole="r d k")(lambda table, indices: table[indices])
    table, indices = real(6, 4), jnp.array([1, 5, 1])
    close(
        jax.grad(lambda table: (region(table, indices) ** 2).sum())(table),
        jnp.zeros((6, 4)).at[jnp.array([1, 5])].set(jnp.stack([4 * table[1], 2 * table[5]])),
    )


def test_gradients_that_nothing_needs_are_not_computed() -> None:
    region = sr.region("r d, d -> r d", split="r")(normalise)
    x, weight = real(8, 4), real(4, seed=1)
    program = without_dead_code(jax.make_jaxpr(jax.grad(lambda x: (region(x, weight) ** 2).sum()))(x))
    backward = [equation for equation in program.eqns if equation.primitive.name == "region"][-1]
    assert [aval.shape for aval in backward.params["program"].out_avals] == [(8, 4)]
    assert len(backward.outvars) == 1


def test_kernels_that_refuse_shards_of_half_are_computed_again() -> None:
    def strict(x: Any) -> Any:
        if x.shape[0] not in (8, 1):
            raise ValueError("8 rows, or 1")
        return jnp.sin(x)

    region = sr.region("r -> r", split="r")(strict)
    assert residual_terms(region, real(8)) is None
    close(gradients(region, 1)(real(8)), gradients(jnp.sin, 1)(real(8)))


def test_second_derivatives_say_what_is_missing() -> None:
    region = sr.region("r -> r", split="r")(jnp.sin)
    with pytest.raises(ConfigError, match="first derivatives in reverse mode"):
        jax.grad(lambda x: jax.grad(lambda x: region(x).sum())(x).sum())(jnp.ones(4))


def test_losses_in_loops_have_gradients() -> None:
    region = sr.region("r d, d -> r d", split="r")(normalise)

    def loss(norm: Any, x: Any, weights: Any) -> Any:
        def layer(x: Any, weight: Any) -> Any:
            return jax.checkpoint(norm)(x, weight) + x, None

        return (lax.scan(layer, x, weights)[0] ** 2).sum()

    x, weights = real(8, 4), real(3, 4, seed=1)
    close(*(jax.grad(lambda w, norm=norm: loss(norm, x, w))(weights) for norm in (region, normalise)))


def test_bfloat16_gradients_keep_their_dtype() -> None:
    region = sr.region("r d, d -> r d", split="r")(normalise)
    x, weight = real(8, 4, dtype=jnp.bfloat16), real(4, seed=1)
    grads = gradients(region, 2)(x, weight)
    assert [grad.dtype for grad in grads] == [jnp.bfloat16, np.float32]


def test_a_residual_is_no_sum_over_letters_of_other_operands() -> None:
    """What comes from keys has nothing of queries in it."""
    region = sr.region("s d, t d -> s t", split="s t")(lambda q, k: q @ jnp.tanh(k).T)
    terms = residual_terms(region, real(4, 3), real(6, 3, seed=1))
    assert terms is not None
    sr.check_region(region, real(4, 3), real(6, 3, seed=1))


def test_results_of_different_operands() -> None:
    region = sr.region("s d, t d -> s d, t d", split="s t")(lambda q, k: (jnp.sin(q), jnp.cos(k)))
    sr.check_region(region, real(4, 3), real(6, 3, seed=1))


def test_a_gradient_from_shards_and_from_what_they_share_is_refused() -> None:
    region = sr.region("r d, d -> r d, d", split="r")(lambda x, w: (x * w, jnp.sin(w)))
    message = r"gradient of operand 1 is a sum over 'r' and comes from result 1, too, which has no 'r'"
    with pytest.raises(ConfigError, match=message):
        gradients(lambda x, w: region(x, w)[0], 2)(real(8, 3), real(3, seed=1))
