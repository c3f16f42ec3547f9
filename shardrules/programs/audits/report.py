"""The report of an audit, which prints, and can be saved and compared."""

from collections.abc import Sequence
from typing import Any, Self, final

import attrs

from shardrules.core.errors import ReportError, printable
from shardrules.core.finding import Finding, shape_text
from shardrules.core.storage.records import Format, object_of, record
from shardrules.core.text import bytes_text
from shardrules.programs.audits.diff import AuditDiff, FigureChange, changed_arrays, changed_collectives
from shardrules.programs.audits.memory import MemoryUse
from shardrules.programs.audits.modules import ModuleCost
from shardrules.programs.audits.text import (
    arrays_table,
    axes_table,
    collectives_table,
    count_text,
    findings_list,
    lines_table,
    modules_table,
)
from shardrules.programs.compiled.collectives import Collective, Total, totals_by_axes, totals_by_kind
from shardrules.programs.compiled.program import read_program
from shardrules.programs.costs.schedule import LineTime
from shardrules.programs.costs.slowest import slowest_of
from shardrules.programs.costs.step_time import StepTime
from shardrules.programs.costs.timeline import Timeline
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.machine.records import hardware_from_json, hardware_to_json
from shardrules.programs.machine.targets import Target
from shardrules.programs.profiles.compare import compare_trace
from shardrules.programs.profiles.comparison import TraceComparison
from shardrules.programs.profiles.modelled import model_program
from shardrules.programs.profiles.trace import Trace, read_trace

AUDIT = Format("shardrules_audit", 2, "an audit report")


@final
@attrs.frozen
class AuditedArray:
    """An array that a function takes or returns, with its requested and its compiled spec."""

    path: str
    """The name of the argument and the path inside it; `"result/..."` for results."""
    shape: tuple[int, ...]
    dtype: str
    role: str
    """`"parameters"`, `"optimizer state"`, `"batch"` or `"result"`."""
    requested: str
    """The requested spec, as text; empty if none was requested."""
    compiled: str
    """The spec in the compiled program."""
    device_bytes: int
    donated: bool = False
    """Set if a result is written over it."""


