"""The best within a limit, as compilers have it that know the limit."""

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.deadline import NO_DEADLINE, Deadline
from shardrules.programs.autoplan.answer.plan import AutoPlan
from shardrules.programs.autoplan.answer.prove import _Proof
from shardrules.programs.autoplan.query import Query, QueryOptions, read_query
from shardrules.programs.autoplan.solve.search import Search, SearchResult, Task
from shardrules.programs.autoplan.solve.trials import Trial
from shardrules.programs.compiling.compile import compiled_memory

MESH = sr.mesh_shape("data:4")
PINS = sr.SpecTreeShardingRule((P("data"), P(), P()))
ARGS = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 64), (64, 1024), (1024, 64)))


def two_matmuls(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ v


def query_of(limit_bytes: int, hardware: sr.Hardware) -> Query:
    options = QueryOptions(limit_bytes, PINS, hardware, None, 60, prove=False)
    return read_query(two_matmuls, ARGS, MESH, options)


@pytest.mark.parametrize(("name", "saves"), [("cuda:h100", True), ("tpu:v5e", False)])
def test_limits_may_be_kept_by_saving_memory(name: str, saves: bool) -> None:
    """XLA for GPUs leaves smaller gaps where a limit binds; plans that fit only so are found."""
    hardware = sr.Hardware.named(name)
    free = query_of(2**30, hardware).search(NO_DEADLINE)
    assert free.fits
    assert not free.is_tight
    query = query_of(int(0.97 * free.peak_bytes), hardware)
    result = query.search(NO_DEADLINE)
    assert (result.fits, result.is_tight) == (saves, saves)
    if saves:
        assert query.plan(result).peak_bytes <= query.limit_bytes < free.peak_bytes
    assert not query_of(int(0.8 * free.peak_bytes), hardware).search(NO_DEADLINE).fits


@jax.checkpoint
def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w) @ w.T


def layers(ws: Any, x: jax.Array) -> jax.Array:
    for w in ws:
        x = layer(x, w)
    return jnp.mean(x**2)


LAYERS = [jax.ShapeDtypeStruct((512, 2048), jnp.bfloat16)] * 6
TOKENS = jax.ShapeDtypeStruct((65536, 512), jnp.bfloat16)


def gathered_again(**options: Any) -> AutoPlan:
    """The plan of a gradient that gathers the weights of its layers anew."""
    plan = sr.autoplan(jax.grad(layers), LAYERS, TOKENS, **options)
    choices = {trial.origin: trial.choice for trial in plan.result.patterns}
    again = choices["data parallel, ZeRO-3, gathered again"]
    return attrs.evolve(plan, result=plan.task.with_choice(plan.result, again))


def test_what_fits_as_compilers_that_save_memory_have_it_is_taken() -> None:
    options = {"mesh": MESH, "hardware": sr.Hardware.named("cuda:h100")}
    again = gathered_again(**options)
    least = again.task.tight().peak(again.choice).expected
    limit = int((least + again.peak_bytes) / 2)
    plan = sr.autoplan(jax.grad(layers), LAYERS, TOKENS, memory_limit=limit, **options)
    assert (plan.result.fits, plan.result.is_tight, plan.fits) == (True, True, "possible")
    assert plan.peak_bytes <= limit < again.peak_bytes
    assert plan.bound <= plan.cost


def test_the_factor_of_a_function_is_of_what_is_predicted() -> None:
    plan = gathered_again(mesh=MESH, hardware=sr.Hardware.named("cuda:h100"))
    proof = _Proof.of(plan, layers, sr.create_mesh("data:4", devices=jax.devices()[:4]), NO_DEADLINE)
    proof.compilations.peaks[plan.choice] = int(0.8 * plan.peak_bytes)
    corrected = proof.corrected(plan.task, plan.choice)
    assert corrected.peak(plan.choice).expected == pytest.approx(0.8 * plan.peak_bytes, rel=1e-3)
    assert proof.corrected(corrected, plan.choice) is corrected


