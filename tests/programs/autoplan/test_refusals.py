"""By behaviour: requests that cannot be planned are reported, and what must stay as written does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.autoplan.graph.problem import read_region

X = jax.ShapeDtypeStruct((512, 256), jnp.float32)
BOTH = "data:4,model:2"


def double(x: Any) -> Any:
    return 2 * x


def test_a_shard_map_with_one_result_stays_as_it_is() -> None:
    mesh = sr.create_mesh(BOTH, axis_types="auto")
    inside = jax.shard_map(double, mesh=mesh, in_specs=P("data"), out_specs=P("data"))

    def whole(x: Any) -> Any:
        return inside(jnp.tanh(x))

    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    planned = sr.autoplan(whole, x, mesh=mesh, pins=sr.SpecTreeShardingRule((P("data"),)))
    assert planned.wire_bytes == 0
    assert "opaque" in [finding.code for finding in planned.findings]
    assert planned.result_specs == (P("data"),)
    np.testing.assert_allclose(planned.jit(whole)(x), 2 * np.tanh(x), rtol=1e-6)


def test_pins_with_axes_in_another_order_are_refused() -> None:
    with pytest.raises(sr.errors.PlanError, match="in the order of the mesh"):
        sr.autoplan(double, X, mesh=sr.mesh_shape(BOTH), pins=sr.SpecTreeShardingRule((P(("model", "data")),)))


def test_constraints_that_do_not_divide_are_reported() -> None:
    mesh = sr.create_mesh(BOTH, axis_types="auto")

    def constrained(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(2 * x, NamedSharding(mesh, P("data")))

    planned = sr.autoplan(constrained, jax.ShapeDtypeStruct((6, 64), jnp.float32), mesh=mesh)
    assert "constraint-ignored" in [finding.code for finding in planned.findings]


def test_two_constraints_on_one_array_are_both_kept() -> None:
    mesh = sr.create_mesh(BOTH, axis_types="auto")

    def constrained(x: Any) -> Any:
        rows, columns = (NamedSharding(mesh, spec) for spec in (P("data"), P(None, "model")))
        y = jnp.tanh(x)
        return jax.lax.with_sharding_constraint(y, rows), jax.lax.with_sharding_constraint(y, columns)

    planned = sr.autoplan(constrained, X, mesh=mesh)
    assert "constrained" in [finding.code for finding in planned.findings]


def test_a_pin_on_an_axis_that_not_all_meshes_have() -> None:
    planned = sr.autoplan(double, X, mesh=4, pins=sr.SpecTreeShardingRule((P(None, "model"),)))
    assert planned.specs == (P(None, "model"),)
    assert [candidate.mesh for candidate in planned.candidates if candidate.seconds is None] == ["data:4"]


@pytest.mark.parametrize("argument_index", [1, -2])
def test_donating_an_unknown_argument_is_refused(argument_index: int) -> None:
    planned = sr.autoplan(double, X, mesh=sr.mesh_shape("data:8"))
    with pytest.raises(sr.errors.ConfigError, match=f"donate_argnums names argument {argument_index}, but there are 1"):
        planned.jit(double, donate_argnums=argument_index)


def test_large_constants_are_reported() -> None:
    table = np.ones((1024, 512), np.float32)
    planned = sr.autoplan(lambda x: x @ table[:256], X, mesh=sr.mesh_shape("data:8"))
    findings = [finding for finding in planned.findings if finding.code == "whole-constant"]
    assert len(findings) <= 1  # small constants are not reported
    planned = sr.autoplan(lambda x: x @ jnp.asarray(np.ones((256, 2048), np.float32)), X, mesh=sr.mesh_shape("data:8"))
    assert "whole-constant" in [finding.code for finding in planned.findings]


def test_numbers_among_the_arguments_are_traced_once() -> None:
    calls: list[int] = []

    def scaled(x: Any, rate: float) -> Any:
        calls.append(1)
        return rate * x

    x = np.ones((16, 8), np.float32)
    planned = sr.autoplan(scaled, x, 0.25, mesh=sr.create_mesh("data:8"))
    run = planned.jit(scaled)
    for _ in range(3):
        run(x, float("0.25"))
    assert len(calls) == 2


@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_shardings_of_jitted_functions_inside_are_obeyed(types: str) -> None:
    mesh = sr.create_mesh(BOTH, axis_types="auto")

    def matmul(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    rows, columns = (NamedSharding(mesh, spec) for spec in (P("data"), P(None, "model")))
    inside = jax.jit(matmul, in_shardings=(rows, None), out_shardings=columns)

    def whole(x: Any, w: Any) -> Any:
        return 2 * inside(x, w)

    x, w = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((64, 32), (32, 16)))
    planned = sr.autoplan(whole, x, w, mesh=sr.create_mesh(BOTH, axis_types=types))
    assert [finding.message for finding in planned.findings if finding.code == "constrained"] == [
        "2 constraints in the function are obeyed"
    ]
    layouts = [planned.task.problem.layout(home, planned.choice) for home in fixed(planned)]
    assert layouts == [(0, -1), (-1, 1)]
    np.testing.assert_allclose(planned.jit(whole)(x, w), 2 * np.tanh(x @ w), rtol=1e-4, atol=1e-5)


def fixed(planned: sr.reports.AutoPlan) -> list[Any]:
    """Homes of the arrays that the function itself constrains."""
    problem = planned.task.problem
    return [
        problem.homes[operation.results[0]] for operation in problem.program.operations if operation.role == "fixed"
    ]


def test_feedback_is_reported() -> None:
    planned = sr.autoplan(lambda state, x: (state + x.sum(), x.mean()), X, X, mesh=sr.mesh_shape(BOTH))
    (note,) = [finding for finding in planned.findings if finding.code == "fed-back"]
    assert note.message.startswith("state comes back as results")


def test_debug_callbacks_are_reported() -> None:
    def printing(x: Any) -> Any:
        jax.debug.print("{x}", x=x)
        return jnp.tanh(x)

    (note,) = [
        finding
        for finding in sr.autoplan(printing, X, mesh=sr.mesh_shape(BOTH)).findings
        if finding.code == "debug-callback"
    ]
    assert "1 debug callback gathers its operands" in note.message


def test_assumptions_change_the_modelled_time() -> None:
    def chained(x: Any, ws: Any) -> Any:
        for w in ws:
            x = x @ w
        return x

    def plan(hidden: float, temporaries: float) -> Any:
        assumptions = sr.Assumptions(hidden=hidden, temporaries=temporaries)
        w = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
        pins = sr.SpecTreeShardingRule((P("data"), [P("data")] * 3))
        return sr.autoplan(chained, w, [w] * 3, mesh=sr.mesh_shape(BOTH), pins=pins, assumptions=assumptions)

    careful, sure = plan(0.0, 2.0), plan(0.5, 1.0)
    assert careful.step_time.exposed_seconds > sure.step_time.exposed_seconds
    assert careful.peak_bytes > sure.peak_bytes


def test_a_plan_without_devices_runs_on_each_mesh_in_force() -> None:
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    planned = sr.autoplan(double, x, mesh=sr.mesh_shape("data:4"), pins=sr.SpecTreeShardingRule((P("data"),)))
    run = planned.jit(double)
    for devices in (jax.devices()[:4], jax.devices()[4:]):
        with jax.set_mesh(jax.sharding.Mesh(np.array(devices), ("data",))):
            assert run(x).devices() == {*devices}


def test_branches_in_loops_are_brought_together_inside() -> None:
    def looped(w: Any, x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            return jax.lax.cond(carry.sum() > 0, lambda y: jnp.tanh(y @ w), lambda y: y * 2, carry), None

        return jax.lax.scan(body, x, None, length=4)[0]

    w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    program = sr.autoplan(looped, w, X, mesh=sr.mesh_shape(BOTH)).task.problem.program
    (cond_index,) = [
        op_index
        for op_index, operation in enumerate(program.operations)
        if operation.name == "cond" and program.arrays[operation.results[0]].shape
    ]
    region = program.operations[cond_index].region
    assert program.regions[region][1] == 4
    assert [read_region(program, cond_index, position) for position in range(2)] == [region, region]
    (join_index,) = [
        op_index
        for op_index, operation in enumerate(program.operations)
        if operation.name == "join" and program.arrays[operation.results[0]].shape
    ]
    assert read_region(program, join_index, 0) == 0


@pytest.mark.parametrize("mesh", ["data:1", "data:1,model:1"])
@pytest.mark.parametrize("fn", [lambda x: x + x, lambda x: x @ x, jax.grad(lambda x: (x @ x).sum())])
def test_one_device(mesh: str, fn: Any) -> None:
    x = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    planned = sr.autoplan(fn, x, mesh=sr.create_mesh(mesh, devices=jax.devices()[:1]))
    assert (planned.wire_bytes, planned.status) == (0, "optimal")
    assert planned.explain("x").startswith("x float32[4, 4]: P()")
    assert planned.frontier(2).points
    np.testing.assert_allclose(planned.jit(fn)(x), fn(x))


def test_tiny_and_empty_arrays() -> None:
    mesh = sr.mesh_shape("a:2,b:2,c:2")
    for shape, dtype in (((2, 2, 2), jnp.int8), ((), jnp.float32), ((0, 8), jnp.float32)):
        planned = sr.autoplan(double, jax.ShapeDtypeStruct(shape, dtype), mesh=mesh)
        assert planned.status == "optimal"
        assert planned.frontier(2).points


def test_a_function_that_writes_to_its_arguments_is_refused() -> None:
    def count(model: nnx.Dropout, x: jax.Array) -> jax.Array:
        return model(x)

    model = nnx.eval_shape(lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    with pytest.raises(sr.errors.TreeError, match=r"^count: the function writes to .* nnx\.update\(model, state\)"):
        sr.autoplan(count, model, X, mesh=sr.mesh_shape(BOTH))


def test_names_that_a_policy_saves_in_vain_are_reported() -> None:
    policy = jax.checkpoint_policies.save_only_these_names("hiden")

    def layer(w: Any, x: Any) -> Any:
        return jnp.sin(checkpoint_name(jnp.sin(x @ w), "hidden"))

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jax.checkpoint(layer, policy=policy)(w, x))

    w = jax.ShapeDtypeStruct((256, 256), np.float32)
    planned = sr.autoplan(jax.grad(loss), w, X, mesh=sr.mesh_shape("data:8"))
    (finding,) = [finding for finding in planned.findings if finding.code == "unmatched-names"]
    assert finding.severity == "warning"
    assert "did you mean 'hidden'?" in finding.message
