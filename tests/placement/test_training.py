"""By behaviour: losses under a plan match one device, and every array stays where it was placed."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.axes import AnyMesh
from tests.placement.models import FSDP, OPTIM, TASKS, Task, compiled_step, params, step_of

STEPS = 20
MESHES: dict[str, Callable[[], Mesh]] = {
    "auto": functools.cache(lambda: sr.create_mesh("data:4,model:2")),
    "explicit": functools.cache(lambda: jax.make_mesh((4, 2), ("data", "model"))),
}

PLANS: dict[str, Callable[[Task], sr.ShardingRule]] = {
    "fsdp": lambda task: FSDP,
    "tensor_parallel": lambda task: task.tensor_parallel,
    "both": lambda task: task.tensor_parallel | FSDP,
}

SPLITS = {"fsdp": ("data",), "tensor_parallel": ("model",), "both": ("data", "model")}
"""The axes that a plan must use at all: one that replicates everything trains as well."""


@functools.cache
def losses_on_one_device(name: str) -> np.ndarray:
    task = next(task for task in TASKS if task.name == name)
    training = eqx.filter_jit(task.make)(jax.random.key(0))
    moments = eqx.filter_jit(OPTIM.init)(params(training))
    step, batch = eqx.filter_jit(step_of(task)), jax.tree.map(jnp.asarray, task.batch())
    losses = []
    for _ in range(STEPS):
        training, moments, loss = step(training, moments, batch)
        losses.append(loss)
    return np.array(jax.device_get(losses))


def assert_sharded_as(tree: Any, plan: sr.ShardingPlan, mesh: Mesh) -> int:
    """Every array has exactly the plan's sharding, on this mesh with its axis types; returns how many are split."""
    split = 0
    arrays = [leaf for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]
    specs = [plan.decision(path).spec or P() for path in plan.paths]
    for path, array, spec in zip(plan.paths, arrays, specs, strict=True):
        assert isinstance(array.sharding, NamedSharding), path
        assert array.sharding.mesh == mesh, path
        assert sr.specs.same(array.sharding.spec, spec), (path, array.sharding.spec, spec)
        assert array.sharding.shard_shape(array.shape) == sr.specs.shard_shape(array.shape, spec, mesh.shape), path
        split += not array.sharding.is_fully_replicated
    return split


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_losses_match_one_device_and_nothing_moves(task: Task, kind: str) -> None:
    rule = PLANS[kind](task)
    training = sr.filter_init(task.make, rule, MESHES["explicit" if kind == "both" else "auto"]())(jax.random.key(0))
    plan = rule.plan(params(training), sr.mesh_shape("data:4,model:2"))
    used = {name for path in plan.paths for entry in plan.decision(path).spec or () for name in np.atleast_1d(entry)}
    assert used - {None} == set(SPLITS[kind])
    for mesh in MESHES.values():
        losses = losses_under(task, rule, sr.filter_shard(training, rule, mesh()), mesh())
        np.testing.assert_allclose(losses, losses_on_one_device(task.name), rtol=1e-5)
        assert losses[-1] < 0.8 * losses[0]


def losses_under(task: Task, rule: sr.ShardingRule, training: Any, mesh: Mesh) -> np.ndarray:
    """Trains, and checks on the way how everything is sharded."""
    training = jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, training)  # the step donates it
    whole = rule.plan(training, mesh)
    plan = rule.plan(params(training), mesh)
    moments = sr.filter_init(OPTIM.init, plan.mirror, mesh)(params(training))
    batch = sr.filter_shard(task.batch(), P("data"), mesh)
    step = compiled_step(task, rule, plan, mesh)
    losses = []
    for turn in range(STEPS):
        previous = (training, moments)
        training, moments, loss = step(training, moments, batch)
        losses.append(loss)
        if turn in (0, STEPS - 1):
            assert assert_sharded_as(training, whole, mesh) > 0
            assert assert_sharded_as(moments, plan.mirror(moments), mesh) == 2 * assert_sharded_as(
                params(training), plan, mesh
            )
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(previous) if eqx.is_inexact_array(leaf))
    return np.array(jax.device_get(losses))


# ---- Explicit axes ----


def explicit() -> Mesh:
    return MESHES["explicit"]()


def forward(model: eqx.nn.MLP, x: jax.Array) -> jax.Array:
    return jax.vmap(model)(x)


def mlp(mesh: AnyMesh, rule: sr.ShardingRule = FSDP) -> eqx.nn.MLP:
    return sr.filter_init(functools.partial(eqx.nn.MLP, 8, 8, 16, 2), rule, mesh)(key=jax.random.key(0))


def test_refused_layers_on_explicit_axes_get_a_note_with_the_remedy() -> None:
    run = sr.filter_jit(forward, mesh=explicit(), in_shardings=(FSDP, P("data")), axis_types=None)
    with pytest.raises(Exception, match="illegally sharded") as caught:
        run(mlp(explicit()), np.ones((8, 8), np.float32))
    assert any("filter_jit(..., axis_types='auto'" in note for note in caught.value.__notes__)


