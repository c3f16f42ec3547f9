"""Fingerprints of functions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules.planning.run.call import read_call

MATRIX = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def fingerprint(fn: Callable[..., Any]) -> str:
    return read_call(fn, (MATRIX, MATRIX), sr.mesh_shape("data:8"), "fn").fingerprint


def scanned(body: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y: jax.lax.scan(lambda row, other: (body(row, other), None), x[0], y)


PAIRS = {
    "operands": (lambda x, y: x - y, lambda x, y: y - x),
    "results": (lambda x, y: (jnp.sin(x), jnp.cos(y)), lambda x, y: (jnp.sin(y), jnp.cos(x))),
    "order of results": (lambda x, y: (x + y, x * y), lambda x, y: (x + y, x * y)[::-1]),
    "bodies of loops": (scanned(lambda row, other: row - other), scanned(lambda row, other: other - row)),
    "constants": (lambda x, y: x - 1, lambda x, y: 1 - x),
}


@pytest.mark.parametrize("name", PAIRS)
def test_fingerprints_tell_which_arrays_operations_read(name: str) -> None:
    left, right = PAIRS[name]
    assert fingerprint(left) != fingerprint(right)


def test_another_trace_has_the_same_fingerprint() -> None:
    def fn(x: Any, y: Any) -> Any:
        return jax.jit(jnp.matmul)(x, y) + jnp.linalg.norm(scanned(lambda row, other: row - other)(x, y)[0])

    before = fingerprint(fn)
    jax.clear_caches()
    assert fingerprint(fn) == before
    assert fingerprint(lambda x, y: fn(x, y)) == before