@final
@attrs.frozen
class AuditReport:
    """A function as a compiler made it for a target, from `audit`. It prints as a page.

    All figures are for one device and one call of the function, loops included.

    ```python
    mesh = sr.mesh_shape("data:4,model:2")
    args = {"w": jnp.ones((64, 64)), "x": jnp.ones((32, 64))}
    shardings = ({"w": P("model"), "x": P("data", "model")},)
    report = sr.audit(lambda a: a["x"] @ a["w"], args, mesh=mesh, in_shardings=shardings)
    assert report.flops == 2 * 32 * 64 * 64 // 8
    assert report.totals_by_axes()["model"].wire_bytes == report.wire_bytes == 8 * 64 * 4
    ```
    """

    name: str
    target: Target
    hardware: Hardware
    mesh: str
    device_count: int
    arrays: tuple[AuditedArray, ...] = attrs.field(repr=False)
    """The arguments, then the results."""
    collectives: tuple[Collective, ...] = attrs.field(repr=False)
    """In the order of the program."""
    modules: tuple[ModuleCost, ...] = attrs.field(repr=False)
    memory: MemoryUse
    flops_by_dtype: tuple[tuple[str, int], ...]
    """FLOPs of matmuls and convolutions, by the dtype that they multiply."""
    model_flops: int | None
    """The function's own FLOPs, all devices together; `None` where it does not say how often a loop runs."""
    time: StepTime
    lines: tuple[LineTime, ...] = attrs.field(repr=False)
    """The time of each line of Python, the longest first. It adds up to `time.seconds`."""
    findings: tuple[Finding, ...] = attrs.field(repr=False)
    """Findings on what no rule or spec asks for, errors first."""
    compile_seconds: float = attrs.field(default=0.0, eq=False)
    """Tracing and lowering included."""
    hlo_text: str = attrs.field(default="", repr=False, eq=False)
    """The compiled program."""
    kernel_seconds: tuple[tuple[str, float], ...] = attrs.field(default=(), repr=False)
    """The modelled time of each run of kernels that the compiled program may not say it of, by instruction."""
    timeline: Timeline = attrs.field(default=Timeline(""), repr=False, eq=False)
    """The schedule; empty in a report that was read from JSON without it."""

    @property
    def wire_bytes(self) -> int:
        """The bytes that one device sends in one call, if collectives run as rings."""
        return sum(collective.total_wire_bytes for collective in self.collectives)

    @property
    def flops(self) -> int:
        """The FLOPs of the matmuls and convolutions of one device in one call."""
        return sum(count for _, count in self.flops_by_dtype)

    @property
    def peak_bytes(self) -> int:
        """The bytes that one device needs: arguments, results that are not written over them, and temporaries."""
        return self.memory.peak_bytes

    @property
    def fits(self) -> bool:
        """Returns whether a device has that much memory, and the compiler has not refused the program."""
        # A compiler may refuse a program whose categories add up to less: TPUs need memory for more than these.
        refused = any(finding.code == "does-not-fit" for finding in self.findings)
        return self.peak_bytes <= self.hardware.memory_bytes and not refused

    def step_time(self) -> float:
        """Returns the modelled seconds of one call: `time.seconds`.

        ```python
        report = sr.audit(lambda x: x @ x.T, jnp.ones((64, 64)), mesh=sr.mesh_shape("data:8"))
        assert np.isclose(report.step_time(), sum(line.seconds for line in report.lines))
        ```
        """
        return self.time.seconds

    def totals_by_axes(self) -> dict[str, Total]:
        """Returns the totals of the collectives over each mesh axis, or several, most bytes first."""
        return totals_by_axes(self.collectives)

    def totals_by_kind(self) -> dict[str, Total]:
        """Returns the totals of the collectives of each kind, most bytes first."""
        return totals_by_kind(self.collectives)

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that are errors or warnings."""
        return tuple(finding for finding in self.findings if finding.severity != "note")

    def __str__(self) -> str:
        capacity = f" of {bytes_text(self.hardware.memory_bytes)}"
        shares = [f"{name} {bytes_text(size)}" for name, size in self.memory.shares().items() if size]
        dtypes = [f"{dtype} {count_text(count)}" for dtype, count in self.flops_by_dtype]
        runs = sum(collective.times.count for collective in self.collectives if collective.wire_bytes)
        where = f"{self.target} ({self.hardware.name}), mesh {self.mesh}: {self.device_count} devices"
        figures = [
            f"{self.name} on {where}",
            "per device and call:",
            f"  matmuls   {count_text(self.flops)}FLOP{_in_brackets(dtypes)}{self._flops_ratio_text()}",
            f"  wire      {bytes_text(self.wire_bytes)} in {runs:,} collectives",
            f"  memory    {bytes_text(self.peak_bytes)}{capacity}{_in_brackets(shares)}",
            f"  time      {self.time}",
        ]
        tables = [
            axes_table(self.collectives),
            modules_table(self.modules),
            collectives_table(self.collectives),
            lines_table(self.lines),
        ]
        sections = [[*map(printable, figures)], *tables, findings_list(self.findings)]
        return "\n\n".join("\n".join(section) for section in sections if section)

    def _flops_ratio_text(self) -> str:
        if not self.model_flops:
            return ""
        return f", {self.flops * self.device_count / self.model_flops:.2f} times the function's own"

    def arrays_text(self) -> str:
        """Returns a table of the arguments and results with requested and compiled specs; equal layers are one row.

        ```python
        mesh = sr.mesh_shape("data:8")
        report = sr.audit(lambda x: x @ x.T, jnp.ones((64, 64)), mesh=mesh, in_shardings=P("data"))
        assert "P('data')" in report.arrays_text().splitlines()[2]
        ```
        """
        return "\n".join(
            arrays_table(
                [
                    (
                        array.path,
                        shape_text(array.shape),
                        array.dtype,
                        array.role,
                        array.requested or "-",
                        array.compiled,
                        "yes" * array.donated,
                    )
                    for array in self.arrays
                ]
            )
        )

    def diff(self, other: "AuditReport") -> AuditDiff:
        """Returns what has changed from this report to a newer one. It prints, and is false where nothing differs.

        ```python
        report = sr.audit(lambda x: x @ x.T, jnp.ones((64, 64)), mesh=sr.mesh_shape("data:8"))
        assert not report.diff(report)
        ```
        """
        figures = (
            FigureChange("FLOPs", self.flops, other.flops),
            FigureChange("wire bytes", self.wire_bytes, other.wire_bytes),
            *(
                FigureChange(f"memory: {name}", old, other.memory.shares()[name])
                for name, old in self.memory.shares().items()
            ),
            FigureChange("peak bytes", self.peak_bytes, other.peak_bytes),
            FigureChange("nanoseconds", round(1e9 * self.step_time()), round(1e9 * other.step_time())),
        )
        return AuditDiff(
            f"{self.name} on {self.target}, mesh {self.mesh}",
            f"{other.name} on {other.target}, mesh {other.mesh}",
            tuple(figure for figure in figures if figure.old != figure.new),
            changed_collectives(self.collectives, other.collectives),
            changed_arrays(_array_texts(self.arrays), _array_texts(other.arrays)),
            tuple(finding for finding in other.findings if finding not in self.findings),
            tuple(finding for finding in self.findings if finding not in other.findings),
        )

    def compare(self, trace: Trace, *, module: str | None = None) -> TraceComparison:
        """Returns the modelled times beside those of a profiler trace, by line of code, by collective, by kernel.

        `trace`: the folder that `jax.profiler.trace` wrote, a file of it, or a `jax.profiler.ProfileData`. `module`:
        the name of the program in the trace (`"jit_train_step"`), if it is another than the audited one's. A trace
        without the program is a `TraceError`, which lists its programs. A report that was read back needs its
        program: save it with `to_json(hlo=True)`.
        """
        if not self.hlo_text:
            raise ReportError(
                f"the report of {self.name} has no program to compare with, as one that was read back: save it with "
                "report.to_json(hlo=True), or audit again"
            )
        seconds = dict(self.kernel_seconds)
        slowest = slowest_of(self.hardware, self.device_count)
        program = model_program(read_program(self.hlo_text), self.collectives, slowest, seconds)
        where = f"{self.name} on {self.target} ({self.hardware.name}), mesh {self.mesh}"
        return compare_trace(read_trace(trace), program, where, self.step_time(), module)

    def to_json(self, *, hlo: bool = False, timeline: bool = False) -> str:
        """Returns the report as JSON that `from_json` reads; the compiled program and the timeline if requested."""
        data = {
            # Other programs may want these; `from_json` computes them again.
            "totals": {
                "wire_bytes": self.wire_bytes,
                "flops": self.flops,
                "peak_bytes": self.peak_bytes,
                "seconds": self.step_time(),
            },
            **attrs.asdict(self if timeline else attrs.evolve(self, timeline=Timeline("")), filter=_is_written),
            # The name of a set of flags may stand for others in a later version.
            "target": self.target.machine,
            "flags": dict(self.target.flags),
            "hardware": hardware_to_json(self.hardware),
            "hlo_text": self.hlo_text if hlo else "",
        }
        return AUDIT.write(data)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the report that `to_json` wrote. Any other text is a `ReportError`.

        ```python
        report = sr.audit(lambda x: x @ x.T, jnp.ones((64, 64)), mesh=sr.mesh_shape("data:8"))
        assert sr.reports.AuditReport.from_json(report.to_json()) == report
        ```
        """
        with AUDIT.read(text) as data:
            data.pop("totals", None)
            # A target is written as users write it, and read as the class that it is in the report.
            target = Target.parse(record(str, data["target"], "target"))
            flags = [[name, value] for name, value in object_of(data.pop("flags", {}), "flags").items()]
            data["target"] = {**attrs.asdict(target), "shape": [*target.shape], "flags": flags}
            data["hardware"] = hardware_from_json(data["hardware"])
            return record(cls, data, "report")


def _is_written(field: "attrs.Attribute[Any]", value: Any) -> bool:
    return field.name not in ("source", "memory_space") or bool(value)


def _in_brackets(parts: Sequence[str]) -> str:
    return f" ({', '.join(parts)})" if parts else ""


def _array_texts(arrays: Sequence[AuditedArray]) -> dict[str, str]:
    return {array.path: f"{shape_text(array.shape)} {array.dtype} {array.compiled}" for array in arrays}
