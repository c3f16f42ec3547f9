"""Ring attention: keys and values go round the devices, and each device attends to them as they pass.

Every device has the keys and values of one other at a time. In the backward pass they go round once more, and their
gradients follow them, one device behind.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardrules.programs.attention.blocks import Keys, Queries, Rows
from shardrules.programs.attention.rounds import Rounds


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_in_ring(rounds: Rounds, queries: Queries, keys: Keys) -> Any:
    """Attention of the queries of each device to the keys of all, which are split in the same order."""
    return _forward(rounds, queries, keys)[0]


def _forward(rounds: Rounds, queries: Queries, keys: Keys) -> tuple[Any, Any]:
    index, size = rounds.index_and_size()

    def attend_to(offset: Any, carry: tuple[Rows, Keys], *, is_first: bool, is_last: bool) -> tuple[Rows, Keys]:
        rows, passing = carry
        following = passing if is_last else _send(passing, rounds)  # while this device computes
        return rounds.of(queries, passing, index, (index - offset) % size, rows), following

    passing = _send(keys, rounds)
    rows, _ = _go_round(attend_to, (rounds.of_own(queries, keys), passing), size)
    return rows.out.astype(queries.q.dtype), (queries, keys, rows)


def _backward(rounds: Rounds, saved: tuple[Queries, Keys, Rows], cotangent: Any) -> tuple[Queries, Keys]:
    queries, keys, rows = saved
    index, size = rounds.index_and_size()
    cotangent = cotangent.astype(rows.out.dtype)

    def attend_to(offset: Any, carry: Any, *, is_first: bool, is_last: bool) -> Any:
        q_gradient, passing, behind = carry
        following = passing if is_last else _send(passing, rounds)
        arrived = behind if is_first else _send(behind, rounds)
        gradients = rounds.gradients(queries, passing, index, (index - offset) % size, rows, cotangent)
        behind = jax.tree.map(jnp.add, arrived, (gradients.k, gradients.v))
        return q_gradient + gradients.q, following, behind

    passing = _send(keys, rounds)
    local = rounds.own_gradients(queries, keys, rows, cotangent)
    nothing = jax.tree.map(jnp.zeros_like, (local.k, local.v))
    q_gradient, _, behind = _go_round(attend_to, (local.q, passing, nothing), size)
    k_gradient, v_gradient = jax.tree.map(jnp.add, (local.k, local.v), _send(behind, rounds))
    return (
        Queries(q_gradient.astype(queries.q.dtype), None),
        Keys(k_gradient.astype(keys.k.dtype), v_gradient.astype(keys.v.dtype), None),
    )


attend_in_ring.defvjp(_forward, _backward)


def _send(tree: Any, rounds: Rounds) -> Any:
    _, size = rounds.index_and_size()
    pairs = [(device, (device + 1) % size) for device in range(size)]
    return jax.tree.map(lambda array: lax.ppermute(array, rounds.axis_name, pairs), tree)


def _go_round(step: Callable[..., Any], carry: Any, size: int) -> Any:
    """Runs a step for each offset from 1 to `size` - 1; the first and the last of them send less."""
    carry = step(1, carry, is_first=True, is_last=size == 2)
    if size > 3:
        middle = functools.partial(step, is_first=False, is_last=False)
        carry, _ = lax.scan(lambda carry, offset: (middle(offset, carry), None), carry, jnp.arange(2, size - 1))
    return step(size - 1, carry, is_first=False, is_last=True) if size > 2 else carry
