"""Budgets of memory, kept by putting a price on it, against brute force over all choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardrules as sr
from shardrules.core.deadline import NO_DEADLINE, Deadline
from shardrules.programs.autoplan.graph.machine import Machine
from shardrules.programs.autoplan.solve import search
from shardrules.programs.autoplan.solve.formulation import MICRO
from shardrules.programs.autoplan.solve.messages import Messages
from shardrules.programs.autoplan.solve.price import Budget, within_budget
from shardrules.programs.autoplan.solve.search import Task, layout_preference
from shardrules.programs.autoplan.solve.trials import Trials
from shardrules.programs.traced.program import read_jaxpr
from tests.programs.autoplan.solve.test_search import LOOSE, TIGHT, budget
from tests.programs.autoplan.solve.test_solver import best_cost, preferred, random_task, within

SEEDS = (*TIGHT[:4], *TIGHT[6:], *LOOSE)


def priced(task: Task, limit: float) -> tuple[Budget, Trials]:
    trials = Trials(task.occupancy, limit)
    messages = Messages(task.problem, [extra / MICRO for extra in layout_preference(task.problem)])
    return within_budget(messages, trials, NO_DEADLINE, {}), trials


@pytest.mark.parametrize("seed", SEEDS)
def test_choices_fit_and_the_bound_is_below_the_best(seed: int) -> None:
    task = random_task(seed)
    limit = budget(task, 0.3)
    best, (result, trials) = within(task, limit), priced(task, limit)
    assert result.bound <= best * (1 + 1e-6) + preferred(task.problem)
    assert trials.smallest is not None
    if trials.best is None:
        assert trials.smallest.peak_bytes > limit
    else:
        assert task.occupancy.timeline(trials.best.choice).max() == trials.best.peak_bytes <= limit * (1 + 1e-6)
        assert task.problem.cost(trials.best.choice) == trials.best.cost


@pytest.mark.slow
def test_choices_are_near_the_best_mostly() -> None:
    near = []
    for seed in SEEDS:
        task = random_task(seed)
        limit = budget(task, 0.7)
        best = priced(task, limit)[1].best
        near.append(best is not None and best.cost <= within(task, limit) * 1.1 + preferred(task.problem))
    assert sum(near) >= 0.9 * len(near)


@pytest.mark.parametrize("seed", SEEDS[::2])
def test_without_a_limit_the_choice_is_the_best(seed: int) -> None:
    task = random_task(seed)
    result, trials = priced(task, np.inf)
    assert trials.best is not None
    assert trials.best.cost == pytest.approx(best_cost(task.problem), rel=1e-3, abs=preferred(task.problem))
    assert result.price == 0.0


@pytest.mark.parametrize("seed", [seed for seed in TIGHT if seed != 60])  # its costs are nearly free
def test_impossible_budgets_are_hopeless_and_a_small_choice_is_met(seed: int) -> None:
    task = random_task(seed)
    exact = task.within(0.0).peak_bytes
    result, trials = priced(task, exact * 0.1)
    assert result.is_hopeless
    assert trials.best is None
    assert trials.smallest is not None
    assert exact * (1 - 1e-3) <= trials.smallest.peak_bytes <= exact * 1.5


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", SEEDS[::3])
def test_layouts_cost_at_least_the_bound_and_their_extra(seed: int) -> None:
    """The bound and the extra of a layout are below the best choice that takes it, with a price on memory, too."""
    task = random_task(seed)
    limit = budget(task, 0.3)
    for most in (limit, np.inf):
        result, _ = priced(task, most)
        for node in range(len(task.problem.nodes)):
            for layout_index in range(0, len(task.problem.nodes[node].layouts), 3):
                keep = [np.arange(len(other.layouts)) for other in task.problem.nodes]
                keep[node] = np.array([layout_index])
                with_it = task.only(keep).within(most)
                if with_it.fits:
                    least = result.bound + result.extra[node][layout_index]
                    assert task.problem.cost(with_it.choice) >= least * (1 - 1e-6) - preferred(task.problem)


@pytest.mark.parametrize("seed", TIGHT[::2])
def test_no_choice_costs_more_than_the_highest_cost(seed: int) -> None:
    problem = random_task(seed).problem
    rng = np.random.default_rng(seed)
    for _ in range(200):
        cost = problem.cost([int(rng.integers(len(node.layouts))) for node in problem.nodes])
        assert cost <= problem.highest_cost() * (1 + 1e-9) or not np.isfinite(cost)


@pytest.mark.parametrize(("seed", "part"), [(6, 0.3), (12, 0.7), (36, 0.3), (42, 0.3), (58, 0.7), (61, 0.3)])
def test_large_problems_are_solved_as_small_ones(seed: int, part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    task = random_task(seed)
    limit = budget(task, part)
    exact = task.within(limit)
    monkeypatch.setattr(search, "_SMALL", 0)
    result = task.within(limit)
    assert result.peak_bytes <= limit * (1 + 1e-6)
    assert result.bound <= task.problem.cost(exact.choice) * (1 + 1e-6) + preferred(task.problem)
    assert task.problem.cost(result.choice) <= task.problem.cost(exact.choice) * 1.02 + preferred(task.problem)


def test_late_searches_return_the_best_so_far() -> None:
    task = random_task(6)
    result = task.within(task.occupancy.timeline((0,) * len(task.problem.nodes)).max(), Deadline(0.0))
    assert task.problem.cost(result.choice) <= task.problem.cost((0,) * len(task.problem.nodes))
    late = task.within(task.within(0.0).peak_bytes * 0.99, Deadline(0.0))
    assert late.is_late
    assert not late.fits


def test_equal_arrays_in_different_layouts_are_impossible() -> None:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (16, 32), (16, 64))]
    program = read_jaxpr(jax.make_jaxpr(lambda x, w, v: (x @ w, x @ v))(*shapes))
    problem = Task.of(program, Machine.of(sr.mesh_shape("a:2,b:2")), ["x", "w", "v"], {}, {}).problem
    first, second = problem.equal_homes[0]
    choice = [0] * len(problem.nodes)
    for layout_index in range(len(problem.nodes[first.node].layouts)):
        choice[first.node] = layout_index
        if problem.layout(first, choice) != problem.layout(second, choice):
            break
    assert problem.cost(choice) == np.inf
