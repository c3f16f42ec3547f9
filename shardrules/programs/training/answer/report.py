"""A training plan as a record to keep: as an engineer would note it down, without the functions and the search."""

import json
from collections.abc import Iterator, Sequence
from typing import Self, final

import attrs

from shardrules.core.errors import printable
from shardrules.core.finding import Finding, listing
from shardrules.core.rule import ShardingPlan
from shardrules.core.text import bytes_text
from shardrules.core.views.table import aligned
from shardrules.programs.autoplan.answer.explain import RegionUse, SplitDim
from shardrules.programs.autoplan.answer.frontier import Frontier, FrontierPoint
from shardrules.programs.autoplan.answer.report import read_plan_report
from shardrules.programs.autoplan.answer.version import TRAINING_PLAN
from shardrules.programs.autoplan.answer.whole import first_line
from shardrules.programs.costs.step_time import StepTime, seconds_text
from shardrules.programs.pipelines.schedule import PipelineSchedule
from shardrules.programs.training.stages.run import tick_count

_SHOWN_CANDIDATES = 24
"""The candidates that are printed at most, chosen by hand: one for each mesh, and the best recipes."""


@final
@attrs.frozen
class TrainingCandidate:
    """A mesh and a recipe that were planned, or why they were not."""

    mesh: str
    microbatches: int
    groups: int
    keep: str
    """The arrays that the backward pass keeps, in words."""
    seconds: float | None
    """The modelled time of a step; `None` where nothing was planned."""
    peak_bytes: int
    fits: bool
    reason: str = ""
    """The reason it lost; empty for the plan itself."""
    host_bytes: int = 0
    """The bytes that a device has in the memory of its host."""
    stages: int = 1
    """The groups of layers that compute side by side, each with another microbatch."""
    chunks: int = 1
    """The chunks of layers that a stage has."""

    @property
    def batch_text(self) -> str:
        """The count of microbatches, and in how many stages or how often gradients are reduced."""
        if self.microbatches == 1:
            return "1"
        if self.stages > 1:
            chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
            return f"{self.microbatches} in {self.stages} stages{chunks}"
        return f"{self.microbatches} (reduced {'once' if self.groups > 1 else 'in each'})"


@final
@attrs.frozen
class Advice:
    """Another set-up, planned in the same way."""

    change: str
    seconds: float
    """The modelled time of a step."""
    examples_per_second: float
    peak_bytes: int
    gain: float
    """The examples per second over those of the plan."""


