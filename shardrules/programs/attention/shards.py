"""Attention as devices run it on shards, in three ways to split the sequence.

Arrays are `q[b, s, k, g, d]`, `k[b, t, k, d]` and `v[b, t, k, d]`: heads of queries in groups `g` for each
head `k` of keys. `axis_name` is what the sequence is split over, or `None` where it is whole.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from shardrules.core.errors import SplitError
from shardrules.programs.attention.blocks import Keys, Queries
from shardrules.programs.attention.gather import attend_to_gathered, by_device, gather
from shardrules.programs.attention.kernels import Kernel, call_kernel
from shardrules.programs.attention.paired import PairedKernel, as_kernel
from shardrules.programs.attention.ring import attend_in_ring
from shardrules.programs.attention.rounds import Rounds
from shardrules.programs.attention.zigzag import from_zigzag, to_zigzag


def attention_by_ring(
    q: Any, k: Any, v: Any, *segments: Any, axis_name: tuple[str, ...] | None, causal: bool, kernel: Any
) -> Any:
    """Keys and values go round the devices."""
    queries, keys = _operands(q, k, v, segments)
    if axis_name is None or lax.axis_size(axis_name) == 1:
        return _attend_whole(as_kernel(kernel), queries, keys, is_causal=causal).reshape(q.shape)
    # In order, the last device would attend to the most keys: halves from both ends even that out.
    rounds = Rounds("ring", as_kernel(kernel), axis_name, causal, causal and q.shape[1] % 2 == 0)
    if rounds.is_zigzag:
        queries, keys = to_zigzag((queries, keys), axis_name)
    out: Any = attend_in_ring(rounds, queries, keys)
    return (from_zigzag(out, axis_name) if rounds.is_zigzag else out).reshape(q.shape)


def attention_by_gather(
    q: Any, k: Any, v: Any, *segments: Any, axis_name: tuple[str, ...] | None, causal: bool, kernel: Any
) -> Any:
    """Keys and values are gathered."""
    queries, keys = _operands(q, k, v, segments)
    if axis_name is None or lax.axis_size(axis_name) == 1:
        return _attend_whole(as_kernel(kernel), queries, keys, is_causal=causal).reshape(q.shape)
    keys = gather(keys, axis_name)
    # Without a mask the gathered keys are one call of the kernel, which then needs no log-sum-exp.
    if not causal:
        return _attend_whole(as_kernel(kernel), queries, keys, is_causal=False).reshape(q.shape)
    rounds = Rounds("gather", as_kernel(kernel), axis_name, True, q.shape[1] % 2 == 0)
    if rounds.is_zigzag:
        queries = to_zigzag(queries, axis_name)
    keys = by_device(keys, rounds.index_and_size()[1], is_zigzag=rounds.is_zigzag)
    out: Any = attend_to_gathered(rounds, queries, keys)
    return (from_zigzag(out, axis_name) if rounds.is_zigzag else out).reshape(q.shape)


def attention_by_all_to_all(
    q: Any, k: Any, v: Any, *segments: Any, axis_name: tuple[str, ...] | None, causal: bool, kernel: Any
) -> Any:
    """Heads are split instead of the sequence while attention is computed."""
    if axis_name is None or lax.axis_size(axis_name) == 1:
        queries, keys = _operands(q, k, v, segments)
        return _attend_whole(as_kernel(kernel), queries, keys, is_causal=causal).reshape(q.shape)
    repeats = head_repeats(q.shape[2], q.shape[3], lax.axis_size(axis_name))
    if repeats is None:
        raise SplitError(uneven_heads(q.shape[2] * q.shape[3], lax.axis_size(axis_name), axis_name))
    batch, length, kv_heads, groups, width = q.shape
    grouped = q.reshape(batch, length, kv_heads * repeats, groups // repeats, width)
    # Heads of keys are repeated until the devices divide them, and groups of queries get as many times smaller.
    all_q, all_k, all_v = (
        lax.all_to_all(array, axis_name, split_axis=2, concat_axis=1, tiled=True)
        for array in (grouped, jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2))
    )
    # Segments have no heads: each device needs those of the whole sequence.
    queries, keys = _operands(all_q, all_k, all_v, gather(segments, axis_name))
    out = _attend_whole(as_kernel(kernel), queries, keys, is_causal=causal).reshape(all_q.shape)
    return lax.all_to_all(out, axis_name, split_axis=1, concat_axis=2, tiled=True).reshape(q.shape)


WAYS: dict[str, Callable[..., Any]] = {
    "ring": attention_by_ring,
    "gather": attention_by_gather,
    "all_to_all": attention_by_all_to_all,
}
"""The functions for each `how`."""


def head_repeats(kv_heads: int, groups: int, devices: int) -> int | None:
    """The repetitions of heads of keys after which all devices have as many of them, or `None` if there are none."""
    repeats = devices // math.gcd(kv_heads, devices)
    return None if groups % repeats else repeats


def uneven_heads(heads: int, devices: int, axis_name: tuple[str, ...]) -> str:
    return (
        f'how="all_to_all" cannot split {heads} heads over the {devices} devices of {", ".join(axis_name)}; pass '
        'how="ring" or "gather", or a smaller axis'
    )


def _operands(q: Any, k: Any, v: Any, segments: Any) -> tuple[Queries, Keys]:
    q_segments, kv_segments = segments or (None, None)
    batch, length, kv_heads, groups, width = q.shape
    return Queries(q.reshape(batch, length, kv_heads * groups, width), q_segments), Keys(k, v, kv_segments)


def _attend_whole(kernel: Kernel, queries: Queries, keys: Keys, *, is_causal: bool) -> Any:
    if isinstance(kernel, PairedKernel):
        kernel = kernel.attend
    out, _ = call_kernel(kernel, queries.q, keys.k, keys.v, queries.segments, keys.segments, is_causal=is_causal)
    return out.astype(queries.q.dtype)
