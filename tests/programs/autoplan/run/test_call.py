"""Functions as they are traced: the types of their arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules.programs.autoplan.run.call import read_call


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
