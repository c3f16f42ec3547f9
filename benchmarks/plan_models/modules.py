"""Kinds of train steps that are written as Equinox modules: a GRU, a neural ODE, a residual net with batch norm."""

from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from plan_models.experts import Splits, constrain, constrain_as_moments
from plan_models.parts import DECAY, RATE, SECOND_DECAY, array, cross_entropy, equinox_step, tokens

GRU_SPLITS: Splits = (
    (r"(^|/)embed/weight$", 0, "rows"),
    (r"(^|/)embed/weight$", 1, "columns"),
    (r"(^|/)head/(weight|bias)$", 0, "vocab"),
)
ODE_SPLITS: Splits = (
    (r"(^|/)field/layers/(0|2)/(weight|bias)$", 0, "tensor"),
    (r"(^|/)field/layers/(1|3)/weight$", 1, "tensor"),
)
BATCH_NORM_SPLITS: Splits = (
    (r"(^|/)blocks/\d+/first/weight$", 0, "tensor"),
    (r"(^|/)blocks/\d+/norm_1/(weight|bias)$", 0, "tensor"),
    (r"(^|/)blocks/\d+/second/weight$", 1, "tensor"),
)


@final
class Recurrence(eqx.Module):
    """A language model of one GRU."""

    embed: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, units: int, vocab: int, key: jax.Array) -> None:
        first, second, third = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(vocab, units, key=first)
        self.cell = eqx.nn.GRUCell(units, units, key=second)
        self.head = eqx.nn.Linear(units, vocab, key=third)

    def __call__(self, text: jax.Array) -> jax.Array:
        x = constrain(jax.vmap(jax.vmap(self.embed))(text.T), None, "batch beside table", "columns")
        x = constrain(x, None, "batch", None)
        cell = jax.tree.map(lambda leaf: constrain(leaf, *[None] * leaf.ndim), self.cell)  # gathered before the loop

        def step(state: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = constrain(jax.vmap(cell)(now, state), "batch", None)
            return state, state

        start = constrain(jnp.zeros(x.shape[1:], x.dtype), "batch", None)
        _, states = jax.lax.scan(step, start, x)
        states = constrain(states, None, "batch beside vocab", None)
        return constrain(jax.vmap(jax.vmap(self.head))(states), None, "batch beside vocab", "vocab")


def gru(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A GRU of 1,024 units over 128 time steps, with a scan over time."""
    units, vocab, length, batch = 1024, 32000, 128, 32 * devices
    if smoke:
        units, vocab, length, batch = 32, 64, 8, devices

    def loss(model: Recurrence, text: jax.Array) -> jax.Array:
        return cross_entropy(model(text[:, :-1]), text[:, 1:].T)

    step, state = equinox_step(lambda key: Recurrence(units, vocab, key), loss)
    return step, (state, tokens(batch, length + 1))


def _gathered(layer: eqx.nn.Linear, by_inputs: bool) -> eqx.nn.Linear:
    """A layer that is gathered before the loop that uses it, apart from the features that are split."""
    split = (None, "tensor") if by_inputs else ("tensor", None)
    return eqx.tree_at(lambda leaf: leaf.weight, layer, constrain(layer.weight, *split))


@final
class NeuralODE(eqx.Module):
    """An encoder, a vector field that is integrated by Runge and Kutta's method, and a decoder."""

    into: eqx.nn.Linear
    field: eqx.nn.MLP
    out: eqx.nn.Linear
    steps: int = eqx.field(static=True)

    def __init__(self, observed: int, latent: int, hidden: int, steps: int, key: jax.Array) -> None:
        first, second, third = jax.random.split(key, 3)
        self.into = eqx.nn.Linear(observed, latent, key=first)
        self.field = eqx.nn.MLP(latent, latent, hidden, 3, activation=jax.nn.softplus, key=second)
        self.out = eqx.nn.Linear(latent, observed, key=third)
        self.steps = steps

    def __call__(self, start: jax.Array) -> jax.Array:
        width = 1.0 / self.steps
        field = tuple(_gathered(layer, bool(index % 2)) for index, layer in enumerate(self.field.layers))

        def slope(y: jax.Array) -> jax.Array:
            for index, layer in enumerate(field):
                y = jax.vmap(layer)(y)
                y = jax.nn.softplus(y) if index < len(field) - 1 else y
                y = constrain(y, "batch", None if index % 2 else "tensor")
            return y

        @jax.checkpoint
        def step(y: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            k_1 = slope(y)
            k_2 = slope(y + 0.5 * width * k_1)
            k_3 = slope(y + 0.5 * width * k_2)
            k_4 = slope(y + width * k_3)
            y = constrain(y + (width / 6 * (k_1 + 2 * k_2 + 2 * k_3 + k_4)).astype(y.dtype), "batch", None)
            return y, y

        y = constrain(jax.vmap(self.into)(start), "batch", None)
        _, states = jax.lax.scan(step, y, None, length=self.steps)
        return jax.vmap(jax.vmap(self.out))(states)


def neural_ode(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A latent ODE of 1,024 states, sixteen steps, fitted to trajectories."""
    observed, latent, hidden, steps, batch = 64, 1024, 4096, 16, 512 * devices
    if smoke:
        observed, latent, hidden, steps, batch = 8, 16, 32, 2, devices

    def loss(model: NeuralODE, batch: Any) -> jax.Array:
        predicted = model(batch["start"])
        return jnp.mean((predicted - batch["path"].swapaxes(0, 1)).astype(jnp.float32) ** 2)

    step, state = equinox_step(lambda key: NeuralODE(observed, latent, hidden, steps, key), loss)
    return step, (state, {"start": array(batch, observed), "path": array(batch, steps, observed)})


@final
class NormedBlock(eqx.Module):
    """Two convolutions, each with a batch norm, beside a shortcut."""

    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    norm_1: eqx.nn.BatchNorm
    norm_2: eqx.nn.BatchNorm
    shortcut: eqx.nn.Conv2d | None

    def __init__(self, before: int, width: int, stride: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(before, width, 3, stride, 1, use_bias=False, key=keys[0])
        self.second = eqx.nn.Conv2d(width, width, 3, 1, 1, use_bias=False, key=keys[1])
        self.norm_1, self.norm_2 = (eqx.nn.BatchNorm(width, "examples", mode="batch") for _ in range(2))
        plain = stride == 1 and before == width
        self.shortcut = None if plain else eqx.nn.Conv2d(before, width, 1, stride, use_bias=False, key=keys[2])

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        y, state = self.norm_1(self.first(x), state)
        y, state = self.norm_2(self.second(jax.nn.relu(y)), state)
        return jax.nn.relu(y.astype(x.dtype) + (x if self.shortcut is None else self.shortcut(x))), state


@final
class ResidualNet(eqx.Module):
    """A residual net for images of 64 x 64, which is called under a `vmap` with an axis name."""

    stem: eqx.nn.Conv2d
    blocks: list[NormedBlock]
    head: eqx.nn.Linear

    def __init__(self, widths: tuple[int, ...], classes: int, key: jax.Array) -> None:
        keys = jax.random.split(key, len(widths) + 2)
        self.stem = eqx.nn.Conv2d(3, widths[0], 3, 1, 1, key=keys[0])
        before = (widths[0], *widths)
        self.blocks = [
            NormedBlock(before[index], width, 2 if index else 1, keys[index + 2]) for index, width in enumerate(widths)
        ]
        self.head = eqx.nn.Linear(widths[-1], classes, key=keys[1])

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        x = self.stem(x)
        for block in self.blocks:
            x, state = block(x, state)
        return self.head(jnp.mean(x, (1, 2))), state


def batch_norm(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A residual net with `eqx.nn.BatchNorm`: statistics go through the step as state."""
    widths, image, classes, batch = (128, 256, 512), 64, 1000, 32 * devices
    if smoke:
        widths, image, classes, batch = (8, 16), 8, 16, devices
    optimizer = optax.adam(RATE, b1=DECAY, b2=SECOND_DECAY)

    def start(key: jax.Array) -> Any:
        model, state = eqx.nn.make_with_state(ResidualNet)(widths, classes, key)
        return model, state, optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def loss(model: ResidualNet, state: eqx.nn.State, batch: Any) -> tuple[jax.Array, eqx.nn.State]:
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, model)
        images = constrain(batch["images"], "batch", None, None, None)
        scores, state = jax.vmap(low, axis_name="examples", in_axes=(0, None), out_axes=(0, None))(images, state)
        return cross_entropy(constrain(scores, "batch", None), batch["labels"]), state

    def step(train_state: Any, batch: Any) -> Any:
        model, state, moments = train_state
        (value, state), gradients = eqx.filter_value_and_grad(loss, has_aux=True)(model, state, batch)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        updates, moments = optimizer.update(constrain_as_moments(gradients), moments)
        model = eqx.combine(constrain_as_moments(optax.apply_updates(params, updates)), static)
        return (model, state, moments), value

    shapes = eqx.filter_eval_shape(start, jax.random.key(0))
    return step, (shapes, {"images": array(batch, 3, image, image), "labels": tokens(batch)})
