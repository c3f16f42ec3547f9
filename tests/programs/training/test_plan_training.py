"""From a loss and a cluster to a step that runs."""

from types import SimpleNamespace
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
from shardrules.core.errors import ConfigError, ConfigTypeError, DoesNotFitError, MicrobatchError, PlanError, TreeError
from shardrules.programs.autoplan.solve.peak import Peak
from shardrules.programs.training.answer import make as answer
from shardrules.programs.training.search.staged import StageSearch
from shardrules.programs.training.step import TrainingStep
from shardrules.reports import Frontier, TrainingPlan, TrainingPlanReport
from tests.programs.training.checks import assert_close

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
    aux = "unset"
    for _ in range(2):
        model, state, loss, aux = plan.step(model, state, batch)
        expected, expected_state, expected_loss, _ = eqx.filter_jit(step)(expected, expected_state, batch)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert aux is None
    assert_close(eqx.filter(model, eqx.is_array), eqx.filter(expected, eqx.is_array), 1e-4)


def test_scales_of_weak_types_are_trained_and_restored(tmp_path: Any) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean(((batch @ model["up"]) * model["scale"] * model["gain"] - 1) ** 2)

    def make() -> Any:
        return {"up": jnp.ones((16, 16)), "scale": jnp.full((16,), 0.1), "gain": jnp.array(0.1)}

    batch, step = jnp.full((64, 16), 0.5), TrainingStep(loss, OPTIMIZER)
    plan = sr.plan_training(loss, make(), OPTIMIZER, batch, cluster=jax.devices())
    call = plan.planned.call
    owners = [owner for array, owner in zip(call.structs, call.argument_indices, strict=True) if array.weak_type]
    assert owners == [2]  # the batch is no result of a step
    model, state = plan.init(make)()
    expected, expected_state = make(), step.init_state(make())
    for _ in range(3):
        model, state, loss_value, _ = plan.step(model, state, batch)
        expected, expected_state, expected_loss, _ = step(expected, expected_state, batch)
        np.testing.assert_allclose(loss_value, expected_loss, rtol=1e-5)
    sr.save_equinox(tmp_path / "step.eqx", (model, state))
    restored = sr.load_equinox(tmp_path / "step.eqx", plan.init(make)(), plan.as_rule(), plan.mesh)
    *_, loss_value, _ = plan.step(*restored, batch)
    np.testing.assert_allclose(loss_value, step(expected, expected_state, batch)[2], rtol=1e-5)


def test_what_the_loss_leaves_out_is_found() -> None:
    model = {"up": jnp.ones((16, 16)), "layers": [{"unused": jnp.ones(4)}, {"unused": jnp.ones(4)}]}
    plan = sr.plan_training(
        lambda m, x: jnp.mean((x @ m["up"]) ** 2), model, OPTIMIZER, jnp.ones((64, 16)), cluster="cpu:2"
    )
    (finding,) = [finding for finding in plan.report.findings if finding.code == "no-gradient"]
    assert (finding.severity, finding.path, finding.count) == ("warning", "model/layers/*/unused", 2)


def test_losses_that_cannot_be_planned_are_refused() -> None:
    counts = iter(range(1, 100))
    w, x = jnp.ones((16, 16)), jnp.ones((64, 16))
    for loss, batch, text in (
        (lambda w, x: jnp.mean(x**2), x, "does not depend on what is trained"),
        (lambda w, x: jnp.mean((x @ w) ** 2), x[:0], "the batch has no examples"),
        (lambda w, x: jnp.mean((x @ w) ** next(counts)), x, "another program each time that it is traced"),
    ):
        with pytest.raises(ConfigError, match=text):
            sr.plan_training(loss, w, OPTIMIZER, batch, cluster="cpu:2")


