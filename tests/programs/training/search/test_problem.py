"""The problem of a training plan."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules.programs.training.cluster import Cluster
from shardrules.programs.training.search.problem import TrainingProblem
from tests.programs.training.checks import problem_of


def loss(model: Any, x: Any) -> Any:
    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        up, down = (weight.astype(jnp.bfloat16) for weight in weights)
        return x + jnp.tanh(jnp.tanh(x @ up) @ down), None

    return jnp.mean(jax.lax.scan(layer, x, model)[0].astype(jnp.float32) ** 2)


def problem(host_memory: int | None) -> TrainingProblem:
    """Of layers so wide that a TPU fetches arrays from its host faster than it computes them."""
    shape, width = jax.ShapeDtypeStruct, 2**14
    model = shape((4, width, width), jnp.float32), shape((4, width, width), jnp.float32)
    cluster = Cluster.of(sr.mesh_shape("data:8"), sr.Hardware.named("tpu:v5e"))
    return problem_of(loss, model, shape((2**14, width), jnp.bfloat16), cluster, host_memory=host_memory)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_hosts_have_no_room_for_may_be_computed_again(microbatches: int) -> None:
    roomy, tight, none = (problem(room).keeps(microbatches) for room in (None, 2**20, 0))
    assert any(keep.host_bytes for keep in roomy)
    assert not any(keep.host_bytes for keep in tight)
    assert tight[0] == none[0]
    assert tight[-1] == none[-1]
    kept = [keep.kept_bytes for keep in tight]
    assert kept == sorted(kept, reverse=True)
    assert [keep.seconds for keep in tight[1:]] == sorted(keep.seconds for keep in tight[1:])
