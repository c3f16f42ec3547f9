"""What a compiler made of a function: the report of an audit, which can be printed, kept and compared."""

import json
from collections.abc import Sequence
from typing import Self, final

import attrs

from shardrules.analysis.audits.diff import AuditDiff, FigureChange, changed_arrays, changed_collectives
from shardrules.analysis.audits.evidence import MemoryUse
from shardrules.analysis.audits.modules import ModuleCost
from shardrules.analysis.audits.roofline import StepTime
from shardrules.analysis.audits.text import (
    arrays_table,
    axes_table,
    count_text,
    dearest_table,
    findings_list,
    modules_table,
)
from shardrules.analysis.machine.hardware import Hardware
from shardrules.analysis.machine.targets import Target
from shardrules.analysis.program.collectives import Collective, Total, totals_by_axes, totals_by_kind
from shardrules.core.check import bytes_text
from shardrules.core.errors import ReportError
from shardrules.core.finding import Finding, shape_text
from shardrules.core.storage.codec import finding_from_json, finding_to_json
from shardrules.core.storage.records import record

FORMAT = 1
"""The version of the JSON of a report."""


@final
@attrs.frozen
class AuditedArray:
    """One array that a function takes or returns: what was asked, and what was compiled.

    **Arguments:**

    - `path`: the name of the argument and the path in it; of a result `"result/..."`.
    - `shape`, `dtype`: the whole array.
    - `role`: `"parameters"`, `"optimizer state"`, `"batch"` or `"result"`.
    - `asked`: the spec that was asked for, as text; empty where nobody asked.
    - `compiled`: the spec that it has.
    - `device_bytes`: what it takes on one device.
    - `donated`: whether a result is written over it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    asked: str
    compiled: str
    device_bytes: int
    donated: bool = False


@final
@attrs.frozen
class AuditReport:
    """What a compiler made of a function for a target. It prints as a page.

    All figures are for one device and one call of the function, loops included.

    **Arguments:**

    - `name`: the function's.
    - `target`, `hardware`: the machine, and its sheet.
    - `mesh`, `device_count`: the mesh as text, and how many devices it has.
    - `arrays`: every array that goes in or comes out, as asked and as compiled.
    - `collectives`: what the devices send each other, in the order of the program.
    - `modules`: FLOPs and bytes on the wire, by module.
    - `memory`: what a device needs, by what it is for.
    - `flops_by_dtype`: FLOPs of matmuls and convolutions, by what they multiply.
    - `model_flops`: the FLOPs that the function asks for, of all devices together; `None` where it does not say how
        often a loop goes round.
    - `time`: the modelled time.
    - `findings`: what nobody asked for, errors first.
    - `compile_seconds`: how long tracing, lowering and compiling took.
    - `hlo_text`: the compiled program.

    ```python
    mesh = sr.mesh_shape("data:4,model:2")
    args = {"w": jnp.ones((64, 64)), "x": jnp.ones((32, 64))}
    shardings = ({"w": P("model"), "x": P("data", "model")},)
    report = sr.ShardingAnalyzer(mesh).audit(lambda a: a["x"] @ a["w"], args, in_shardings=shardings)
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
    collectives: tuple[Collective, ...] = attrs.field(repr=False)
    modules: tuple[ModuleCost, ...] = attrs.field(repr=False)
    memory: MemoryUse
    flops_by_dtype: tuple[tuple[str, int], ...]
    model_flops: int | None
    time: StepTime
    findings: tuple[Finding, ...] = attrs.field(repr=False)
    compile_seconds: float = attrs.field(default=0.0, eq=False)
    hlo_text: str = attrs.field(default="", repr=False, eq=False)

    @property
    def wire_bytes(self) -> int:
        """What one device sends in one call, if collectives go in rings."""
        return sum(one.total_wire_bytes for one in self.collectives)

    @property
    def flops(self) -> int:
        """The FLOPs of one device in one call: those of matmuls and convolutions."""
        return sum(count for _, count in self.flops_by_dtype)

    @property
    def peak_bytes(self) -> int:
        """What one device needs: arguments, results that take memory of their own, and temporaries."""
        return self.memory.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether that is no more than the device has, and the compiler has not refused it."""
        refused = any(finding.code == "does-not-fit" for finding in self.findings)
        return self.peak_bytes <= self.hardware.memory_bytes and not refused

    def step_time(self, *, overlap: bool = False) -> float:
        """Returns the modelled time of one call, in seconds. It is a floor: peaks of the hardware are never reached.

        **Arguments:**

        - `overlap`: whether compute and communication go on at the same time, as well as can be, or one after the
            other. What a machine does lies between.

        **Returns:**

        Seconds.

        ```python
        report = sr.ShardingAnalyzer(sr.mesh_shape("data:8")).audit(lambda x: x @ x.T, jnp.ones((64, 64)))
        assert report.step_time(overlap=True) <= report.step_time()
        ```
        """
        return self.time.overlapped_seconds if overlap else self.time.serial_seconds

    def totals_by_axes(self) -> dict[str, Total]:
        """Returns what collectives add up to for each mesh axis, or axes, the dearest first."""
        return totals_by_axes(self.collectives)

    def totals_by_kind(self) -> dict[str, Total]:
        """Returns what collectives add up to for each kind, the dearest first."""
        return totals_by_kind(self.collectives)

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that are errors or warnings."""
        return tuple(finding for finding in self.findings if finding.severity != "note")

    def __str__(self) -> str:
        most = f" of {bytes_text(self.hardware.memory_bytes)}"
        shares = [f"{name} {bytes_text(size)}" for name, size in self.memory.shares().items() if size]
        kinds = [f"{kind} {count_text(count)}" for kind, count in self.flops_by_dtype]
        runs = sum(one.times.count for one in self.collectives if one.wire_bytes)
        where = f"{self.target} ({self.hardware.name}), mesh {self.mesh}: {self.device_count} devices"
        figures = [
            f"{self.name} on {where}",
            "per device and call:",
            f"  matmuls   {count_text(self.flops)}FLOP{_listed(kinds)}{self._over_own()}",
            f"  wire      {bytes_text(self.wire_bytes)} in {runs:,} collectives",
            f"  memory    {bytes_text(self.peak_bytes)}{most}{_listed(shares)}",
            f"  time      {self.time}",
        ]
        parts = [figures, axes_table(self.collectives), modules_table(self.modules), dearest_table(self.collectives)]
        return "\n\n".join("\n".join(part) for part in [*parts, findings_list(self.findings)] if part)

    def _over_own(self) -> str:
        if not self.model_flops:
            return ""
        return f", {self.flops * self.device_count / self.model_flops:.2f} times the function's own"

    def arrays_text(self) -> str:
        """Returns a table of what goes in and comes out: what was asked, and what was compiled.

        **Returns:**

        Lines joined by newlines; equal layers are one row.

        ```python
        analyzer = sr.ShardingAnalyzer(sr.mesh_shape("data:8"))
        report = analyzer.audit(lambda x: x @ x.T, jnp.ones((64, 64)), in_shardings=P("data"))
        assert "P('data')" in report.arrays_text().splitlines()[2]
        ```
        """
        rows = [
            (one.path, shape_text(one.shape), one.dtype, one.role, one.asked or "-", one.compiled, "yes" * one.donated)
            for one in self.arrays
        ]
        return "\n".join(arrays_table(rows))

    def diff(self, other: "AuditReport") -> AuditDiff:
        """Returns what has changed from this report to another one.

        **Arguments:**

        - `other`: the newer report.

        **Returns:**

        An `AuditDiff`, which prints as a table and is false where nothing differs.

        ```python
        report = sr.ShardingAnalyzer(sr.mesh_shape("data:8")).audit(lambda x: x @ x.T, jnp.ones((64, 64)))
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
        )
        return AuditDiff(
            f"{self.name} on {self.target}, mesh {self.mesh}",
            f"{other.name} on {other.target}, mesh {other.mesh}",
            tuple(one for one in figures if one.old != one.new),
            changed_collectives(self.collectives, other.collectives),
            changed_arrays(_placed(self.arrays), _placed(other.arrays)),
            tuple(one for one in other.findings if one not in self.findings),
            tuple(one for one in self.findings if one not in other.findings),
        )

    def to_json(self, *, hlo: bool = False) -> str:
        """Returns the report as text that `from_json` reads.

        **Arguments:**

        - `hlo`: whether to keep the compiled program, too.

        **Returns:**

        JSON.
        """
        data = {
            "shardrules_audit": FORMAT,
            "name": self.name,
            "target": str(self.target),
            "hardware": attrs.asdict(self.hardware),
            "mesh": self.mesh,
            "device_count": self.device_count,
            "totals": {
                "wire_bytes": self.wire_bytes,
                "flops": self.flops,
                "peak_bytes": self.peak_bytes,
                "serial_seconds": self.step_time(),
                "overlapped_seconds": self.step_time(overlap=True),
            },
            "arrays": [attrs.asdict(one) for one in self.arrays],
            "collectives": [attrs.asdict(one) for one in self.collectives],
            "modules": [attrs.asdict(one) for one in self.modules],
            "memory": attrs.asdict(self.memory),
            "flops_by_dtype": self.flops_by_dtype,
            "model_flops": self.model_flops,
            "time": attrs.asdict(self.time),
            "findings": [finding_to_json(one) for one in self.findings],
            "compile_seconds": self.compile_seconds,
            "hlo_text": self.hlo_text if hlo else "",
        }
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the report that `to_json` wrote.

        **Arguments:**

        - `text`: JSON.

        **Returns:**

        The report.

        **Raises:**

        `ReportError` when the text is no report.

        ```python
        report = sr.ShardingAnalyzer(sr.mesh_shape("data:8")).audit(lambda x: x @ x.T, jnp.ones((64, 64)))
        assert sr.reports.AuditReport.from_json(report.to_json()) == report
        ```
        """
        try:
            data = json.loads(text)
            if data["shardrules_audit"] != FORMAT:
                raise ReportError(f"this report is of format {data['shardrules_audit']!r}, this version reads {FORMAT}")
            return cls(
                record(str, data["name"], "name"),
                Target.parse(record(str, data["target"], "target")),
                record(Hardware, data["hardware"], "hardware"),
                record(str, data["mesh"], "mesh"),
                record(int, data["device_count"], "device_count"),
                record(tuple[AuditedArray, ...], data["arrays"], "arrays"),
                record(tuple[Collective, ...], data["collectives"], "collectives"),
                record(tuple[ModuleCost, ...], data["modules"], "modules"),
                record(MemoryUse, data["memory"], "memory"),
                record(tuple[tuple[str, int], ...], data["flops_by_dtype"], "flops_by_dtype"),
                record(int | None, data["model_flops"], "model_flops"),
                record(StepTime, data["time"], "time"),
                tuple(map(finding_from_json, data["findings"])),
                record(float, data["compile_seconds"], "compile_seconds"),
                record(str, data["hlo_text"], "hlo_text"),
            )
        except (LookupError, TypeError, ValueError) as error:
            if isinstance(error, ReportError):
                raise
            raise ReportError(f"this text is no report of an audit: {type(error).__name__}: {error}") from error


def _listed(parts: Sequence[str]) -> str:
    return f" ({', '.join(parts)})" if parts else ""


def _placed(arrays: Sequence[AuditedArray]) -> dict[str, str]:
    return {one.path: f"{shape_text(one.shape)} {one.dtype} {one.compiled}" for one in arrays}
