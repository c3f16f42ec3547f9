"""The search over meshes and recipes: what it plans, and what it leaves."""

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest

from shardrules.core.deadline import NO_DEADLINE, Deadline
from shardrules.programs.training.cluster import Cluster
from shardrules.programs.training.search.problem import TrainingProblem, plan_once
from shardrules.programs.training.search.search import TrainingSearch, first_fitting
from shardrules.programs.training.search.staged import search_again, search_plans
from tests.programs.training.checks import problem_of


def loss(model: Any, x: Any) -> Any:
    out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1] + x, None), x, model)
    return jnp.mean(out**2)


def problem_on(cluster: str, limit: int | None = None) -> TrainingProblem:
    real = jnp.float32
    model = jax.ShapeDtypeStruct((4, 64, 256), real), jax.ShapeDtypeStruct((4, 256, 64), real)
    batch = jax.ShapeDtypeStruct((4096, 64), real)
    return problem_of(loss, model, batch, Cluster.of(cluster), limit=limit)


def searched(cluster: str, limit: int | None = None, deadline: Deadline = NO_DEADLINE) -> TrainingSearch:
    search = TrainingSearch(problem_on(cluster, limit), None, 1, deadline, lambda text: None)
    search.run()
    return search


def test_microbatches_may_keep_what_the_whole_batch_may() -> None:
    problem = problem_on("cuda:h100:2")
    whole, parts = problem.keeps(1), problem.keeps(2)
    assert len(whole) > 1
    assert parts == whole
    assert [2 * keep.kept_bytes for keep in parts] == [keep.kept_bytes for keep in whole]
    assert [4 * keep.kept_bytes for keep in problem.keeps(4)] == [keep.kept_bytes for keep in whole]


def test_a_search_out_of_time_has_one_plan_and_says_so() -> None:
    search = searched("cuda:h100:8", deadline=Deadline.after(0))
    assert search.is_late
    assert len(search.free) == 1
    assert search.best is not None


def test_one_mesh_is_planned_until_something_fits_before_others_are() -> None:
    limit = 3 * 2**20
    search = TrainingSearch(problem_on("cuda:h100:8", limit), None, 1, NO_DEADLINE, lambda text: None)
    search.most_count = 3
    search.run()
    assert search.count == 3
    ((shape, free),) = search.free.items()
    assert shape == (8,)
    assert free.peak_bytes > limit > free.argument_bytes > 0
    assert search.best is not None
    assert search.best.seconds < 1.5 * free.seconds


def test_what_does_not_fit_is_planned_for_the_least_memory() -> None:
    limit = problem_on("cuda:h100:2").cluster.count * 2**16
    search = TrainingSearch(problem_on("cuda:h100:2", limit), 1, 1, NO_DEADLINE, lambda text: None)
    search_plans(search)
    assert search.best is None
    smallest = search.smallest
    assert smallest is not None
    assert smallest.peak_bytes < min(outcome.peak_bytes for outcome in search.free.values())
    again = plan_once(
        search.problem, smallest.shape, search.recipe(1, 1, len(search.problem.keeps(1)) - 1), 0.0, shrinks=True
    )
    assert smallest.peak_bytes <= again.peak_bytes * 1.001


def test_plans_are_cut_in_time_for_the_answer() -> None:
    search = TrainingSearch(problem_on("cuda:h100:8"), None, 1, Deadline.after(1000), lambda text: None)
    search.answer_seconds = search.longest_seconds = 400
    assert not search.is_over
    search.answer_seconds = 700
    assert search.is_over
    assert search.is_late


def test_meshes_are_left_that_cannot_be_better() -> None:
    search = searched("cuda:h100:2")
    best = search.best
    assert best is not None
    assert best.fits
    assert best.seconds <= min(outcome.seconds for outcome in search.free.values()) * 1.001


def test_the_same_plan_on_another_mesh_is_not_another_plan() -> None:
    search = TrainingSearch(problem_on("cuda:h100:2"), None, 1, NO_DEADLINE, lambda text: None)
    search.plan_free((2,), search.first_recipe)
    (plan,) = search.fitting
    search.outcomes[(1, 2), plan.recipe] = attrs.evolve(plan, shape=(1, 2))
    assert search.fitting == [plan]
    slower = search.outcomes[(2, 1), plan.recipe] = attrs.evolve(plan, shape=(2, 1), seconds=1.1 * plan.seconds)
    assert search.fitting == [plan, slower]


@pytest.mark.slow
def test_equal_searches_find_equal_plans() -> None:
    first, second = (searched("cuda:h100:2", 10 * 2**20) for _ in range(2))
    assert list(first.outcomes) == list(second.outcomes)
    assert first.best is not None
    assert second.best is not None
    assert (first.best.shape, first.best.recipe) == (second.best.shape, second.best.recipe)


@pytest.mark.slow
def test_less_memory_is_hardly_faster_and_more_recomputing_takes_less() -> None:
    whole = searched("cuda:h100:2")
    free = whole.best
    assert free is not None
    tight = searched("cuda:h100:2", int(0.6 * free.peak_bytes))
    assert tight.best is not None
    assert tight.best.peak_bytes <= 0.6 * free.peak_bytes
    shared = whole.outcomes.keys() & tight.outcomes.keys()
    assert shared
    for key in shared:
        assert tight.outcomes[key].plan(tight.problem).cost >= whole.outcomes[key].plan(whole.problem).cost
    # The layouts of a set-up are the best where nothing overlaps. Others are up to 5 % faster where sending overlaps.
    assert tight.best.seconds >= 0.95 * free.seconds
    assert [outcome for outcome in tight.outcomes.values() if outcome.recipe != free.recipe]


@pytest.mark.slow
def test_leaving_room_finds_smaller_plans() -> None:
    search = searched("cuda:h100:2")
    before = search.best
    assert before is not None
    search.limit_bytes = before.peak_bytes
    assert search_again(search, 0.8)
    assert search.best is not None
    assert search.best.peak_bytes <= 0.8 * before.peak_bytes


@pytest.mark.parametrize("count", range(1, 8))
def test_the_first_that_fits_is_found(count: int) -> None:
    indices = [10 * index for index in range(count)]
    for first in range(count):
        assert first_fitting(indices, lambda index, first=first: index >= 10 * first) == first
    assert first_fitting(indices, lambda index: False) is None