def test_every_candidate_says_why_it_lost(plan: TrainingPlan) -> None:
    first, *others = plan.candidates
    assert first.reason == ""
    assert first.fits
    assert first.seconds == plan.step_time.seconds == plan.report.time.seconds
    assert others
    assert all(candidate.reason for candidate in others)
    assert {candidate.mesh for candidate in plan.candidates} >= {"data:8", "data:4,model:2"}
    fitting = [candidate.seconds for candidate in others if candidate.fits and candidate.seconds is not None]
    assert min(fitting) * 1.002 > plan.step_time.seconds


def test_reports_are_the_same_after_json(plan: TrainingPlan) -> None:
    report = TrainingPlanReport.from_json(plan.to_json())
    assert report == plan.report
    assert str(report) == str(plan)
    assert "the plan" in str(plan)
    assert "examples/s" in str(plan)
    assert sum(nbytes for _, nbytes in report.memory) == plan.peak_bytes
    assert plan.peak.at_least <= plan.peak_bytes <= plan.peak.at_most
    assert plan.fits == "certain"
    *points, last = plan.frontier.points
    assert all(point.price is not None and point.price > 0 for point in points)
    assert last.price is None


def test_the_frontier_says_what_memory_is_worth() -> None:
    sizes, seconds = (3, 1, 2, 4, 8), (0.1, 0.4, 0.45, 0.1, 0.05)
    choices = [(size * 2**30, time) for size, time in zip(sizes, seconds, strict=True)]
    outcome: Any = SimpleNamespace(choices=choices, paired_bytes=0)
    points = answer._frontier([outcome])
    assert [(point.limit_bytes, point.seconds) for point in points] == [(2**30, 0.4), (3 * 2**30, 0.1), (2**33, 0.05)]
    assert [point.price for point in points] == [pytest.approx(0.15 / 2**30), pytest.approx(0.01 / 2**30), None]
    first, second, last = str(Frontier("loss", "data:8", points)).splitlines()[-3:]
    assert (first.split()[-2:], second.split()[-2:]) == (["150", "ms"], ["10", "ms"])
    assert last.split() == ["8.0", "GiB", "50", "ms", "8.0", "GiB"]


def test_the_rule_places_model_and_state(plan: TrainingPlan) -> None:
    model, _ = shapes()
    pair = model, eqx.filter_eval_shape(TrainingStep(squares, OPTIMIZER).init_state, model)
    assert plan.as_rule().plan(pair, plan.mesh).specs == plan.plan.specs[:2]


def test_differences_name_mesh_and_recipe(plan: TrainingPlan) -> None:
    assert plan.diff(plan).seconds == (plan.step_time.seconds, plan.step_time.seconds)
    assert str(plan.diff(plan)).startswith("time ")
    model, batch = shapes()
    mesh = sr.create_mesh("a:2,b:4")
    other = sr.plan_training(squares, model, OPTIMIZER, batch, cluster=mesh, microbatches=2)
    text = str(plan.diff(other))
    assert f"mesh {plan.report.mesh} -> a:2,b:4\n" in text
    assert text.count("mesh ") == 1
    assert "recipe whole batch, keeps everything -> 2 microbatches, gradients reduced" in text
    assert plan.diff(other).peak_bytes == (plan.peak_bytes, other.peak_bytes)


def test_batches_that_were_not_planned_are_refused(plan: TrainingPlan) -> None:
    x = jnp.ones((64, 16))
    model, state = plan.init(make)(jax.random.key(0))
    with pytest.raises(TreeError, match=r"structure of the batch differs.*Plan again for this one"):
        plan.step(model, state, {"x": x})
    with pytest.raises(TreeError, match=r"batch/1: 1\.0 is not an array, and what was planned is float32\[64, 16\]"):
        plan.step(model, state, (x, 1.0))
    with pytest.raises(TreeError, match=r"batch/0 was float32\[64, 16\] and is float32\[32, 16\].*Plan again"):
        plan.step(model, state, (x[:32], x[:32]))


@pytest.mark.parametrize("count", [0, -1, 1.5, "3"])
def test_counts_of_plans_to_compile_are_checked(plan: TrainingPlan, count: Any) -> None:
    with pytest.raises(ConfigError, match="count must be how many plans to compile, got"):
        plan.prove(count)


