"""What an autoplan found, as a record that can be kept: without the function, the program and the search."""

import json
from typing import Any, Self, final

import attrs

from shardrules.analysis.audits.roofline import StepTime
from shardrules.core.errors import PlanError, ReportError
from shardrules.core.finding import Finding
from shardrules.core.rule import ShardingPlan
from shardrules.core.storage.codec import finding_from_json, finding_to_json
from shardrules.core.storage.records import record
from shardrules.planning.answer.explain import SplitDim
from shardrules.planning.answer.frontier import FrontierPoint
from shardrules.planning.answer.plan import AutoPlan, Candidate
from shardrules.planning.solve.solver import Status

FORMAT = 1
"""The version of the JSON."""


@final
@attrs.frozen
class AutoPlanReport:
    """What `autoplan` found, to be kept in a file and shown on a page.

    **Arguments:**

    - `name`: the function.
    - `mesh`: the mesh, as text.
    - `status`: `"optimal"` or `"feasible"`.
    - `cost`, `bound`: the modelled time of a call in seconds, and what every plan takes at least.
    - `time`: that time in its parts.
    - `sent_bytes`: what a device sends in one call, by kind of collective.
    - `peak_bytes`, `memory_limit`: the most that lies in the memory of a device, and the most that may.
    - `price_of_memory`: what one more byte of memory would save, in seconds.
    - `split_dims`: dims that go together, and the axes that split them.
    - `frontier`: the best plans for other budgets, if somebody asked for them.
    - `candidates`: the meshes that were tried, if there were several.
    - `findings`: what is worth knowing.
    - `plan`: the plan of all arguments.

    ```python
    planned = sr.autoplan(lambda w, x: x @ w, jnp.ones((64, 64)), jnp.ones((4096, 64)), mesh=sr.mesh_shape("data:8"))
    report = sr.reports.AutoPlanReport.of(planned)
    assert sr.reports.AutoPlanReport.from_json(report.to_json()) == report
    ```
    """

    name: str
    mesh: str
    status: Status
    cost: float
    bound: float
    time: StepTime
    sent_bytes: tuple[tuple[str, int], ...]
    peak_bytes: int
    memory_limit: int
    price_of_memory: float
    split_dims: tuple[SplitDim, ...]
    frontier: tuple[FrontierPoint, ...]
    candidates: tuple[Candidate, ...]
    findings: tuple[Finding, ...]
    plan: ShardingPlan

    @classmethod
    def of(cls, planned: AutoPlan, *, frontier: int = 0) -> Self:
        """Returns the report of a plan.

        **Arguments:**

        - `planned`: the plan.
        - `frontier`: for how many budgets to search the best plan; each takes a search.

        **Returns:**

        The report.
        """
        return cls(
            planned.call.name,
            planned.plan.placements().mesh,
            planned.status,
            planned.cost,
            planned.bound,
            planned.step_time,
            tuple(planned.sent_bytes.items()),
            planned.peak_bytes,
            planned.memory_limit,
            planned.price_of_memory,
            planned.split_dims,
            planned.frontier(frontier).points if frontier else (),
            planned.candidates,
            planned.findings,
            planned.plan,
        )

    def to_json(self) -> str:
        """Returns the report as text that `from_json` reads.

        **Returns:**

        JSON. `plan` in it is that of `ShardingPlan.to_json`.
        """
        simple = ("split_dims", "frontier", "candidates", "time")
        data: dict[str, Any] = {"shardrules_autoplan": FORMAT}
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if field.name == "time":
                value = attrs.asdict(value)
            elif field.name in simple:
                value = [attrs.asdict(one) for one in value]
            elif field.name == "findings":
                value = [finding_to_json(one) for one in value]
            elif field.name == "plan":
                value = json.loads(value.to_json())
            data[field.name] = value
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
        """
        try:
            data = json.loads(text)
            if data["shardrules_autoplan"] != FORMAT:
                found = data["shardrules_autoplan"]
                raise ReportError(f"this report is of format {found!r}, this version reads {FORMAT}")
            return cls(
                record(str, data["name"], "name"),
                record(str, data["mesh"], "mesh"),
                record(Status, data["status"], "status"),
                record(float, data["cost"], "cost"),
                record(float, data["bound"], "bound"),
                record(StepTime, data["time"], "time"),
                record(tuple[tuple[str, int], ...], data["sent_bytes"], "sent_bytes"),
                record(int, data["peak_bytes"], "peak_bytes"),
                record(int, data["memory_limit"], "memory_limit"),
                record(float, data["price_of_memory"], "price_of_memory"),
                record(tuple[SplitDim, ...], data["split_dims"], "split_dims"),
                record(tuple[FrontierPoint, ...], data["frontier"], "frontier"),
                record(tuple[Candidate, ...], data["candidates"], "candidates"),
                tuple(map(finding_from_json, data["findings"])),
                ShardingPlan.from_json(json.dumps(data["plan"])),
            )
        except (LookupError, TypeError, ValueError, PlanError) as error:
            if isinstance(error, ReportError):
                raise
            what = f"{type(error).__name__}: {error}"
            raise ReportError(f"this text is no report of an autoplan: {what}") from error
