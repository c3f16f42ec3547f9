"""Arrays that the backward pass keeps, by device."""

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import optax
import pytest

import shardrules as sr
from shardrules.programs.training.cluster import Cluster
from shardrules.programs.training.search.problem import plan_once
from tests.programs.training.checks import problem_of

LAYERS, EXAMPLES, LENGTH, WIDTH, HIDDEN = 4, 2, 8192, 512, 2048


def scanned(model: Any, x: Any) -> Any:
    out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1] + x, None), x, model)
    return jnp.mean(out**2)


def unrolled(model: Any, x: Any) -> Any:
    for up, down in zip(*model, strict=True):
        x = jnp.tanh(x @ up) @ down + x
    return jnp.mean(x**2)


@pytest.mark.parametrize("loss", [scanned, pytest.param(unrolled, marks=pytest.mark.slow)])
def test_what_is_kept_is_split_as_the_plan_says(loss: Any) -> None:
    """Two examples leave half of four devices to another dim: those of tokens."""
    up, down = (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH)
    model = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (up, down))
    if loss is unrolled:
        model = tuple([jax.ShapeDtypeStruct(array.shape[1:], array.dtype)] * LAYERS for array in model)
    batch = jax.ShapeDtypeStruct((EXAMPLES, LENGTH, WIDTH), jnp.float32)
    cluster = Cluster.of(sr.mesh_shape("data:2,model:2"))
    problem = problem_of(loss, model, batch, cluster, optimizer=optax.sgd(0.1))
    (shape,) = cluster.shapes()
    for keep in problem.keeps(1)[1:]:
        recipe = attrs.evolve(problem.step.recipe, keep=keep)
        outcome = plan_once(problem, shape, recipe, float("inf"), is_free=True)
        # Its layouts: all of it is split over all devices.
        assert outcome.batch_splits < 4
        assert outcome.recipe.keep.kept_bytes == pytest.approx(keep.kept_bytes / 4)
