"""A train state with everything that checkpoints hold, and the comparison of two of them."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardrules as sr

OPTIM = optax.adamw(1e-2)
RULES = sr.DimShardingRule("model", 0, ignore_ndim_error=True) | sr.FSDPShardingRule("data", min_size_mb=0)


class State(eqx.Module):
    """As the pages on training have it: a model, its optimizer, a step and a typed key; and a few more leaves."""

    model: eqx.nn.MLP
    optimizer: optax.OptState
    step: jax.Array
    key: jax.Array
    keys: jax.Array
    half: jax.Array
    eighth: jax.Array
    exponents: jax.Array
    epoch: int
    rate: float
    is_frozen: bool
    activation: Callable[..., Any]
    name: str


def make_state(seed: int = 0, epoch: int = 3) -> State:
    """Returns a state whose values depend on the seed."""
    rng = np.random.default_rng(seed)
    shapes = eqx.filter_eval_shape(eqx.nn.MLP, 8, 8, 64, 2, key=jax.random.key(0))

    def filled(leaf: Any) -> Any:  # by numpy: drawing each array with JAX takes seconds to compile
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        return jnp.asarray(rng.standard_normal(leaf.shape, np.float32)) if is_shape else leaf

    model = jax.tree.map(filled, shapes)
    numbers = rng.standard_normal((16, 8), np.float32)
    return State(
        model,
        OPTIM.init(eqx.filter(model, eqx.is_array)),
        jnp.array(epoch),
        jax.random.key(seed),
        jax.random.split(jax.random.key(seed), 8),
        jnp.asarray(numbers.astype(jnp.bfloat16)),
        jnp.asarray(numbers.astype(jnp.float8_e4m3fn)),
        jnp.asarray(np.ones(8, jnp.float8_e8m0fnu)),
        epoch,
        epoch / 7,
        epoch > 0,
        jax.nn.gelu,
        "state",
    )


def like_state() -> State:
    """Returns the shapes of a state, with other Python numbers."""
    shapes = eqx.filter_eval_shape(make_state)
    numbers = lambda state: (state.epoch, state.rate, state.is_frozen)  # noqa: E731
    return eqx.tree_at(numbers, shapes, (0, 0.0, False))


def place(state: State, mesh: jax.sharding.Mesh) -> State:
    """Places a state: its large arrays are split, where they can be."""
    return sr.filter_shard(state, sr.FittedShardingRule(RULES), mesh)


def facts(tree: Any) -> list[Any]:
    """Returns what must be equal in equal trees, bit by bit."""
    result: list[Any] = []
    for leaf in jax.tree.leaves(sr.filter_gather(tree)):
        if eqx.is_array(leaf):
            kind = str(leaf.dtype)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            result.append((kind, np.asarray(leaf).shape, np.asarray(leaf).tobytes()))
        else:
            result.append((type(leaf), leaf))
    return result
