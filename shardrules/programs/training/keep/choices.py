"""The arrays that a backward pass may keep: choices from everything to only the inputs of layers."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias, final

import attrs
from jax.extend.core import ClosedJaxpr

from shardrules.programs.compiling.model_flops import model_flops
from shardrules.programs.jaxprs.inline import flattened
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.training.host_state import LEAST_HOST_BYTES
from shardrules.programs.training.keep.cut import KeepProblem, KeptValues, cheapest, kept_values
from shardrules.programs.training.keep.keep import Keep, KeptUnit
from shardrules.programs.training.keep.needs import NeedsReader
from shardrules.programs.training.keep.problem import UnitProblem, unit_problem
from shardrules.programs.training.keep.units import find_units
from shardrules.programs.training.keep.words import UnitPart, keep_words, repeated_flops

_ALMOST = 1e-6
"""Choices that differ by this part are the same: capacities of cuts are rounded."""


def keep_choices(
    program: ClosedJaxpr,
    hardware: Hardware,
    *,
    trainable_count: int | None = None,
    offload: bool = True,
    device_count: int = 1,
    replace_checkpoints: bool = False,
    count: int = 10,
) -> tuple[Keep, ...]:
    """Returns choices of the arrays that the backward pass of a program may keep, the most first, each of the others
    with less memory.

    The first keeps everything, as the program is written. The first `trainable_count` inputs have gradients. `offload`:
    whether arrays may be kept in the memory of the host, if they are not small once they are split over `device_count`
    devices. `replace_checkpoints`: whether the program's own `jax.checkpoint` are taken away; otherwise each is a
    single step. At most `count` are returned that keep all on the device, and half as many others.
    """
    flat = flattened(program, replace_checkpoints)
    reader = NeedsReader()
    is_offered = offload and not hardware.is_cpu  # the memory of CPU devices is the host's
    least_host_bytes = LEAST_HOST_BYTES * device_count if is_offered else math.inf
    units = [unit for unit in find_units(flat, trainable_count) if not unit.body.effects]
    problems = [unit_problem(unit, reader, hardware, least_host_bytes) for unit in units]
    written = _Choice.of(problems, [((each.as_written, each.repeats),) for each in problems])
    flops = model_flops(flat)
    choices = _thinned(_front(problems, written), count)
    return tuple(_keep(problems, choice, replace_checkpoints, flops) for choice in choices)


_UnitChoice: TypeAlias = tuple[tuple[KeptValues, int], ...]
"""The arrays kept of the segments of a unit, and the number of segments that follow each other; the last of a unit come
last."""


@final
@attrs.frozen(eq=False)
class _Choice:
    """The arrays kept of each unit."""

    units: tuple[_UnitChoice, ...]
    nbytes: int
    seconds: float

    @property
    def is_on_host(self) -> bool:
        return any(kept.offloaded for unit in self.units for kept, _ in unit)

    @classmethod
    def of(cls, problems: Sequence[UnitProblem], units: Sequence[_UnitChoice]) -> "_Choice":
        parts = [(kept, count / problem.repeats) for problem, kept, count in _parts(problems, units)]
        nbytes = round(sum(kept.nbytes * part for kept, part in parts))
        return cls(tuple(units), nbytes, math.fsum(kept.seconds * part for kept, part in parts))


def _parts(problems: Sequence[UnitProblem], units: Sequence[_UnitChoice]) -> Iterator[UnitPart]:
    for problem, unit in zip(problems, units, strict=True):
        yield from ((problem, kept, count) for kept, count in unit)


def _solved(problems: Sequence[UnitProblem], price: float) -> _Choice:
    """The best choice at a price of a byte, in seconds."""
    return _Choice.of(problems, [((_cheapest(problem, price), problem.repeats),) for problem in problems])


def _cheapest(problem: UnitProblem, price: float) -> KeptValues:
    chosen, written = cheapest(problem.problem, price), problem.as_written
    return chosen if chosen.seconds + price * chosen.nbytes < written.seconds + price * written.nbytes else written


def _front(problems: Sequence[UnitProblem], written: _Choice) -> list[_Choice]:
    """The program as written, then choices that keep less and less: the best at some price, and choices between two."""
    front, hull = [written], _hull(problems)
    subsets = [
        _subsets(problem, [choice.units[index][0][0] for choice in hull]) for index, problem in enumerate(problems)
    ]
    for choice in hull:
        if choice.nbytes < front[-1].nbytes * (1 - _ALMOST):
            front += _between(problems, subsets, front[-1], choice)
            front.append(choice)
    return front


def _subsets(problem: UnitProblem, choices: Sequence[KeptValues]) -> list[KeptValues]:
    """Sets that a loop may keep beside some choices: segments of a run may keep different arrays instead."""
    on_device = [kept for kept in choices if kept is not problem.as_written and not kept.offloaded]
    return subset_choices(problem.problem, on_device) if problem.unit.is_loop and on_device else []


_MOST_GROUPS = 9
"""The most groups of arrays that are combined, the largest. All combinations of this many take half a second."""


def subset_choices(problem: KeepProblem, choices: Sequence[KeptValues]) -> list[KeptValues]:
    """Returns choices that keep part of what some `choices` keep: best at no price of memory, yet within some budgets.

    Arrays that all choices keep together, as the queries, keys and values of attention, are not taken apart.
    """
    # Arrays that the same choices keep go together, so that there are few combinations.
    members: dict[tuple[bool, ...], list[int]] = {}
    for value in sorted({value for choice in choices for value in choice.kept}):
        members.setdefault(tuple(value in choice.kept for choice in choices), []).append(value)
    always = members.pop((True,) * len(choices), [])
    groups = sorted(members.values(), key=lambda group: -sum(problem.values[value].nbytes for value in group))
    # Combinations double with each group: beyond the largest few, groups are always kept.
    always += [value for group in groups[_MOST_GROUPS:] for value in group]
    combinations = itertools.product(*(((), group) for group in groups[:_MOST_GROUPS]))
    return _best([kept_values(problem, {*always, *itertools.chain(*groups)}) for groups in combinations])


def _between(
    problems: Sequence[UnitProblem], subsets: Sequence[Sequence[KeptValues]], more: _Choice, less: _Choice
) -> Iterator[_Choice]:
    """Yields choices that keep less and less between two.

    Segments are as in `less` one after the other, from the first on, instead of as in `more`; these choices are as good
    as the two. Of a loop they are the `subsets` between the two, and what has less on the host.
    """
    # More memory that saves no time leaves nothing to choose between the two.
    if more.seconds >= less.seconds:
        return
    units = list(more.units)
    for index, (before, after) in enumerate(zip(more.units, less.units, strict=True)):
        if before == after:
            continue
        (kept_before, repeats), (kept_after, _) = before[0], after[0]
        for count in range(1, repeats):
            units[index] = (kept_after, count), (kept_before, repeats - count)
            yield _Choice.of(problems, units)
        others = (*subsets[index], *_partly_on_host(problems[index], kept_after))
        for kept in _best([kept for kept in others if kept_after.nbytes < kept.nbytes < kept_before.nbytes]):
            if kept.seconds < kept_after.seconds:
                units[index] = ((kept, 1),)
                yield _Choice.of(problems, units)
        units[index] = after
        if units != list(less.units):
            yield _Choice.of(problems, units)


def _partly_on_host(problem: UnitProblem, choice: KeptValues) -> Iterator[KeptValues]:
    """Yields what a loop may keep if only the largest of the arrays that a choice sends to the host go there."""
    values = problem.problem.values
    on_host = sorted(choice.offloaded, key=lambda index: (-values[index].nbytes, index))
    for count in range(1, len(on_host)) if problem.unit.is_loop else ():
        kept = *choice.kept, *on_host[count:]
        yield KeptValues.of(problem.problem, kept, on_host[:count], choice.repeated)


def _best(choices: Sequence[KeptValues]) -> list[KeptValues]:
    """The choices that are faster than all that keep less, the most kept first."""
    best: list[KeptValues] = []
    for choice in sorted(choices, key=lambda choice: (choice.nbytes, choice.seconds)):
        if not best or choice.seconds < best[-1].seconds:
            best.append(choice)
    return best[::-1]


def _hull(problems: Sequence[UnitProblem]) -> list[_Choice]:
    """The choices that are best at some price, those that keep most first."""
    fastest = _solved(problems, 0.0)
    # At this price a byte in a million is worth more than all seconds.
    highest = 1e6 * (1e-9 + fastest.seconds + _step_seconds(problems)) / max(1, fastest.nbytes)
    smallest = _solved(problems, highest)
    choices = [fastest, smallest]
    pending, solves = [(fastest, smallest)], 2
    # Each takes a few milliseconds. More find no more choices for the models of the benchmark.
    while pending and solves < 40:
        # The widest gap first.
        pending.sort(key=lambda pair: pair[0].nbytes - pair[1].nbytes)
        more, less = pending.pop()
        if more.nbytes - less.nbytes <= _ALMOST * more.nbytes or less.seconds <= more.seconds:
            continue
        price = (less.seconds - more.seconds) / (more.nbytes - less.nbytes)
        between, solves = _solved(problems, price), solves + 1
        bound = more.seconds + price * more.nbytes
        if between.seconds + price * between.nbytes < bound * (1 - _ALMOST):
            choices.append(between)
            pending += [(more, between), (between, less)]
    choices.sort(key=lambda choice: (-choice.nbytes, choice.seconds))
    return choices


def _step_seconds(problems: Sequence[UnitProblem]) -> float:
    return math.fsum(step.seconds for problem in problems for step in problem.problem.steps)


def _thinned(front: Sequence[_Choice], count: int) -> list[_Choice]:
    """At most `count` choices of a front that keep nothing on the host, and half that number of others, with the first
    and the last of each."""
    on_devices = _least_gaps([choice for choice in front if not choice.is_on_host], count)
    on_hosts = _least_gaps([choice for choice in front if choice.is_on_host], count // 2)
    return sorted((*on_devices, *on_hosts), key=lambda choice: -choice.nbytes)


def _least_gaps(front: Sequence[_Choice], count: int) -> list[_Choice]:
    choices = list(front)
    if not choices:
        return []
    most_bytes = max(1, choices[0].nbytes)
    most_seconds = max(choice.seconds for choice in choices) or 1.0
    while len(choices) > max(2, count):
        # What is dropped leaves the smallest gap in memory and time together.
        gaps = [
            (before.nbytes - after.nbytes) / most_bytes + abs(after.seconds - before.seconds) / most_seconds
            for before, after in zip(choices, choices[2:], strict=False)
        ]
        choices.pop(1 + gaps.index(min(gaps)))
    return choices


def _keep(problems: Sequence[UnitProblem], choice: _Choice, replace_checkpoints: bool, flops: int) -> Keep:
    units: list[KeptUnit] = []
    parts = [*_parts(problems, choice.units)]
    for problem, unit in zip(problems, choice.units, strict=True):
        position, values = problem.unit.position, problem.problem.values
        start = position.start
        for kept, count in unit:
            if kept is not problem.as_written:
                units.append(
                    KeptUnit(
                        attrs.evolve(position, start=start, repeats=count),
                        tuple(values[index].position for index in kept.kept),
                        tuple(values[index].position for index in kept.offloaded),
                    )
                )
            start += position.length * count
    return Keep(
        tuple(units),
        replace_checkpoints,
        choice.nbytes,
        round(sum(kept.host_bytes * count / problem.repeats for problem, kept, count in parts)),
        choice.seconds,
        repeated_flops(parts) / max(1, flops),
        keep_words(parts),
    )
