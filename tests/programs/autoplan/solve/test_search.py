"""Searches within a budget against every choice, bounds, and meshes of three axes."""

import itertools

import numpy as np
import pytest

from shardrules.programs.autoplan.graph.restrict import restrict, variable_count
from shardrules.programs.autoplan.solve import search, solver
from shardrules.programs.autoplan.solve.search import Search, SearchResult, Task
from shardrules.programs.autoplan.solve.trials import Trials
from tests.programs.autoplan.solve.test_solver import TooLarge, best_cost, preferred, random_task, within

PARTS = (0.02, 0.3, 0.7)
"""Budgets, from the least that anything fits in to what the fastest plan takes."""

TIGHT = (6, 12, 36, 42, 47, 49, 58, 60, 61, 65, 68, 69, 78)
"""Random programs whose fastest plan is not the smallest: the budget makes them slower, by up to 2,000 times."""

LOOSE = (1, 7, 9, 22)
"""Others."""

THREE = "x:2,y:2,z:2"


ENDLESS = ((47, 0.02), (47, 0.3), (47, 0.7), (65, 0.02), (68, 0.02))
"""Brute force does not end."""

CASES = [
    *((seed, part) for seed in (*TIGHT, *LOOSE) for part in PARTS if (seed, part) not in ENDLESS),
    *((3, 0.02), (49, 0.3), (49, 0.7), (50, 0.3), (57, 0.3), (57, 0.7), (76, 0.7)),
]


def budget(task: Task, part: float) -> float:
    """A budget between the least that anything fits in and what the fastest plan takes."""
    most, least = task.within(np.inf).peak_bytes, task.within(0.0).peak_bytes
    return least + part * (most - least)


def cost(task: Task, result: SearchResult) -> float:
    return task.problem.cost(result.choice) if result.fits else np.inf


@pytest.mark.sample(3)
@pytest.mark.parametrize(("seed", "part"), CASES)
def test_search_with_a_budget_is_near_the_best(seed: int, part: float) -> None:
    task = random_task(seed)
    limit = budget(task, part)
    try:
        best = within(task, limit)
    except TooLarge:
        pytest.fail("brute force does not end: choose another program")
    result = task.within(limit)
    slack = preferred(task.problem)
    assert result.fits == np.isfinite(best)
    if not result.fits:
        return
    assert task.occupancy.timeline(result.choice).max() == result.peak_bytes <= limit * (1 + 1e-6)
    assert task.problem.cost(result.choice) <= best * 1.01 + slack
    if task.problem.cost(result.choice) < best * (1 - 1e-6):  # limits are kept to a millionth
        assert task.problem.cost(result.choice) >= within(task, limit * (1 + 1e-6)) * (1 - 1e-6)
    assert result.bound <= best * (1 + 1e-6) + slack


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", TIGHT[::2])
def test_less_memory_is_never_faster(seed: int) -> None:
    task = random_task(seed)
    least = task.within(0.0)
    assert not least.fits
    limits = np.geomspace(least.peak_bytes * 1.001, task.within(np.inf).peak_bytes * 1.1, 6)
    costs = [cost(task, task.within(float(limit))) for limit in limits]
    assert np.isfinite(costs[1:]).all()  # about the least there is: whole numbers may take a little more
    assert all(later <= earlier * 1.01 for earlier, later in itertools.pairwise(costs))


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", [0, 2, 4, 6, 9, 11, 12, 14, 17, 18, 20, 23])
def test_three_axes(seed: int) -> None:
    task = random_task(seed, THREE)
    best = best_cost(task.problem)
    result = task.within(np.inf)
    assert task.problem.cost(result.choice) == pytest.approx(best, rel=1e-3, abs=preferred(task.problem))
    assert result.bound <= best * (1 + 1e-6)


def test_three_axes_on_which_nothing_fits() -> None:
    task = random_task(6, THREE)
    result = task.within(1.0)
    assert not result.fits
    assert task.within(result.peak_bytes * 1.05).fits


