"""Which plans are compiled, and what compilers make of plans with arrays in the memory of hosts."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from shardrules.planning.graph.machine import Assumptions
from shardrules.planning.query import QueryOptions
from shardrules.training.answer.prove import ProvedPlan, plans_to_prove, prove_outcome
from shardrules.training.cluster import Cluster
from shardrules.training.search.problem import Outcome, TrainingProblem, plan_once
from shardrules.training.step import Recipe, TrainingStep

LAYERS, WIDTH, ROWS = 8, 1024, 262144


def loss(model: Any, x: Any) -> Any:
    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        up, down = (weight.astype(jnp.bfloat16) for weight in weights)
        return x + jnp.tanh(x @ up) @ down, None

    return jnp.mean(jax.lax.scan(layer, x, model)[0].astype(jnp.float32) ** 2)


def problem(target: str = "cuda:h100:8", layers: int = LAYERS, width: int = WIDTH, rows: int = ROWS) -> TrainingProblem:
    shape = jax.ShapeDtypeStruct
    model = shape((layers, width, 4 * width), jnp.float32), shape((layers, 4 * width, width), jnp.float32)
    step, cluster = TrainingStep(loss, optax.adam(1e-3)), Cluster.of(target)
    options = QueryOptions(None, None, cluster.hardware, Assumptions(), 600, False)
    state = jax.eval_shape(step.init_state, model)
    return TrainingProblem(step, model, state, shape((rows, width), jnp.bfloat16), cluster, options)


def test_plans_nearly_as_fast_that_differ_are_compiled_first() -> None:
    def outcome(shape: tuple[int, ...], seconds: float, microbatches: int = 1, host_bytes: int = 0) -> Outcome:
        return Outcome(shape, "", Recipe(microbatches), None, seconds, 0, True, host_bytes=host_bytes)

    best, same = outcome((4, 2), 1.0), outcome((4, 2), 1.001)
    parts, mesh, hosts = outcome((4, 2), 1.01, 2), outcome((8,), 1.02), outcome((4, 2), 1.025, 1, 2**30)
    slow = outcome((2, 4), 1.1)
    outcomes = [best, same, parts, mesh, hosts, slow]
    assert plans_to_prove(outcomes, 3) == [best, parts, mesh]
    assert plans_to_prove(outcomes, 9) == [best, parts, mesh, hosts, same, slow]
    assert plans_to_prove([], 2) == []


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


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 4])
def test_pairs_of_rounds_are_counted_as_the_compiler_has_them(groups: int) -> None:
    training = problem("cuda:h100:4 maxtext:gpu", layers=16, width=2048, rows=16384)
    recipe = Recipe(2, groups, training.keeps(2)[0])
    outcome = plan_once(training, (4,), recipe, float("inf"), is_free=True)
    proof = prove_outcome(training, outcome)
    assert outcome.peak_bytes - outcome.paired_bytes < proof.peak_bytes <= outcome.peak_bytes


def saved_bytes(before: ProvedPlan, after: ProvedPlan) -> int:
    return before.peak_bytes - after.peak_bytes


def modelled_saving(before: Outcome, after: Outcome) -> int:
    return before.peak_bytes - after.peak_bytes
