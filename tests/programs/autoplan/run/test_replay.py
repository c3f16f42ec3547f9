"""Functions that run as planned return what they return unplanned."""

import functools
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import shardrules as sr
from shardrules.core.errors import NoMeshError, TreeError
from tests.compiles import compiles
from tests.programs.autoplan import models
from tests.programs.autoplan.models import (
    FAST,
    SMALL,
    TRAINED,
    WRITTEN,
    Case,
    compare,
    mlp_loss,
    mlp_weights,
    pairs,
    real,
)

MESHES = ("data:8", "data:4,model:2", "a:2,b:2,c:2")
ids = [case.name for case in SMALL]


def mesh_of(axes: str, types: str = "auto") -> Mesh:
    return sr.create_mesh(axes, axis_types=types)


def planned(case: Case, mesh: Any) -> sr.reports.AutoPlan:
    return sr.autoplan(case.fn, *case.args, mesh=mesh, hardware=FAST, time_limit=10)


@functools.cache
def unplanned(name: str, axes: str) -> Any:
    (case,) = [case for case in (*SMALL, *TRAINED, *WRITTEN) if case.name == name]
    with jax.set_mesh(mesh_of(axes)):
        return (case.fn if case in SMALL or case.name.startswith("equinox") else jax.jit(case.fn))(*case.args)


def assert_as_planned(plan: sr.reports.AutoPlan, results: Any) -> None:
    """Checks that results have the shardings of the plan."""
    assert isinstance(plan.mesh, Mesh)
    arrays = [array for array in jax.tree.leaves(results) if isinstance(array, jax.Array)]
    for array, spec in zip(arrays, plan.result_specs, strict=True):
        mesh = Mesh(plan.mesh.devices, plan.mesh.axis_names)
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)


@pytest.mark.sample(10)
@pytest.mark.parametrize("case_index", range(len(SMALL)), ids=ids)
def test_small_functions(case_index: int) -> None:
    """Meshes and axis types take turns."""
    case, axes = SMALL[case_index], MESHES[case_index % len(MESHES)]
    mesh = mesh_of(axes, ("auto", "explicit")[case_index % 2])
    plan = planned(case, mesh)
    got = plan.jit(case.fn)(*case.args)
    compare(got, unplanned(case.name, axes))
    if case.name not in ("constants only", "no arrays"):
        assert_as_planned(plan, got)


def test_mutable_arrays_stay_as_they_are() -> None:
    def rewritten(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        ref[0] = 2 * ref[0]
        return ref[...] @ x

    x = real(16, 16)
    plan = sr.autoplan(rewritten, x, mesh=mesh_of("data:8"), hardware=FAST)
    assert "unknown-operation" in {finding.code for finding in plan.findings}
    compare(plan.jit(rewritten)(x), jax.jit(rewritten)(x))


LARGE = ("recomputed block", "dropout", "unrolled blocks", "dropout, raw key")
"""Cases that add little to the others and take long to compile."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", [case for case in TRAINED if case.name not in LARGE], ids=lambda case: case.name)
def test_training(case: Case) -> None:
    plan = planned(case, mesh_of("data:8"))
    got = plan.jit(case.fn)(*case.args)
    compare(got, unplanned(case.name, "data:8"))
    assert_as_planned(plan, got)
    assert any(plan.specs), "on such hardware arrays are split"


QUICKLY = ("mlp", "dropout", "custom derivatives")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in TRAINED if case.name in QUICKLY], ids=QUICKLY)
def test_training_on_two_explicit_axes(case: Case) -> None:
    plan = planned(case, mesh_of("data:4,model:2", "explicit"))
    compare(plan.jit(case.fn)(*case.args), unplanned(case.name, "data:4,model:2"))


@pytest.mark.parametrize("case", WRITTEN, ids=[case.name for case in WRITTEN])
@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_functions_with_constraints_of_their_own(case: Case, types: str) -> None:
    assert case.axes is not None
    plan = planned(case, mesh_of(case.axes, types))
    compare(plan.jit(case.fn)(*case.args), unplanned(case.name, case.axes))
    assert {"constraints": "constrained", "shard_map": "opaque"}[case.name] in [
        finding.code for finding in plan.findings
    ]


def placed(plan: sr.reports.AutoPlan, mesh: Mesh, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Puts arguments, whose leaves are all arrays, where the plan has them."""
    leaves, treedef = jax.tree.flatten(args)
    pairs = zip(leaves, plan.specs, strict=True)
    return treedef.unflatten([jax.device_put(leaf, NamedSharding(mesh, spec)) for leaf, spec in pairs])


def step(w: Any, x: Any, y: Any) -> Any:
    value, grads = jax.value_and_grad(mlp_loss)(w, x, y)
    return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, w, grads), value