@pytest.mark.slow
def test_pins_are_kept() -> None:
    model, batch = shapes()
    pins = sr.RegexShardingRule([("0/layers/1/weight", P("model", None))])
    pinned = sr.plan_training(squares, model, OPTIMIZER, batch, cluster="cuda:h100:8", pins=pins)
    assert pinned.plan.specs[0].layers[1].weight == P("model")
    # Pins that name an axis leave only the meshes that have it.
    refused = [candidate for candidate in pinned.candidates if candidate.mesh == "data:8"]
    assert "model" in refused[0].reason
    assert refused[0].seconds is None


def test_a_mesh_is_kept() -> None:
    model, batch = shapes()
    mesh = sr.create_mesh("a:2,b:4")
    pinned = sr.plan_training(squares, model, OPTIMIZER, batch, cluster=mesh)
    assert pinned.mesh is mesh
    assert len(pinned.candidates) == 1


@pytest.mark.parametrize("cluster", ["cuda:h100:8", "cuda:h100:5", sr.mesh_shape("data:4,model:2")], ids=str)
def test_what_cannot_fit_is_refused_before_anything_is_planned(cluster: Any) -> None:
    model, batch = shapes()
    plans: list[str] = []
    with pytest.raises(DoesNotFitError, match=r"^squares does not fit in 100 B on .* whatever its layouts") as caught:
        sr.plan_training(
            squares, model, OPTIMIZER, batch, cluster=cluster, memory_limit=100, progress=plans.append, time_limit=1e-3
        )
    assert plans == []
    assert "checkpoint" not in str(caught.value)  # recomputing leaves parameters where they are


def test_bounds_leave_out_what_hosts_have_room_for() -> None:
    model = {"a": jax.ShapeDtypeStruct((1024, 2048), jnp.float32), "b": jax.ShapeDtypeStruct((2048, 1024), jnp.float32)}
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    options: dict[str, Any] = {"cluster": "cuda:h100:8", "memory_limit": "1MiB"}
    needed = []
    for host_memory in (0, "1MiB", None):
        with pytest.raises(DoesNotFitError, match=r"does not fit in 1\.0 MiB") as caught:
            sr.plan_training(wide, model, OPTIMIZER, x, host_memory=host_memory, **options)
        needed.append(caught.value.needed_bytes)
    matrices = 2 * 1024 * 2048 * 4 // 8
    assert needed[0] == 3 * matrices + 64 * 1024 * 4 // 8 + 4  # the count of steps is whole on each device
    assert needed[1] == needed[0] - 2**20
    assert needed[2] == needed[0] - 2 * matrices - 4


def test_pins_of_a_mesh_count_for_its_bound() -> None:
    model, batch = shapes()
    mesh = sr.mesh_shape("data:8")
    pins = sr.RegexShardingRule([("0/layers/1/weight", P())])
    options: dict[str, Any] = {"cluster": mesh, "memory_limit": "16KiB", "host_memory": 0}
    assert sr.plan_training(squares, model, OPTIMIZER, batch, **options).planned.memory_limit == 2**14
    with pytest.raises(DoesNotFitError, match="on data:8 with these pins"):
        sr.plan_training(squares, model, OPTIMIZER, batch, pins=pins, **options)


def test_guessed_devices_are_noted() -> None:
    model, batch = shapes()
    plan = sr.plan_training(squares, model, OPTIMIZER, batch, cluster=sr.mesh_shape("data:8"))
    assert "assumed-hardware" in [finding.code for finding in plan.report.findings]
    present = sr.plan_training(squares, model, OPTIMIZER, batch, cluster=sr.create_mesh("data:8"))
    assert "assumed-hardware" not in [finding.code for finding in present.report.findings]


