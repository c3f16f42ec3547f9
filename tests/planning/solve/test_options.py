"""What a search has met."""

import numpy as np

from shardrules.planning.solve.options import Options
from tests.planning.solve.test_solver import random_task


def some_options(limit: float) -> tuple[Options, list[tuple[int, ...]]]:
    task = random_task(6)
    rng = np.random.default_rng(0)
    options = Options(task.occupancy, limit)
    choices = [tuple(int(rng.integers(len(node.layouts))) for node in task.problem.nodes) for _ in range(200)]
    for choice in choices:
        options.add(choice)
    return options, choices


def test_the_front_has_what_nothing_is_cheaper_and_smaller_than() -> None:
    options, choices = some_options(np.inf)
    front = options.front()
    assert front[0] == options.best
    assert [option.cost for option in front] == sorted(option.cost for option in front)
    peaks = [option.peak_bytes for option in front]
    assert peaks == sorted(peaks, reverse=True)
    assert all(
        any(other.cost <= option.cost and other.peak_bytes <= option.peak_bytes * (1 + 1e-5) for other in front)
        for option in map(options.add, choices)
        if np.isfinite(option.cost)
    )


def test_the_answer_fits_if_anything_does() -> None:
    free, _ = some_options(np.inf)
    assert free.smallest is not None
    tight, _ = some_options(free.smallest.peak_bytes)
    assert tight.answer == tight.best is not None
    assert tight.best.peak_bytes <= free.smallest.peak_bytes * (1 + 1e-6)
    hopeless, _ = some_options(free.smallest.peak_bytes * 0.9)
    assert hopeless.best is None
    assert hopeless.answer == hopeless.smallest


def test_impossible_choices_are_not_kept() -> None:
    options, choices = some_options(np.inf)
    impossible = [choice for choice in choices if not np.isfinite(options.add(choice).cost)]
    assert not {*impossible} & {option.choice for option in options.front()}
