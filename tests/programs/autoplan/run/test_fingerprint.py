"""Programs that differ, and where."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from shardrules.programs.autoplan.run.fingerprint import fingerprint, first_difference

X = jnp.ones((4, 8))


def program(fn: Any, *args: Any) -> Any:
    return jax.make_jaxpr(fn)(*(args or (X,)))


def loop(rounds: int, fn: Any) -> Any:
    return lambda x: jax.lax.scan(lambda carry, _: (fn(carry), None), x, length=rounds)[0]


@pytest.mark.parametrize(
    ("fn", "other", "text"),
    [
        (jnp.sin, jnp.cos, r"sin float32\[4,8\].* is cos float32\[4,8\]"),
        (lambda x: x.sum(0), lambda x: x.sum(1), r"reduce_sum float32\[8\].* is reduce_sum float32\[4\]"),
        (lambda x: x**2, lambda x: x**3, r"integer_pow .* is integer_pow .* with y=3 instead of 2"),
        (lambda x: jnp.sin(x) + x, lambda x: jnp.sin(x), r"add .* is return"),
        (lambda x: jnp.sin(x), lambda x: jnp.sin(x) + x, r"return is add"),
        (lambda x: jnp.sin(x) - x, lambda x: x - jnp.sin(x), r"sub .* is sub .* of other arrays"),
        (lambda x: (x + 1, x * 2), lambda x: (x + 1, x * 2)[::-1], r"return is return of other arrays"),
        (loop(3, jnp.sin), loop(3, jnp.cos), r"sin float32\[4,8\].* is cos"),
        (lambda x: jnp.dot(x, x.T), lambda x: jnp.dot(x, x.T, precision="highest"), r"dot_general .* with precision="),
        (loop(3, jnp.sin), loop(4, jnp.sin), r"scan .* with length=4 instead of 3"),
    ],
)
def test_the_first_difference_is_named(fn: Any, other: Any, text: str) -> None:
    programs = program(fn), program(other)
    assert fingerprint(programs[0]) != fingerprint(programs[1])
    assert re.search(text, first_difference(*programs))


@pytest.mark.parametrize(
    ("fn", "other", "text"),
    [
        (lambda x: x * 2.0, lambda x: x * 3.0, r"a constant of mul float32\[4,8\]"),
        (lambda x: x * jnp.nan, lambda x: x * jnp.nan, ""),
        (lambda x: x * np.arange(8.0), lambda x: x * np.arange(1.0, 9.0), r"a constant of .* float32\[.*8\]"),
        (lambda x: x + jax.random.normal(jax.random.key(0), (8,)), lambda x: x + 1, r"random"),
    ],
)
def test_values_of_constants_differ_where_they_count(fn: Any, other: Any, text: str) -> None:
    programs = program(fn), program(other)
    difference = first_difference(*programs, with_values=True)
    assert re.search(text, difference) if text else difference == ""


def test_equal_programs_have_no_difference() -> None:
    key = jax.random.key(0)

    def fn(x: Any) -> Any:
        return loop(3, jnp.sin)(x) + jax.random.normal(key, x.shape) * np.arange(8.0)

    before = program(fn)
    jax.clear_caches()
    assert first_difference(before, program(fn), with_values=True) == ""
    assert fingerprint(before) == fingerprint(program(fn))


def doubling(block: int, index: Any) -> Any:
    """A Pallas kernel with blocks of so many rows."""

    def double(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = 2 * x_ref[0, 0] + jnp.zeros_like(out_ref)

    out_spec = pl.BlockSpec((1, 8), lambda i: (i, 0))
    shape, in_spec = jax.ShapeDtypeStruct(X.shape, X.dtype), pl.BlockSpec((block, 8), index)
    return pl.pallas_call(double, shape, grid=(4,), in_specs=[in_spec], out_specs=out_spec)


def test_kernels_differ_in_the_blocks_that_they_read() -> None:
    """Their programs and arrays are the same, but for the sizes of blocks."""
    kernels = [doubling(1, index) for index in (lambda i: (i, 0), lambda i: (3 - i, 0), lambda i: (0, 0))]
    prints = [fingerprint(program(kernel)) for kernel in (*kernels, doubling(2, lambda i: (i // 2, 0)))]
    assert len(set(prints)) == 4
    assert fingerprint(program(doubling(1, lambda i: (i, 0)))) == prints[0]
    assert "grid_mapping" in first_difference(program(kernels[0]), program(kernels[1]))