UNKNOWN_AXIS = sr.RegexShardingRule([("weight", P("tensor"))])
OPAQUE = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"microbatches": 0}, ConfigError, "microbatches must be a positive integer"),
        ({"accumulate_dtype": jnp.int32}, ConfigError, "accumulate_dtype must be a floating-point type"),
        ({"accumulate_dtype": "float64"}, ConfigError, "accumulate_dtype is float64, which JAX computes as float32"),
        ({"host_memory": "foo"}, ConfigError, "host_memory must be a number of bytes, or a string like '80GB'"),
        ({"host_memory": "8GiB"}, ConfigError, "host_memory is '8GiB', but CPU devices have no memory of a host"),
        ({"time_limit": 0}, ConfigError, "time_limit must be a number of seconds above 0"),
        ({"optimizer": optax.adam}, ConfigTypeError, r"such as optax\.adam\(1e-3\)"),
        ({"optimizer": SimpleNamespace(init=None)}, ConfigTypeError, "optimizer must be one of optax"),
        ({"loss": "squares"}, ConfigTypeError, "loss must be a function, got 'squares'"),
        ({"progress": True}, ConfigTypeError, "progress must be a function, got True"),
        ({"pins": UNKNOWN_AXIS}, PlanError, "pins: unknown axis 'tensor'; meshes of cpu:8 have stage, replica, data"),
        (
            {"optimizer": optax.lbfgs()},
            PlanError,
            r"'value_fn'\. Line searches, such as that of optax\.lbfgs",
        ),
        ({"optimizer": OPAQUE}, PlanError, r"the optimizer cannot update the model.*grad_fn"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    model, batch = shapes()
    arguments = {"loss": squares, "model": model, "optimizer": OPTIMIZER, "batch": batch, "cluster": "cpu:8", **wrong}
    with pytest.raises(error, match=message) as caught:
        sr.plan_training(**arguments)
    assert wrong.get("optimizer") is not OPAQUE or isinstance(caught.value.__cause__, ValueError)


@pytest.mark.slow
def test_progress_has_a_line_for_each_plan() -> None:
    lines: list[str] = []
    model, batch = shapes()
    plan = sr.plan_training(squares, model, OPTIMIZER, batch, cluster="cuda:h100:4", progress=lines.append)
    assert len(lines) == len(plan.candidates)
    assert "best so far" in lines[-1]


def layers(model: Any, batch: Any) -> Any:
    x, y = batch
    out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1] + x, None), x, model)
    return jnp.mean((out - y) ** 2)