STEP = Case("mlp", step, TRAINED[0].make)


def step_plan(axes: str = "data:4,model:2", **options: Any) -> sr.reports.AutoPlan:
    return sr.autoplan(STEP.fn, *STEP.args, mesh=mesh_of(axes), hardware=FAST, **options)


def test_step_after_step() -> None:
    """Results are passed in again as they are."""
    plan = step_plan()
    run, (w, x, y) = plan.jit(STEP.fn), STEP.args
    expected = w
    first, _ = run(w, x, y)
    second, _ = run(first, x, y)
    w, loss = run(second, x, y)
    for _ in range(2):
        expected, _ = STEP.fn(expected, x, y)
    expected, other = STEP.fn(expected, x, y)
    compare((w, loss), (expected, other))
    assert jax.tree.map(lambda leaf: leaf.sharding, w) == jax.tree.map(lambda leaf: leaf.sharding, first)


@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_the_first_step_compiles_for_all_steps(types: str) -> None:
    """Arrays that are not placed yet, and those that come back."""
    mesh = mesh_of("data:4,model:2", types)
    plan = sr.autoplan(STEP.fn, *STEP.args, mesh=mesh, hardware=FAST)
    run, (w, x, y) = plan.jit(STEP.fn), STEP.args
    back, _ = jax.block_until_ready(run(w, x, np.asarray(y)))
    assert compiles(lambda: run(back, x, y)) == 0
    on_devices = jax.block_until_ready(placed(plan, mesh, STEP.args))
    assert compiles(lambda: run(*on_devices)) == 0


@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_arguments_may_be_placed_already(types: str) -> None:
    mesh = mesh_of("data:4,model:2", types)
    plan = sr.autoplan(STEP.fn, *STEP.args, mesh=mesh, hardware=FAST)
    compare(plan.jit(STEP.fn)(*placed(plan, mesh, STEP.args)), unplanned("mlp", "data:8"))


def test_numpy_arrays_and_shapes_are_accepted() -> None:
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), STEP.args)
    plan = sr.autoplan(STEP.fn, *shapes, mesh=mesh_of("data:8"), hardware=FAST)
    run = plan.jit(STEP.fn)
    compare(run(*jax.tree.map(np.asarray, STEP.args)), unplanned("mlp", "data:8"))
    assert run.lower(*shapes).compile().as_text()


def test_lowered_and_compiled() -> None:
    plan = step_plan()
    program = plan.jit(STEP.fn).lower(*STEP.args).compile()
    shardings = jax.tree.leaves(program.input_shardings)
    for sharding, spec, struct in zip(shardings, plan.specs, plan.call.structs, strict=True):
        assert sharding.is_equivalent_to(NamedSharding(mesh_of("data:4,model:2"), spec), len(struct.shape))
    assert program.memory_analysis() is not None


def test_donated_arguments_are_deleted() -> None:
    plan = step_plan("data:8")
    w, x, y = placed(plan, mesh_of("data:8"), STEP.args)
    got = plan.jit(STEP.fn, donate_argnums=0)(w, x, y)
    compare(got, unplanned("mlp", "data:8"))
    assert [leaf.is_deleted() for leaf in jax.tree.leaves((w, x, y))] == [True] * 3 + [False] * 2


