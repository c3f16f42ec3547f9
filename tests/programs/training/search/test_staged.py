"""Plans with stages: what runs is the plain step, and what is left out says why."""

import re
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardrules as sr
from shardrules.core.deadline import NO_DEADLINE, Deadline
from shardrules.core.errors import ConfigError, PlanError
from shardrules.programs.training.cluster import Cluster
from shardrules.programs.training.search.search import TrainingSearch
from shardrules.programs.training.search.staged import StageSearch, Staging
from shardrules.programs.training.stages.traffic import StageTraffic
from tests.programs.training.checks import assert_close, problem_of

LAYERS, EXAMPLES, WIDTH = 4, 16, 16


def numbers(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng([*shape]).normal(size=shape) / 4, jnp.float32)


MODEL = {"in": numbers(8, WIDTH), "layers": numbers(LAYERS, WIDTH, WIDTH)}
BATCH = numbers(EXAMPLES, 8), numbers(EXAMPLES, 4, 8)[:, 0]


def layer(x: Any, weights: Any) -> Any:
    return x + jnp.tanh(x @ weights)


def loss(model: Any, batch: Any) -> Any:
    x, y = batch
    x = jax.lax.scan(lambda x, w: (layer(x, w), None), x @ model["in"], model["layers"])[0]
    return jnp.mean((x @ model["in"].T - y) ** 2)


def written_out(model: Any, batch: Any) -> Any:
    x = batch[0] @ model["in"]
    for index in range(LAYERS):
        x = layer(x, model["layers"][index])
    return jnp.mean((x @ model["in"].T - batch[1]) ** 2)


def of_other_layers(model: Any, batch: Any) -> Any:
    x = batch[0] @ model["in"]
    for function, weights in zip((jnp.tanh, jnp.sin, jnp.cos, jnp.exp), model["layers"], strict=True):
        x = x + function(x @ weights)
    return jnp.mean((x @ model["in"].T - batch[1]) ** 2)


def of_neighbours(model: Any, batch: Any) -> Any:
    return loss(model, batch) + jnp.mean(jnp.cumsum(batch[0] @ model["in"], 0) ** 2)


