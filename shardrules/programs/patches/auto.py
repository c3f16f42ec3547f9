"""The annotations that a function needs on Auto axes: those without which the compiler chooses otherwise."""

from collections.abc import Callable, Sequence

from shardrules.core.deadline import Deadline
from shardrules.programs.patches.reading import Reading
from shardrules.programs.patches.text import Annotation
from shardrules.programs.patches.trials import EQUAL, CompiledFigures, PatchTarget, constrained, needed

_NEAR = 1.01
"""The ratio to the plan's time up to which nothing faster is looked for: chosen by hand."""


def auto_annotations(
    reading: Reading, machine: PatchTarget, goal: CompiledFigures, deadline: Deadline
) -> tuple[list[Annotation], CompiledFigures]:
    """Returns annotations with which a function is compiled as planned, none of which can be taken out, and the figures
    of the program with them."""
    needs, places = reading.needs, reading.sources.places
    outcomes: dict[frozenset[int], CompiledFigures] = {}

    def outcome(chosen: frozenset[int]) -> CompiledFigures:
        if chosen not in outcomes:
            specs = {number: needs[number].spec for number in chosen}
            outcomes[chosen] = machine.outcome(constrained(reading.marked, specs))
        return outcomes[chosen]

    order = reading.candidates
    products = [number for number in order if needs[number].has_matmul]
    reads = [number for number in order if places[number].is_read]
    chosen = least([], products + reads, products, order, outcome=outcome, goal=goal)
    chosen = improved(chosen, order, outcome, goal, deadline)
    kept = take_out([number for number in order if number in chosen], outcome, goal, deadline)
    annotations = [Annotation(places[number], needs[number].spec, "constraint") for number in sorted(kept)]
    return annotations, outcome(frozenset(kept))


def least(
    *starts: Sequence[int], outcome: Callable[[frozenset[int]], CompiledFigures], goal: CompiledFigures
) -> frozenset[int]:
    """Returns the first choice that is as good as the plan, and else the fastest."""
    choices = [frozenset(start) for start in starts]
    as_good = (choice for choice in choices if outcome(choice).is_as_good_as(goal, exact=False))
    first = next(as_good, None)
    return min(choices, key=lambda choice: outcome(choice).seconds) if first is None else first


def improved(
    chosen: frozenset[int],
    order: Sequence[int],
    outcome: Callable[[frozenset[int]], CompiledFigures],
    goal: CompiledFigures,
    deadline: Deadline,
) -> frozenset[int]:
    """Returns a choice that is faster, if the plan is: each annotation is added, or left out, where that is faster."""
    for number in order:
        if outcome(chosen).seconds <= _NEAR * goal.seconds or deadline.is_over:
            break
        changed = chosen ^ {number}
        # Changes below the tolerance of times are not worth a line.
        if EQUAL * outcome(changed).seconds < outcome(chosen).seconds:
            chosen = changed
    return chosen


def take_out(
    order: Sequence[int],
    outcome: Callable[[frozenset[int]], CompiledFigures],
    goal: CompiledFigures,
    deadline: Deadline,
) -> list[int]:
    """Returns those of some annotations that cannot be taken out: without each the program is worse, or another."""
    whole = outcome(frozenset(order))
    exact = whole.collectives == goal.collectives
    limit = goal if whole.is_as_good_as(goal, exact=exact) else whole
    return needed(
        order,
        lambda chosen: not deadline.is_over and outcome(chosen).is_as_good_as(limit, exact=exact),
    )
