"""The cheapest arrays to keep, against all subsets."""

import itertools
import math
import random

import pytest

from shardrules.programs.training.keep.choices import subset_choices
from shardrules.programs.training.keep.cut import KeepProblem, UnitStep, UnitValue, cheapest, kept_values


def random_problem(seed: int) -> KeepProblem:
    """Two inputs, then steps that each take one or two values and return one or two."""
    draw = random.Random(seed)
    values = [UnitValue((-1, index), draw.randint(1, 9), draw.choice((0.0, 0.5)), math.inf) for index in range(2)]
    steps: list[UnitStep] = []
    for index in range(6):
        operands = tuple(draw.sample(range(len(values)), draw.choice((1, 2))))
        results = []
        for result in range(draw.choice((1, 1, 2))):
            host = draw.choice((math.inf, 1.5))
            values.append(UnitValue((index, result), draw.randint(1, 9), draw.choice((0.0, 0.5)), host))
            results.append(len(values) - 1)
        steps.append(UnitStep(draw.choice((0.0, 0.3, 2.0)), operands, tuple(results)))
    needed = tuple(sorted(draw.sample(range(len(values)), 3)))
    forced = tuple(index for index in range(len(steps)) if draw.random() < 0.15)
    return KeepProblem(tuple(values), tuple(steps), needed, forced)


def least_cost(problem: KeepProblem, price: float) -> float:
    """The cost of the best set of steps to run again: what they do not return has to be kept."""
    costs = [min(value.keep_seconds + price * value.nbytes, value.host_seconds) for value in problem.values]
    best = math.inf
    for flags in itertools.product((False, True), repeat=len(problem.steps)):
        steps = [index for index, flag in enumerate(flags) if flag]
        if not set(problem.forced) <= set(steps):
            continue
        read = {*problem.needed, *(operand for index in steps for operand in problem.steps[index].operands)}
        computed = {result for index in steps for result in problem.steps[index].results}
        total = sum(costs[value] for value in read - computed) + sum(problem.steps[index].seconds for index in steps)
        best = min(best, total)
    return best


@pytest.mark.parametrize("price", [0.0, 0.05, 0.3, 10.0])
def test_no_subset_is_cheaper(price: float) -> None:
    for seed in range(25):
        problem = random_problem(seed)
        kept = cheapest(problem, price)
        host = sum(problem.values[index].host_seconds for index in kept.offloaded)
        assert host < math.inf
        if not kept.offloaded:
            same = kept_values(problem, kept.kept)
            assert (same.nbytes, same.seconds) == (kept.nbytes, pytest.approx(kept.seconds))
        assert kept.seconds + price * kept.nbytes == pytest.approx(least_cost(problem, price), rel=1e-6, abs=1e-7)


def test_what_is_needed_is_kept_or_computed_from_what_is_kept() -> None:
    for seed in range(25):
        problem = random_problem(seed)
        kept = cheapest(problem, 0.2)
        available = {*kept.kept, *kept.offloaded}
        for index in kept.repeated:
            assert set(problem.steps[index].operands) <= available
            available.update(problem.steps[index].results)
        assert set(problem.needed) <= available
        assert set(problem.forced) <= set(kept.repeated)


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