def plan_of(fn: Any = loss, cluster: Any = "cuda:h100:8", **options: Any) -> Any:
    return sr.plan_training(fn, MODEL, optax.adam(1e-2), BATCH, cluster=cluster, **options)


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (2, None), (2, 2)])
@pytest.mark.sample(1)
def test_stages_train_as_one_device(stages: int, microbatches: int | None) -> None:
    plan = plan_of(cluster=jax.devices(), stages=stages, microbatches=microbatches)
    assert plan.recipe.stages == plan.report.stages == plan.mesh.shape["stage"] == stages
    assert plan.plan.specs[0]["layers"][0] == "stage"
    schedule = plan.schedule
    assert schedule is not None
    assert (schedule.stages, schedule.microbatches) == (stages, plan.recipe.microbatches)
    assert plan.report.regions == ()  # what stages send is no region of the user's
    assert plan.candidates[0].batch_text == f"{plan.recipe.microbatches} in {stages} stages"
    optimizer = optax.adam(1e-2)
    expected, expected_state = MODEL, optimizer.init(MODEL)
    model, state = plan.init(lambda: MODEL)()
    for _ in range(2):
        model, state, value, _ = plan.step(model, state, BATCH)
        expected_value, gradients = jax.value_and_grad(loss)(expected, BATCH)
        updates, expected_state = optimizer.update(gradients, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    assert_close(model, expected, 1e-4, 1e-5)


@pytest.mark.slow
def test_layers_of_a_python_loop_train_as_one_device() -> None:
    """Weights of layers may be arrays of their own: they come to their stages in each step."""
    model = {"in": MODEL["in"], "layers": [*MODEL["layers"]]}
    optimizer = optax.sgd(1e-2)
    plan = sr.plan_training(written_out, model, optimizer, BATCH, cluster=jax.devices(), stages=4, microbatches=8)
    assert plan.recipe.stages == 4
    assert_trains_as_written(plan, written_out, model, optimizer, BATCH)


def assert_trains_as_written(plan: Any, loss: Any, model: Any, optimizer: Any, batch: Any) -> None:
    expected, gradients = jax.value_and_grad(loss)(model, batch)
    trained, _, value, _ = plan.step(*plan.init(lambda: model)(), batch)
    updated = optax.apply_updates(model, optimizer.update(gradients, optimizer.init(model))[0])
    assert_close((value, trained), (expected, updated), 1e-4, 1e-5)


@pytest.mark.slow
def test_chunks_train_as_one_device() -> None:
    """Chunks shorten the wait of stages, and are taken where computing takes longer than sending."""
    width, tokens = 256, 64

    def deep(x: Any, w: Any) -> tuple[Any, None]:
        return jax.lax.scan(lambda x, _: (layer(x, w), None), x, None, 16)[0], None

    def loss(model: Any, batch: Any) -> Any:
        x = jax.lax.scan(deep, batch @ model["in"], model["layers"])[0]
        return jnp.mean((x @ model["in"].T - batch) ** 2)

    model, batch = {"in": numbers(8, width), "layers": numbers(8, width, width) / 16}, numbers(8, tokens, 8)
    optimizer = optax.sgd(1e-2)
    plan = sr.plan_training(loss, model, optimizer, batch, cluster=jax.devices()[:4], stages=4, microbatches=4)
    assert plan.recipe.chunks == plan.report.chunks == 2
    best, other = plan.candidates[:2]
    assert (best.batch_text, other.batch_text) == ("4 in 4 stages of 2 chunks", "4 in 4 stages")
    assert "slower" in other.reason
    assert "stages     4 of 2 chunks, which wait in 3 of 11 rounds" in str(plan.report)
    schedule = plan.schedule
    assert schedule is not None
    assert (schedule.chunks, schedule.bubble) == (2, pytest.approx(3 / 11))
    assert_trains_as_written(plan, loss, model, optimizer, batch)


@pytest.mark.slow
def test_stages_send_microbatches() -> None:
    """Each round sends a microbatch, and what waits, to the next stage and back: forward, and their gradients."""
    plan = plan_of(cluster=sr.create_mesh("stage:4,data:2"), stages=4, microbatches=4)
    step = plan.step
    report = sr.audit(step, *plan.planned.args, mesh=plan.mesh)
    sent = [each for each in report.collectives if each.kind == "collective-permute"]
    message = EXAMPLES // 4 // 2 * WIDTH * 4
    rounds = 4 + 4 - 1
    assert [(each.wire_bytes, each.times.count) for each in sent] == [(message, rounds)] * 4


@pytest.mark.slow
def test_a_mesh_with_an_axis_of_stages_is_taken() -> None:
    mesh = sr.create_mesh("stage:2,data:4")
    assert plan_of(cluster=mesh, stages=2).report.mesh == "stage:2,data:4"
    assert plan_of(cluster=sr.create_mesh("data:8")).report.why_no_stages == "the mesh has no axis 'stage'"


@pytest.mark.parametrize(
    ("fn", "options", "why"),
    [
        (of_other_layers, {}, "its layers are neither one loop over stacked parameters nor equal ones"),
        (of_neighbours, {}, "the loss cannot be computed by microbatches"),
        (loss, {"stages": 1}, "stages=1"),
    ],
)
def test_plans_without_stages_say_why(fn: Any, options: Any, why: str) -> None:
    plan = plan_of(fn, **options)
    assert plan.recipe.stages == 1
    assert plan.schedule is None
    assert plan.report.why_no_stages.startswith(why)
    assert f"stages     none: {why}" in str(plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 3}, "3 stages: 8 devices do not divide into 3 stages"),
        ({"stages": 8}, "8 stages: there are 4 layers"),
        ({"stages": 4, "microbatches": 2}, "microbatches have to be a multiple of the stages, got 2"),
        ({"stages": 2, "cluster": "stage:4,data:2"}, "the mesh is stage:4,data:2; its first axis has to be 'stage'"),
        ({"stages": 2, "cluster": "data:4,stage:2"}, "the mesh is data:4,stage:2; its first axis has to be 'stage'"),
        ({"stages": 4, "cluster": "stage:4,data:32"}, "4 layers, 128 devices and 16 examples do not divide into"),
    ],
)
def test_stages_that_cannot_be_are_refused(options: Any, message: str) -> None:
    meshes = {"cluster": sr.mesh_shape(options["cluster"])} if "cluster" in options else {}
    with pytest.raises(PlanError, match=re.escape(message)):
        plan_of(**(options | meshes))