@final
@attrs.frozen
class TrainingPlanReport:
    """The result of `plan_training`, to keep in a file and show on a page.

    ```python
    import optax

    loss = lambda w, x: jnp.mean((x @ w) ** 2)
    w, x = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    report = sr.plan_training(loss, w, optax.sgd(0.1), x, cluster="cpu:8").report
    assert sr.reports.TrainingPlanReport.from_json(report.to_json()) == report
    ```
    """

    name: str
    """The loss."""
    cluster: str
    device_count: int
    mesh: str
    microbatches: int
    groups: int
    gradient_dtype: str
    """The dtype in which gradients of microbatches add up; empty without microbatches."""
    keep: str
    """The arrays that the backward pass keeps, in words."""
    time: StepTime
    """The modelled time of a step, in its parts: `time.seconds` is that of the plan among the candidates."""
    examples: int
    """The examples of a step."""
    split_arrays: tuple[str, ...]
    """The arrays of the batch that have examples, with the dims of these."""
    whole_arrays: tuple[str, ...]
    """The arrays that are the same for all examples."""
    tokens: int
    """The tokens of a step; 0 if no array of the batch looks something up, as tokens do in a table of words."""
    model_flops: int
    """The FLOPs of the step as written, over all devices: nothing that is computed again counts."""
    peak_flops: float
    """The FLOP/s that the devices reach together at most."""
    peak_bytes: int
    memory_limit: int
    memory: tuple[tuple[str, int], ...]
    """The bytes of a device at the peak, by category."""
    host_memory: tuple[tuple[str, int], ...]
    """The bytes that a device has in the memory of its host, by category."""
    host_exchanged_bytes: int
    """The bytes that a device sends to its host in a step, and fetches from there."""
    sent_bytes: tuple[tuple[str, int], ...]
    """The bytes that a device sends in a step, by kind of collective."""
    split_dims: tuple[SplitDim, ...]
    regions: tuple[RegionUse, ...]
    """The layout of each `shardrules.region`, and what its alternatives would take."""
    candidates: tuple[TrainingCandidate, ...]
    frontier: tuple[FrontierPoint, ...]
    advice: tuple[Advice, ...]
    findings: tuple[Finding, ...]
    plan: ShardingPlan
    """The plan of model, state and batch."""
    stages: int = 1
    """The groups of layers that compute side by side, each with another microbatch."""
    why_no_stages: str = ""
    """The reason that layers are not in stages; empty where they are."""
    chunks: int = 1
    """The chunks of layers that a stage has, through which microbatches go one after another."""

    @property
    def schedule(self) -> PipelineSchedule | None:
        """The stage that computes the layers of each microbatch at each time; `None` without stages.

        What comes before the layers, and after them, is computed for all microbatches at once.
        """
        if self.stages < 2:
            return None
        return PipelineSchedule(
            "gpipe",
            stages=self.stages,
            microbatches=self.microbatches,
            chunks=self.chunks,
            in_step=True,
            last_first=True,
        )

    @property
    def examples_per_second(self) -> float:
        """The examples that are trained on in a second."""
        return self.examples / self.time.seconds if self.time.seconds else 0.0

    @property
    def mfu(self) -> float:
        """The part of the devices' FLOP/s that the model's FLOPs use."""
        most_flops = self.time.seconds * self.peak_flops
        return self.model_flops / most_flops if most_flops else 0.0

    def __str__(self) -> str:
        lines = [*map(printable, self._note()), "", *self._candidate_table()]
        if self.findings:
            lines += ["", listing(self.findings)]
        return "\n".join(line.rstrip() for line in lines)

    def _note(self) -> Iterator[str]:
        yield first_line(f"{self.name} on {self.cluster}: {self._speed_text()}", self.findings)
        yield ""
        before = ""
        for head, text in self.rows()[1:]:
            yield f"{head if head != before else '':<11}{text}"
            before = head

    def rows(self) -> list[tuple[str, str]]:
        """Returns what the note says, with a heading for each line."""
        return [
            ("speed", self._speed_text()),
            ("mesh", self.mesh),
            *(("layout", str(dim)) for dim in self.split_dims),
            *(("regions", str(use)) for use in self.regions),
            ("batch", self._batch_text()),
            ("batch", self._examples_text()),
            ("stages", self._stages_text()),
            ("backward", self.keep),
            ("memory", self._memory_text()),
            *([("host", self._host_text())] if self.host_exchanged_bytes else []),
            ("time", self._time_text()),
            ("wire", ", ".join(f"{kind} {bytes_text(sent)}" for kind, sent in self.sent_bytes if sent) or "nothing"),
            ("limit", self._limit_text()),
            *(("would help", _advice_text(item)) for item in self.advice),
        ]

    def _speed_text(self) -> str:
        seconds = self.time.seconds
        tokens = f", {self.tokens / seconds:,.0f} tokens/s" if self.tokens and seconds else ""
        speed = f"{self.examples_per_second:,.4g} examples/s{tokens}"
        return f"{seconds_text(seconds)} a step, {speed}, {100 * self.mfu:.0f} % MFU"

    def _batch_text(self) -> str:
        text = f"{self.examples} examples"
        if self.microbatches == 1:
            return f"{text} at once"
        if self.stages > 1:
            return f"{text} in {self.microbatches} microbatches; gradients of layers add up in {self.gradient_dtype}"
        reduced = "once a step" if self.groups > 1 else "in each microbatch"
        return (
            f"{text} in {self.microbatches} microbatches; gradients add up in {self.gradient_dtype} and are reduced "
            f"{reduced}"
        )

    def _stages_text(self) -> str:
        if self.stages == 1:
            return f"none: {self.why_no_stages}"
        rounds = tick_count(self.stages, self.microbatches, self.chunks)
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        return f"{self.stages}{chunks}, which wait in {self.stages - 1} of {rounds} rounds"

    def _examples_text(self) -> str:
        split = f"examples along {_listed(self.split_arrays)}"
        return f"{split}; {_listed(self.whole_arrays)} the same for all" if self.whole_arrays else split

    def _memory_text(self) -> str:
        parts = ", ".join(f"{category} {bytes_text(nbytes)}" for category, nbytes in self.memory)
        return f"{bytes_text(self.peak_bytes)} of {bytes_text(self.memory_limit)}: {parts}"

    def _host_text(self) -> str:
        parts = ", ".join(f"{category} {bytes_text(nbytes)}" for category, nbytes in self.host_memory)
        exchanged, seconds = bytes_text(self.host_exchanged_bytes), seconds_text(self.time.copy_seconds)
        return f"{parts}; {exchanged} go there and back in each step, which waits {seconds} for it"

    def _time_text(self) -> str:
        time = self.time
        sent, exposed = seconds_text(time.communication_seconds), seconds_text(time.exposed_seconds)
        copies = f", host {seconds_text(time.copy_seconds)}" if time.copy_seconds else ""
        return f"compute {seconds_text(time.compute_seconds)}, communication {sent} ({exposed} of it exposed){copies}"

    def _limit_text(self) -> str:
        time = self.time
        waits = [("communication", time.exposed_seconds)]
        if time.copy_seconds:
            waits.append(("the host", time.copy_seconds))
        shares = [(name, 100 * seconds / time.seconds if time.seconds else 0.0) for name, seconds in waits]
        name, seconds = max(waits, key=lambda wait: wait[1])
        # Waiting is the limit only where it takes longer than all that is computed.
        if seconds > time.compute_seconds:
            return f"{name}: {dict(shares)[name]:.0f} % of the step waits for it"
        rest = 100 - sum(share for _, share in shares)
        text = " and ".join(f"{share:.0f} % waits for {name}" for name, share in shares)
        return f"computing: {rest:.0f} % of the step; {text}"

    def _candidate_table(self) -> list[str]:
        rows = [("mesh", "microbatches", "backward", "time", "memory", "")]
        for candidate in self.candidates[:_SHOWN_CANDIDATES]:
            time = "" if candidate.seconds is None else seconds_text(candidate.seconds)
            memory = bytes_text(candidate.peak_bytes) if candidate.peak_bytes else ""
            reason = candidate.reason or "the plan"
            reason = reason if len(reason) <= 100 else f"{reason[:100].rstrip()} ..."
            rows.append((candidate.mesh, candidate.batch_text, candidate.keep, time, memory, reason))
        more = len(self.candidates) - _SHOWN_CANDIDATES
        return [*aligned(rows), *([f"and {more} more"] if more > 0 else [])]

    def as_frontier(self) -> Frontier:
        """Returns what memory is worth, by all that was planned."""
        return Frontier(self.name, self.cluster, self.frontier)

    def to_json(self) -> str:
        """Returns the report as JSON that `from_json` reads; its `plan` is as `ShardingPlan.to_json` writes it."""
        figures = attrs.asdict(self, filter=lambda field, value: field.name != "plan")
        return TRAINING_PLAN.write({**figures, "plan": json.loads(self.plan.to_json())})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the report that `to_json` wrote, or raises `ReportError`."""
        return read_plan_report(cls, text, TRAINING_PLAN)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - 4
    return ", ".join(names[:4]) + (f" and {more} more" if more > 0 else "")


def _advice_text(advice: Advice) -> str:
    return (
        f"{advice.change}: {advice.gain:.2f} x the examples a second "
        f"({seconds_text(advice.seconds)} a step, {bytes_text(advice.peak_bytes)})"
    )
