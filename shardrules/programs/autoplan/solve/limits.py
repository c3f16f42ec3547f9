"""Finds the best choice within a limit of memory, as compilers have it that know the limit.

Compilers that have to keep a limit need less for most plans, but more for those whose losses are looked up late. Where
that decides what fits, or what fits is slow, it is searched again as such compilers have it.
"""

from collections.abc import Sequence

import attrs

from shardrules.programs.autoplan.solve.deadline import NO_DEADLINE, Deadline
from shardrules.programs.autoplan.solve.search import SearchResult, Task
from shardrules.programs.autoplan.solve.trials import BETTER, Trial

_SLOW = 1.15
"""A plan that takes this many times its bound, and the time of a plan for which compilers have to save memory, is worse
than that one: such plans overlap less, which takes up to a tenth."""


def search_within(
    task: Task, limit_bytes: float, deadline: Deadline = NO_DEADLINE, met: Sequence[Trial] = ()
) -> SearchResult:
    """Finds the best choice that fits; `met` is as `Task.within` takes it."""
    cost, tight = task.problem.cost, task.tight()
    counted = task.within(limit_bytes, deadline, met)
    result = _as_compiled(task, counted, limit_bytes)
    if tight is task:
        return result
    peak = tight.compiled_peak
    fits = result.fits and peak(result.choice) <= limit_bytes
    is_slow = result.fits and result.candidates[0].cost < cost(result.choice) > _SLOW * counted.bound
    if fits and not is_slow:
        return result
    saving = next((trial.choice for trial in result.met if peak(trial.choice) <= limit_bytes), None)
    if saving is None:
        return result
    # The cheapest of what there is. Another search would take seconds.
    other = tight.with_choice(attrs.evolve(result, fits=True, bound=result.free_bound), saving)
    if not deadline.is_over:
        again = tight.within(limit_bytes, deadline, (*result.candidates, *result.patterns))
        seconds = result.seconds + again.seconds
        again = _as_compiled(tight, again, limit_bytes)
        other = attrs.evolve(_with_room(task, tight, again, limit_bytes) if again.fits else other, seconds=seconds)
    if fits and cost(result.choice) <= _SLOW * cost(other.choice):
        return attrs.evolve(result, seconds=other.seconds)
    return attrs.evolve(other, is_tight=True)


def _as_compiled(task: Task, result: SearchResult, limit_bytes: float) -> SearchResult:
    """Returns the cheapest choice that fits, also where it does only since compilers put off less than they might.

    No search looked for such choices: of what others cost, only the bound for any memory is known.
    """
    for trial in result.met:
        if result.fits and trial.cost >= task.problem.cost(result.choice) * (1 - BETTER):
            break
        if task.compiled_peak(trial.choice) <= limit_bytes:
            return task.with_choice(attrs.evolve(result, fits=True, bound=result.free_bound), trial.choice)
    return result


def _with_room(task: Task, tight: Task, result: SearchResult, limit_bytes: float) -> SearchResult:
    """Returns the cheapest choice that fits even with gaps as large as without a limit, if it costs hardly more."""
    gaps = attrs.evolve(tight.occupancy, temporaries=task.occupancy.temporaries)
    for trial in result.candidates:
        # Room for the errors of the model of memory may cost 3 %, chosen by hand: without it, some plans need one per
        # cent more than their limit.
        if trial.cost > 1.03 * task.problem.cost(result.choice):
            break
        if gaps.peak(trial.choice) <= limit_bytes:
            return tight.with_choice(result, trial.choice)
    return result