def test_without_time_for_stages_that_is_said() -> None:
    with pytest.raises(PlanError, match="2 stages: time_limit left no time for them"):
        plan_of(stages=2, time_limit=1e-9)


def test_a_count_of_stages_is_positive() -> None:
    with pytest.raises(ConfigError, match="stages must be a positive integer, got 0"):
        plan_of(stages=0)


@pytest.mark.slow
def test_plans_with_stages_allowed_are_not_slower() -> None:
    without, allowed = plan_of(stages=1), plan_of()
    assert allowed.step_time.seconds <= without.step_time.seconds
    text = allowed.report.to_json()
    assert sr.reports.TrainingPlanReport.from_json(text) == allowed.report


def slow_search(
    stages: int | None,
    network_bytes_per_second: float = 3e9,
    tokens: int = 131072,
    shape: tuple[int, int, int] = (16, 8192, 32768),
    dtype: Any = jnp.float32,
) -> StageSearch:
    """A search for plans of wide layers on four hosts, before it has begun."""
    count, width, inner = shape
    shapes = (count, width, inner), (count, inner, width)
    model = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)

    def wide(weights: Any, x: Any) -> Any:
        x = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, weights)[0]
        return jnp.mean(x.astype(jnp.float32) ** 2)

    hardware = attrs.evolve(
        sr.Hardware.named("cuda:h100"), network_bytes_per_second=network_bytes_per_second, memory_bytes=2**40
    )
    batch = jax.ShapeDtypeStruct((tokens, width), dtype)
    problem = problem_of(wide, model, batch, Cluster.of("cuda:h100:32", hardware), optimizer=optax.sgd(1e-2))
    return StageSearch(TrainingSearch(problem, None, stages, NO_DEADLINE, lambda text: None))


def searched(*args: Any) -> StageSearch:
    staged = slow_search(*args)
    staged.search_all()
    return staged


def seconds_of(staged: StageSearch) -> float:
    assert staged.search.best is not None
    return staged.search.best.seconds


@pytest.mark.slow
def test_stages_are_found_where_networks_are_slow() -> None:
    free, *others = (searched(stages) for stages in (None, 1, 2, 4, 8))
    assert free.search.best is not None
    assert free.search.best.recipe.stages == 4
    assert seconds_of(free) <= min(map(seconds_of, others))
    assert seconds_of(free) < 0.9 * seconds_of(others[0])
    for staged in (free, *others):
        assert all(staged.least_seconds(staging) <= outcome.seconds for staging, outcome in staged.plans.items())
    assert free.search.least_seconds <= seconds_of(others[0])


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2**12, 2**15])
def test_hosts_may_compute_the_same(tokens: int) -> None:
    """Where little is computed, plans without stages need no network, and are found with stages allowed."""
    free, without, slower = searched(None, 1e9, tokens), searched(1, 1e9, tokens), searched(1, 1e8, tokens)
    assert any(map(free.repeats, free.outcomes))
    assert seconds_of(free) <= seconds_of(without) * 1.001
    assert seconds_of(without) == pytest.approx(seconds_of(slower), rel=0.001)


NARROW = 6.25e9 / 8, 262144, (32, 1024, 65536), jnp.bfloat16
"""Layers whose gradients take longer to add up over hosts than all of them to compute the same."""


@pytest.mark.slow
def test_stages_are_found_where_hosts_would_compute_the_same() -> None:
    free, *others = (searched(stages, *NARROW) for stages in (None, 1, 2, 4))
    assert any(map(free.repeats, others[0].outcomes))
    assert seconds_of(free) <= min(map(seconds_of, others)) * 1.001
    assert seconds_of(free) < 0.7 * seconds_of(others[0])