def deep() -> tuple[Any, Any]:
    w = jax.ShapeDtypeStruct((6, 64, 256), jnp.float32), jax.ShapeDtypeStruct((6, 256, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    return w, (x, x)


@pytest.fixture(scope="module")
def tight() -> TrainingPlan:
    """A plan under a limit that nothing fits in that keeps everything."""
    model, batch = deep()
    mesh = sr.create_mesh("data:8")
    free = sr.plan_training(layers, model, OPTIMIZER, batch, cluster=mesh)
    return sr.plan_training(layers, model, OPTIMIZER, batch, cluster=mesh, memory_limit=free.peak_bytes // 3)


@pytest.mark.slow
def test_tight_plans_recompute_or_split_the_batch(tight: TrainingPlan) -> None:
    assert tight.peak_bytes <= tight.planned.memory_limit
    assert tight.recipe.microbatches > 1 or tight.recipe.keep.units
    # What each device keeps of a microbatch: the inputs of six layers, and the matmuls of four times their size.
    inputs = 6 * 4096 * 64 * 4 // 8 // tight.recipe.microbatches
    assert tight.recipe.keep.kept_bytes in (inputs, 5 * inputs)
    refused = [candidate for candidate in tight.candidates if "does not fit" in candidate.reason]
    assert refused
    assert all(candidate.peak_bytes > tight.planned.memory_limit for candidate in refused)


@pytest.mark.slow
def test_tight_plans_compute_the_same(tight: TrainingPlan) -> None:
    rng = np.random.default_rng(0)
    weights = tuple(jnp.asarray(rng.normal(size=leaf.shape, scale=0.1), jnp.float32) for leaf in deep()[0])
    x, y = (jnp.asarray(rng.normal(size=(4096, 64)), jnp.float32) for _ in range(2))
    model, state = tight.init(lambda: weights)()
    model, _, loss, _ = tight.step(model, state, (x, y))
    plain = TrainingStep(layers, OPTIMIZER)
    expected, _, expected_loss, _ = eqx.filter_jit(plain)(weights, plain.init_state(weights), (x, y))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_close(model, expected, 1e-3, 1e-5)


@pytest.mark.slow
def test_microbatches_can_be_pinned() -> None:
    model, batch = deep()
    mesh = sr.create_mesh("data:8")
    pinned = sr.plan_training(layers, model, OPTIMIZER, batch, cluster=mesh, microbatches=4)
    assert pinned.recipe.microbatches == 4
    assert {candidate.microbatches for candidate in pinned.candidates} == {4}
    assert {candidate.groups for candidate in pinned.candidates} == {1, 8}  # reduced in each, and once


@pytest.mark.slow
def test_losses_that_are_no_sums_are_computed_at_once() -> None:
    model, batch = deep()

    def contrastive(model: Any, batch: Any) -> Any:
        x, y = batch
        return jnp.mean(jax.nn.log_softmax((x @ model[0][0]) @ (y @ model[0][0]).T))

    plan = sr.plan_training(contrastive, model, OPTIMIZER, batch, cluster=sr.create_mesh("data:8"))
    assert plan.recipe.microbatches == 1
    with pytest.raises(MicrobatchError, match="contrastive"):
        sr.plan_training(contrastive, model, OPTIMIZER, batch, cluster=sr.create_mesh("data:8"), microbatches=2)


@pytest.mark.slow
def test_gradients_add_up_in_the_dtype_of_choice() -> None:
    model, batch = deep()
    halves = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), model)
    narrow = sr.plan_training(
        layers,
        halves,
        OPTIMIZER,
        batch,
        cluster=sr.create_mesh("data:8"),
        microbatches=4,
        accumulate_dtype=jnp.bfloat16,
    )
    # By default they add up in float32.
    for dtype, is_wide in ((jnp.bfloat16, False), (None, True)):
        step = TrainingStep(layers, OPTIMIZER, recipe=attrs.evolve(narrow.recipe, accumulate_dtype=dtype))
        assert ("f32[6,64,256]" in str(jax.make_jaxpr(step)(*narrow.planned.args))) == is_wide
    assert narrow.recipe.accumulate_dtype == jnp.bfloat16


@pytest.mark.slow
def test_checkpoints_are_kept_unless_they_may_be_replaced() -> None:
    model, batch = deep()

    def checkpointed(model: Any, batch: Any) -> Any:
        x, y = batch
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1] + x, None))
        return jnp.mean((jax.lax.scan(layer, x, model)[0] - y) ** 2)

    mesh = sr.create_mesh("data:8")
    plans = [
        sr.plan_training(checkpointed, model, OPTIMIZER, batch, cluster=mesh, replace_checkpoints=replaced)
        for replaced in (False, True)
    ]
    assert not plans[0].recipe.keep.replaces_checkpoints
    assert plans[1].recipe.keep.replaces_checkpoints
    assert plans[1].step_time.seconds <= plans[0].step_time.seconds
    # What is computed again by hand is not the model's either.
    assert plans[0].report.model_flops == plans[1].report.model_flops == 3 * 2 * 2 * 6 * 4096 * 64 * 256


@pytest.mark.slow
def test_the_compiler_decides_what_fits() -> None:
    model, batch = deep()
    proved = sr.plan_training(layers, model, OPTIMIZER, batch, cluster="cpu:8", prove=2)
    assert proved.compiled[0].fits
    assert proved.compiled[0].modelled_bytes == proved.peak_bytes
    assert proved.fits == "certain"
    assert proved.peak == Peak.point(proved.compiled[0].peak_bytes)
    assert "compiled" in [finding.code for finding in proved.report.findings]


