"""The theory of parallel training, and everything that a caller meets."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.text import bytes_text

DATA = sr.mesh_shape("data:8")
GRID = sr.mesh_shape("data:4,model:2")
OPTIM = optax.adam(1e-3)


def real(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)


def train(w: Any, moments: Any, x: Any) -> Any:
    value, slopes = jax.value_and_grad(loss)(w, x)
    updates, moments = OPTIM.update(slopes, moments)
    return optax.apply_updates(w, updates), moments, value


def mlp(width: int, hidden: int, rows: int) -> tuple[Any, Any, Any]:
    w = {"up": real(width, hidden), "down": real(hidden, width)}
    return w, jax.eval_shape(OPTIM.init, w), real(rows, width)


def codes(planned: sr.reports.AutoPlan) -> list[str]:
    return [finding.code for finding in planned.findings]


def in_products(planned: sr.reports.AutoPlan, path: str) -> list[P]:
    """The layouts in which products take an argument."""
    return [use.spec for use in planned.uses(path) if use.operation == "dot_general"]


def least(fn: Callable[..., Any], *args: Any, **how: Any) -> int:
    return int(sr.autoplan(fn, *args, **how).task.within(0.0).peak_bytes)


# ---- theory ----


def test_tiny_parameters_are_trained_data_parallel() -> None:
    planned = sr.autoplan(train, *mlp(128, 512, 2**18), mesh=DATA)
    assert planned.plan.specs[2] == P("data")
    assert in_products(planned, "w/up") == in_products(planned, "w/down") == [P()]
    parameters = 4 * 2 * 128 * 512
    assert planned.wire_bytes <= 2 * 7 / 8 * parameters * 1.01  # gradients are added up, and nothing else is sent
    assert planned.status == "optimal"


def test_tiny_batches_are_trained_tensor_parallel() -> None:
    """Columns of the first matrix, rows of the second: one sum for the activations, none for the gradients."""
    planned = sr.autoplan(train, *mlp(4096, 16384, 16), mesh=DATA)
    assert planned.plan.specs[0] == {"up": P(None, "data"), "down": P("data")}
    assert planned.plan.specs[2] in (P(), P("data"), P(None, "data"))
    assert in_products(planned, "w/up") == [P(None, "data")]
    assert planned.wire_bytes < 2**20
    moments = planned.argument_plan(1).specs
    assert moments[0].mu == moments[0].nu == planned.plan.specs[0]


def test_tight_budgets_store_everything_split() -> None:
    """ZeRO-3: parameters and moments are split, and parameters are gathered where they are taken."""
    args = mlp(4096, 16384, 2**15)
    pins = sr.RegexShardingRule([(r"^2$|^x$", P("data"))])
    tight = int(least(train, *args, mesh=DATA, pins=pins) * 1.05)
    planned = sr.autoplan(train, *args, mesh=DATA, pins=pins, memory_limit=tight)
    w, moments, x = planned.plan.specs
    assert x == P("data")
    assert all("data" in tuple(spec) for spec in jax.tree.leaves((moments[0].mu, moments[0].nu)))
    assert planned.peak_bytes <= tight * (1 + 1e-6)
    assert sum("data" in tuple(spec) for spec in jax.tree.leaves(w)) >= 1
    assert planned.sent_bytes["all-gather"] > 0
    assert planned.sent_bytes["reduce-scatter"] > 0


def test_in_between_moments_are_split_and_parameters_whole() -> None:
    """ZeRO-1, with the parameters held whole: each device updates its part, which is gathered after that."""
    args = mlp(2048, 8192, 2**15)
    pins = sr.RegexShardingRule([(r"^0/", P()), (r"^2$", P("data"))])
    loose = sr.autoplan(train, *args, mesh=DATA, pins=sr.RegexShardingRule([(r"^[01]/", P()), (r"^2$", P("data"))]))
    parameters = 4 * 2 * 2048 * 8192
    planned = sr.autoplan(train, *args, mesh=DATA, pins=pins, memory_limit=loose.peak_bytes - parameters)
    moments = planned.plan.specs[1]
    assert all("data" in tuple(spec) for spec in jax.tree.leaves((moments[0].mu, moments[0].nu)))
    assert in_products(planned, "w/up") == [P()]
    assert planned.sent_bytes["reduce-scatter"] == pytest.approx(parameters * 7 / 8, rel=0.01)
    assert planned.sent_bytes["all-gather"] == pytest.approx(parameters * 7 / 8, rel=0.01)


def test_two_axes_are_both_used() -> None:
    planned = sr.autoplan(train, *mlp(4096, 16384, 2**15), mesh=GRID)
    entries = [entry for spec in planned.specs for entry in spec]
    used = [name for entry in entries for name in (entry if isinstance(entry, tuple) else (entry,))]
    assert "data" in used
    assert "model" in used
    alone = sr.autoplan(train, *mlp(4096, 16384, 2**15), mesh=DATA)
    assert planned.step_time.compute_seconds < 1.05 * alone.step_time.compute_seconds


# ---- limits ----


def test_limits_are_strings_or_the_memory_less_a_tenth() -> None:
    args = mlp(512, 2048, 4096)
    assert sr.autoplan(train, *args, mesh=DATA, memory_limit="60GiB").memory_limit == 60 * 2**30
    default = sr.autoplan(train, *args, mesh=DATA).memory_limit
    assert default == int(sr.Hardware.named("cuda:h100").memory_bytes * 0.9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [DATA, GRID], ids=["data", "grid"])
def test_the_least_limit_works(mesh: Any) -> None:
    args = mlp(1024, 4096, 2**13)
    needed = least(train, *args, mesh=mesh)
    planned = sr.autoplan(train, *args, mesh=mesh, memory_limit=int(needed * 1.02))
    assert planned.peak_bytes <= needed * 1.021
    smallest = sr.autoplan(train, *args, mesh=mesh, memory_limit=int(needed * 0.85))
    (finding,) = [finding for finding in smallest.findings if finding.code == "may-not-fit"]
    assert "no plan was found that is expected to fit in" in finding.message
    head, *_ = str(smallest).splitlines()
    assert ", may not fit, found in " in head
    assert f"take {bytes_text(smallest.peak.at_least)} to {bytes_text(smallest.peak.at_most)}" in finding.message
    assert (smallest.fits, smallest.status) == ("no", "feasible")
    assert "may-not-fit" not in codes(planned)


def test_plans_near_the_limit_are_noted() -> None:
    args = mlp(512, 2048, 4096)
    peak = sr.autoplan(train, *args, mesh=DATA).peak_bytes
    plans = (sr.autoplan(train, *args, mesh=DATA, memory_limit=int(peak * ratio)) for ratio in (1.05, 1.5, 2.5))
    near, inside, far = plans
    for plan in (near, inside):
        (finding,) = [finding for finding in plan.findings if finding.code == "near-the-limit"]
        assert finding.severity == "note"
        assert "prove=True" in finding.remedy
        assert (plan.peak.at_most <= plan.memory_limit) == ("of some programs it keeps up to 1.66" in finding.message)
    assert near.peak.at_most > near.memory_limit
    assert inside.peak.at_most <= inside.memory_limit
    assert [plan.fits for plan in (near, inside, far)] == ["possible", "possible", "certain"]
    assert "near-the-limit" not in codes(far)


def test_a_plan_that_fits_is_found_within_less() -> None:
    """A plan found within a large budget that takes little is no slower within a small budget that it fits in."""
    args = mlp(4096, 16384, 2**15)
    wide = sr.autoplan(train, *args, mesh=DATA, memory_limit=2_000_000_000)
    narrow = sr.autoplan(train, *args, mesh=DATA, memory_limit=int(wide.peak_bytes * 1.01))
    assert narrow.cost <= wide.cost * 1.01


def test_the_least_memory_is_no_more_than_a_plan_takes() -> None:
    args = mlp(4096, 16384, 2**15)
    enough = sr.autoplan(train, *args, mesh=DATA, memory_limit=2_000_000_000).peak_bytes
    assert least(train, *args, mesh=DATA) <= enough * 1.1  # about the least


# ---- pins ----


def test_pins_are_obeyed() -> None:
    pins = sr.RegexShardingRule([(r"up$", P("model", "data"))])
    planned = sr.autoplan(train, *mlp(1024, 4096, 4096), mesh=GRID, pins=pins)
    assert planned.plan.specs[0]["up"] == P("model", "data")
    assert planned.plan.specs[1][0].mu["up"] == P("model", "data")


def test_pins_that_do_not_divide_are_refused() -> None:
    pins = sr.RegexShardingRule([(r"up$", P("data"))])
    with pytest.raises(sr.errors.PlanError, match="up"):
        sr.autoplan(loss, {"up": real(6, 16), "down": real(16, 6)}, real(8, 6), mesh=DATA, pins=pins)


def test_pins_that_match_nothing_are_refused() -> None:
    with pytest.raises(
        sr.errors.ConfigError, match="pins match no array: paths begin with the name or the index of an arg"
    ):
        sr.autoplan(jnp.tanh, jnp.ones((8, 8)), mesh=DATA, pins=sr.RegexShardingRule([(r"^weights$", P("data"))]))


@pytest.mark.parametrize(
    "pins",
    [
        sr.RegexShardingRule([("^params/up$", P(None, "data"))]),
        sr.RegexShardingRule([("^0/up$", P(None, "data"))]),
        sr.RegexShardingRule([("params/up", P(None, "data"))], unmatched="skip") | sr.FSDPShardingRule("data", 1000),
        sr.SpecTreeShardingRule({"params/up": P(None, "data")}),
    ],
)
def test_pins_take_the_paths_that_plans_print(pins: sr.ShardingRule) -> None:
    params = {"up": real(16, 64), "down": real(64, 16)}
    planned = sr.autoplan(lambda params, x: loss(params, x), params, real(8, 16), mesh=DATA, pins=pins)
    assert planned.plan.specs[0]["up"] == P(None, "data")
    assert planned.plan.named_paths == planned.call.paths == ("params/down", "params/up", "x")


def test_plans_explain_the_paths_that_they_print() -> None:
    params = {"layers": [{"up": real(16, 64), "down": real(64, 16)} for _ in range(2)]}
    fn = lambda params, x: sum(loss(layer, x) for layer in params["layers"])  # noqa: E731
    planned = sr.autoplan(fn, params, real(8, 16), mesh=DATA)
    assert "params/layers/*/up  x2" in str(planned)
    for path in ("params/layers/0/up", "params/layers/*/up", "0/layers/0/up"):
        assert planned.explain(path).startswith("params/layers/0/up float32[16, 64]: ")
    again = sr.ShardingPlan.from_json(planned.plan.to_json())
    for plan in (planned.plan, again, again.bind((params, real(8, 16)))):
        assert plan.explain("params/layers/1/up").startswith("params/layers/1/up  (16, 64) float32")
        assert plan.explain("0/layers/1/up").startswith("0/layers/1/up  (16, 64) float32")
    with pytest.raises(sr.errors.TreeError, match=r"no array 'params/layers/0/pu' .*did you mean"):
        planned.explain("params/layers/0/pu")


def test_hardware_may_be_the_name_of_a_sheet() -> None:
    named, sheet = (
        sr.autoplan(jnp.tanh, real(8, 8), mesh=DATA, hardware=hardware)
        for hardware in ("cuda:a100", sr.Hardware.named("cuda:a100"))
    )
    assert str(named.step_time) == str(sheet.step_time)
    assert named.memory_limit == sheet.memory_limit


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hardware": "cuda:h10"}, sr.errors.HardwareError, "unknown hardware 'cuda:h10' .*did you mean 'cuda:h100'"),
        ({"hardware": 3}, sr.errors.ConfigTypeError, "hardware must be a Hardware or the name of a sheet.*; got 3"),
        ({"prove": "yes"}, sr.errors.ConfigError, "prove must be True or False, got 'yes'"),
        ({"assumptions": "yes"}, sr.errors.ConfigTypeError, "assumptions must be Assumptions, got 'yes'"),
        ({"time_limit": "yes"}, sr.errors.ConfigError, "time_limit must be a number of seconds above 0, got 'yes'"),
        ({"mesh": True}, sr.errors.MeshError, "a device count of at least 1, got True"),
        ({"mesh": 0}, sr.errors.MeshError, "a device count of at least 1, got 0"),
        ({"pins": P("data")}, sr.errors.RuleTypeError, "pins must be a rule"),
    ],
)
def test_arguments_of_wrong_types_are_refused(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        sr.autoplan(jnp.tanh, real(8, 8), **{"mesh": DATA, **options})
    with pytest.raises(sr.errors.ConfigTypeError, match="fn must be a function"):
        sr.autoplan(3, mesh=DATA)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mesh", [8, "data:8"])
def test_pins_are_refused_before_anything_is_traced(mesh: Any) -> None:
    def fn(x: Any) -> Any:
        raise AssertionError("traced")

    mesh = sr.mesh_shape(mesh) if isinstance(mesh, str) else mesh
    with pytest.raises(sr.errors.PlanError, match="unknown axis 'tp'"):
        sr.autoplan(fn, real(8, 8), mesh=mesh, pins=sr.DimShardingRule("tp", 0))


def test_pins_without_patterns_may_have_no_opinion() -> None:
    small = real(6, 6)
    for pins in (sr.FSDPShardingRule("data", min_size_mb=0), sr.SpecTreeShardingRule((None,))):
        assert sr.autoplan(jnp.tanh, small, mesh=DATA, pins=pins).specs == sr.autoplan(jnp.tanh, small, mesh=DATA).specs


def test_a_pin_that_makes_it_twice_as_slow_is_named() -> None:
    slow = attrs.evolve(sr.Hardware.named("cuda:h100"), name="slow links", link_bytes_per_second=1e9)
    pins = sr.RegexShardingRule([(r"^1$", P(None, "data")), (r"^0/", P())])
    planned = sr.autoplan(loss, *mlp(256, 1024, 2**16)[::2], mesh=DATA, pins=pins, hardware=slow)
    (finding,) = [finding for finding in planned.findings if finding.code == "costly-pin"]
    assert (finding.path, finding.shape, finding.count) == ("x", (2**16, 256), 1)
    assert "costly-pin" in str(planned)


def test_cheap_pins_are_not_named() -> None:
    pins = sr.RegexShardingRule([(r"^1$", P("data"))])
    assert "costly-pin" not in codes(sr.autoplan(loss, *mlp(256, 1024, 2**16)[::2], mesh=DATA, pins=pins))


def test_pins_that_cannot_fit_are_named() -> None:
    args = mlp(2048, 8192, 2**12)
    limit = int(least(train, *args, mesh=DATA) * 1.2)
    pins = sr.RegexShardingRule([(r"up|down", P())])
    needed = r"needs at least 388\.0 MiB for its arguments and results, for w/down \(64\.0 MiB\), w/up .* 3 more"
    pinned = r"Without the pins nothing proves that\. Pinned: w/down, w/up"
    with pytest.raises(sr.errors.DoesNotFitError, match=rf"{needed}\. {pinned}") as caught:
        sr.autoplan(train, *args, mesh=DATA, memory_limit=limit, pins=pins)
    assert caught.value.needed_bytes > limit


def test_pins_that_do_not_fit_by_the_model_are_named() -> None:
    args = mlp(2048, 8192, 2**12)
    limit = int(least(train, *args, mesh=DATA) * 1.2)
    pins = sr.RegexShardingRule([(r"^0/(up|down)", P())])
    planned = sr.autoplan(train, *args, mesh=DATA, memory_limit=limit, pins=pins)
    (finding,) = [finding for finding in planned.findings if finding.code == "may-not-fit"]
    assert "Without the pins one fits. Pinned: w/down, w/up" in finding.message


# ---- meshes ----


def test_a_device_count_ranks_meshes() -> None:
    planned = sr.autoplan(train, *mlp(1024, 4096, 4096), mesh=8)
    assert sorted(candidate.mesh for candidate in planned.candidates) == ["data:2,model:4", "data:4,model:2", "data:8"]
    times = [candidate.seconds for candidate in planned.candidates if candidate.seconds is not None]
    assert times == sorted(times)
    assert planned.cost == pytest.approx(times[0])
    assert all(candidate.mesh in str(planned) for candidate in planned.candidates)


@pytest.mark.slow
def test_the_least_memory_of_all_meshes_is_named() -> None:
    args = mlp(1024, 4096, 4096)
    needed = least(train, *args, mesh=8)
    assert needed <= min(least(train, *args, mesh=sr.mesh_shape(text)) for text in ("data:8", "data:4,model:2"))


def test_three_axes() -> None:
    planned = sr.autoplan(train, *mlp(1024, 4096, 4096), mesh=sr.mesh_shape("data:2,fsdp:2,model:2"))
    assert planned.bound <= planned.cost
    assert planned.gap < 0.05


def test_axes_of_one_split_nothing() -> None:
    planned = sr.autoplan(train, *mlp(1024, 4096, 4096), mesh=sr.mesh_shape("data:8,model:1"))
    assert "model" not in str(planned.specs)
    assert planned.cost == pytest.approx(sr.autoplan(train, *mlp(1024, 4096, 4096), mesh=DATA).cost)


# ---- findings ----


def test_unknown_operations_are_named() -> None:
    def fn(x: Any) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x) @ x.T

    planned = sr.autoplan(fn, real(1024, 512), mesh=DATA)
    (finding,) = [finding for finding in planned.findings if finding.code == "unknown-operation"]
    assert "pure_callback" in finding.message
    assert "once" in finding.message or "1 time" in finding.message


def test_constraints_in_the_function_are_obeyed() -> None:
    mesh = sr.create_mesh("data:8")
    columns = jax.sharding.NamedSharding(mesh, P(None, "data"))

    def fn(x: Any, w: Any) -> Any:
        return jnp.tanh(jax.lax.with_sharding_constraint(x @ w, columns))

    planned = sr.autoplan(fn, real(64, 512), real(512, 4096), mesh=mesh)
    assert "constrained" in codes(planned)
    assert planned.plan.specs[1] == P(None, "data")


def test_nothing_to_split_is_reported() -> None:
    planned = sr.autoplan(lambda x: x + 1, real(7), mesh=DATA)
    assert "nothing-split" in codes(planned)
    assert planned.specs == (P(),)


def test_a_function_of_nothing() -> None:
    planned = sr.autoplan(lambda: jnp.float32(1), mesh=sr.create_mesh("data:8"))
    assert planned.specs == ()
    assert planned.jit(lambda: jnp.float32(1))() == 1


def test_assumed_hardware_is_reported() -> None:
    assert "assumed-hardware" in codes(sr.autoplan(loss, *mlp(64, 64, 64)[::2], mesh=DATA))
    planned = sr.autoplan(loss, *mlp(64, 64, 64)[::2], mesh=DATA, hardware=sr.Hardware.named("cuda:a100"))
    assert "assumed-hardware" not in codes(planned)


def test_counting_rounds_is_free_on_tpus() -> None:
    """They have a core for scalars; elsewhere a kernel counts each round, which takes its launch."""
    v5e = sr.Hardware.named("tpu:v5e")
    layers, x = jax.ShapeDtypeStruct((64, 128, 128), jnp.float32), jax.ShapeDtypeStruct((128, 128), jnp.float32)
    free, launched = (
        sr.autoplan(
            lambda w, x: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0], layers, x, mesh=DATA, hardware=sheet
        )
        for sheet in (v5e, attrs.evolve(v5e, clock_hertz=0))
    )
    saved = launched.step_time.seconds - free.step_time.seconds
    assert saved == pytest.approx(64 * v5e.launch_seconds)


# ---- using a plan ----

PROGRAM = """
import jax, jax.numpy as jnp, shardrules as sr
from tests.programs.autoplan.test_autoplan import mlp, train
planned = sr.autoplan(train, *mlp(1024, 4096, 4096), mesh=sr.mesh_shape("data:4,model:2"), memory_limit="100MiB")
print(planned.specs, planned.result_specs, planned.choice, repr(planned.cost), planned.peak_bytes)
print("\\n".join(line for line in str(planned).splitlines() if "found in" not in line))
"""


@pytest.mark.slow
def test_plans_are_the_same_in_every_process() -> None:
    def run(seed: int) -> str:
        env = {**os.environ, "PYTHONHASHSEED": str(seed)}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first, *rest = [run(seed) for seed in range(4)]
    assert "data" in first
    assert rest == [first] * 3


class Net(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, *, key: jax.Array) -> None:
        up_key, down_key = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(64, 256, key=up_key), eqx.nn.Linear(256, 64, key=down_key)

    def __call__(self, x: Any) -> Any:
        return self.down(jax.nn.relu(self.up(x)))


def descend(net: Net, x: Any) -> Net:
    slopes = eqx.filter_grad(lambda net, x: jnp.mean(jax.vmap(net)(x) ** 2))(net, x)
    return eqx.apply_updates(net, jax.tree.map(lambda slope: -0.1 * slope, slopes))


@pytest.mark.slow
def test_modules_are_initialised_as_planned() -> None:
    mesh = sr.create_mesh("data:4,model:2")
    shapes = eqx.filter_eval_shape(Net, key=jax.random.key(0))
    pins = sr.RegexShardingRule([(r"0/up/weight", P("model", "data"))])
    planned = sr.autoplan(descend, shapes, real(512, 64), mesh=mesh, pins=pins)
    net = sr.filter_init(Net, planned.argument_plan(0), mesh)(key=jax.random.key(0))
    assert net.up.weight.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, P("model", "data")), 2)
    x = np.random.default_rng(0).normal(size=(512, 64)).astype(np.float32)
    after = planned.jit(descend)(net, x)
    assert after.up.weight.sharding.is_equivalent_to(net.up.weight.sharding, 2)
    expected = descend(Net(key=jax.random.key(0)), x)
    np.testing.assert_allclose(after.down.weight, expected.down.weight, rtol=1e-5, atol=1e-6)


def test_the_rule_of_a_plan_decides_the_same() -> None:
    args = mlp(1024, 4096, 4096)
    planned = sr.autoplan(train, *args, mesh=GRID)
    assert planned.as_rule().plan(args, GRID).specs == planned.plan.specs
    again = sr.autoplan(train, *args, mesh=GRID, pins=planned.as_rule())
    assert again.specs == planned.specs
    assert again.cost == pytest.approx(planned.cost)
    assert "costly-pin" not in codes(again)


def test_audits_take_planned_functions() -> None:
    mesh = sr.create_mesh("data:8")
    w, _, x = mlp(64, 128, 64)
    planned = sr.autoplan(loss, w, x, mesh=mesh)
    report = sr.audit(planned.jit(loss), w, x, mesh=mesh)
    assert 0 < report.memory.peak_bytes < planned.memory_limit