def test_a_restricted_problem_costs_the_same() -> None:
    """Its indices name the same layouts."""
    problem, rng = random_task(15).problem, np.random.default_rng(0)
    keep = [np.sort(rng.permutation(len(node.layouts))[: max(1, len(node.layouts) // 2)]) for node in problem.nodes]
    part = restrict(problem, keep)
    assert variable_count(part) < variable_count(problem)
    for _ in range(20):
        choice = [int(rng.integers(len(kept))) for kept in keep]
        whole = [int(kept[layout_index]) for kept, layout_index in zip(keep, choice, strict=True)]
        assert part.cost(choice) == pytest.approx(problem.cost(whole), rel=1e-12)
    assert best_cost(part) >= best_cost(problem) * (1 - 1e-12)


@pytest.mark.parametrize("fits", [False, True])
def test_parts_improve_a_poor_answer(fits: bool) -> None:
    task = random_task(TIGHT[0])
    limit = np.inf if fits else 0.0
    trials = Trials(task.occupancy, limit)
    free, smallest = task.within(np.inf), task.within(0.0)
    trials.add(smallest.choice if fits else free.choice)
    start = trials.answer
    assert start is not None
    Search(task, trials).improve()
    assert trials.answer is not None
    if fits:
        assert trials.answer.cost < start.cost
        assert trials.answer.cost == pytest.approx(task.problem.cost(free.choice))
    else:
        assert trials.answer.peak_bytes < start.peak_bytes
        assert trials.answer.peak_bytes == pytest.approx(smallest.peak_bytes)


def test_parts_leave_the_rest_of_an_answer_alone() -> None:
    task = random_task(TIGHT[0])
    trials = Trials(task.occupancy, np.inf)
    answer = trials.add(task.within(0.0).choice)
    keep, opened = Search(task, trials).around(answer, 0)
    assert 0 in opened
    for node, kept in enumerate(keep):
        everything = list(range(len(task.problem.nodes[node].layouts)))
        assert kept.tolist() == (everything if node in opened else [answer.choice[node]])


@pytest.mark.parametrize("seed", [12, 65, 69])
def test_merging_takes_the_better_parts_of_choices(seed: int) -> None:
    task = random_task(seed)
    fastest, smallest = task.within(np.inf), task.within(0.0)
    trials = Trials(task.occupancy, (smallest.peak_bytes + fastest.peak_bytes) / 2)
    for choice in (smallest.choice, fastest.choice, (0,) * len(task.problem.nodes)):
        trials.add(choice)
    Search(task, trials, moments={int(trials.trials[1].timeline.argmax()): None}).merge()
    assert trials.best is not None
    assert trials.best.cost < 0.7 * task.problem.cost(smallest.choice)


def test_parts_are_searched_where_nothing_can_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest is returned then, which programs that are too large for one exact search need parts for."""
    monkeypatch.setattr(search, "_SMALL", 0)
    answers: list[int] = []
    monkeypatch.setattr(Search, "improve", lambda self: answers.append(int(self.trials.smallest.peak_bytes)))
    result = random_task(12).within(0.0)
    assert answers == [int(result.peak_bytes)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", [*TIGHT, *LOOSE])
def test_searches_that_do_not_shrink_find_the_same_where_something_fits(seed: int) -> None:
    task = random_task(seed)
    for part in PARTS:
        limit = budget(task, part)
        plain, quick = task.within(limit), task.within(limit, shrinks=False)
        assert plain.fits == quick.fits
        assert not plain.fits or plain.choice == quick.choice


@pytest.mark.parametrize("seed", TIGHT)
def test_searches_that_do_not_shrink_end_once_nothing_can_fit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    task = random_task(seed)
    limit = 0.9 * task.within(0.0).peak_bytes
    counts = []
    relaxed = solver._relaxed
    for shrinks in (True, False):
        calls: list[int] = []
        monkeypatch.setattr(solver, "_relaxed", lambda *args, calls=calls: calls.append(1) or relaxed(*args))
        assert not task.within(limit, shrinks=shrinks).fits
        counts.append(len(calls))
    assert counts[1] <= counts[0]
