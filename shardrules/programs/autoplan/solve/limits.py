"""Finds the best choice within a limit of memory, or within each of several, as compilers have it that know the limit.

Compilers that have to keep a limit need less for most plans, but more for those whose losses are looked up late. Where
that decides what fits, or what fits is slow, it is searched again as such compilers have it.
"""

from collections.abc import Sequence

import attrs
import numpy as np

from shardrules.core.deadline import NO_DEADLINE, Deadline
from shardrules.programs.autoplan.solve.search import SearchResult, Task
from shardrules.programs.autoplan.solve.trials import Trial, Trials

_SLOW = 1.15
"""A plan that takes this many times its bound, and the time of a plan for which compilers have to save memory, is worse
than that one: such plans overlap less, which takes up to a tenth."""

_STEP = 1.01
"""The factor between the least memory met, which is a little below what fits, and the first budget, and at least
between two budgets; chosen by hand."""


def search_within(
    task: Task, limit_bytes: float, deadline: Deadline = NO_DEADLINE, met: Sequence[Trial] = ()
) -> SearchResult:
    """Finds the best choice that fits; `met` is as `Task.within` takes it."""
    cost, tight = task.problem.cost, task.tight()
    result = task.within(limit_bytes, deadline, met)
    is_slow = result.fits and result.candidates[0].cost < cost(result.choice) > _SLOW * result.bound
    if tight is task or (result.fits and not is_slow):
        return result
    saving = next((trial.choice for trial in result.met if tight.occupancy.peak(trial.choice) <= limit_bytes), None)
    if saving is None:
        return result
    # The cheapest of what there is. Another search would take seconds.
    other = tight.with_choice(attrs.evolve(result, fits=True, bound=result.free_bound), saving)
    if not deadline.is_over:
        again = tight.within(limit_bytes, deadline, (*result.candidates, *result.patterns))
        seconds = result.seconds + again.seconds
        other = attrs.evolve(_with_room(task, tight, again, limit_bytes) if again.fits else other, seconds=seconds)
    if result.fits and cost(result.choice) <= _SLOW * cost(other.choice):
        return attrs.evolve(result, seconds=other.seconds)
    return attrs.evolve(other, is_tight=True)


def frontier_points(task: Task, count: int, deadline: Deadline) -> list[tuple[int, float, int, float | None]]:
    """Returns the best choice for each of `count` budgets: the budget, its seconds and bytes, and the price of a byte.

    Searches end by themselves, so that points depend on the time only once it is up. From then on, they are the best of
    what was met.
    """
    met, patterns = Trials(task.occupancy, np.inf), dict[Trial, None]()

    def search(limit_bytes: float) -> SearchResult:
        result = search_within(task, limit_bytes, deadline, tuple(dict.fromkeys((*met.front(), *patterns))))
        patterns.update(dict.fromkeys(result.patterns))
        for trial in (*result.candidates, *result.patterns):
            met.add(trial.choice, trial.origin)
        return result

    # The ends of the frontier: what the fastest plan takes, and the least that anything does.
    fastest, smallest = search(np.inf), search(0.0)
    first = max(1.0, smallest.peak_bytes * _STEP)
    last = max(fastest.peak_bytes, first * _STEP)
    points: list[tuple[int, float, int, float | None]] = []
    best = task.problem.cost(smallest.choice), smallest.peak_bytes
    # Geometric steps: near the least memory, where plans change most, budgets are close together.
    for limit in np.geomspace(first, last, count):
        result = None if deadline.is_over or limit == last else search(float(limit))
        trials = met.within(limit)
        # What fits in less fits in more, and may be the better of them.
        if trials.best is not None:
            best = min(best, (trials.best.cost, trials.best.peak_bytes))
        if result is not None and result.fits:
            best = min(best, (task.problem.cost(result.choice), result.peak_bytes))
        price = trials.saving if result is None else result.price
        points.append((int(limit), best[0], int(best[1]), price))
    return points


def _with_room(task: Task, tight: Task, result: SearchResult, limit_bytes: float) -> SearchResult:
    """Returns the cheapest choice that fits even with gaps as large as without a limit, if it costs hardly more."""
    for trial in result.candidates:
        # Room for the errors of the model of memory may cost 3 %, chosen by hand: without it, some plans need one per
        # cent more than their limit.
        if trial.cost > 1.03 * task.problem.cost(result.choice):
            break
        if task.occupancy.peak(trial.choice) <= limit_bytes:
            return tight.with_choice(result, trial.choice)
    return result
