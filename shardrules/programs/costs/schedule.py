"""The schedule of a compiled program: how long it takes, what each line of code takes of that, and when it runs."""

from collections.abc import Iterable, Mapping
from typing import final

import attrs

from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.kernels import Kernel
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.costs.path import seconds_by_line
from shardrules.programs.costs.player import Player
from shardrules.programs.costs.slowest import slowest_of
from shardrules.programs.costs.step_time import StepTime
from shardrules.programs.costs.steps import StepReader
from shardrules.programs.costs.tally import Tally
from shardrules.programs.costs.timeline import Timeline
from shardrules.programs.machine.hardware import Hardware


@final
@attrs.frozen
class LineTime:
    """The part of a step that a line of Python takes. `seconds` of all lines add up to the step's time, and so do
    `critical_seconds`.

    ```python
    line = sr.reports.LineTime("model.py:12", 0.004, 0.003, 0.001)
    assert line.seconds == 0.005
    ```
    """

    line: str
    """As `"model.py:12"`; empty for all whose line is unknown."""
    compute_seconds: float
    """Its kernels."""
    communication_seconds: float = 0.0
    """Its collectives, hidden or not."""
    exposed_seconds: float = 0.0
    """The time that the device waits for them."""
    copy_seconds: float = 0.0
    """The time that the device waits for its copies between memories."""
    critical_seconds: float = 0.0
    """Its time on the critical path: only this shortens the step."""
    hidden_by: str = ""
    """The line whose kernels hide the largest part of its collectives; empty if that is unknown, or nothing does."""

    @property
    def seconds(self) -> float:
        """The time that the device computes it or waits for it."""
        return self.compute_seconds + self.exposed_seconds + self.copy_seconds


@final
@attrs.frozen
class PlayedSchedule:
    """A program that was played."""

    time: StepTime
    lines: tuple[LineTime, ...]
    timeline: Timeline
    resources: tuple[tuple[str, float], ...]
    """The time that each resource beside the kernels is busy."""


def play_schedule(
    program: CompiledProgram, collectives: Iterable[Collective], kernels: Iterable[Kernel], hardware: Hardware
) -> PlayedSchedule:
    """Plays the schedule of a program on the slowest of its devices. `collectives` have to be read with a target, which
    knows hosts and links."""
    hardware = slowest_of(hardware, program.partition_count)
    player = Player(StepReader.of(program, kernels, collectives, hardware))
    player.play(program.entry)
    tally = player.tally
    time = StepTime(
        tally.total("compute"), tally.total("busy"), tally.total("memory"), tally.total("exposed"), tally.total("copy")
    )
    # Loops before what is in them.
    events = sorted(player.events, key=lambda event: (event.start, -event.seconds))
    resources = tuple(sorted(tally.of("resource").items()))
    return PlayedSchedule(
        time, _line_times(tally, seconds_by_line(player.path)), Timeline(program.name, tuple(events)), resources
    )


def _line_times(tally: Tally, critical: Mapping[str, float]) -> tuple[LineTime, ...]:
    compute, sent, exposed, copies = (tally.of(purpose) for purpose in ("compute", "sent", "exposed", "copy"))
    hidden_by: dict[str, tuple[float, str]] = {}
    for line, beside, seconds in tally.hidden():
        hidden_by[line] = max(hidden_by.get(line, (0.0, "")), (seconds, beside))
    lines = [
        LineTime(
            line,
            compute.get(line, 0.0),
            sent.get(line, 0.0),
            exposed.get(line, 0.0),
            copies.get(line, 0.0),
            critical.get(line, 0.0),
            hidden_by.get(line, (0.0, ""))[1],
        )
        for line in dict.fromkeys((*compute, *sent, *copies))
    ]
    return tuple(sorted(lines, key=lambda line: (-line.seconds, -line.communication_seconds, line.line)))