def test_each_number_of_stages_that_may_be_better_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Staging] = []
    monkeypatch.setattr(StageSearch, "plan", lambda self, staging: planned.append(staging))
    staged = slow_search(None, *NARROW)
    staged.search.begin()
    assert any(map(staged.repeats, staged.outcomes))
    # What takes least computes the same on all hosts: others compute a part of it.
    assert staged.compute_seconds < 1.1 * min(each.compute_seconds for each in staged.outcomes)
    may_be_better = {each.stages for each in staged.ordered() if staged.least_seconds(each) < seconds_of(staged)}
    assert len(may_be_better) > 1
    staged.run_early()
    assert {each.stages for each in planned} == may_be_better
    planned.clear()
    staged.run()
    assert {each.stages for each in planned} == may_be_better


def test_a_search_that_has_nothing_left_to_plan_is_not_late() -> None:
    problem = problem_of(loss, MODEL, BATCH, Cluster.of("cuda:h100:8"))
    search = TrainingSearch(problem, None, None, Deadline.after(1000), lambda text: None)
    search.begin()
    search.longest_seconds = 2000
    assert not search.has_time
    StageSearch(search).run()
    assert not search.is_late
    assert "a step would take" in search.why_no_stages


def test_traffic_between_hosts_is_counted() -> None:
    hardware = attrs.evolve(
        sr.Hardware.named("cuda:h100"), network_bytes_per_second=1.0, network_fraction=1.0, devices_per_host=8
    )
    traffic = StageTraffic(800, 80, 400, 4, Cluster.of("cuda:h100:32", hardware))
    assert traffic.hosts == 4
    assert traffic.reducing_seconds(4) == 2 * 3 / 4 * (800 + 80) / 8
    # Of two stages each has half of the layers on half of the hosts, and all hosts have the rest.
    assert traffic.reducing_seconds(2, 2) == 2 * 1 / 2 * 400 / 8 + 2 * 3 / 4 * 80 / 8
    assert traffic.sending_seconds(4, 1.5) == 6 * 1.5 * 400 * 3 / 32
    assert traffic.least_seconds(1000.0, 0.5) == 1000 + 0.5 * traffic.reducing_seconds(4)
    # Of two stages on each of two hosts, gradients may be exchanged twice, half of them inside of hosts.
    pair = attrs.evolve(traffic, cluster=Cluster.of("cuda:h100:16", hardware))
    assert pair.sending_seconds(4, 1.5) == (2 * 3 / 4 + 4 * 1 / 2) * 1.5 * 400 * 4 / 16
    # Four hosts that compute the same send nothing.
    assert traffic.least_seconds(0.1, 0.5) == pytest.approx(0.4)
    host = attrs.evolve(traffic, cluster=Cluster.of("cuda:h100:8", hardware))
    assert host.reducing_seconds(1) == host.sending_seconds(4, 1.5) == 0


def with_penalty(model: Any, batch: Any) -> Any:
    """The same loss, computed in bfloat16, and a sum of squares that layers add to."""

    def body(carried: Any, weights: Any) -> Any:
        x, penalty = carried
        y = (x.astype(jnp.bfloat16) @ weights.astype(jnp.bfloat16)).astype(jnp.float32)
        return (x + jnp.tanh(y), penalty + jnp.sum(y**2)), None

    x, penalty = jax.lax.scan(body, (batch[0] @ model["in"], 0.0), model["layers"])[0]
    return jnp.mean((x @ model["in"].T - batch[1]) ** 2) + 1e-3 * penalty / EXAMPLES


def test_traffic_is_read_of_layers_that_carry_a_sum_and_compute_in_fewer_bits() -> None:
    cluster = Cluster.of("cuda:h100:8")
    plain, penalized = (problem_of(fn, MODEL, BATCH, cluster).traffic for fn in (loss, with_penalty))
    assert penalized.layer_bytes == plain.layer_bytes // 2
    assert penalized.layer_count == LAYERS


