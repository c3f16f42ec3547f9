"""Three small models of the kinds that people train, each with a loss, a batch and rules."""

from collections.abc import Callable
from typing import Any, TypeAlias, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr

Made: TypeAlias = tuple[eqx.Module, Any]
"""A module, and its `eqx.nn.State` or `None`."""

BATCH, LENGTH, VOCABULARY, WIDTH, HEADS = 16, 8, 32, 32, 4

FSDP = sr.FSDPShardingRule("data", min_size_mb=0)
"""Whatever divides, over the axis of the batch."""


class Block(eqx.Module):
    """Attention and an MLP, each after a norm and beside a skip."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, heads: int, key: jax.Array) -> None:
        attention, up, down = jax.random.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=attention)
        self.up = eqx.nn.Linear(width, 4 * width, key=up)
        self.down = eqx.nn.Linear(4 * width, width, key=down)

    def __call__(self, x: jax.Array) -> jax.Array:
        normed, mask = jax.vmap(self.norms[0])(x), jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(normed, normed, normed, mask)
        hidden = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)))
        return x + jax.vmap(self.down)(hidden)


class Gpt(eqx.Module):
    """A language model."""

    embedding: eqx.nn.Embedding
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(
        self, key: jax.Array, *, vocabulary: int = VOCABULARY, width: int = WIDTH, heads: int = HEADS, depth: int = 2
    ) -> None:
        embedding, positions, head, *blocks = jax.random.split(key, 3 + depth)
        self.embedding = eqx.nn.Embedding(vocabulary, width, key=embedding)
        self.positions = 0.02 * jax.random.normal(positions, (LENGTH, width))
        self.blocks = [Block(width, heads, subkey) for subkey in blocks]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, vocabulary, use_bias=False, key=head)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.embedding)(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


class ConvNet(eqx.Module):
    """Two convolutions, the first followed by a batch norm, whose statistics are a state."""

    first: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    second: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        first, second, head = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(4, 16, 3, padding=1, key=first)
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
        self.second = eqx.nn.Conv2d(16, 32, 3, stride=2, padding=1, key=second)
        self.head = eqx.nn.Linear(32, 8, key=head)

    def __call__(self, image: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        x, state = self.norm(self.first(image), state)
        x = jax.nn.relu(self.second(jax.nn.relu(x)))
        return self.head(x.mean((1, 2))), state


class Residual(eqx.Module):
    """A layer that is one of many."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        up, down = jax.random.split(key)
        self.up = eqx.nn.Linear(32, 64, key=up)
        self.down = eqx.nn.Linear(64, 32, key=down)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.silu(self.up(x)))


class Stacked(eqx.Module):
    """Four equal layers in one, run by a scan."""

    inlet: eqx.nn.Linear
    layers: Residual
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        inlet, layers, head = jax.random.split(key, 3)
        self.inlet = eqx.nn.Linear(16, 32, key=inlet)
        self.layers = eqx.filter_vmap(Residual)(jax.random.split(layers, 4))
        self.head = eqx.nn.Linear(32, 8, key=head)

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, layer: (eqx.combine(layer, static)(x), None), self.inlet(x), arrays)
        return self.head(x)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -picked.mean()


def stateless_loss(module: Any, state: None, batch: tuple[Any, Any]) -> tuple[jax.Array, None]:
    """Returns the loss, and no state."""
    inputs, labels = batch
    return _cross_entropy(jax.vmap(module)(inputs), labels), state


def stateful_loss(module: Any, state: Any, batch: tuple[Any, Any]) -> tuple[jax.Array, Any]:
    """Returns the loss, and the state after this batch."""
    inputs, labels = batch
    logits, state = jax.vmap(module, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(inputs, state)
    return _cross_entropy(logits, labels), state


def _batch(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    return numbers.normal(size=(BATCH, *shape)).astype(np.float32), numbers.integers(0, 8, BATCH)


def _tokens() -> tuple[np.ndarray, np.ndarray]:
    text = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, LENGTH + 1))
    return text[:, :-1], text[:, 1:]


@final
@attrs.frozen
class Task:
    """A model to train."""

    name: str
    make: Callable[[jax.Array], Made]
    """From a random key to the module and its state."""
    loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]]
    """From module, state and batch to the loss and the next state."""
    batch: Callable[[], Any]
    tensor_parallel: sr.ShardingRule
    """Rules that split it over "model"."""


def _stateless(module: Callable[[jax.Array], eqx.Module]) -> Callable[[jax.Array], Made]:
    return lambda key: (module(key), None)


OPTIM = optax.adam(2e-3)


def params(training: Any) -> Any:
    """Returns what is trained of a module and its state."""
    return eqx.filter(training[0], eqx.is_inexact_array)


def step_of(task: Task) -> Callable[..., Any]:
    """Returns a training step as people write it, which says nothing about sharding."""

    def step(training: Any, moments: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        module, state = training
        (value, state), grads = eqx.filter_value_and_grad(task.loss, has_aux=True)(module, state, batch)
        updates, moments = OPTIM.update(grads, moments, eqx.filter(module, eqx.is_inexact_array))
        return (eqx.apply_updates(module, updates), state), moments, value

    return step


def compiled_step(task: Task, rule: sr.ShardingRule, plan: sr.ShardingPlan, mesh: Mesh) -> Callable[..., Any]:
    """Returns the step compiled for a mesh, with everything that is trained split by the rule."""
    return sr.filter_jit(
        step_of(task),
        mesh=mesh,
        in_shardings=(rule, plan.mirror, P("data")),
        out_shardings=(rule, plan.mirror, P()),
        donate=(0, 1),
    )


COLUMN, ROW = P("model"), P(None, "model")

TASKS = (
    Task(
        "gpt",
        _stateless(Gpt),
        stateless_loss,
        _tokens,
        sr.RegexShardingRule(
            [
                (r"(query_proj|key_proj|value_proj|up)/weight|up/bias", COLUMN),
                (r"(output_proj|down)/weight", ROW),
                (r"embedding|head", COLUMN),
            ]
        ),
    ),
    Task(
        "conv",
        eqx.nn.make_with_state(ConvNet),
        stateful_loss,
        lambda: _batch(4, 8, 8),
        sr.RegexShardingRule([(r"(first|second|norm)/(weight|bias)", COLUMN), (r"head/weight", ROW)]),
    ),
    Task(
        "stacked",
        _stateless(Stacked),
        stateless_loss,
        lambda: _batch(16),
        sr.RegexShardingRule(
            [
                (r"layers/", sr.StackedShardingRule(sr.RegexShardingRule([(r"up/", COLUMN), (r"down/weight", ROW)]))),
                (r"inlet/", COLUMN),
                (r"head/weight", ROW),
            ]
        ),
    ),
)
"""Everything that trains: a new one is trained under every plan and on every mesh."""
