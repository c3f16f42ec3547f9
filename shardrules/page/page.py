"""The page of a plan: a template, its scripts, and the data that they draw."""

import json
from collections.abc import Callable
from typing import Any

from shardrules.core.axes import mesh_text
from shardrules.core.errors import printable, printable_text
from shardrules.core.rule import ShardingPlan, ShardingRule
from shardrules.page.data import Part, audit_data, autoplan_data, page_data, training_data
from shardrules.page.frame import asset, framed
from shardrules.page.rules import rules_text
from shardrules.programs.audits.report import AuditReport
from shardrules.programs.autoplan.answer.report import AutoPlanReport
from shardrules.programs.training.answer.report import TrainingPlanReport


def report_page(
    plan: ShardingPlan,
    *,
    state: ShardingPlan | None = None,
    audit: AuditReport | None = None,
    planned: AutoPlanReport | None = None,
    training: TrainingPlanReport | None = None,
    title: str = "",
    rules: ShardingRule | str | None = None,
    command: str = "",
) -> str:
    """Returns a page that shows a plan: bytes by module, every array, which device has which block, and the findings.

    It is one file, and loads nothing from the network.

    **Arguments:**

    - `plan`: the plan.
    - `state`: the plan of an optimizer's state, shown beside it.
    - `audit`: the audit of a step, shown below.
    - `planned`: the result of autoplan, shown below.
    - `training`: the result of `plan_training`, shown below.
    - `title`: the heading; by default it names the mesh.
    - `rules`: the rules to show: a rule, or the text of a file. By default those that decided an array.
    - `command`: the command that makes the page, to show it.

    **Returns:**

    HTML.

    ```python
    plan = sr.DimShardingRule("data", 0).plan({"w": np.ones((8, 4))}, sr.mesh_shape("data:4"))
    assert "One matrix" in sr.report_page(plan, title="One matrix")
    ```
    """
    # Paths of the state get a prefix, so that no two arrays share one.
    parts = [Part(plan), *([] if state is None else [Part(state, "optimizer/")])]
    heading = title or f"A plan for {mesh_text(plan.mesh)}"
    data = {
        "title": heading,
        "command": command,
        "rules": rules_text(plan, rules),
        **page_data(parts),
        "audit": None if audit is None else audit_data(audit),
        "autoplan": None if planned is None else autoplan_data(planned),
        "training": None if training is None else training_data(training),
    }
    text = json.dumps(_shown(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    scripts = ("numbers.js", "theme.js", "page.js")
    return framed(heading, asset("report.html"), skip="arrays", scripts=scripts, data=text)


_WITH_LINES = ("rules", "command", "drawings", "timeline")
"""The entries that have several lines on the page; a newline in a name would only hide."""


def _shown(data: Any, escape: Callable[[str], str] = printable) -> Any:
    """Plain values in which every text is as terminals show it: names from files may hold what only acts."""
    if isinstance(data, str):
        return escape(data)
    if isinstance(data, dict):
        return {
            printable(key): _shown(value, printable_text if key in _WITH_LINES else escape)
            for key, value in data.items()
        }
    return [_shown(item, escape) for item in data] if isinstance(data, list | tuple) else data
