"""Small mixtures of experts, and what they compute, by loops over tokens in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EXPERTS, WIDTH, HIDDEN, CHOICES = 16, 4, 6, 2


def expert(params: Any, rows: Any) -> Any:
    """One expert on its rows."""
    return jnp.tanh(rows @ params["up"] + params["bias"]) @ params["down"]


def grouped_experts(params: Any, rows: Any, sizes: Any) -> Any:
    """All experts, on rows that are sorted by expert."""
    expert_of_row = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))
    hidden = jax.lax.ragged_dot(rows, params["up"], sizes) + params["bias"][expert_of_row]
    return jax.lax.ragged_dot(jnp.tanh(hidden), params["down"], sizes)


def experts_of(params: Any, capacity: int | None) -> Any:
    return jax.tree_util.Partial(grouped_experts if capacity is None else expert, params)


def parameters(dtype: Any = jnp.float32) -> Any:
    draw = np.random.default_rng(0).normal
    shapes = {"up": (EXPERTS, WIDTH, HIDDEN), "bias": (EXPERTS, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    return {name: jnp.asarray(draw(size=shape) / 2, dtype) for name, shape in shapes.items()}


def tokens_and_weights(*lead: int, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    generator = np.random.default_rng(1)
    tokens, weights = generator.normal(size=(*lead, WIDTH)), generator.uniform(size=(*lead, CHOICES))
    return jnp.asarray(tokens, dtype), jnp.asarray(weights, dtype)


def routes_of(kind: str, *lead: int) -> jax.Array:
    """Choices of experts: some to none, all of one expert, or all of a few."""
    shape, generator = (*lead, CHOICES), np.random.default_rng(2)
    if kind == "one expert":
        routes = np.full(shape, 5)
    elif kind == "few experts":
        routes = generator.integers(0, 3, size=shape) * 5
    else:
        routes = generator.integers(-1, EXPERTS, size=shape)
    return jnp.asarray(routes, jnp.int32)


def is_kept(routes: Any, capacity: int | None) -> np.ndarray:
    """The choices that an expert takes: the first of each group."""
    flat = np.asarray(routes).reshape(-1, *routes.shape[-2:])
    kept = (flat >= 0) & (flat < EXPERTS)
    if capacity is not None:
        for group, choices in enumerate(flat):
            used = np.zeros(EXPERTS + 1, int)  # the last for choices of none
            for choice in range(choices.shape[1]):
                for token in range(choices.shape[0]):
                    kept[group, token, choice] &= used[choices[token, choice]] < capacity
                    used[choices[token, choice]] += 1
    return kept.reshape(routes.shape)


def mixture(tokens: Any, weights: Any, params: Any, routes: Any, kept: Any) -> Any:
    """The weighted sum of what every expert makes of every token."""
    wide = [jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree) for tree in (tokens, weights, params)]
    tokens32, weights32, params32 = wide
    results = jax.vmap(expert, (0, None), -2)(params32, tokens32)
    chosen = jax.nn.one_hot(routes, EXPERTS) * jnp.asarray(kept)[..., None]
    return jnp.einsum("...ke,...k,...ed->...d", chosen, weights32, results)
