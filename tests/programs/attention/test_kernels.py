"""The plain kernel computes some rows of scores at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardrules.programs.attention import kernels
from shardrules.programs.attention.kernels import plain_kernel
from tests.programs.regions.test_region import close, real


@pytest.mark.sample(1)
@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_in_blocks_are_those_of_all_scores(
    is_causal: bool, has_segments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = real(1, 10, 4, 8), real(1, 10, 2, 8, seed=1), real(1, 10, 2, 8, seed=2)
    segments = (jnp.arange(10) // 4)[None] if has_segments else None
    options = {"is_causal": is_causal, "q_segment_ids": segments, "kv_segment_ids": segments}

    def loss(q: Any, k: Any, v: Any) -> Any:
        out, log_sum_exp = plain_kernel(q, k, v, **options)
        return (out**2).sum() + jnp.sin(log_sum_exp).sum()

    expected = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)
    monkeypatch.setattr(kernels, "_LEAST_ROWS", 4)  # three blocks, the last one smaller
    close(jax.jit(jax.value_and_grad(lambda *arrays: loss(*arrays), (0, 1, 2)))(q, k, v), expected)


@pytest.mark.slow
def test_blocks_compute_hardly_more_than_what_is_attended() -> None:
    shapes = [jax.ShapeDtypeStruct((1, 8192, 1, 64), jnp.float32)] * 3

    def flops(is_causal: bool) -> float:
        compiled = jax.jit(lambda *arrays: plain_kernel(*arrays, is_causal=is_causal)).lower(*shapes).compile()
        analysis = compiled.cost_analysis()
        assert analysis is not None
        return analysis["flops"]

    assert flops(True) / flops(False) == pytest.approx((1 + 1 / 8) / 2, rel=0.02)