def test_donated_counted_from_the_end() -> None:
    plan = sr.autoplan(lambda x, y: y + x.sum(), real(16, 8), real(16, 8), mesh=mesh_of("data:8"), hardware=FAST)
    x, y = placed(plan, mesh_of("data:8"), (real(16, 8), real(16, 8)))
    plan.jit(lambda x, y: y + x.sum(), donate_argnums=(-1,))(x, y)
    assert y.is_deleted()
    assert not x.is_deleted()


@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_gradients_of_planned_functions(types: str) -> None:
    args = mlp_weights(), *pairs()
    plan = sr.autoplan(mlp_loss, *args, mesh=mesh_of("data:4,model:2", types), hardware=FAST)
    run = plan.jit(mlp_loss)
    compare(jax.grad(run)(*args), jax.grad(mlp_loss)(*args))
    compare(jax.jit(jax.value_and_grad(lambda *values: 2 * run(*values)))(*args), jax.value_and_grad(_double)(*args))


def _double(*args: Any) -> Any:
    return 2 * mlp_loss(*args)


@pytest.mark.slow
def test_gradients_through_loops_and_checkpoints() -> None:
    w, x = models.block_weights(2), real(8, models.LENGTH, models.WIDTH)
    plan = sr.autoplan(models.scanned_loss, w, x, mesh=mesh_of("data:8"), hardware=FAST)
    compare(jax.grad(plan.jit(models.scanned_loss))(w, x), jax.grad(models.scanned_loss)(w, x))


def test_planned_functions_inside_of_jit_and_eval_shape() -> None:
    args = mlp_weights(), *pairs()
    plan = sr.autoplan(mlp_loss, *args, mesh=mesh_of("data:8"), hardware=FAST)
    run = plan.jit(mlp_loss)
    compare(jax.jit(lambda *values: run(*values) + 1)(*args), mlp_loss(*args) + 1)
    compare(jax.eval_shape(run, *args), jax.eval_shape(mlp_loss, *args))


def test_a_mesh_without_devices_needs_one_in_force() -> None:
    plan = sr.autoplan(STEP.fn, *STEP.args, mesh=sr.mesh_shape("data:8"), hardware=FAST)
    with pytest.raises(NoMeshError, match=r"jax\.set_mesh"):
        plan.jit(STEP.fn)(*STEP.args)
    with jax.set_mesh(mesh_of("data:4,model:2")), pytest.raises(NoMeshError, match="data:8"):
        plan.jit(STEP.fn)(*STEP.args)
    args = STEP.args
    with jax.set_mesh(mesh_of("data:8")):
        compare(plan.jit(STEP.fn)(*args), unplanned("mlp", "data:8"))


# Calls that differ from the plan.


def test_other_shapes_are_named() -> None:
    run = step_plan("data:8").jit(STEP.fn)
    w, x, y = STEP.args
    with pytest.raises(TreeError, match=r"x was float32\[16, 16\] and is float32\[8, 16\]; y was .*\[8, 16\]"):
        run(w, x[:8], y[:8])
    with pytest.raises(TreeError, match=r"w/up was float32\[16, 32\] and is bfloat16\[16, 32\]"):
        run({**w, "up": w["up"].astype(jnp.bfloat16)}, x, y)


def loss_of_tree(w: Any, x: Any) -> Any:
    return sum(jnp.sum(leaf * x.sum()) for leaf in jax.tree.leaves(w))


def test_other_trees_are_named() -> None:
    w, x = {"a": real(8, 8), "b": real(8)}, real(16)
    run = sr.autoplan(loss_of_tree, w, x, mesh=mesh_of("data:8"), hardware=FAST).jit(loss_of_tree)
    with pytest.raises(TreeError, match="w/c is new"):
        run({**w, "c": real(4)}, x)
    with pytest.raises(TreeError, match="w/b is missing"):
        run({"a": w["a"]}, x)


def test_another_function_is_refused() -> None:
    plan = step_plan("data:8")
    with pytest.raises(TreeError, match=r"what it computes is not: in the plan .* \(.*\.py:\d+\) is .*\. Plan again"):
        plan.jit(lambda w, x, y: (w, mlp_loss(w, x, y)))(*STEP.args)  # which has no gradient


