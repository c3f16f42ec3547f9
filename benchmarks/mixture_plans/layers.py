"""Layers of a mixture of experts as users write them: train steps without any sharding.

Tokens are added to what two experts make of each. `dense` dispatches as GShard does, by one-hot tensors with a
capacity; `sorted` sorts tokens by expert, drops none, and multiplies with `jax.lax.ragged_dot`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
from plan_models.parts import array, rms_norm, train_step, with_moments

import shardrules as sr

Layer: TypeAlias = Callable[[Any, jax.Array], jax.Array]
"""From the parameters of a layer and tokens to what its experts make of them."""

KINDS = ("dense", "sorted")


@final
@attrs.frozen
class Mixture:
    """The sizes of a mixture."""

    kind: str
    batch: int
    length: int = 1024
    width: int = 2048
    hidden: int = 4096
    experts: int = 16
    choices: int = 2
    layers: int = 2

    @property
    def capacity(self) -> int | None:
        """How many tokens of each sequence an expert takes: a quarter more than an even share."""
        return None if self.kind == "sorted" else 5 * self.length * self.choices // (4 * self.experts)

    def args(self) -> tuple[Any, Any]:
        """The shapes of the state of training and of the tokens."""
        layer = {
            "norm": array(self.width),
            "router": array(self.width, self.experts),
            "up": array(self.experts, self.width, self.hidden),
            "down": array(self.experts, self.hidden, self.width),
        }
        return with_moments([layer] * self.layers), array(self.batch, self.length, self.width)

    def step(self, layer: Layer) -> Callable[[Any, Any], Any]:
        """A train step, of which each layer is computed again in the backward pass."""

        def loss(layers: Any, tokens: jax.Array) -> jax.Array:
            for params in layers:
                tokens = jax.checkpoint(lambda params, tokens: tokens + layer(params, tokens))(params, tokens)
            return (tokens.astype(jnp.float32) ** 2).mean()

        return train_step(loss)

    def plain(self) -> Layer:
        """The layer as users write it."""
        return self.dense_layer if self.kind == "dense" else self.sorted_layer

    def dense_layer(self, params: Any, tokens: jax.Array) -> jax.Array:
        """By one-hot tensors."""
        y, weights, routes = self.routed(params, tokens)
        combine = self.combine_tensor(weights, routes)
        slots = jnp.einsum("bsec,bsd->becd", (combine > 0).astype(y.dtype), y)
        inner = jax.nn.gelu(jnp.einsum("becd,edf->becf", slots, params["up"]))
        return jnp.einsum("bsec,becd->bsd", combine, jnp.einsum("becf,efd->becd", inner, params["down"]))

    def sorted_layer(self, params: Any, tokens: jax.Array) -> jax.Array:
        """By sorting."""
        y, weights, routes = self.routed(params, tokens)
        y, weights, routes = y.reshape(-1, self.width), weights.reshape(-1, self.choices), routes.reshape(-1)
        order = jnp.argsort(routes)
        sizes = jnp.bincount(routes, length=self.experts).astype(jnp.int32)
        results = grouped_mlp(params, y[order // self.choices], sizes)[jnp.argsort(order)]
        results = results.reshape(-1, self.choices, self.width)
        return jnp.einsum("tkd,tk->td", results, weights).reshape(tokens.shape)

    def exchanged_layer(self, params: Any, tokens: jax.Array) -> jax.Array:
        """By `shardrules.expert_exchange`."""
        y, weights, routes = self.routed(params, tokens)
        experts = {name: params[name] for name in ("up", "down")}
        function = jax.tree_util.Partial(mlp if self.kind == "dense" else grouped_mlp, experts)
        return sr.expert_exchange(y, routes, weights, function, capacity=self.capacity)[0]

    def routed(self, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Normalised tokens, and the weights and indices of their experts."""
        y = rms_norm(tokens, params["norm"])
        weights, routes = jax.lax.top_k(jax.nn.softmax((y @ params["router"]).astype(jnp.float32)), self.choices)
        return y, weights.astype(y.dtype), routes

    def combine_tensor(self, weights: jax.Array, routes: jax.Array) -> jax.Array:
        """[sequences, tokens, experts, capacity]: the weights that bring results back. First choices are first."""
        assert self.capacity is not None
        sequences, length, choices = routes.shape
        chosen = jax.nn.one_hot(routes, self.experts, dtype=jnp.int32)
        in_order = jnp.moveaxis(chosen, 2, 1).reshape(sequences, choices * length, -1)
        before = ((jnp.cumsum(in_order, 1) - in_order) * in_order).sum(-1).reshape(sequences, choices, length)
        slots = jax.nn.one_hot(jnp.moveaxis(before, 1, 2), self.capacity, dtype=weights.dtype)  # zero past the last
        return jnp.einsum("bske,bskc,bsk->bsec", chosen.astype(weights.dtype), slots, weights)


def mlp(params: Any, rows: jax.Array) -> jax.Array:
    """An expert on its rows."""
    return jax.nn.gelu(rows @ params["up"]) @ params["down"]


def grouped_mlp(params: Any, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """All experts on rows that are sorted by expert."""
    return jax.lax.ragged_dot(jax.nn.gelu(jax.lax.ragged_dot(rows, params["up"], sizes)), params["down"], sizes)
