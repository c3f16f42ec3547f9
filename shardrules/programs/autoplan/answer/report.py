"""A record of an autoplan to keep: without the function, the program and the search."""

import json
import typing
from collections.abc import Callable
from typing import Self, TypeVar, final

import attrs

from shardrules.core.finding import Finding
from shardrules.core.rule import ShardingPlan
from shardrules.core.storage.records import SAVE_AGAIN, Format, record
from shardrules.programs.autoplan.answer.explain import RegionUse, SplitDim
from shardrules.programs.autoplan.answer.findings import Remarks
from shardrules.programs.autoplan.answer.frontier import FrontierPoint
from shardrules.programs.autoplan.answer.plan import AutoPlan, Candidate, CompiledPlan, Status
from shardrules.programs.autoplan.answer.version import AUTOPLAN
from shardrules.programs.autoplan.solve.peak import Peak
from shardrules.programs.costs.step_time import StepTime

_Report = TypeVar("_Report")


@final
@attrs.frozen
class AutoPlanReport:
    """The result of `autoplan`, to keep in a file and show on a page.

    ```python
    planned = sr.autoplan(lambda w, x: x @ w, jnp.ones((64, 64)), jnp.ones((4096, 64)), mesh=sr.mesh_shape("data:8"))
    report = sr.reports.AutoPlanReport.of(planned)
    assert sr.reports.AutoPlanReport.from_json(report.to_json()) == report
    ```
    """

    name: str
    """The function."""
    mesh: str
    status: Status
    cost: float
    """The modelled time of a call, in seconds."""
    bound: float
    """The least seconds that any plan takes."""
    time: StepTime
    sent_bytes: tuple[tuple[str, int], ...]
    """The bytes that a device sends in one call, by kind of collective."""
    peak: Peak
    memory_limit: int
    price_of_memory: float
    """The seconds that one more byte of memory would save."""
    split_dims: tuple[SplitDim, ...]
    regions: tuple[RegionUse, ...]
    """The layout of each `shardrules.region`, and what its alternatives would take."""
    frontier: tuple[FrontierPoint, ...]
    """The best plans for other budgets, if requested."""
    candidates: tuple[Candidate, ...]
    """The meshes that were tried, if there were several."""
    compiled: tuple[CompiledPlan, ...]
    """The plans that were compiled, if the compiler was to decide which fit."""
    findings: tuple[Finding, ...]
    plan: ShardingPlan
    """The plan of all arguments."""

    @classmethod
    def of(cls, planned: AutoPlan, *, frontier: int = 0) -> Self:
        """Returns the report of a plan, with a frontier of so many budgets; each takes a search."""
        remarks = Remarks()
        points = remarks.of("what memory is worth", lambda: planned.frontier(frontier).points, ()) if frontier else ()
        return cls(
            name=planned.call.name,
            mesh=planned.plan.placements().mesh,
            status=planned.status,
            cost=planned.cost,
            bound=planned.bound,
            time=planned.step_time,
            sent_bytes=tuple(planned.sent_bytes.items()),
            peak=planned.peak,
            memory_limit=planned.memory_limit,
            price_of_memory=planned.price_of_memory,
            split_dims=planned.split_dims,
            regions=planned.regions,
            frontier=points,
            candidates=planned.candidates,
            compiled=planned.compiled,
            findings=(*planned.findings, *remarks.findings),
            plan=planned.plan,
        )

    def to_json(self) -> str:
        """Returns the report as JSON that `from_json` reads; its `plan` is as `ShardingPlan.to_json` writes it."""
        figures = attrs.asdict(
            self, filter=lambda field, value: field.name != "plan" and (field.name != "source" or bool(value))
        )
        return AUTOPLAN.write({**figures, "plan": json.loads(self.plan.to_json())})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the report that `to_json` wrote, or raises `ReportError`."""
        return read_plan_report(cls, text, AUTOPLAN)


def read_plan_report(kind: Callable[..., _Report], text: str, report_format: Format) -> _Report:
    """Reads a report with a `plan`, which has a format of its own."""
    with report_format.read(text) as data:
        fields = typing.get_type_hints(kind)
        if missing := [name for name in fields if name not in data]:
            raise LookupError(f"{', '.join(missing)} missing. {SAVE_AGAIN}")
        values = {name: record(field, data[name], name) for name, field in fields.items() if name != "plan"}
        return kind(**values, plan=ShardingPlan.from_json(json.dumps(data["plan"])))
