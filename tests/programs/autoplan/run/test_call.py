"""Functions as they are traced: their fingerprints, and the types of their arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules.programs.autoplan.run.call import read_call

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


def test_arrays_that_come_back_have_no_weak_types() -> None:
    def step(params: Any, rate: Any, batch: Any) -> Any:
        change = rate * (batch["x"] * batch["mask"]).sum()
        return jax.tree.map(lambda array: array - change, params), change

    params = {"scale": jnp.full((4,), 0.1), "gain": jnp.array(0.1)}
    batch = {"x": jnp.ones(8, jnp.bfloat16), "mask": jnp.full((8,), 1.0)}
    call = read_call(step, (params, jnp.array(0.1), batch), sr.mesh_shape("data:8"), "step")
    assert [path for path, array in zip(call.paths, call.structs, strict=True) if array.weak_type] == [
        "rate",
        "batch/mask",
    ]
    assert [str(aval.dtype) for aval in call.jaxpr.out_avals] == ["float32", "float32", "bfloat16"]
    assert sorted(call.feedback.values()) == [0, 1]


def test_weak_types_stay_where_the_function_needs_them() -> None:
    def call_of(batch: Any) -> Any:
        def layer(x: Any, weight: Any) -> tuple[Any, None]:
            return x @ weight * batch["scale"], None

        return read_call(
            lambda weights, batch: jax.lax.scan(layer, batch["x"], weights)[0], (weights, batch), mesh, "f"
        )

    mesh, weights = sr.mesh_shape("data:8"), jnp.ones((2, 4, 4), jnp.bfloat16)
    call = call_of({"x": jnp.ones((8, 4), jnp.bfloat16), "scale": jnp.array(2.0)})
    assert [str(aval.dtype) for aval in call.jaxpr.out_avals] == ["bfloat16"]
    with pytest.raises(TypeError, match="carry"):
        call_of({"x": jnp.ones((8, 4), jnp.bfloat16), "scale": jnp.float32(2.0)})


def test_states_keep_weak_types_that_their_dtypes_rest_on() -> None:
    def step(state: Any, gradient: Any) -> Any:
        return {"decay": state["decay"], "mean": state["decay"] * state["mean"] + gradient}, gradient.sum()

    state = {"decay": jnp.array(0.9), "mean": jnp.ones(4, jnp.bfloat16)}
    call = read_call(step, (state, jnp.ones(4, jnp.bfloat16)), sr.mesh_shape("data:8"), "step")
    assert [array.weak_type for array in call.structs] == [True, False, False]
    assert sorted(call.feedback.values()) == [0, 1]
