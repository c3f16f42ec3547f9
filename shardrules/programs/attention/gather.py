"""Attention to gathered keys: each device has the keys and values of all, and its own queries.

Causal queries are in zig-zag order, and attend to the keys of one device after the other, so that nothing is computed
which is masked.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardrules.programs.attention.blocks import Keys, Queries, Rows
from shardrules.programs.attention.rounds import Rounds


def gather(tree: Any, axis_name: Sequence[str]) -> Any:
    """Gathers arrays that are split along dim 1. Their gradients are reduced and scattered."""
    return jax.tree.map(lambda array: lax.all_gather(array, axis_name, axis=1, tiled=True), tree)


def by_device(tree: Any, size: int, *, is_zigzag: bool) -> Any:
    """Gathered arrays with a first dim of devices: what each of them has, in order or in zig-zag order."""

    def split(array: Any) -> Any:
        if not is_zigzag:
            return jnp.stack(jnp.split(array, size, axis=1))
        halves = jnp.split(array, 2 * size, axis=1)
        return jnp.stack([jnp.concatenate([halves[device], halves[-1 - device]], axis=1) for device in range(size)])

    return jax.tree.map(split, tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_to_gathered(rounds: Rounds, queries: Queries, keys: Keys) -> Any:
    """Attention of the queries of each device to keys that are stacked `by_device`."""
    return _forward(rounds, queries, keys)[0]


def _forward(rounds: Rounds, queries: Queries, keys: Keys) -> tuple[Any, Any]:
    index, size = rounds.index_and_size()

    def attend_to(rows: Rows, offset: Any) -> tuple[Rows, None]:
        source = (index - offset) % size
        return rounds.of(queries, _of_device(keys, source), index, source, rows), None

    rows, _ = lax.scan(attend_to, rounds.of_own(queries, _of_device(keys, index)), jnp.arange(1, size))
    return rows.out.astype(queries.q.dtype), (queries, keys, rows)


def _backward(rounds: Rounds, saved: tuple[Queries, Keys, Rows], cotangent: Any) -> tuple[Queries, Keys]:
    queries, keys, rows = saved
    index, size = rounds.index_and_size()
    cotangent = cotangent.astype(rows.out.dtype)
    local = rounds.own_gradients(queries, _of_device(keys, index), rows, cotangent)

    # Each device's keys are met once: what they get is written, and not added up.
    def write(gradients: tuple[Any, Any], k: Any, v: Any, source: Any) -> tuple[Any, Any]:
        pairs = zip(gradients, (k, v), strict=True)
        return tuple(  # pyright: ignore[reportReturnType]
            lax.dynamic_update_index_in_dim(whole, part.astype(whole.dtype), source, 0) for whole, part in pairs
        )

    def attend_to(carry: Any, offset: Any) -> tuple[Any, None]:
        q_gradient, kv_gradients = carry
        source = (index - offset) % size
        gradients = rounds.gradients(queries, _of_device(keys, source), index, source, rows, cotangent)
        return (q_gradient + gradients.q, write(kv_gradients, gradients.k, gradients.v, source)), None

    kv_gradients = write((jnp.zeros_like(keys.k), jnp.zeros_like(keys.v)), local.k, local.v, index)
    (q_gradient, (k_gradient, v_gradient)), _ = lax.scan(attend_to, (local.q, kv_gradients), jnp.arange(1, size))
    return Queries(q_gradient.astype(queries.q.dtype), None), Keys(k_gradient, v_gradient, None)


attend_to_gathered.defvjp(_forward, _backward)


def _of_device(keys: Keys, device: Any) -> Keys:
    return jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, device, 0, keepdims=False), keys)
