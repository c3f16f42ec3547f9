"""Attention as its formula says it, and operands for it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def reference(q: Any, k: Any, v: Any, *, causal: bool, segment_ids: Any = None) -> Any:
    """Attention of float32, in which queries without keys get 0."""
    groups = q.shape[2] // k.shape[2]
    wide_q, wide_k, wide_v = (array.astype(jnp.float32) for array in (q, k, v))
    wide_k, wide_v = (jnp.repeat(array, groups, axis=2) for array in (wide_k, wide_v))
    scores = jnp.einsum("bsnd,btnd->bnst", wide_q, wide_k) / q.shape[3] ** 0.5
    mask = jnp.ones(scores.shape, bool)
    if causal:
        mask &= jnp.tri(q.shape[1], k.shape[1], dtype=bool)
    if segment_ids is not None:
        q_ids, kv_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids,) * 2
        mask &= (q_ids[:, :, None] == kv_ids[:, None, :])[:, None]
    weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, -1e30)), 0)
    return jnp.einsum("bnst,btnd->bsnd", weights, wide_v).astype(q.dtype)


def operands(
    length: int, *, heads: int = 8, kv_heads: int = 2, batch: int = 2, width: int = 4, dtype: Any = jnp.float32
) -> list[jax.Array]:
    generator = np.random.default_rng(0)
    shapes = [(batch, length, count, width) for count in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes]


def packed(length: int, batch: int = 2) -> jax.Array:
    """Segment ids of three sequences that are packed into one."""
    return jnp.sort(jax.random.randint(jax.random.key(0), (batch, length), 0, 3))


def value_and_gradients(fn: Any) -> Any:
    def weighted(*arrays: Any) -> tuple:
        out = fn(*arrays)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (weights * jnp.sin(out.astype(jnp.float32))).sum(), out

    return jax.jit(jax.grad(weighted, (0, 1, 2), has_aux=True))


def assert_close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    for result, target in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert result.dtype == target.dtype
        wide = np.asarray(target, np.float32)
        np.testing.assert_allclose(np.asarray(result, np.float32), wide, rtol=0, atol=tolerance * np.abs(wide).max())