def test_an_error_that_is_not_about_shardings_is_left_alone() -> None:
    def wrong(x: jax.Array) -> jax.Array:
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer") as caught:
        sr.filter_jit(wrong, mesh=explicit())(np.ones(8))
    assert "axis_types" not in "".join(caught.value.__notes__)  # JAX leaves notes of its own


def test_plain_layers_with_gathered_weights_run_on_explicit_axes() -> None:
    """For Explicit axes inside, a user says where weights are needed whole, and gradients follow."""

    def loss(model: eqx.nn.MLP, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(model, eqx.is_array)
        whole = eqx.combine(sr.with_sharding_constraint(arrays, P()), static)
        out = forward(whole, x)
        assert jax.typeof(out).sharding.spec == P("data", None)
        return (out**2).mean()

    model, x = mlp(explicit()), np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    plan = FSDP.plan(model, explicit())
    run = sr.filter_jit(
        eqx.filter_value_and_grad(loss),
        mesh=explicit(),
        in_shardings=(FSDP, P("data")),
        out_shardings=(P(), FSDP),
        axis_types=None,
    )
    value, grads = run(model, x)
    here = sr.filter_shard(model, jax.devices()[0])
    expected_value, expected_grads = eqx.filter_value_and_grad(lambda model, x: (forward(model, x) ** 2).mean())(
        here, x
    )
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    assert assert_sharded_as(grads, plan, explicit()) == 6
    for gradient, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)


def test_results_without_shardings_keep_the_mesh_of_the_arguments() -> None:
    seen = []

    def run(model: eqx.nn.MLP, x: jax.Array) -> tuple[Any, Any, str]:
        seen.append((jax.sharding.get_abstract_mesh().axis_types, jax.typeof(x).sharding.spec))
        return forward(model, x), model, "text"

    compiled = sr.filter_jit(run, mesh=explicit())
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(explicit(), P("data")))
    model = mlp(explicit())
    out, same, text = compiled(model, x)
    assert seen[0] == ((AxisType.Auto, AxisType.Auto), P(None, None))
    assert text == "text"
    assert out.sharding.mesh == explicit()
    assert assert_sharded_as(same, FSDP.plan(model, explicit()), explicit()) == 6
    here = sr.filter_shard(model, jax.devices()[0])
    np.testing.assert_allclose(out, forward(here, jnp.ones((8, 8))), rtol=1e-5)
    count = len(seen)
    compiled(same, x)
    assert len(seen) == count  # what came out goes in again, without being compiled again


def test_auto_axes_can_be_explicit_inside() -> None:
    mesh = MESHES["auto"]()
    seen = []

    def double(x: jax.Array) -> jax.Array:
        seen.append(jax.typeof(x).sharding.spec)
        return 2 * x

    run = sr.filter_jit(double, mesh=mesh, in_shardings=P("data"), axis_types="explicit")
    out = run(np.ones((8, 2)))
    assert seen[0] == P("data", None)
    assert out.sharding == NamedSharding(mesh, P("data", None))


def test_axis_types_work_with_the_mesh_in_force() -> None:
    with jax.set_mesh(explicit()):
        run = sr.filter_jit(forward, in_shardings=(FSDP, P("data")), out_shardings=P("data"))
        out = run(mlp(explicit()), np.ones((8, 8), np.float32))
    assert out.sharding == NamedSharding(explicit(), P("data"))


def test_a_misplaced_argument_is_described_on_its_own_mesh() -> None:
    run = sr.filter_jit(forward, mesh=explicit(), in_shardings=(FSDP, P("data")))
    whole = sr.filter_shard(mlp(explicit()), P(), explicit())
    with pytest.raises(sr.errors.PlanError, match=r"argument 0, .*is P\(\) on data:4,model:2, not P\('data', None\)"):
        run(whole, np.ones((8, 8), np.float32))


def test_closed_over_arrays_get_a_note_with_the_remedy() -> None:
    w = jax.device_put(np.ones(8), NamedSharding(explicit(), P("data")))
    with pytest.raises(ValueError, match="should match the aval mesh") as caught:
        sr.filter_jit(lambda x: x * w, mesh=explicit())(np.ones(8))
    assert any("as an argument" in note for note in caught.value.__notes__)


def test_inside_of_another_traced_function_its_types_stay() -> None:
    seen = []
    run = sr.filter_jit(lambda x: seen.append(jax.typeof(x).sharding.spec) or 2 * x, mesh=explicit())
    x = jax.device_put(np.ones(8), NamedSharding(explicit(), P("data")))
    assert jax.jit(run)(x).sharding == x.sharding
    assert run(x).sharding.mesh == explicit()
    assert seen == [P("data"), P(None)]


def test_code_for_explicit_axes_gets_a_note_with_the_remedy() -> None:
    def columns(x: jax.Array) -> jax.Array:
        return jax.sharding.reshard(x, P(None, "data"))

    x = jax.device_put(np.ones((8, 8)), NamedSharding(explicit(), P("data")))
    with pytest.raises(ValueError, match="of type Auto") as caught:
        sr.filter_jit(columns, mesh=explicit())(x)
    assert any("axis_types=None" in note for note in caught.value.__notes__)
    assert sr.filter_jit(columns, mesh=explicit(), axis_types=None)(x).sharding.spec == P(None, "data")
