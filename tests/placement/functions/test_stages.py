"""The results of `lower` and `compile`: called as the function, read as the stages of JAX."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr

MESH = sr.create_mesh("data:8")
MODEL = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))
X = np.ones((8, 8), np.float32)


def forward(model: Any, x: Any, scale: float = 2.0, *, shift: Any = 0) -> Any:
    return scale * jax.vmap(model)(x) + shift, scale


@pytest.mark.parametrize("options", [{}, {"mesh": MESH, "in_shardings": (P(), P("data"))}], ids=["plain", "sharded"])
def test_what_is_compiled_takes_the_arguments_of_the_function(options: Any) -> None:
    run = sr.filter_jit(forward, **options)
    compiled = run.lower(MODEL, X, shift=np.float32(1)).compile()
    for shift in (np.float32(1), np.float32(5)):
        actual, scale = compiled(MODEL, X, shift=shift)
        np.testing.assert_allclose(actual, forward(MODEL, X, shift=shift)[0], rtol=1e-5)
        assert scale == 2.0


def test_shapes_are_enough_to_lower() -> None:
    shapes = jax.eval_shape(lambda: eqx.filter(MODEL, eqx.is_array))
    model = eqx.combine(shapes, MODEL)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    lowered = sr.filter_jit(forward, mesh=MESH, in_shardings=(P(), P("data"))).lower(model, x)
    actual, _ = lowered.compile()(MODEL, X)
    assert actual.shape == (8, 8)
    plain, _ = sr.filter_jit(forward).lower(model, x).compile()(MODEL, X)
    np.testing.assert_allclose(actual, plain, rtol=1e-5)


def test_stages_show_what_those_of_jax_show() -> None:
    lowered = sr.filter_jit(forward, mesh=MESH, in_shardings=(P(), P("data"))).lower(MODEL, X)
    assert "forward" in lowered.as_text()
    assert lowered.as_text("hlo") != lowered.as_text()
    assert lowered.compiler_ir() is not None
    assert lowered.cost_analysis() == lowered.lowered.cost_analysis()
    compiled = lowered.compile({"xla_cpu_enable_fast_math": False})
    assert "ENTRY" in str(compiled.as_text())
    assert compiled.memory_analysis().argument_size_in_bytes == 4 * (8 * 16 * 2 + 16 + 8 + 8)
    assert compiled.cost_analysis()
    assert compiled.compiled.input_shardings == lowered.compile().compiled.input_shardings


def test_arguments_that_are_compiled_in_cannot_change() -> None:
    compiled = sr.filter_jit(forward).lower(MODEL, X, 2.0).compile()
    with pytest.raises(sr.errors.TreeError, match=r"3.0 instead of 2.0"):
        compiled(MODEL, X, 3.0)
    with pytest.raises(sr.errors.TreeError, match="differ in structure"):
        compiled([MODEL], X, 2.0)


def test_misplaced_arguments_of_what_is_compiled_are_named() -> None:
    compiled = sr.filter_jit(forward, mesh=MESH, in_shardings=(None, P("data"))).lower(MODEL, X).compile()
    with pytest.raises(sr.errors.PlanError, match=r"argument 1 \(8, 8\): is P\(\) on data:8, not P\('data'\)"):
        compiled(MODEL, sr.filter_shard(X, P(), MESH))
