"""An LSTM for the planning benchmark: Equinox modules and optax, a scan over time."""

from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp

from plan_models.experts import Expert, Splits, constrain, plain, vocabularies
from plan_models.parts import cross_entropy, equinox_step, tokens

SPLITS: Splits = (
    (r"(^|/)layers/\d+/(inputs|hidden|bias)$", -1, "tensor"),
    (r"(^|/)head$", 1, "vocab"),
    (r"(^|/)embed$", 0, "rows"),
    (r"(^|/)embed$", 1, "columns"),
)


@final
class Layer(eqx.Module):
    """One layer: the share of the inputs is computed for all times at once, the share of the hidden state in a scan.

    The gates have a dimension of their own, so that hidden units can be split.
    """

    inputs: jax.Array
    hidden: jax.Array
    bias: jax.Array

    def __init__(self, width: int, units: int, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.inputs = jax.random.normal(first, (width, 4, units)) / width**0.5
        self.hidden = jax.random.normal(second, (units, 4, units)) / units**0.5
        self.bias = jnp.zeros((4, units))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Takes `(time, batch, width)`, and returns the hidden states of all times."""
        input_gates = constrain(jnp.einsum("tbd,dgh->tbgh", x, self.inputs) + self.bias, None, "batch", None, "tensor")

        hidden = constrain(self.hidden, None, None, "tensor")  # otherwise every step of the scan gathers it

        def cell(carry: tuple[jax.Array, jax.Array], now: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            h, c = carry
            gates = now + jnp.einsum("bk,kgh->bgh", h, hidden)
            i, f, g, o = (constrain(gates, "batch", None, "tensor")[:, n] for n in range(4))
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = constrain(jax.nn.sigmoid(o) * jnp.tanh(c), "batch", None)
            return (h, constrain(c, "batch", "tensor")), h

        start = jnp.zeros((x.shape[1], self.hidden.shape[0]), x.dtype)
        _, states = jax.lax.scan(
            cell, (constrain(start, "batch", None), constrain(start, "batch", "tensor")), input_gates
        )
        return states


@final
class Recurrent(eqx.Module):
    """A language model: an embedding, layers, a head."""

    embed: jax.Array
    layers: list[Layer]
    head: jax.Array

    def __init__(self, units: int, layers: int, vocab: int, key: jax.Array) -> None:
        keys = jax.random.split(key, layers + 2)
        self.embed = jax.random.normal(keys[0], (vocab, units))
        self.head = jax.random.normal(keys[1], (units, vocab)) / units**0.5
        self.layers = [Layer(units, units, layer_key) for layer_key in keys[2:]]

    def __call__(self, text: jax.Array) -> jax.Array:
        x = constrain(constrain(self.embed[text.T], None, "batch beside table", "columns"), None, "batch", None)
        for layer in self.layers:
            x = constrain(eqx.filter_checkpoint(layer)(x), None, "batch", None)
        x = constrain(x, None, "batch beside vocab", None)
        return constrain(x @ self.head, None, "batch beside vocab", "vocab")


def lstm(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """Two layers of 1,024 units, 128 time steps."""
    units, layers, vocab, length, batch = 1024, 2, 32000, 128, 32 * devices
    if smoke:
        units, layers, vocab, length, batch = 32, 2, 64, 8, devices

    def make(key: jax.Array) -> Recurrent:
        return Recurrent(units, layers, vocab, key)

    def loss(model: Recurrent, text: jax.Array) -> jax.Array:
        return cross_entropy(model(text[:, :-1]), text[:, 1:].T)

    step, state = equinox_step(make, loss)
    return step, (state, tokens(batch, length + 1))


def lstm_experts() -> tuple[Expert, ...]:
    """The plans for an LSTM: some split hidden units, and the vocabulary with them."""
    d, m, df = ("data",), ("model",), ("data", "fsdp")
    return (
        *plain(SPLITS),
        *vocabularies(SPLITS),
        Expert("units over model, ZeRO-1 over data", d, (), d, m, splits=SPLITS),
        Expert("units over model, FSDP over data", d, d, d, m, splits=SPLITS),
        Expert("units over model, ZeRO-1 over data+fsdp", df, (), df, m, splits=SPLITS),
        Expert("units over model, FSDP over data+fsdp", df, df, df, m, splits=SPLITS),
    )
