"""Plays a schedule: when each stage computes what, if each pair of stages that exchanges waits for the other."""

from collections.abc import Sequence
from typing import TypeAlias, final

import attrs

Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""Source and target of what is sent."""


@final
@attrs.frozen
class StagePass:
    """The pass of a stage in a tick: a microbatch goes through a chunk of its layers, forward or backward."""

    is_backward: bool
    microbatch: int
    chunk: int


@final
@attrs.frozen
class Phase:
    """Ticks that run in one loop."""

    ticks: tuple[tuple[StagePass | None, ...], ...]
    """The pass of each stage in each tick."""
    exchanges: tuple[Pairs, ...]
    """Who sends to whom after a tick; they take turns."""


@final
@attrs.frozen
class TimedPass:
    stage: int
    start: float
    end: float
    work: StagePass


@final
@attrs.frozen
class PipelineTimes:
    """The result of `PipelineSchedule.simulate`: all passes with their times in seconds."""

    seconds: float
    """The end of the last stage."""
    bubble: float
    """The part of the time of all stages in which they wait."""
    live: tuple[float, ...]
    """The most microbatches that each stage keeps activations of; a chunk counts as a part of one."""
    passes: tuple[TimedPass, ...]
    """The passes of all stages, in order of time."""


def play(
    phases: Sequence[Phase],
    stages: int,
    chunks: int,
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    send: float,
) -> PipelineTimes:
    of_stage = [_by_stage(seconds, stages) for seconds in (forward, backward)]
    clocks = [0.0] * stages
    passes = []
    for phase in phases:
        for tick, row in enumerate(phase.ticks):
            for stage, work in enumerate(row):
                if work is not None:
                    start = clocks[stage]
                    clocks[stage] += of_stage[work.is_backward][stage] / chunks
                    passes.append(TimedPass(stage, start, clocks[stage], work))
            clocks = _exchanged(clocks, phase.exchanges[tick % len(phase.exchanges)], send)
    total = max(timed.end for timed in passes)
    busy = sum(timed.end - timed.start for timed in passes)
    bubble = 1 - busy / (stages * total) if total else 0.0
    live = tuple(
        _most_live([timed.work for timed in passes if timed.stage == stage]) / chunks for stage in range(stages)
    )
    return PipelineTimes(total, bubble, live, tuple(sorted(passes, key=lambda timed: (timed.start, timed.stage))))


def _by_stage(seconds: float | Sequence[float], stages: int) -> Sequence[float]:
    return seconds if isinstance(seconds, Sequence) else [float(seconds)] * stages


def _exchanged(clocks: Sequence[float], pairs: Pairs, send: float) -> list[float]:
    """The clocks after an exchange: who takes part waits for whom it sends to, and for whom it hears from."""
    after = list(clocks)
    for pair in pairs:
        for stage in pair:
            after[stage] = max(after[stage], *(clocks[member] + send for member in pair))
    return after


def _most_live(works: Sequence[StagePass]) -> int:
    live = most = 0
    for work in works:
        live += -1 if work.is_backward else 1
        most = max(most, live)
    return most
