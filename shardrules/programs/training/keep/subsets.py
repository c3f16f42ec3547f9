"""Choices of what a loop keeps that are best at no price of memory, yet best within some budgets.

Segments of a run may keep different arrays, which fills the gaps between the choices that are best at some price. A
loop has one body for all rounds: here the arrays by which those choices differ are kept in all combinations.
"""

import itertools
from collections.abc import Collection, Sequence

from shardrules.programs.training.keep.cut import KeepProblem, KeptValues

_MOST_GROUPS = 9
"""The most groups of arrays that are combined, the largest. All combinations of this many take half a second."""


def subset_choices(problem: KeepProblem, choices: Sequence[KeptValues]) -> list[KeptValues]:
    """Returns choices that keep part of what some `choices` keep, those that keep most first: of any two the one that
    keeps more takes less time.

    Arrays that all choices keep together, as the queries, keys and values of attention, are not taken apart.
    """
    members: dict[tuple[bool, ...], list[int]] = {}
    for value in sorted({value for choice in choices for value in choice.kept}):
        members.setdefault(tuple(value in choice.kept for choice in choices), []).append(value)
    always = members.pop((True,) * len(choices), [])
    groups = sorted(members.values(), key=lambda group: -sum(problem.values[value].nbytes for value in group))
    always += [value for group in groups[_MOST_GROUPS:] for value in group]
    candidates = []
    # Arrays that the same choices keep go together, so that there are few combinations.
    for flags in itertools.product((False, True), repeat=len(groups[:_MOST_GROUPS])):
        combined = [value for group, flag in zip(groups, flags, strict=False) if flag for value in group]
        candidates.append(kept_values(problem, {*always, *combined}))
    candidates.sort(key=lambda choice: (choice.nbytes, choice.seconds))
    best: list[KeptValues] = []
    for choice in candidates:
        if not best or choice.seconds < best[-1].seconds:
            best.append(choice)
    return best[::-1]


def kept_values(problem: KeepProblem, kept: Collection[int]) -> KeptValues:
    """Returns the choice to keep some values, as far as they are needed, and inputs that all else is computed from."""
    producers = {value: index for index, step in enumerate(problem.steps) for value in step.results}
    pending = [*problem.needed, *(value for step in problem.forced for value in problem.steps[step].operands)]
    repeated, read = dict.fromkeys(problem.forced), dict[int, None]()
    # Back from what gradients need, to kept values and inputs.
    while pending:
        value = pending.pop()
        step = producers.get(value)
        if value in kept or step is None:
            read[value] = None
        elif step not in repeated:
            repeated[step] = None
            pending += problem.steps[step].operands
    stored = sorted(value for value in read if producers.get(value) not in repeated)
    seconds = sum(problem.values[value].keep_seconds for value in stored)
    return KeptValues(
        tuple(stored),
        (),
        tuple(sorted(repeated)),
        sum(problem.values[value].nbytes for value in stored),
        0,
        seconds + sum(problem.steps[step].seconds for step in repeated),
    )
