"""The parts that models of the planning benchmark share: Adam, norms, attention, losses. Arrays are only shapes."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from plan_models.experts import constrain, constrain_as_moments

RATE, DECAY, SECOND_DECAY, TINY = 1e-3, 0.9, 0.99, 1e-8
"""Adam's usual settings, which no figure depends on."""


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array of tokens or labels."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def with_moments(params: Any) -> dict[str, Any]:
    """Returns the state of a train step: parameters, and the moments of Adam in float32."""
    moments = jax.tree.map(lambda leaf: array(*leaf.shape, dtype=jnp.float32), params)
    return {"params": params, "mu": moments, "nu": moments, "count": tokens()}


def train_step(loss: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], Any]:
    """Returns a step that lowers a loss by Adam."""

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), constrain_as_moments(gradients))
        count = state["count"] + 1
        mu = jax.tree.map(lambda m, g: DECAY * m + (1 - DECAY) * g, state["mu"], gradients)
        nu = jax.tree.map(lambda n, g: SECOND_DECAY * n + (1 - SECOND_DECAY) * g * g, state["nu"], gradients)
        first, second = 1 - DECAY ** count.astype(jnp.float32), 1 - SECOND_DECAY ** count.astype(jnp.float32)

        def updated(p: jax.Array, m: jax.Array, n: jax.Array) -> jax.Array:
            return (p - RATE * (m / first) / (jnp.sqrt(n / second) + TINY)).astype(p.dtype)

        params = constrain_as_moments(jax.tree.map(updated, state["params"], mu, nu))
        return {"params": params, "mu": mu, "nu": nu, "count": count}, value

    return step


def equinox_step(
    make: Callable[[jax.Array], Any], loss: Callable[[Any, Any], jax.Array]
) -> tuple[Callable[[Any, Any], Any], tuple[Any, Any]]:
    """Returns a step that lowers the loss of a module by optax's Adam, and its state as shapes, in bfloat16."""
    optimizer = optax.adam(RATE, b1=DECAY, b2=SECOND_DECAY)

    def in_float32(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    def start(key: jax.Array) -> tuple[Any, Any]:
        model = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, make(key))
        return model, optimizer.init(in_float32(eqx.filter(model, eqx.is_inexact_array)))

    def step(state: tuple[Any, Any], batch: Any) -> Any:
        model, moments = state
        value, gradients = eqx.filter_value_and_grad(loss)(model, batch)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        updates, moments = optimizer.update(in_float32(constrain_as_moments(gradients)), moments)
        return (eqx.combine(constrain_as_moments(optax.apply_updates(params, updates)), static), moments), value

    return step, eqx.filter_eval_shape(start, jax.random.key(0))


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Scales the last dimension to a mean square of one."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype) * weight


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Scales the last dimension to a mean of zero and a variance of one."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, -1, keepdims=True)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(x.dtype) * weight + bias


def in_heads(x: jax.Array, heads: int) -> jax.Array:
    """Cuts the last dimension into heads."""
    batch, length, width = x.shape
    return constrain(x.reshape(batch, length, heads, width // heads), "batch", None, "tensor", None)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    """Returns the result of each head, with heads joined."""
    batch, length, heads, size = q.shape
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / math.sqrt(size)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, k.shape[1]), bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1).astype(q.dtype), v)
    return constrain(mixed.reshape(batch, length, heads * size), "batch", None, "tensor")


def residual(x: jax.Array) -> jax.Array:
    """Returns the hidden state between layers."""
    return constrain(x, "batch", "length", None)


def whole(x: jax.Array) -> jax.Array:
    """Returns a hidden state with all of its positions, to multiply with split weights."""
    return constrain(x, "batch", None, None)


def look_up(table: jax.Array, text: jax.Array) -> jax.Array:
    """Returns the hidden state of each token."""
    return residual(constrain(table[text], "batch beside table", None, "columns"))


def vocabulary_scores(x: jax.Array, head: jax.Array) -> jax.Array:
    """Returns a score for each token of the vocabulary."""
    return constrain(constrain(x, "batch beside vocab", None, None) @ head, "batch beside vocab", None, "vocab")


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean loss of a softmax; the last dimension is the classes."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return -jnp.mean(jnp.take_along_axis(scores, labels[..., None], -1))