def with_low_rank(model: Any, batch: Any) -> Any:
    """Layers whose weights are frozen, but for what factors of low rank add to them."""
    inner, frozen, factors = model
    weights = frozen + factors @ factors.swapaxes(1, 2)
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), batch[0] @ inner, weights)[0] ** 2)


def with_adapters(model: Any, batch: Any) -> Any:
    """The same, where factors are applied by themselves."""
    inner, frozen, factors = model

    def body(x: Any, weights: Any) -> Any:
        return layer(x, weights[0]) + x @ weights[1] @ weights[1].T, None

    return jnp.mean(jax.lax.scan(body, batch[0] @ inner, (frozen, factors))[0] ** 2)


@pytest.mark.parametrize("fn", [with_low_rank, with_adapters])
def test_traffic_leaves_frozen_arrays_out(fn: Any) -> None:
    model = MODEL["in"], MODEL["layers"], numbers(LAYERS, WIDTH, 2)
    problem = problem_of(fn, model, BATCH, Cluster.of("cuda:h100:8"), trainable=(True, False, True))
    assert problem.traffic.layer_bytes == model[2].nbytes
    assert problem.traffic.other_bytes == model[0].nbytes


def test_only_layers_wait() -> None:
    """What is computed after the layers, here half of the work, waits for nobody."""
    width, tokens, struct = 2048, 16384, jax.ShapeDtypeStruct
    shapes = {"layers": (4, width, width), "head": (width, 2 * width), "out": (2 * width, width)}
    model = {name: struct(shape, jnp.bfloat16) for name, shape in shapes.items()}

    def headed(model: Any, x: Any) -> Any:
        x = jax.lax.scan(lambda x, w: (layer(x, w), None), x, model["layers"])[0]
        return jnp.mean((jnp.tanh(x @ model["head"]) @ model["out"]).astype(jnp.float32) ** 2)

    batch = struct((tokens, width), jnp.bfloat16)
    problem = problem_of(headed, model, batch, Cluster.of("cuda:h100:8"), optimizer=optax.sgd(1e-2))
    search = TrainingSearch(problem, 4, None, NO_DEADLINE, lambda text: None)
    search.plan_free((8,), search.first_recipe)
    staged = StageSearch(search)
    staging = next(each for each in staged.ordered() if each.stages == 4)
    staged.plan(staging)
    assert staging.waiting(4) == 3 / 4
    least, planned = staged.least_seconds(staging), staged.plans[staging]
    assert 1.1 * staged.compute_seconds < least <= planned.compute_seconds < planned.seconds
    assert planned.compute_seconds < 1.5 * staged.compute_seconds


def test_waiting_is_counted() -> None:
    staging = Staging((4, 8), 12, 6)
    assert (staging.stages, staging.rounds) == (4, 15)
    assert staging.waiting(5) == 15 / 12 * 6 / 5 - 1
    chunked = Staging((4, 8), 12, 8, chunks=2)
    assert chunked.rounds == 27
    assert chunked.waiting(5) == 27 / 24 * 8 / 5 - 1


def test_many_and_few_microbatches_take_turns() -> None:
    model, batch = jax.ShapeDtypeStruct((8, WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((256, WIDTH), jnp.float32)

    def deep(weights: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0] ** 2)

    problem = problem_of(deep, model, batch, Cluster.of("cuda:h100:8"), optimizer=optax.sgd(1e-2))
    ordered = StageSearch(TrainingSearch(problem, None, None, NO_DEADLINE, lambda text: None)).ordered()
    counts = [each.microbatches // each.stages for each in ordered]
    assert counts[:4] == [32, 8, 32, 8]
    assert len({*ordered}) == len(ordered)
    for count in {*counts}:
        least = [each.waiting(8) for each in ordered if each.microbatches == count * each.stages]
        assert least == sorted(least)


@pytest.mark.parametrize(("stages", "names"), [(1, ("data", "model")), (4, ("stage", "data"))])
def test_meshes_with_stages_name_them(stages: int, names: tuple[str, ...]) -> None:
    assert Cluster.of("cuda:h100:8").abstract_mesh((4, 2), stages).axis_names == names
