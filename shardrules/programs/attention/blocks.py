"""Attention in blocks: each attends to some of the keys, and the log-sum-exp of their scores merges them.

The gradients of a block need the merged output and log-sum-exp, and nothing of other blocks: a pass over the blocks
keeps nothing for each of them, and its backward pass computes each block again.
"""

from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp

from shardrules.core.errors import SplitError
from shardrules.programs.attention.kernels import MASKED, Kernel, call_kernel, no_log_sum_exp


@final
class Queries(NamedTuple):
    """Queries [batch, length, heads, width], and their segments [batch, length], if they have any."""

    q: Any
    segments: Any


@final
class Keys(NamedTuple):
    """Keys and values [batch, length, heads, width], and their segments [batch, length], if they have any."""

    k: Any
    v: Any
    segments: Any


@final
class Rows(NamedTuple):
    """For each query what it attends to so far, in float32, and the log-sum-exp of its scores."""

    out: Any
    log_sum_exp: Any


@final
class BlockGradients(NamedTuple):
    """Gradients of a block, in float32."""

    q: Any
    k: Any
    v: Any


def attend(kernel: Kernel, queries: Queries, keys: Keys, *, is_causal: bool, how: str) -> Rows:
    """Attention of queries to a block of keys."""
    out, log_sum_exp = call_kernel(
        kernel, queries.q, keys.k, keys.v, queries.segments, keys.segments, is_causal=is_causal
    )
    if log_sum_exp is None:
        raise SplitError(f"sharded_attention: {no_log_sum_exp(kernel, how)}")
    # Kernels mask by large negative numbers: rows without keys must have no weight at all.
    log_sum_exp = jnp.where(log_sum_exp <= MASKED, -jnp.inf, log_sum_exp)
    return Rows(out.astype(log_sum_exp.dtype), log_sum_exp)


def merge(rows: Rows, block: Rows) -> Rows:
    """The same rows, with the keys of another block."""
    largest = jnp.maximum(rows.log_sum_exp, block.log_sum_exp)
    largest = jnp.where(largest <= MASKED, 0, largest)  # minus infinity less itself is no number
    weight, block_weight = jnp.exp(rows.log_sum_exp - largest), jnp.exp(block.log_sum_exp - largest)
    total = weight + block_weight
    # Rows without keys in either block have no weight to divide by, and stay zeros.
    divisor = jnp.where(total == 0, 1, total)
    out = (weight / divisor)[..., None] * rows.out + (block_weight / divisor)[..., None] * block.out
    return Rows(out, jnp.where(total == 0, -jnp.inf, largest + jnp.log(divisor)))


def block_gradients(
    kernel: Kernel, queries: Queries, keys: Keys, merged: Rows, cotangent: Any, *, is_causal: bool, how: str
) -> BlockGradients:
    """The gradients that the cotangent of the merged output has by way of a block."""

    def run(q: Any, k: Any, v: Any) -> Rows:
        return attend(kernel, queries._replace(q=q), keys._replace(k=k, v=v), is_causal=is_causal, how=how)

    block, gradients_of = jax.vjp(run, queries.q, keys.k, keys.v)
    # The merged output is the mean of the blocks' outputs, weighed by these.
    is_empty = (block.log_sum_exp <= MASKED) | (merged.log_sum_exp <= MASKED)
    weight = jnp.exp(jnp.where(is_empty, -jnp.inf, block.log_sum_exp - merged.log_sum_exp))
    # The weight of a block grows with its log-sum-exp, which moves the mean towards its own output.
    cotangents = Rows(
        weight[..., None] * cotangent,
        weight * jnp.sum(cotangent * (block.out - merged.out), axis=-1),
    )
    return BlockGradients(*(gradient.astype(cotangent.dtype) for gradient in gradients_of(cotangents)))
