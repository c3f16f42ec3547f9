"""The cheapest arrays to keep, against all subsets."""

import itertools
import math
import random

import pytest

from shardrules.programs.training.keep.cut import KeepProblem, UnitStep, UnitValue, cheapest


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
