"""The optimizer's state in the memory of the host: what is sent there, and updates a few arrays at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from shardrules.programs.jaxprs.walk import equations
from shardrules.programs.training.host_state import LEAST_HOST_BYTES, array_bytes, host_state
from shardrules.programs.training.step import TrainingStep

PARAMS = {"a": jnp.full((512, 512), 0.01), "b": jnp.full((512, 1024), 0.02), "c": jnp.zeros(1024)}
X = jax.random.normal(jax.random.key(0), (8, 512))


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] + params["c"]) ** 2)


def on_host(state: Any) -> Any:
    sharding = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    leaves, treedef = jax.tree.flatten(state)
    chosen = host_state(state, 1)
    return treedef.unflatten(
        [jax.device_put(leaf, sharding) if index in chosen else leaf for index, leaf in enumerate(leaves)]
    )


def test_the_largest_arrays_go_first() -> None:
    state = optax.adam(1e-3).init(PARAMS)
    assert host_state(state, 1) == (1, 2, 4, 5)  # the moments of a and b; c is small
    assert host_state(state, 1, 0.4) == (2, 5)  # those of b are two thirds
    assert host_state(state, 1, 0.0) == ()
    assert host_state(state, 2) == (2, 5)  # split over two devices, a is small
    most_bytes = 3 * LEAST_HOST_BYTES
    chosen = host_state(state, 1, most_bytes=most_bytes)
    assert chosen == (1, 2)
    assert sum(array_bytes(state)[index] for index in chosen) <= most_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
        optax.contrib.muon(1e-2),
        optax.MultiSteps(optax.adam(1e-2), 2),
        optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau()),
    ],
    ids=["adamw", "muon", "multi", "plateau"],
)
def test_state_on_the_host_is_updated_as_on_the_device(optimizer: Any) -> None:
    step = TrainingStep(loss, optimizer)
    run = jax.jit(step.__call__)
    expected = actual = PARAMS
    expected_state = step.init_state(PARAMS)
    state = on_host(expected_state)
    memories = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)]
    assert "pinned_host" in memories
    for _ in range(2):
        expected, expected_state, _, _ = run(expected, expected_state, X)
        actual, state, _, _ = run(actual, state, X)
        assert [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)] == memories
    for new, other in zip(jax.tree.leaves((actual, state)), jax.tree.leaves((expected, expected_state)), strict=True):
        np.testing.assert_allclose(new, other, rtol=1e-4, atol=1e-7)


def counts(optimizer: Any) -> dict[str, int]:
    step = TrainingStep(loss, optimizer)
    program = jax.make_jaxpr(step.__call__)(PARAMS, on_host(step.init_state(PARAMS)), X)
    names = [equation.primitive.name for equation in equations(program)]
    return {name: names.count(name) for name in ("device_put", "optimization_barrier")}


def test_each_part_waits_for_the_one_before() -> None:
    # The moments of a and those of b: fetched and sent, the second pair once the first is on the host.
    assert counts(optax.adam(1e-2)) == {"device_put": 8, "optimization_barrier": 1}


@pytest.mark.slow
def test_updates_that_may_be_skipped_have_parts() -> None:
    # Three pairs of moments and sums of gradients have two.
    assert counts(optax.MultiSteps(optax.adam(1e-2), 2))["optimization_barrier"] == 1
    assert counts(optax.apply_if_finite(optax.adam(1e-2), 2))["optimization_barrier"] == 1


@pytest.mark.slow
def test_updates_in_which_all_depends_on_all_are_one_part() -> None:
    skipping = optax.conditionally_transform(optax.adam(1e-2), lambda step, **_: jnp.asarray(step) % 2 == 0)
    assert counts(skipping)["optimization_barrier"] == 0