@pytest.mark.parametrize("donate", [(), (0,)])
def test_arrays_of_weak_types_may_come_back_without(donate: Any) -> None:
    def fn(p: Any, x: Any, rate: Any) -> Any:
        return {"scale": p["scale"] - rate * x.sum(0), "gain": p["gain"] + 1}, x * rate

    p, x = {"scale": jnp.full((8,), 0.1), "gain": jnp.array(0.5)}, real(16, 8).astype(jnp.bfloat16)
    rate = jnp.array(0.5)
    run = sr.autoplan(fn, p, x, rate, mesh=mesh_of("data:8"), hardware=FAST).jit(fn, donate_argnums=donate)
    expected = jax.tree.map(np.asarray, p)
    for _ in range(3):
        expected, scaled = fn(expected, x, rate)
        p, result = run(p, x, rate)
        compare((p, result), (expected, scaled))
    assert run._prepared((p, x, rate))[1]._cache_size() == 1  # compiled once


def test_arrays_may_have_weak_types_where_the_plan_has_none() -> None:
    shape = jax.ShapeDtypeStruct((16,), jnp.float32)
    run = sr.autoplan(lambda x: x * 2, shape, mesh=mesh_of("data:8"), hardware=FAST).jit(lambda x: x * 2)
    np.testing.assert_array_equal(run(jnp.full(16, 0.5)), np.ones(16))


@pytest.mark.parametrize(
    ("fn", "other"),
    [
        (lambda x: x.sum(0), lambda x: x[:, ::-1].sum(0)),
        (lambda x: (x[0] + x[1]) * x[2], lambda x: (x[2] + x[1]) * x[0]),
    ],
    ids=["an operation more", "other variables"],
)
def test_another_function_of_the_same_shapes_is_refused_or_run(fn: Any, other: Any) -> None:
    x = real(8, 8)
    plan = sr.autoplan(fn, x, mesh=mesh_of("data:8"), hardware=FAST)
    try:
        got = plan.jit(other)(x)
    except TreeError:
        return
    compare(got, other(x))


def test_functions_are_traced_once_for_the_same_arguments() -> None:
    traces: list[int] = []

    def fn(x: Any) -> Any:
        traces.append(1)
        return x + 1

    x = real(16, 8)
    run = sr.autoplan(fn, x, mesh=mesh_of("data:8"), hardware=FAST).jit(fn)
    run(x)
    count = len(traces)
    run(x + 1)
    assert len(traces) == count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "peak", "options"),
    [
        (2**30, 0.5, {"xla_gpu_memory_limit_slop_factor": 1}),  # far from the limit: as little as a number can say
        (2**30, 0.95, {"xla_gpu_memory_limit_slop_factor": 0, "xla_disable_hlo_passes": "rematerialization"}),
        (2**30, 1.05, {"xla_gpu_memory_limit_slop_factor": 2}),  # does not fit: what it needs
        (14 * 10**8, 0.95, {"xla_gpu_memory_limit_slop_factor": 2}),  # a number between both
        # No number between both: with 2, which is less than needed, XLA would compute much twice.
        (14 * 10**8, 0.98, {"xla_gpu_memory_limit_slop_factor": 0, "xla_disable_hlo_passes": "rematerialization"}),
        (40 * 2**30, 0.95, {"xla_gpu_memory_limit_slop_factor": 61}),
        (70 * 2**30, 0.95, {}),
    ],
)
def test_gpus_save_memory_near_the_limit(limit: int, peak: float, options: dict[str, Any]) -> None:
    """XLA counts in hundredths of a GPU's memory, so that limits of small functions lie between two numbers."""
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    mesh = sr.Target.parse("cuda:h100:8").mesh(sr.mesh_shape("data:8"))
    planned = sr.autoplan(jnp.tanh, x, mesh=mesh, memory_limit=limit).jit(jnp.tanh)
    assert attrs.evolve(planned, peak_bytes=int(peak * limit)).compiler_options(mesh) == options
