"""Attention as the published steps ran it: a kernel of the platform, which never writes the scores to memory."""

from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

BATCH = ("data", "fsdp")
"""The mesh axes that split a batch."""

Blocks: TypeAlias = tuple[int, int, int, int]
"""Rows of queries or keys that splash attention works on at a time: queries and keys forward, queries for the gradients
of keys and values, and queries for the gradients of queries."""

_BLOCK = 512
"""The queries of a block, as in splash attention."""

RATES = MappingProxyType(
    {
        "flash2": ((346e12, 380), (330e12, 275)),
        "flash1-triton": ((346e12 / 1.4, 380), (330e12 / 2, 275)),
    }
)
"""The FLOP/s of other kernels on an H100 for heads of 128, forward and backward: at infinite length, and the length at
which half of it is reached. FlashAttention-2 reaches 191, 260, 298, 319, 333 and 335 TFLOP/s forward with a causal
mask, and 214, 260, 291, 310, 318 and 322 backward without one, for lengths of 512, twice as many, and so on to 16
thousand (arXiv 2407.08608, figures 5 and 6). It is 1.3 to 1.5 times as fast as the first FlashAttention in Triton
forward, and twice backward (arXiv 2307.08691, section 4.1)."""


def attend(platform: str, blocks: Blocks, query: Any, key: Any, value: Any) -> Any:
    """Causal attention of (batch, length, heads, head_dim); keys and values may have fewer heads.

    Values may be narrower than queries and keys.
    """
    if platform == "cuda":
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
    if platform == "tpu":
        # As MaxText, which repeats the heads of keys and values itself before a kernel for equal heads.
        repeats = query.shape[2] // key.shape[2]
        return _splash(blocks, query, jnp.repeat(key, repeats, 2), jnp.repeat(value, repeats, 2))
    # Toys on CPUs, for which JAX takes values as wide as keys.
    size = value.shape[-1]
    value = jnp.pad(value, [(0, 0)] * 3 + [(0, key.shape[-1] - size)])
    if platform == "blocks":
        return _blockwise(query, key, value)
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)[..., :size]


def _blockwise(query: Any, key: Any, value: Any) -> Any:
    """Attention of blocks of queries, each with its part of the scores, which the backward pass computes again."""
    batch, length, heads, size = query.shape
    rows = min(_BLOCK, length)
    repeats = heads // key.shape[2]
    key, value = jnp.repeat(key, repeats, 2), jnp.repeat(value, repeats, 2)
    blocks = jnp.moveaxis(query.reshape(batch, length // rows, rows, heads, size), 1, 0)
    starts = jnp.arange(length // rows) * rows

    @jax.checkpoint
    def attend_block(block: Any, start: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", block, key, preferred_element_type=jnp.float32) * size**-0.5
        causal = start + jnp.arange(rows)[:, None] >= jnp.arange(length)
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1).astype(value.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    _, results = jax.lax.scan(lambda carry, item: (carry, attend_block(*item)), None, (blocks, starts))
    return jnp.moveaxis(results, 0, 1).reshape(batch, length, heads, value.shape[-1])


def _splash(blocks: Blocks, query: Any, key: Any, value: Any) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length = query.shape[1]
    rows, columns, rows_dkv, rows_dq = (min(block, length) for block in blocks)
    sizes = splash.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_kv_compute=columns,
        block_q_dkv=rows_dkv,
        block_kv_dkv=columns,
        block_kv_dkv_compute=columns,
        block_q_dq=rows_dq,
        block_kv_dq=columns,
    )

    def local(query: Any, key: Any, value: Any) -> Any:
        mask = splash.MultiHeadMask([splash.CausalMask((length, length))] * query.shape[2])
        # The name lets a policy keep the output together with the sums that the backward kernels need.
        kernel: Any = splash.make_splash_mha(
            mask, head_shards=1, q_seq_shards=1, block_sizes=sizes, residual_checkpoint_name="context"
        )
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        return jnp.swapaxes(jax.vmap(kernel)(query, key, value), 1, 2)

    spec = P(BATCH, None, "tensor")
    # The kernel does not scale its queries.
    query = query * query.shape[-1] ** -0.5
    return jax.shard_map(local, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)(query, key, value)
