"""From a loss and a cluster to a step that runs."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import ConfigError, DoesNotFitError, PlanError
from shardrules.reports import TrainingPlan, TrainingPlanReport
from shardrules.training.step import TrainingStep

OPTIMIZER = optax.adam(1e-2)


def make(key: Any) -> eqx.nn.MLP:
    return eqx.nn.MLP(16, 16, 64, 2, key=key)


def squares(model: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def shapes() -> tuple[Any, Any]:
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    return eqx.filter_eval_shape(make, jax.random.key(0)), (x, x)


@pytest.fixture(scope="module")
def plan() -> TrainingPlan:
    model, batch = shapes()
    return sr.plan_training(squares, model, OPTIMIZER, batch, cluster=jax.devices())


def test_planned_steps_equal_plain_steps(plan: TrainingPlan) -> None:
    key = jax.random.key(1)
    batch = jax.random.normal(key, (64, 16)), jnp.ones((64, 16))
    model, state = plan.init(make)(key)
    assert all(leaf.sharding.mesh == plan.mesh for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    step = TrainingStep(squares, OPTIMIZER)
    expected, expected_state = make(key), step.init_state(make(key))
    for _ in range(2):
        model, state, loss, aux = plan.step(model, state, batch)
        expected, expected_state, expected_loss, _ = eqx.filter_jit(step)(expected, expected_state, batch)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert aux is None
    for leaf, other in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
        if eqx.is_array(leaf):
            np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-6)


def test_every_candidate_says_why_it_lost(plan: TrainingPlan) -> None:
    first, *others = plan.candidates
    assert first.reason == ""
    assert first.fits
    assert first.seconds == plan.planned.cost
    assert others
    assert all(candidate.reason for candidate in others)
    assert {candidate.mesh for candidate in plan.candidates} >= {"data:8", "data:4,model:2"}
    assert (
        min(candidate.seconds for candidate in others if candidate.fits and candidate.seconds) * 1.002 > first.seconds
    )


def test_reports_are_the_same_after_json(plan: TrainingPlan) -> None:
    report = TrainingPlanReport.from_json(plan.to_json())
    assert report == plan.report
    assert str(report) == str(plan)
    assert "the plan" in str(plan)
    assert "examples/s" in str(plan)


def test_memory_by_category_is_the_peak(plan: TrainingPlan) -> None:
    assert sum(nbytes for _, nbytes in plan.report.memory) == plan.peak_bytes


def test_the_rule_places_model_and_state(plan: TrainingPlan) -> None:
    model, _ = shapes()
    pair = model, eqx.filter_eval_shape(plan.training_step.init_state, model)
    assert plan.as_rule().plan(pair, plan.mesh).specs == plan.plan.specs[:2]


def test_two_plans_can_be_compared(plan: TrainingPlan) -> None:
    assert plan.diff(plan).seconds == (plan.planned.cost, plan.planned.cost)


def test_pins_are_kept() -> None:
    model, batch = shapes()
    pins = sr.RegexShardingRule([("0/layers/1/weight", P("model", None))])
    pinned = sr.plan_training(squares, model, OPTIMIZER, batch, cluster="cuda:h100:8", pins=pins)
    assert pinned.plan.specs[0].layers[1].weight == P("model")
    # Pins that name an axis leave only the meshes that have it.
    refused = [candidate for candidate in pinned.candidates if candidate.mesh == "8"]
    assert "model" in refused[0].reason
    assert refused[0].seconds is None


def test_a_mesh_is_kept() -> None:
    model, batch = shapes()
    mesh = sr.create_mesh("a:2,b:4")
    pinned = sr.plan_training(squares, model, OPTIMIZER, batch, cluster=mesh)
    assert pinned.mesh is mesh
    assert len(pinned.candidates) == 1


def test_what_cannot_fit_is_refused_with_a_bound() -> None:
    model, batch = shapes()
    with pytest.raises(DoesNotFitError, match="no mesh can be planned"):
        sr.plan_training(squares, model, OPTIMIZER, batch, cluster="cuda:h100:8", memory_limit=100)


def test_wrong_arguments_are_refused() -> None:
    model, batch = shapes()
    with pytest.raises(ConfigError, match="microbatches must be a positive integer"):
        sr.plan_training(squares, model, OPTIMIZER, batch, cluster="cuda:h100:8", microbatches=0)
    unknown = sr.RegexShardingRule([("weight", P("tensor"))])
    with pytest.raises(PlanError, match="no mesh can be planned"):
        sr.plan_training(squares, model, OPTIMIZER, batch, cluster="cuda:h100:8", pins=unknown)


def test_progress_has_a_line_for_each_plan() -> None:
    lines: list[str] = []
    model, batch = shapes()
    plan = sr.plan_training(squares, model, OPTIMIZER, batch, cluster="cuda:h100:4", progress=lines.append)
    assert len(lines) == len(plan.candidates)
    assert "best so far" in lines[-1]
