"""Schedules of pipelines as data: what each stage does in each tick, and which stages exchange what they computed.

Devices of a pipeline run one program, in which an exchange is a collective of pairs of stages that are fixed when it is
compiled. In the "1f1b" schedule a stage therefore computes forward in every other tick and backward in those between,
and its neighbours the other way round: in even ticks stages 0 and 1, 2 and 3 exchange, in odd ticks 1 and 2, 3 and 4.
A pair waits for each other, as it has to, and nobody waits for all. With chunks the last stage sends to the first, and
such pairs would wait for each other round the ring: there all stages compute forward in even ticks, and backward in
odd ones.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias, final, get_args

import attrs

from shardrules.core.errors import ConfigError
from shardrules.drawing.picture import Picture
from shardrules.programs.pipelines.picture import picture, text
from shardrules.programs.pipelines.simulate import Phase, PipelineTimes, StagePass, play

ScheduleName: TypeAlias = Literal["gpipe", "1f1b"]
"""The schedules that can be had by name."""

NAMES: tuple[str, ...] = get_args(ScheduleName)


@final
@attrs.frozen(repr=False)
class PipelineSchedule:
    """The passes of each stage of a pipeline, in time: forward or backward, with a microbatch and a chunk of layers.

    With chunks, a stage has several groups of layers that do not follow each other, and microbatches go round the
    stages as often ("interleaved"): bubbles are shorter, and more is sent. Printed it shows the passes of all stages in
    time; notebooks draw it.

    The `name` `"gpipe"` computes all microbatches forward, then all backward. `"1f1b"` computes a microbatch backward
    as soon as it can be: a stage keeps the activations of at most as many microbatches as there are stages, and with
    chunks of up to twice as many. There are `stages` stages, at least 2, and `microbatches` microbatches; each stage
    has `chunks` groups of layers. With `in_step` all stages compute forward in the same ticks, and backward in those
    between, as they do with chunks. `shardrules.pipeline` does so on a mesh with other axes than for stages and the
    batch. Stages then keep what they keep with chunks. With `last_first` the backward pass of `"gpipe"` begins with the
    last microbatch, as in training plans with stages. A `ConfigError` lists everything that is wrong.

    ```python
    schedule = sr.reports.PipelineSchedule("1f1b", stages=2, microbatches=3)
    print(schedule)
    # 1f1b: 2 stages, 3 microbatches; bubble 25.0%, live microbatches at most 2 1
    # stage 0 | F0 F1 .. B0--- F2 B1--- .. B2---
    # stage 1 | .. F0 B0--- F1 B1--- F2 B2--- ..
    assert schedule.simulate(forward=1.0, backward=2.0).seconds == (3 + 2 - 1) * 3.0
    ```
    """

    name: ScheduleName
    stages: int = attrs.field(kw_only=True)
    microbatches: int = attrs.field(kw_only=True)
    chunks: int = attrs.field(kw_only=True, default=1)
    in_step: bool = attrs.field(kw_only=True, default=False)
    last_first: bool = attrs.field(kw_only=True, default=False)
    phases: tuple[Phase, ...] = attrs.field(init=False, eq=False)
    """The ticks, in phases that differ in who exchanges with whom."""

    def __attrs_post_init__(self) -> None:
        problems = schedule_problems(self.name, self.stages, self.microbatches, self.chunks)
        if self.last_first and self.name != "gpipe":
            problems.append('last_first is for "gpipe", which computes all microbatches forward first')
        if problems:
            raise ConfigError(f"PipelineSchedule: {'; '.join(problems)}")
        phases = _gpipe(self) if self.name == "gpipe" else _one_forward_one_backward(self)
        object.__setattr__(self, "phases", phases)

    @property
    def bubble(self) -> float:
        """The part of the time in which stages wait: (stages - 1) / (chunks * microbatches + stages - 1).

        It is more where there are several chunks and the stages do not divide the microbatches.
        """
        return self.simulate().bubble

    def simulate(
        self, forward: float | Sequence[float] = 1.0, backward: float | Sequence[float] = 2.0, send: float = 0.0
    ) -> PipelineTimes:
        """Plays the schedule, and returns when each stage computes what, the bubble, and the live microbatches.

        `forward` and `backward` are the seconds of one microbatch on all layers of a stage, or of each stage, and
        `send` those of an exchange between two stages.
        """
        return play(self.phases, self.stages, self.chunks, forward, backward, send)

    def picture(self, forward: float = 1.0, backward: float = 2.0, send: float = 0.0) -> Picture:
        """Draws who computes what when, with the times `forward`, `backward` and `send` that `simulate` takes."""
        return picture(self.simulate(forward, backward, send), self.summary)

    @property
    def takes_turns(self) -> bool:
        """All stages compute in the same direction in a tick."""
        return self.in_step or self.chunks > 1

    def forward_only(self) -> "tuple[Phase, ...]":
        """The phases of a pass without gradients."""
        return (_forward_phase(self),)

    def __repr__(self) -> str:
        chunks = f", chunks={self.chunks}" if self.chunks > 1 else ""
        options = "".join(f", {name}=True" for name in ("in_step", "last_first") if getattr(self, name))
        sizes = f"stages={self.stages}, microbatches={self.microbatches}"
        return f"PipelineSchedule({self.name!r}, {sizes}{chunks}{options})"

    @property
    def summary(self) -> str:
        """The sizes in a line, with the bubble and how many microbatches each stage keeps activations of."""
        chunks = f", {self.chunks} chunks" if self.chunks > 1 else ""
        live = " ".join(f"{count:g}" for count in self._in_columns.live)
        return (
            f"{self.name}: {self.stages} stages, {self.microbatches} microbatches{chunks}; bubble "
            f"{self._in_columns.bubble:.1%}, live microbatches at most {live}"
        )

    @functools.cached_property
    def _in_columns(self) -> PipelineTimes:
        """The times in which a chunk is computed forward in one column and backward in two."""
        return self.simulate(float(self.chunks), 2.0 * self.chunks)

    def __str__(self) -> str:
        return f"{self.summary}\n{text(self._in_columns)}"

    def _repr_html_(self) -> str:
        return self.picture().to_svg()


def schedule_problems(name: object, stages: object, microbatches: object, chunks: object) -> list[str]:
    problems = []
    if name not in NAMES:
        problems.append(f"schedule must be one of {', '.join(map(repr, NAMES))}, got {name!r:.60}")
    for label, value, least in (("stages", stages, 2), ("microbatches", microbatches, 1), ("chunks", chunks, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            problems.append(f"{label} must be an integer of at least {least}, got {value!r:.60}")
    return problems


def _slots(schedule: PipelineSchedule) -> Iterator[tuple[int, int, int, int]]:
    """Yields microbatch, chunk, and which of a stage's passes it is, forward and backward.

    As many microbatches as there are stages go round once before they go round again: the first of them is back when
    the last has left.
    """
    stages, chunks = schedule.stages, schedule.chunks
    for microbatch in range(schedule.microbatches):
        first, rest = divmod(microbatch, stages) if chunks > 1 else (0, microbatch)
        for chunk in range(chunks):
            start = first * stages * chunks + rest
            yield microbatch, chunk, start + chunk * stages, start + (chunks - 1 - chunk) * stages


def _pairs(stages: int, chunks: int, step: int) -> tuple[tuple[int, int], ...]:
    """Pairs of source and target of a whole pipeline; with several chunks the last stage sends to the first."""
    ring = [(stage, (stage + step) % stages) for stage in range(stages)]
    return tuple((source, target) for source, target in ring if chunks > 1 or target - source == step)


def _table(passes: dict[tuple[int, int], StagePass], stages: int) -> tuple[tuple[StagePass | None, ...], ...]:
    """Rows of ticks from passes at (tick, stage)."""
    ticks = 1 + max(tick for tick, _ in passes)
    return tuple(tuple(passes.get((tick, stage)) for stage in range(stages)) for tick in range(ticks))


def _forward_phase(schedule: PipelineSchedule) -> Phase:
    stages, chunks = schedule.stages, schedule.chunks
    passes = {
        (slot + stage, stage): StagePass(False, microbatch, chunk)
        for microbatch, chunk, slot, _ in _slots(schedule)
        for stage in range(stages)
    }
    return Phase(_table(passes, stages), (_pairs(stages, chunks, 1),))


def _gpipe(schedule: PipelineSchedule) -> tuple[Phase, ...]:
    stages, chunks = schedule.stages, schedule.chunks
    last = schedule.microbatches - 1
    passes = {
        (slot + stages - 1 - stage, stage): StagePass(
            True, last - microbatch if schedule.last_first else microbatch, chunk
        )
        for microbatch, chunk, _, slot in _slots(schedule)
        for stage in range(stages)
    }
    backward = Phase(_table(passes, stages), (_pairs(stages, chunks, -1),))
    return _forward_phase(schedule), backward


def _one_forward_one_backward(schedule: PipelineSchedule) -> tuple[Phase, ...]:
    stages, chunks = schedule.stages, schedule.chunks
    passes = {}
    for microbatch, chunk, forward, backward in _slots(schedule):
        for stage in range(stages):
            if not schedule.takes_turns:
                # A stage is a tick behind the one before it, and takes a microbatch in every other tick.
                ticks = stage + 2 * forward, 2 * stages - 1 - stage + 2 * backward
            else:  # after a turn through all chunks, and back through as many stages
                ticks = 2 * (stage + forward), 2 * ((chunks + 1) * stages - 2 - stage + backward) + 1
            for tick, is_backward in zip(ticks, (False, True), strict=True):
                passes[tick, stage] = StagePass(is_backward, microbatch, chunk)
    ahead, back = _pairs(stages, chunks, 1), _pairs(stages, chunks, -1)
    if not schedule.takes_turns:
        # A pair meets in every other tick, when each of them has computed for the other.
        exchanges = [
            (*(pair for pair in ahead if pair[0] % 2 == parity), *(pair for pair in back if pair[1] % 2 == parity))
            for parity in range(2)
        ]
        return (Phase(_table(passes, stages), tuple(exchanges)),)
    return (Phase(_table(passes, stages), (ahead, back)),)
