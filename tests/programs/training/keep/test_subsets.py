"""Choices between those that are best at some price."""

import math

import pytest

from shardrules.programs.training.keep.choices import subset_choices
from shardrules.programs.training.keep.cut import KeepProblem, UnitStep, UnitValue, cheapest, kept_values
from tests.programs.training.keep.test_cut import random_problem


def test_the_values_of_a_cut_have_the_figures_of_the_cut() -> None:
    for seed in range(25):
        problem = random_problem(seed)
        kept = cheapest(problem, 0.1)
        if not kept.offloaded:
            same = kept_values(problem, kept.kept)
            assert (same.nbytes, same.seconds) == (kept.nbytes, pytest.approx(kept.seconds))


def test_arrays_that_no_price_tells_apart_are_kept_alone_too() -> None:
    # Three results of the input: the large one saves a little more for each byte than the two small ones.
    sizes, seconds = (128, 64, 64), (12.9, 6.0, 6.0)
    values = [UnitValue((-1, 0), 0, 0.0, math.inf)]
    values += [UnitValue((index, 0), size, 0.0, math.inf) for index, size in enumerate(sizes)]
    steps = tuple(UnitStep(each, (0,), (index + 1,)) for index, each in enumerate(seconds))
    problem = KeepProblem(tuple(values), steps, (1, 2, 3), ())
    by_price = [cheapest(problem, price) for price in (0.0, 0.097, 1.0)]
    assert [choice.nbytes for choice in by_price] == [256, 128, 0]
    large = subset_choices(problem, by_price)
    assert [choice.nbytes for choice in large] == [256, 128, 0]  # the small ones always go together
    apart = subset_choices(problem, [*by_price, kept_values(problem, (2,))])
    assert [choice.nbytes for choice in apart] == [256, 192, 128, 64, 0]
    times = [choice.seconds for choice in apart]
    assert times == sorted(times)
