"""Trials of a search."""

import numpy as np

from shardrules.programs.autoplan.solve.trials import Trials
from tests.programs.autoplan.solve.test_solver import random_task


def some_trials(limit: float) -> tuple[Trials, list[tuple[int, ...]]]:
    task = random_task(6)
    rng = np.random.default_rng(0)
    trials = Trials(task.occupancy, limit)
    choices = [tuple(int(rng.integers(len(node.layouts))) for node in task.problem.nodes) for _ in range(200)]
    for choice in choices:
        trials.add(choice)
    return trials, choices


def test_the_front_has_what_nothing_is_cheaper_and_smaller_than() -> None:
    trials, choices = some_trials(np.inf)
    front = trials.front()
    assert front[0] == trials.best
    assert [trial.cost for trial in front] == sorted(trial.cost for trial in front)
    peaks = [trial.peak_bytes for trial in front]
    assert peaks == sorted(peaks, reverse=True)
    assert all(
        any(other.cost <= trial.cost and other.peak_bytes <= trial.peak_bytes * (1 + 1e-5) for other in front)
        for trial in map(trials.add, choices)
        if np.isfinite(trial.cost)
    )


def test_the_answer_fits_if_anything_does() -> None:
    free, _ = some_trials(np.inf)
    assert free.smallest is not None
    tight, _ = some_trials(free.smallest.peak_bytes)
    assert tight.best is not None
    assert tight.answer == tight.best
    assert tight.best.peak_bytes <= free.smallest.peak_bytes * (1 + 1e-6)
    hopeless, _ = some_trials(free.smallest.peak_bytes * 0.9)
    assert hopeless.best is None
    assert hopeless.answer == hopeless.smallest


def test_impossible_choices_are_not_kept() -> None:
    trials, choices = some_trials(np.inf)
    impossible = [choice for choice in choices if not np.isfinite(trials.add(choice).cost)]
    assert not {*impossible} & {trial.choice for trial in trials.front()}


def test_what_a_byte_saves_is_the_slope_to_a_plan_that_needs_more() -> None:
    free, _ = some_trials(np.inf)
    assert free.saving == 0
    cheapest, smallest = free.front()[0], free.front()[-1]
    tight, _ = some_trials(smallest.peak_bytes)
    slope = (smallest.cost - cheapest.cost) / (cheapest.peak_bytes - smallest.peak_bytes)
    assert tight.saving >= slope > 0
