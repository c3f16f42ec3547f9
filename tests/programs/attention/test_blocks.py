"""Blocks of keys merge to attention over all of them, whatever is masked."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardrules.programs.attention.blocks import Keys, Queries, Rows, attend, block_gradients, merge
from shardrules.programs.attention.kernels import call_kernel, plain_kernel
from tests.programs.attention.reference import assert_close, operands, packed, reference


@pytest.mark.parametrize("causal", [True, False])
def test_the_plain_kernel_is_attention(causal: bool) -> None:
    q, k, v = operands(12)
    ids = None if causal else packed(12)
    out, log_sum_exp = jax.jit(lambda q, k, v: call_kernel(plain_kernel, q, k, v, ids, ids, is_causal=causal))(q, k, v)
    assert_close(out, jax.jit(lambda *a: reference(*a, causal=causal, segment_ids=ids))(q, k, v))
    if causal:
        attend = jax.jit(lambda *a: jax.nn.dot_product_attention(*a, is_causal=True, return_residual=True))
        assert_close(log_sum_exp, attend(q, k, v)[1])


def halves() -> tuple[Queries, list[Keys]]:
    """Queries of two segments: those of the second have no keys in the first half."""
    q, k, v = operands(8)
    ids = jnp.asarray([[0, 0, 0, 0, 1, 1, 1, 7], [0, 0, 1, 1, 1, 1, 1, 1]])
    kv_ids = jnp.asarray([[0, 0, 0, 0, 1, 1, 1, 1]] * 2)
    keys = [Keys(k[:, part], v[:, part], kv_ids[:, part]) for part in (slice(4), slice(4, 8))]
    return Queries(q, ids), keys


def whole(blocks: list[Keys]) -> Keys:
    return Keys(*(jnp.concatenate(pair, axis=1) for pair in zip(*blocks, strict=True)))


def attended(queries: Queries, blocks: list[Keys]) -> Rows:
    return merge(*(attend(plain_kernel, queries, keys, is_causal=False, how="ring") for keys in blocks))


def test_blocks_merge_to_the_whole() -> None:
    queries, blocks = halves()
    k, v, ids = whole(blocks)
    merged = jax.jit(attended)(queries, blocks)
    expected = jax.jit(lambda *a: reference(*a, causal=False, segment_ids=(queries.segments, ids)))(queries.q, k, v)
    assert_close(merged.out, expected)
    out, log_sum_exp = map(np.asarray, merged)
    assert not out[0, 7].any()  # segment 7 has no keys
    assert np.isneginf(log_sum_exp[0, 7]).all()


@pytest.mark.slow
def test_gradients_of_blocks_add_up() -> None:
    queries, blocks = halves()

    def by_block(queries: Queries, blocks: list[Keys], cotangent: Any) -> tuple:
        merged = attended(queries, blocks)
        first, second = (
            block_gradients(plain_kernel, queries, keys, merged, cotangent, is_causal=False, how="ring")
            for keys in blocks
        )
        return first.q + second.q, *(jnp.concatenate(pair, axis=1) for pair in zip(first[1:], second[1:], strict=True))

    def at_once(queries: Queries, blocks: list[Keys], cotangent: Any) -> tuple:
        k, v, ids = whole(blocks)
        attend = functools.partial(reference, causal=False, segment_ids=(queries.segments, ids))
        return jax.vjp(attend, queries.q, k, v)[1](cotangent)

    cotangent = np.cos(np.arange(queries.q.size, dtype=np.float32)).reshape(queries.q.shape)
    assert_close(jax.jit(by_block)(queries, blocks, cotangent), jax.jit(at_once)(queries, blocks, cotangent))


def test_rows_without_keys_stay_empty() -> None:
    nothing = Rows(jnp.zeros((1, 2, 1, 4)), jnp.full((1, 2, 1), -jnp.inf))
    some = Rows(jnp.ones((1, 2, 1, 4)), jnp.asarray([[[0.0], [-jnp.inf]]]))
    merged = merge(nothing, some)
    np.testing.assert_array_equal(merged.out[0, :, 0, 0], [1, 0])
    gradient = jax.grad(lambda out: merge(nothing, some._replace(out=out)).out.sum())(some.out)
    np.testing.assert_array_equal(gradient[0, :, 0, 0], [1, 0])


def test_what_is_no_number_stays_so_in_blocks() -> None:
    queries, blocks = halves()
    merged = jax.jit(attended)(queries._replace(q=queries.q.at[0, 2].set(jnp.nan)), blocks)
    for array in merged:
        spots = np.isnan(array)
        assert spots[0, 2].all()
        assert spots.sum() == spots[0, 2].size
