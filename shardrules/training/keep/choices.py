"""What the backward pass of a function may keep: choices from everything to only the inputs of its layers."""

import math
from collections.abc import Sequence
from typing import final

import attrs
from jax.extend.core import ClosedJaxpr

from shardrules.analysis.compiling.model_flops import model_flops
from shardrules.analysis.machine.hardware import Hardware
from shardrules.training.keep.cut import KeptValues, cheapest
from shardrules.training.keep.flat import flattened
from shardrules.training.keep.keep import Keep, KeptUnit
from shardrules.training.keep.needs import NeedsReader
from shardrules.training.keep.problem import UnitProblem, unit_problem
from shardrules.training.keep.units import find_units
from shardrules.training.keep.words import keep_text, repeated_flops

_SOLVES = 40
"""How often the cuts of all units are computed: each takes a few milliseconds. With half as many, some choices between
two far apart are missing; with twice as many, no more choices are found for the models of the benchmark."""

_ALMOST = 1e-6
"""Choices that differ by this part are the same: capacities of cuts are rounded."""


def keep_choices(
    program: ClosedJaxpr,
    hardware: Hardware,
    *,
    trainable_count: int | None = None,
    offload: bool = True,
    replace_checkpoints: bool = False,
    count: int = 10,
) -> tuple[Keep, ...]:
    """Returns what the backward pass of a program may keep, the most first, each of the others with less memory.

    The first keeps everything, as the program is written. The first `trainable_count` inputs have gradients.
    `offload`: whether arrays may be kept in the memory of the host. `replace_checkpoints`: whether the program's own
    `jax.checkpoint` are taken away; otherwise each is a single step. At most `count` are returned.
    """
    flat = flattened(program, replace_checkpoints)
    reader = NeedsReader()
    offload = offload and not hardware.name.startswith("CPU")
    units = [unit for unit in find_units(flat, trainable_count) if not unit.body.effects]
    problems = [unit_problem(unit, reader, hardware, offload) for unit in units]
    written = _Choice.of([problem.as_written for problem in problems])
    front = _thinned(_front(problems), written, count - 1)
    first = Keep(replaces_checkpoints=replace_checkpoints, kept_bytes=written.nbytes, seconds=written.seconds)
    return first, *(_keep(problems, choice, replace_checkpoints, model_flops(flat)) for choice in front)


@final
@attrs.frozen(eq=False)
class _Choice:
    """What is kept of each unit."""

    units: tuple[KeptValues, ...]
    nbytes: int
    seconds: float

    @classmethod
    def of(cls, units: Sequence[KeptValues]) -> "_Choice":
        return cls(tuple(units), sum(each.nbytes for each in units), math.fsum(each.seconds for each in units))


def _solved(problems: Sequence[UnitProblem], price: float) -> _Choice:
    """The best choice at a price of a byte, in seconds."""
    return _Choice.of([_cheapest(problem, price) for problem in problems])


def _cheapest(problem: UnitProblem, price: float) -> KeptValues:
    chosen, written = cheapest(problem.problem, price), problem.as_written
    return chosen if chosen.seconds + price * chosen.nbytes < written.seconds + price * written.nbytes else written


def _front(problems: Sequence[UnitProblem]) -> list[_Choice]:
    """The choices that are best at some price, those that keep most first."""
    fastest = _solved(problems, 0.0)
    # At this price a byte in a million is worth more than all seconds.
    highest = 1e6 * (1e-9 + fastest.seconds + _step_seconds(problems)) / max(1, fastest.nbytes)
    smallest = _solved(problems, highest)
    choices = [fastest, smallest]
    pending, solves = [(fastest, smallest)], 2
    while pending and solves < _SOLVES:
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


def _thinned(choices: Sequence[_Choice], written: _Choice, count: int) -> list[_Choice]:
    """At most `count` choices that keep less and less, with the first and the last of those that differ."""
    distinct: list[_Choice] = []
    for choice in choices:
        least = distinct[-1].nbytes if distinct else math.inf
        if choice.units != written.units and choice.nbytes < least * (1 - _ALMOST):
            distinct.append(choice)
    while len(distinct) > max(1, count):
        # Drop what is closest to what its neighbors on both sides make of it.
        gains = [
            (distinct[index - 1].nbytes - distinct[index + 1].nbytes, index) for index in range(1, len(distinct) - 1)
        ]
        distinct.pop(min(gains)[1] if gains else 0)
    return distinct


def _keep(problems: Sequence[UnitProblem], choice: _Choice, replace_checkpoints: bool, flops: int) -> Keep:
    units = []
    for problem, chosen in zip(problems, choice.units, strict=True):
        if chosen is problem.as_written:
            continue
        values = problem.problem.values
        units.append(
            KeptUnit(
                problem.unit.position,
                tuple(values[index].position for index in chosen.kept),
                tuple(values[index].position for index in chosen.offloaded),
            )
        )
    return Keep(
        tuple(units),
        replace_checkpoints,
        choice.nbytes,
        sum(each.host_bytes for each in choice.units),
        choice.seconds,
        repeated_flops(problems, choice.units) / max(1, flops),
        keep_text(problems, choice.units),
    )
