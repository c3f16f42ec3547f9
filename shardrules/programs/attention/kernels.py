"""Kernels of attention: functions of whole arrays, which each way to split a sequence calls on what a device has."""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from shardrules.core.callables import name_of
from shardrules.core.errors import ConfigError

Kernel: TypeAlias = Callable[..., Any]
"""`kernel(q, k, v, *, is_causal, q_segment_ids, kv_segment_ids)` returns the output, or `(output, log_sum_exp)`."""

MASKED = -1e30
"""The log-sum-exp of a row that attends to nothing is below this: minus infinity, or what kernels mask with."""


_LEAST_ROWS, _MOST_BLOCKS = 1024, 8
"""The rows of scores that are computed at once, and the most blocks of rows that attention is cut into: with more,
causal attention computes fewer scores that are masked, half a block each, and programs are larger."""


def plain_kernel(
    q: Any, k: Any, v: Any, *, is_causal: bool, q_segment_ids: Any = None, kv_segment_ids: Any = None
) -> tuple[Any, Any]:
    """Attention in float32, of some rows at a time. Rows that attend to nothing are 0."""
    length = q.shape[1]
    size = max(_LEAST_ROWS, -(-length // _MOST_BLOCKS))
    if length <= size:
        return _attend_rows(q, k, v, q_segment_ids, kv_segment_ids, first=0 if is_causal else None)
    blocks = []
    for first in range(0, length, size):
        rows, keys = slice(first, first + size), slice(min(first + size, length) if is_causal else None)
        segments = (None, None)
        if q_segment_ids is not None:
            segments = q_segment_ids[:, rows], kv_segment_ids[:, keys]
        # The backward pass computes scores again, block by block.
        attend_rows = jax.checkpoint(functools.partial(_attend_rows, first=first if is_causal else None))
        blocks.append(attend_rows(q[:, rows], k[:, keys], v[:, keys], *segments))
    out, log_sum_exp = zip(*blocks, strict=True)
    return jnp.concatenate(out, axis=1), jnp.concatenate(log_sum_exp, axis=1)


def _attend_rows(
    q: Any, k: Any, v: Any, q_segment_ids: Any, kv_segment_ids: Any, *, first: int | None
) -> tuple[Any, Any]:
    """Attention of rows from `first` on, if it is causal, with all their scores at once."""
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    grouped, dtype = (
        q.reshape(batch, length, kv_heads, heads // kv_heads, width),
        jnp.promote_types(q.dtype, jnp.float32),
    )
    scores = jnp.einsum("bskgd,btkd->bkgst", grouped, k, preferred_element_type=dtype) / math.sqrt(width)
    mask = _mask(first, q_segment_ids, kv_segment_ids, length, k.shape[1])
    if mask is not None:
        mask = mask[:, None, None]
        scores = jnp.where(mask, scores, -jnp.finfo(scores.dtype).max)
    # The softmax by hand, since its sum is a result as well: blocks of keys are merged by it.
    largest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - largest)
    if mask is not None:
        weights = jnp.where(mask, weights, 0)
    total = weights.sum(-1)
    is_masked = total == 0
    total = jnp.where(is_masked, 1, total)
    log_sum_exp = jnp.where(is_masked, -jnp.inf, largest[..., 0] + jnp.log(total))
    weights = (weights / total[..., None]).astype(v.dtype)
    out = jnp.einsum("bkgst,btkd->bskgd", weights, v, preferred_element_type=dtype)
    return out.astype(q.dtype).reshape(q.shape), jnp.moveaxis(log_sum_exp, 3, 1).reshape(q.shape[:3])


def _mask(first: int | None, q_segment_ids: Any, kv_segment_ids: Any, q_length: int, kv_length: int) -> Any:
    """The keys that each query attends to, or `None` for all. In causal attention the queries begin at `first`."""
    mask = None
    if first is not None:
        mask = jnp.tri(q_length, kv_length, first, dtype=bool)[None]
    if q_segment_ids is not None:
        is_same = q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]
        mask = is_same if mask is None else mask & is_same
    return mask


def _jax_attention(
    implementation: Any, q: Any, k: Any, v: Any, *, is_causal: bool, q_segment_ids: Any, kv_segment_ids: Any
) -> Any:
    # Its log-sum-exp has the dtype of q: in bfloat16 too coarse to merge blocks by.
    mask = _mask(None, q_segment_ids, kv_segment_ids, q.shape[1], k.shape[1])
    return jax.nn.dot_product_attention(
        q, k, v, mask=None if mask is None else mask[:, None], is_causal=is_causal, implementation=implementation
    )


KERNELS: dict[str, Kernel] = {name: functools.partial(_jax_attention, name) for name in ("xla", "cudnn")}
"""The implementations of `jax.nn.dot_product_attention`."""


def call_kernel(
    kernel: Kernel, q: Any, k: Any, v: Any, q_segment_ids: Any, kv_segment_ids: Any, *, is_causal: bool
) -> tuple[Any, Any]:
    """The output of a kernel, and its log-sum-exp or `None`. Results of other shapes raise."""
    results = kernel(q, k, v, is_causal=is_causal, q_segment_ids=q_segment_ids, kv_segment_ids=kv_segment_ids)
    out: Any = results
    log_sum_exp = None
    if isinstance(results, tuple | list) and len(results) == 2:
        out, log_sum_exp = results
    problems = []
    if getattr(out, "shape", None) != q.shape:
        problems.append(f"an output of {_described(out)} for queries of shape {q.shape}")
    if log_sum_exp is not None:
        if getattr(log_sum_exp, "shape", None) != q.shape[:3]:
            problems.append(f"a log-sum-exp of {_described(log_sum_exp)} instead of shape {q.shape[:3]}")
        elif log_sum_exp.dtype not in (jnp.float32, jnp.float64):
            problems.append(f"a log-sum-exp of {log_sum_exp.dtype}, too coarse to merge blocks by; return float32")
    if problems:
        raise ConfigError(f"sharded_attention: the kernel {kernel_name(kernel)} returns {' and '.join(problems)}")
    if log_sum_exp is not None:
        out = jnp.where(log_sum_exp[..., None] <= MASKED, 0, out)  # NaN stays NaN
    return out, log_sum_exp


def no_log_sum_exp(kernel: Kernel, how: str) -> str:
    return (
        f"how={how!r} merges blocks of keys, and the kernel {kernel_name(kernel)} returns no log-sum-exp to do that "
        'by. Return (output, log_sum_exp) from it, or pass how="all_to_all" or kernel=None'
    )


def kernel_name(kernel: Kernel) -> str:
    names = [f'"{name}"' for name, function in KERNELS.items() if function is kernel]
    return names[0] if names else name_of(kernel)


def _described(array: Any) -> str:
    return f"shape {array.shape}" if hasattr(array, "shape") else f"type {type(array).__name__}"
