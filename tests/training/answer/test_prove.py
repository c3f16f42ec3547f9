"""What compilers make of plans with arrays in the memory of hosts."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from shardrules.planning.graph.machine import Assumptions
from shardrules.planning.query import QueryOptions
from shardrules.training.answer.prove import ProvedPlan, prove_outcome
from shardrules.training.cluster import Cluster
from shardrules.training.search.problem import Outcome, TrainingProblem, plan_once
from shardrules.training.step import Recipe, TrainingStep

LAYERS, WIDTH, ROWS = 8, 1024, 262144


def loss(model: Any, x: Any) -> Any:
    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        up, down = (weight.astype(jnp.bfloat16) for weight in weights)
        return x + jnp.tanh(x @ up) @ down, None

    return jnp.mean(jax.lax.scan(layer, x, model)[0].astype(jnp.float32) ** 2)


def problem() -> TrainingProblem:
    shape = jax.ShapeDtypeStruct
    model = shape((LAYERS, WIDTH, 4 * WIDTH), jnp.float32), shape((LAYERS, 4 * WIDTH, WIDTH), jnp.float32)
    step, cluster = TrainingStep(loss, optax.adam(1e-3)), Cluster.of("cuda:h100:8")
    options = QueryOptions(None, None, cluster.hardware, Assumptions(), 600, False)
    state = jax.eval_shape(step.init_state, model)
    return TrainingProblem(step, model, state, shape((ROWS, WIDTH), jnp.bfloat16), cluster, options)


@pytest.mark.slow
def test_what_is_on_hosts_is_not_on_devices_by_the_compiler() -> None:
    training = problem()
    least, on_host = training.keeps(1)[-2:]
    assert on_host.host_bytes
    assert not least.host_bytes
    recipes = Recipe(keep=least), Recipe(keep=on_host), Recipe(keep=least, host_state=training.host_state(1.0))
    outcomes = [plan_once(training, (8,), recipe, float("inf"), is_free=True) for recipe in recipes]
    proofs = [prove_outcome(training, outcome) for outcome in outcomes]
    for proof in proofs:
        assert proof.seconds == pytest.approx(proof.modelled_seconds, rel=0.25)
    (_, activations, state), (_, offloaded, moved) = outcomes, proofs
    for outcome, proof in ((activations, offloaded), (state, moved)):
        assert saved_bytes(proofs[0], proof) > 0.8 * outcome.host_bytes
        assert saved_bytes(proofs[0], proof) == pytest.approx(modelled_saving(outcomes[0], outcome), rel=0.25)
        assert proof.audit.time.copy_seconds > 0
    assert moved.audit.memory.state_bytes < 1024


def saved_bytes(before: ProvedPlan, after: ProvedPlan) -> int:
    return before.peak_bytes - after.peak_bytes


def modelled_saving(before: Outcome, after: Outcome) -> int:
    return before.peak_bytes - after.peak_bytes
