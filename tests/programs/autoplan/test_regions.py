"""Plans split what a region declares, and run it on shards."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import shardrules as sr
from shardrules.programs.autoplan.run.call import read_call
from shardrules.programs.traced.factors.table import Factors, op_factors
from tests.programs.examples import mesh_on
from tests.programs.regions.test_region import SHARDED_ATTENTION, attention, close, real

MESH = "data:4,model:2"


def train_step(attend: Any) -> Any:
    def loss(weights: dict[str, Any], x: Any) -> Any:
        q, k, v = jnp.einsum("bsd,dkhe->kbhse", x, weights["qkv"])
        return (jnp.einsum("bhse,hed->bsd", attend(q, k, v), weights["out"]) ** 2).mean()

    return lambda weights, x: jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))


def test_factors_are_the_split_letters() -> None:
    region = sr.region("m k, k n -> m n, m", split="m k")(lambda a, b: (a @ b, a.sum(1)))
    jaxpr = jax.make_jaxpr(region)(jnp.ones((4, 6)), jnp.ones((6, 8)))
    (call,) = jaxpr.eqns
    (equation,) = next(value for value in call.params.values() if hasattr(value, "eqns")).eqns
    factors = op_factors(equation)
    assert factors == Factors(((0, 1), (1, None)), ((0, None), (0,)), (4, 6), (1,), is_local=True)


def test_plans_tell_declarations_apart() -> None:
    def fingerprint(split: str, cost: Any = None) -> str:
        region = sr.region("m k, k n -> m n", split=split, cost=cost)(jnp.matmul)
        return read_call(region, (jnp.ones((4, 6)), jnp.ones((6, 8))), sr.create_mesh(MESH), "step").fingerprint

    assert fingerprint("m") == fingerprint("m") != fingerprint("m n")
    costs = fingerprint("m", lambda a, b: a.size), fingerprint("m", lambda *_: 24), fingerprint("m", lambda *_: 25)
    assert fingerprint("m") != costs[0] == costs[1] != costs[2]


def test_what_a_result_is_not_computed_from_is_not_summed() -> None:
    region = sr.region("s d, t d -> s d, t d", split="s t")(lambda q, k: (jnp.sin(q), jnp.cos(k)))
    plan = sr.autoplan(region, jnp.ones((64, 128)), jnp.ones((32, 128)), mesh=sr.create_mesh(MESH))
    q, k = real(64, 128), real(32, 128, seed=1)
    close(plan.jit(region)(q, k), (jnp.sin(q), jnp.cos(k)))


def test_scalar_sums_are_completed() -> None:
    loss = sr.region("m k, k ->", split="m")(lambda x, w: ((x @ w) ** 2).sum())
    x, w = real(512, 256), real(256, seed=1)

    def step(w: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda w: loss(x, w) / len(x))(w)

    plan = sr.autoplan(step, w, x, mesh=sr.create_mesh("data:8"))
    assert plan.specs[1] == jax.P("data")
    close(plan.jit(step)(w, x), step(w, x))


@pytest.mark.slow
def test_a_planned_step_computes_the_same() -> None:
    weights, x = {"qkv": real(64, 3, 8, 16), "out": real(8, 16, 64, seed=1)}, real(16, 32, 64, seed=2)
    plan = sr.autoplan(train_step(SHARDED_ATTENTION), weights, x, mesh=sr.create_mesh(MESH))
    assert not any(finding.code == "unknown-operation" for finding in plan.findings)
    planned = plan.jit(train_step(SHARDED_ATTENTION))(weights, x)
    close(planned, train_step(attention)(weights, x))


def test_costs_are_the_authors_or_those_of_the_matmuls() -> None:
    def flops(**options: Any) -> float:
        region = sr.region("m k, k n -> m n", split="m", **options)(jnp.matmul)
        shapes = jax.ShapeDtypeStruct((4096, 4096), jnp.float32), jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
        return sr.autoplan(region, *shapes, mesh=sr.create_mesh("data:8")).cost

    counted, doubled = flops(), flops(cost=lambda a, b: 4 * a.shape[0] * a.shape[1] * b.shape[1])
    assert 1.9 < doubled / counted < 2.1
    mapped = jax.vmap(
        sr.region("m k, k n -> m n", split="m", cost=lambda a, b: 2 * a.size * b.shape[1])(jnp.matmul), (0, None)
    )
    shapes = jax.ShapeDtypeStruct((8, 512, 4096), jnp.float32), jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    assert sr.autoplan(mapped, *shapes, mesh=sr.create_mesh("data:8")).cost == pytest.approx(counted, rel=0.05)
    with pytest.raises(sr.errors.ConfigError, match="its cost must return a number of at least 0, got -1"):
        flops(cost=lambda *_: -1)


def layer_on(target: str) -> Any:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] + x_ref[...]

    @sr.region("rows dim -> rows dim", split="rows")
    def double(x: Any) -> Any:
        block, grid = pl.BlockSpec((64, x.shape[1]), lambda row: (row, 0)), (x.shape[0] // 64,)
        options: dict[str, Any] = {"compiler_params": triton.CompilerParams()} if target.startswith("cuda") else {}
        struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, struct, grid=grid, in_specs=[block], out_specs=block, **options)(x)

    return lambda x, w: jax.nn.relu(double(x) @ w)


SHAPES = jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:h100:8", "tpu:v5e:2x4"])
def test_nothing_is_gathered_for_a_kernel_of_a_plan(target: str) -> None:
    mesh, layer = mesh_on(target, MESH), layer_on(target)
    plan = sr.autoplan(layer, *SHAPES, mesh=mesh)
    report = sr.audit(plan.jit(layer), *SHAPES, mesh=mesh, target=target)
    assert report.collectives == ()
    assert "custom-call" in (report.hlo_text or "")


def constrained(target: str, mesh: Any) -> Any:
    sharding, layer = jax.NamedSharding(mesh, jax.P(("data", "model"))), layer_on(target)
    return lambda x, w: layer(jax.lax.with_sharding_constraint(x, sharding), w)


@pytest.mark.slow
def test_nothing_is_gathered_by_the_partitioner_for_gpus() -> None:
    mesh = mesh_on("cuda:h100:8", MESH)
    report = sr.audit(constrained("cuda", mesh), *SHAPES, mesh=mesh, target="cuda:h100:8")
    assert report.collectives == ()


@pytest.mark.slow
def test_the_partitioner_for_tpus_cannot_be_told() -> None:
    mesh = mesh_on("tpu:v5e:2x4", MESH)
    with pytest.raises(sr.errors.ConfigError, match="cannot be told how to split a kernel"):
        sr.audit(constrained("tpu", mesh), *SHAPES, mesh=mesh, target="tpu:v5e:2x4")


@pytest.mark.slow
def test_a_training_plan_recomputes_regions() -> None:
    import optax

    weights, x = {"qkv": real(64, 3, 8, 16) / 8, "out": real(8, 16, 64, seed=1) / 8}, real(16, 32, 64, seed=2)

    def loss(attend: Any) -> Any:
        def run(weights: dict[str, Any], x: Any) -> Any:
            q, k, v = jnp.einsum("bsd,dkhe->kbhse", x, weights["qkv"])
            return (jnp.einsum("bhse,hed->bsd", attend(q, k, v), weights["out"]) ** 2).mean()

        return run

    optimizer = optax.sgd(0.1)
    plan = sr.plan_training(loss(SHARDED_ATTENTION), weights, optimizer, x, cluster="cpu:8", pins=None)
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss(attention))(weights, x))
    with jax.set_mesh(sr.create_mesh(plan.report.mesh)):
        actual, *_ = plan.step(weights, optimizer.init(weights), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), actual, expected)


def test_constants_of_a_kernel_are_written_into_plans() -> None:
    table = np.random.default_rng(1).normal(size=(128, 128)).astype(np.float32)
    region = sr.region("r d -> r d", split="r")(lambda x: x @ jnp.array(table))

    def looped(x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (jnp.sin(region(carry)), None), region(x), None, length=2)[0]

    x = real(512, 128)
    plan = sr.autoplan(looped, x, mesh=sr.create_mesh("data:8"))
    assert plan.specs == (jax.P("data"),)
    close(plan.jit(looped)(x), jnp.sin(jnp.sin(x @ table @ table) @ table))


def test_a_region_inside_of_another_costs_as_much() -> None:
    def attend(q: Any, k: Any) -> Any:
        return jnp.einsum("hst,thd->shd", jax.nn.softmax(jnp.einsum("shd,thd->hst", q, k)), k)

    rule, shape = "s h d, t h d -> s h d", jax.ShapeDtypeStruct((2048, 8, 64), jnp.float32)
    inner = sr.region(rule, split="h")(attend)
    outer = sr.region(rule, split="h")(lambda q, k: inner(q, k))
    costs = [sr.autoplan(each, shape, shape, mesh=sr.create_mesh("data:8")).cost for each in (inner, outer)]
    assert costs[1] == pytest.approx(costs[0], rel=0.01)