@pytest.mark.slow
def test_plans_for_targets_run_under_a_mesh_like_theirs() -> None:
    model, batch = shapes()
    plan = sr.plan_training(squares, model, OPTIMIZER, batch, cluster="cpu:8")
    rows = jnp.ones((64, 16))
    with jax.set_mesh(sr.create_mesh(sr.mesh_shape(plan.report.mesh))):
        model, state = plan.init(make)(jax.random.key(0))
        _, _, loss, _ = plan.step(model, state, (rows, rows))
    np.testing.assert_allclose(loss, squares(make(jax.random.key(0)), (rows, rows)), rtol=1e-5)


class Named(eqx.Module):
    weight: jax.Array
    axis_name: str


def test_losses_of_one_batch_size_and_models_with_names_are_planned() -> None:
    def loss(model: Named, x: jax.Array) -> jax.Array:
        return jnp.mean((x.reshape(63, 16) @ model.weight) ** 2)

    def named() -> Named:
        return Named(jnp.ones((16, 16)), "batch")

    x = jax.ShapeDtypeStruct((63, 16), jnp.float32)
    planned = sr.plan_training(loss, named(), OPTIMIZER, x, cluster=sr.create_mesh("data:8"))
    assert not [advice for advice in planned.report.advice if "batch" in advice.change]
    (finding,) = [finding for finding in planned.report.findings if finding.code == "not-said"]
    assert "what a batch of 126 examples would give is unknown: TypeError" in finding.message
    model, state = planned.init(named)()
    model, *_ = planned.step(model, state, jnp.ones((63, 16)))
    assert model.axis_name == "batch"


@pytest.mark.parametrize("count", [5, 6, 7])
def test_clusters_that_cannot_be_doubled_are_planned(count: int) -> None:
    model, _ = shapes()
    x = jax.ShapeDtypeStruct((840, 16), jnp.float32)
    planned = sr.plan_training(squares, model, OPTIMIZER, (x, x), cluster=f"cuda:h100:{count}")
    assert planned.candidates[0].fits
    assert not [advice for advice in planned.report.advice if "devices" in advice.change]


def broken(*args: Any) -> Any:
    raise RuntimeError("a bug")


@pytest.mark.parametrize("name", ["_model_flops", "token_count", "_frontier", "machine_findings", "_of_larger_batch"])
def test_what_is_said_about_a_plan_does_not_lose_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, name, broken)
    model, batch = shapes()
    planned = sr.plan_training(squares, model, OPTIMIZER, batch, cluster="cuda:h100:2", stages=1)
    assert planned.candidates[0].fits
    (finding,) = [finding for finding in planned.report.findings if finding.code == "not-said"]
    assert finding.message.endswith("is unknown: RuntimeError: a bug")


def test_findings_before_a_bug_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "program_findings", broken)
    model, batch = shapes()
    planned = sr.plan_training(
        squares, model, OPTIMIZER, batch, cluster="cuda:h100:8", memory_limit="30KiB", time_limit=1e-3
    )
    severities = {finding.code: finding.severity for finding in planned.report.findings}
    assert severities["may-not-fit"] == severities["not-said"] == "warning"
    assert not planned.candidates[0].fits  # and there is a plan, though there was no time for it


def test_stages_that_cannot_be_planned_do_not_lose_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageSearch, "ordered", broken)
    monkeypatch.setattr(StageSearch, "refusal", lambda search: "")
    model, batch = shapes()
    planned = sr.plan_training(squares, model, OPTIMIZER, batch, cluster="cuda:h100:2")
    assert planned.report.why_no_stages == "planning them failed: RuntimeError: a bug"
    with pytest.raises(RuntimeError, match="a bug"):
        sr.plan_training(squares, model, OPTIMIZER, batch, cluster="cuda:h100:2", stages=2)


def test_without_time_meshes_that_pins_rule_out_are_passed_over() -> None:
    model, batch = shapes()
    pins = sr.RegexShardingRule([("0/layers/1/weight", P("model", None))])
    options: dict[str, Any] = {"cluster": "cuda:h100:8", "pins": pins, "time_limit": 1e-9}
    planned = sr.plan_training(squares, model, OPTIMIZER, batch, **options)
    assert planned.plan.specs[0].layers[1].weight == P("model")
    assert "time-is-up" in [finding.code for finding in planned.report.findings]


