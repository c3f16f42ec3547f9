"""The comparison of a report with a trace, and its tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Self, TypeAlias, final

import attrs

from shardrules.core.errors import printable
from shardrules.core.storage.records import Format, record
from shardrules.core.views.table import aligned
from shardrules.programs.costs.step_time import seconds_text

COMPARISON = Format("shardrules_comparison", 1, "a comparison with a trace")

_MAX_ROWS = 10
"""The rows that each table prints, chosen by hand: all of them fit a screen or two."""

_SAME_PROGRAM = 0.9
"""With a smaller share in instructions of the audited program, a trace may be of another one. Chosen by hand: traces of
the program itself have all of their time there on CPUs, and lose some to helpers of libraries on GPUs."""

_ANOTHER_PROGRAM = (
    "            another program than the audited one? "
    "Audit with the mesh, the shapes, the target and the flags that it ran with"
)

UnmatchedKind: TypeAlias = Literal[
    "idle",
    "between steps",
    "loops and calls",
    "instruction",
    "run left out",
    "other program",
    "kernel",
    "host transfer",
]
"""Things that a trace may have beside the parts of the modelled program."""


@final
@attrs.frozen
class ComparedTime:
    """The time of a line of code, a collective or a kernel in one step: modelled beside measured.

    On each device it is the median over the steps; `measured_seconds` is the median over the devices.
    """

    name: str
    """A line of code, or the name of an instruction."""
    label: str
    """The operation of a kernel; kind, axes and array of a collective; empty for a line."""
    line: str
    """The line of code behind it; empty if the compiler added it."""
    count: int
    """The runs in one step."""
    modelled_seconds: float
    measured_seconds: float
    """Of a transfer that runs beside kernels the trace may know only its start and its end. It takes at most the time
    between them, and at least the part of it in which no kernel runs: this is the nearest to what is modelled."""
    slowest_seconds: float
    """On the device where it takes longest."""
    slowest_device: str
    exposed_seconds: float = 0.0
    """The time in which a collective runs while no kernel does."""

    @property
    def difference(self) -> float:
        """The measured seconds less the modelled ones."""
        return self.measured_seconds - self.modelled_seconds


@final
@attrs.frozen
class DeviceTime:
    """The steps of one device: medians, in seconds."""

    device: str
    step_seconds: float
    """From the first to the last event of the program."""
    period_seconds: float
    """From the start of a step to that of the next."""
    kernel_seconds: float
    """While a kernel runs."""
    collective_seconds: float
    """While a collective is in flight."""
    exposed_seconds: float
    """While a collective is in flight and no kernel runs."""
    idle_seconds: float
    """Within a step, while nothing runs."""


@final
@attrs.frozen
class UnmatchedTime:
    """Something in a trace that the model has no time for. The figures are of the device that has most of it."""

    kind: UnmatchedKind
    name: str
    seconds: float
    """In one step."""
    count: float
    """The times that it runs in one step."""
    outside_seconds: float = 0.0
    """In all of the trace before, after and between the compared steps."""


@final
@attrs.frozen
class MissingPart:
    """A part of the program that a trace has no event of."""

    name: str
    label: str
    line: str
    modelled_seconds: float
    conditional: bool
    """Inside a branch, which need not be taken."""


@final
@attrs.frozen
class TraceComparison:
    """A report beside a profile of the machine, from `AuditReport.compare`. It prints as tables.

    Rows are sorted by how far measured and modelled times are apart. `lines`, `collectives` and `kernels` have what is
    both in the program and in the trace; `unmatched` has what only the trace has, `missing` what only the program has.

    ```python
    import tempfile

    step, x = jax.jit(lambda x: x @ x.T), jnp.ones((256, 256))
    report = sr.audit(step, x, mesh=sr.mesh_shape("data:1"))
    step(x).block_until_ready()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(3):
                step(x).block_until_ready()
        comparison = report.compare(folder)
    assert comparison.step_count == 2 and comparison.matched_share > 0.5
    print(comparison)
    ```
    """

    name: str
    """The audited function, its target and its mesh."""
    source: str
    """The file or folder of the trace."""
    program: str
    """The name of the program in the trace, with its id."""
    step_count: int
    """The steps that are compared, on the device with the fewest."""
    left_out: int
    """The runs that are not, on the device with the most: the first, which may have warmed up, and those cut off."""
    devices_left_out: int
    """The devices that ran a program of this name that is another one, or have no whole run of it."""
    modelled_seconds: float
    """The modelled time of a step."""
    devices: tuple[DeviceTime, ...]
    lines: tuple[ComparedTime, ...] = attrs.field(repr=False)
    collectives: tuple[ComparedTime, ...] = attrs.field(repr=False)
    kernels: tuple[ComparedTime, ...] = attrs.field(repr=False)
    unmatched: tuple[UnmatchedTime, ...] = attrs.field(repr=False)
    missing: tuple[MissingPart, ...] = attrs.field(repr=False)
    matched_share: float
    """The share of the program's time on all devices in instructions that the audited program has, too."""

    @property
    def step_seconds(self) -> float:
        """The measured time of a step: the median over the steps, on the slowest device."""
        return max(device.step_seconds for device in self.devices)

    @property
    def spread(self) -> float:
        """The share of the slowest device's step by which the fastest device's is shorter."""
        return 1 - min(device.step_seconds for device in self.devices) / self.step_seconds

    def __str__(self) -> str:
        slowest = max(self.devices, key=lambda device: device.step_seconds)
        fastest = seconds_text(min(device.step_seconds for device in self.devices))
        steps = f"{self.step_count} steps" if self.step_count > 1 else "1 step"
        where = f"{len(self.devices)} devices" if len(self.devices) > 1 else "1 device"
        left_out = f", {self.left_out} left out" if self.left_out else ", which may have warmed up"
        if self.devices_left_out:
            where += f" ({self.devices_left_out} left out: they have no whole run of it, or another program)"
        device = f"{slowest.device}, the fastest {fastest}" if len(self.devices) > 1 else slowest.device
        measured = (
            f"{seconds_text(self.step_seconds)} a step ({device}): kernels {seconds_text(slowest.kernel_seconds)}, "
            f"collectives {seconds_text(slowest.collective_seconds)} ({seconds_text(slowest.exposed_seconds)} of it "
            f"exposed), idle {seconds_text(slowest.idle_seconds)}"
        )
        share = self.modelled_seconds / self.step_seconds
        suspicion = [_ANOTHER_PROGRAM] if self.matched_share < _SAME_PROGRAM else []
        head = [
            self.name,
            f"trace {self.source}",
            f"program {self.program}: {steps} on {where}{left_out}",
            "",
            f"  measured  {measured}",
            f"  modelled  {seconds_text(self.modelled_seconds)}: {share:.2f} of the measured",
            f"  matched   {self.matched_share:.1%} of the program's time on the devices, by the names of instructions",
            *suspicion,
        ]
        sections = [
            [*map(printable, head)],
            _times_table(self.lines, {"line": lambda time: time.name or "none"}),
            _times_table(
                self.collectives,
                {
                    "collective": lambda time: time.label,
                    "exposed": lambda time: seconds_text(time.exposed_seconds),
                    "instruction": lambda time: time.name,
                    "line": lambda time: time.line,
                },
            ),
            _times_table(
                self.kernels,
                {
                    "kernel": lambda time: time.name,
                    "operation": lambda time: time.label,
                    "line": lambda time: time.line,
                },
            ),
            _unmatched_table(self.unmatched),
            _missing_table(self.missing),
        ]
        return "\n\n".join("\n".join(section) for section in sections if section)

    def to_json(self) -> str:
        """Returns the comparison as JSON that `from_json` reads."""
        # Other programs may want the measured step; `from_json` computes it again.
        totals = {"step_seconds": self.step_seconds, "spread": self.spread}
        return COMPARISON.write({"totals": totals, **attrs.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the comparison that `to_json` wrote. Any other text is a `ReportError`."""
        with COMPARISON.read(text) as data:
            data.pop("totals", None)
            return record(cls, data, "comparison")


def _times_table(times: Sequence[ComparedTime], columns: Mapping[str, Callable[[ComparedTime], str]]) -> list[str]:
    rows = [
        (
            seconds_text(time.modelled_seconds),
            seconds_text(time.measured_seconds),
            f"{'+' * (time.difference > 0)}{seconds_text(time.difference)}",
            seconds_text(time.slowest_seconds),
            f"{time.count:,}",
            *(cell(time) for cell in columns.values()),
        )
        for time in times
    ]
    rest = times[_MAX_ROWS:]
    modelled, measured = sum(time.modelled_seconds for time in rest), sum(time.measured_seconds for time in rest)
    heading = ("modelled", "measured", "difference", "slowest", "runs", *columns)
    return _table(heading, rows, 5, f"{seconds_text(modelled)} modelled, {seconds_text(measured)} measured")


def _unmatched_table(unmatched: Sequence[UnmatchedTime]) -> list[str]:
    rows = [
        (
            seconds_text(time.seconds),
            seconds_text(time.outside_seconds) if time.outside_seconds else "",
            f"{time.count:,.3g}",
            time.kind,
            time.name,
        )
        for time in unmatched
    ]
    rest = sum(time.seconds for time in unmatched[_MAX_ROWS:])
    return _table(("in a step", "outside", "runs", "in the trace only", ""), rows, 3, f"{seconds_text(rest)} in a step")


def _missing_table(missing: Sequence[MissingPart]) -> list[str]:
    rows = [
        (seconds_text(part.modelled_seconds), part.name, part.label, part.line + " (in a branch)" * part.conditional)
        for part in missing
    ]
    rest = sum(part.modelled_seconds for part in missing[_MAX_ROWS:])
    return _table(("modelled", "in the program only", "", "line"), rows, 1, f"{seconds_text(rest)} modelled")


def _table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]], figures: int, rest: str) -> list[str]:
    """The first rows as a table whose first columns are figures, and the sum of the rest; empty without rows."""
    if not rows:
        return []
    more = [f"and {len(rows) - _MAX_ROWS} more: {rest}"] if len(rows) > _MAX_ROWS else []
    return [*aligned([heading, *rows[:_MAX_ROWS]], range(figures)), *more]