@pytest.mark.slow
def test_the_peak_is_in_the_range_where_it_is_wide() -> None:
    """XLA hides the gathers of a layer's weights behind the gradients of those weights: it puts off few of them."""
    mesh = sr.Target.parse("cuda:h100:4").mesh(MESH)
    plan = gathered_again(mesh=mesh)
    with jax.set_mesh(mesh):
        memory = compiled_memory(plan.jit(jax.grad(layers)).lower(LAYERS, TOKENS), mesh)
    assert plan.peak.at_least <= memory.peak_bytes <= plan.peak.at_most


def test_a_second_search_starts_from_what_the_first_has_met(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = sr.Hardware.named("cuda:h100")
    free = query_of(2**30, hardware).search(NO_DEADLINE)
    weigh, limits = Search.weigh_patterns, list[float]()

    def weigh_patterns(search: Search) -> None:
        limits.append(search.trials.limit_bytes)
        weigh(search)

    monkeypatch.setattr(Search, "weigh_patterns", weigh_patterns)
    query = query_of(int(0.97 * free.peak_bytes), hardware)
    assert query.search(NO_DEADLINE).is_tight
    assert limits == [query.limit_bytes]


def test_without_time_nothing_is_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice that fits where compilers save memory is one that the first search has met."""
    hardware = sr.Hardware.named("cuda:h100")
    free = query_of(2**30, hardware).search(NO_DEADLINE)
    query = query_of(int(0.97 * free.peak_bytes), hardware)
    limits = list[float]()

    def within(task: Task, limit: float, *_: Any) -> SearchResult:
        limits.append(limit)
        return attrs.evolve(free, fits=False, is_late=True)

    monkeypatch.setattr(Task, "within", within)
    result = query.search(Deadline.after(-1))
    assert len(limits) == 1
    assert (result.fits, result.is_tight, result.is_late) == (True, True, True)
    assert result.peak_bytes <= query.limit_bytes


@pytest.mark.parametrize(("larger", "is_taken"), [(1.009, True), (1.02, False)])
def test_where_nothing_fits_hardly_more_memory_is_taken_for_time(
    larger: float, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = query_of(2**20, sr.Hardware.named("cuda:h100"))
    free = query.task.within(2**30)
    smallest = (0,) * len(free.choice)
    assert smallest != free.choice
    front = (Trial(free.choice, 1e-3, larger * 2**30), Trial(smallest, 2e-3, 2**30))
    result = attrs.evolve(
        query.task.with_choice(free, smallest), fits=False, peak_bytes=2**30, candidates=front, patterns=()
    )
    monkeypatch.setattr("shardrules.programs.autoplan.query.search_within", lambda *_: result)
    assert query.search(NO_DEADLINE).choice == (free.choice if is_taken else smallest)
    result = attrs.evolve(result, fits=True)
    assert query.search(NO_DEADLINE).choice == smallest


def lookup_step(params: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        hidden = x
        for up, down in params["layers"]:
            hidden = hidden + jax.nn.gelu(hidden @ up) @ down
        scores = jax.nn.log_softmax((hidden @ params["head"]).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(scores, y[:, None], -1))

    return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, jax.grad(loss)(params))


@pytest.mark.slow
def test_plans_that_fit_are_left_for_faster_ones_that_save_memory() -> None:
    layer = jax.ShapeDtypeStruct((512, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((2048, 512), jnp.bfloat16)
    params = {"head": jax.ShapeDtypeStruct((512, 32768), jnp.bfloat16), "layers": [layer] * 3}
    args = (params, jax.ShapeDtypeStruct((8192, 512), jnp.bfloat16), jax.ShapeDtypeStruct((8192,), jnp.int32))
    options = QueryOptions(None, None, sr.Hardware.named("cuda:h100"), None, 60, prove=False)
    query = read_query(lookup_step, args, sr.mesh_shape("data:8"), options)
    free = query.search(NO_DEADLINE)
    cost = query.task.problem.cost
    costs = [
        cost(attrs.evolve(query, limit_bytes=int(part * free.peak_bytes)).search(NO_DEADLINE).choice)
        for part in (0.98, 0.95, 0.93)
    ]
    same = 1 + 1e-5  # searches end that close to the best
    assert cost(free.choice) <= costs[0] * same
    assert costs[0] <= costs[1] * same
    assert costs[1] <= costs[2] * same < 2 * cost(free.choice)
