"""Losses and gradients of pipelines are those of the model layer by layer."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import ConfigError, ConfigTypeError
from tests.programs.pipelines.models import assert_equal, batch, mesh, parameters, pipelined, unpipelined

GRID = [
    (text, schedule, chunks, inside)
    for text, inside in (
        ("stage:2,data:2,model:2", True),
        ("data:2,stage:4", True),
        ("data:2,stage:4", False),
        ("stage:8", True),
    )
    for schedule in ("gpipe", "1f1b")
    for chunks in (1, 2)
]
"""Meshes, schedules, chunks, and whether the loss is computed on the last stage."""


def test_1f1b_equals_the_model() -> None:
    loss = pipelined(schedule="1f1b", microbatches=8, batch="data")
    assert_equal(loss, mesh("stage:4,data:2"), layers=4)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "schedule", "chunks", "inside"), GRID)
def test_schedules_equal_the_model(text: str, schedule: Any, chunks: int, inside: bool) -> None:
    axis = "data" if "data" in text else None
    loss = pipelined(inside, schedule=schedule, chunks=chunks, microbatches=8, batch=axis)
    assert_equal(loss, mesh(text), layers=16)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_uneven_layers_equal_the_model(inside: bool) -> None:
    assert_equal(pipelined(inside, microbatches=4, schedule="1f1b"), mesh("stage:4"), layers=6)
    assert_equal(pipelined(inside, microbatches=2, cut=(1, 3, 2, 0)), mesh("stage:4,data:2"), layers=6)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_compilers_may_communicate_inside_of_uneven_stages(schedule: Any) -> None:
    """Rows that are shifted go to other devices of a stage, by a collective that waits for the whole mesh."""

    def layer(params: Any, x: Any) -> Any:
        x = jnp.tanh(x @ params)
        for spec in (P("rows", "columns"), P("columns", "rows")) if is_split else ():
            x = jax.lax.with_sharding_constraint(x, spec)
        return jnp.roll(x, 1, axis=0) + x

    def squares(head: Any, y: Any, targets: Any) -> Any:
        return jnp.mean((y @ head - targets) ** 2)

    run = sr.pipeline(layer, axis="stage", microbatches=4, schedule=schedule, last=squares)
    gradient = jax.grad(lambda params, head, x: run(params, x, x, last=head), (0, 1, 2))
    is_split = False
    with jax.enable_x64(True):
        arrays = jnp.linspace(-1, 1, 320).reshape(5, 8, 8), jnp.eye(8) + 0.1, jnp.linspace(0, 1, 256).reshape(32, 8)
        expected = gradient(*arrays)
        is_split = True
        with jax.set_mesh(mesh("stage:2,rows:2,columns:2")):
            compiled = jax.jit(gradient).lower(*arrays).compile()
            results = compiled(*arrays)
    assert "collective-permute" in str(compiled.as_text())
    for result, reference in zip(map(np.asarray, results), map(np.asarray, expected), strict=True):
        np.testing.assert_allclose(result, reference, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_without_a_mesh_it_computes_the_same() -> None:
    params, (x, targets) = parameters(4), batch()
    loss = pipelined(microbatches=4, schedule="1f1b")
    assert jnp.allclose(loss(params, x, targets), unpipelined(params, x, targets), rtol=1e-6)


def test_all_that_is_wrong_is_listed() -> None:
    with pytest.raises(ConfigError, match=r"got 'x'.*microbatches must.*must be different mesh axes.*cut must"):
        sr.pipeline(jnp.dot, axis="a", microbatches=0, schedule="x", batch="a", cut=[-1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigTypeError, match="layer, first must be functions"):
        sr.pipeline(3, axis="a", microbatches=1, first=4)  # pyright: ignore[reportArgumentType]
    run = sr.pipeline(lambda params, x: x @ params, axis="stage", microbatches=3, batch="rows")
    wrong = (
        "unknown axis 'rows'.*no function first=.*no function last=.*32 examples cannot be split into 3.*"
        "6 layers are too few for 8 stages"
    )
    with jax.set_mesh(mesh("stage:8")), pytest.raises(ConfigError, match=wrong):
        run(jnp.ones((6, 4, 4)), jnp.ones((32, 4)), jnp.ones(32), first=1)
    run = sr.pipeline(jnp.dot, axis="stage", microbatches=4)
    with jax.set_mesh(jax.make_mesh((8,), ("stage",))), pytest.raises(ConfigError, match="Explicit axes, stage; make"):
        run(jnp.ones((8, 4, 4)), jnp.ones((32, 4)))


def test_functions_are_held_to_what_they_return() -> None:
    run = sr.pipeline(lambda params, x: (x @ params)[..., :2], axis="stage", microbatches=4)
    with pytest.raises(ConfigError, match=r"gets float32\[8, 4\] in .* and returns float32\[8, 2\]"):
        run(jnp.ones((6, 4, 4)), jnp.ones((32, 4)))
    losses = sr.pipeline(lambda params, x: x @ params, axis="stage", microbatches=4, last=lambda params, y, targets: y)
    with pytest.raises(ConfigError, match="last must return one float"):
        losses(jnp.ones((6, 4, 4)), jnp.ones((32, 4)))
    with pytest.raises(
        ConfigError, match=r"must be that of the layers in all arrays, got layers\.a \(6, 4\), layers\.b \(5,\)"
    ):
        run({"a": jnp.ones((6, 4)), "b": jnp.ones(5)}, jnp.ones((32, 4)))


@pytest.mark.slow
def test_lists_and_modules_are_stacked() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    linears = [eqx.nn.Linear(8, 8, key=key) for key in keys]
    together = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(keys)
    run = sr.pipeline(lambda linear, x: jax.vmap(linear)(x), axis="stage", microbatches=2)
    x = jnp.ones((4, 8))
    assert jnp.array_equal(run(linears, x), run(together, x))
    assert jnp.allclose(run(linears, x), jax.vmap(lambda row: linears[3](linears[2](linears[1](linears[0](row)))))(x))


@pytest.mark.slow
def test_vmap_checkpoint_and_bfloat16() -> None:
    def layer(params: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ params)

    params = jax.random.normal(jax.random.key(0), (4, 8, 8), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (3, 8, 8), jnp.bfloat16)

    def loss(run: Any) -> Any:
        return jax.vmap(jax.grad(lambda params, x: (run(params, x).astype(jnp.float32) ** 2).sum()), (None, 0))

    plain = sr.pipeline(layer, axis="stage", microbatches=4)
    kept = sr.pipeline(jax.checkpoint(layer), axis="stage", microbatches=4)
    with jax.set_mesh(mesh("stage:4")):
        results = [jax.jit(loss(run))(params, x).astype(jnp.float32) for run in (plain, kept)]
    expected = jax.jit(loss(plain))(params, x).astype(jnp.float32)
    for result in results:
        assert jnp.abs(result - expected).max() <= 2e-2 * jnp.abs(expected).max()