def wide(model: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ model["a"]) @ model["b"]) ** 2)


def wide_model() -> Any:
    first, second = jax.random.split(jax.random.key(0))
    return {"a": jax.random.normal(first, (1024, 2048)) / 32, "b": jax.random.normal(second, (2048, 1024)) / 32}


def on_hosts(memory_limit: int = 7_000_000, **options: Any) -> TrainingPlan:
    """A plan for which the optimizer's state does not fit on devices: CPU devices stand in for GPUs, as they can."""
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    h100 = sr.Hardware.named("cuda:h100")
    mesh = sr.create_mesh("data:8")
    model = jax.eval_shape(wide_model)
    return sr.plan_training(
        wide, model, OPTIMIZER, x, cluster=mesh, hardware=h100, memory_limit=memory_limit, **options
    )


@pytest.mark.slow
def test_state_on_hosts_is_what_makes_a_plan_fit() -> None:
    plan = on_hosts()
    assert plan.candidates[0].fits
    assert plan.recipe.host_state == (1, 2, 3, 4)
    assert dict(plan.report.host_memory) == {"optimizer state": 4 * 2**20}
    assert plan.report.host_exchanged_bytes == 8 * 2**20
    assert dict(plan.report.memory)["optimizer state"] == 4  # the count of steps
    assert "optimizer state 4.0 MiB; 8.0 MiB go there and back in each step" in str(plan)
    assert plan.step_time.copy_seconds > plan.step_time.compute_seconds
    assert "% of the step waits for it" in str(plan)
    assert all(not candidate.fits for candidate in plan.candidates if not candidate.host_bytes)
    assert TrainingPlanReport.from_json(plan.to_json()) == plan.report
    model, state = plan.init(wide_model)()
    memories = ["device", *["pinned_host"] * 4]
    assert [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)] == memories
    assert jax.tree.map(lambda leaf: leaf.sharding, (model, state)) == plan.shardings()
    x = jax.random.normal(jax.random.key(2), (64, 1024))
    # As after a load of a checkpoint by `as_rule`, which has no memories.
    state = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("device")), state)
    model, state, loss, _ = plan.step(model, state, x)
    assert [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)] == memories
    plain = TrainingStep(wide, OPTIMIZER)
    expected = wide_model()
    expected, expected_state, expected_loss, _ = eqx.filter_jit(plain)(expected, plain.init_state(expected), x)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_close(state, expected_state, 1e-3, 1e-7)


@pytest.mark.slow
def test_only_as_much_state_is_on_hosts_as_has_to_be() -> None:
    plan = on_hosts(9_200_000)
    assert plan.candidates[0].fits
    assert 0 < len(plan.recipe.host_state) < 4
    others = [candidate for candidate in plan.candidates if candidate.fits and candidate.host_bytes == 4 * 2**20]
    parts = [candidate.keep for candidate in plan.candidates if "of state on the host" in candidate.keep]
    assert len(parts) == len(dict.fromkeys(parts)) > 1
    assert max(map(len, str(plan).splitlines())) < 240
    assert all(other.seconds > plan.step_time.seconds for other in others if other.seconds is not None)


@pytest.mark.slow
def test_hosts_are_used_no_more_than_they_may_be() -> None:
    (plan, other) = on_hosts(host_memory=0), on_hosts(host_memory="3MiB")
    assert not plan.candidates[0].fits
    assert not any(candidate.host_bytes for candidate in plan.candidates)
    assert "no-host-memory" in [finding.code for finding in plan.report.findings]
    assert all(candidate.host_bytes <= 3 * 2**20 for candidate in other.candidates if candidate.fits)
    with pytest.raises(ConfigError, match="host_memory must be a number of bytes"):
        on_hosts(host_memory=-1)
