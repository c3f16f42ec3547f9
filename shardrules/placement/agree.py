"""All processes have the same plan, or every process raises an error that says how the plans differ."""

import hashlib
import json
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardrules.core.axes import AnyMesh
from shardrules.core.errors import ConfigTypeError, DisagreementError
from shardrules.core.jax_state import process_id
from shardrules.core.rule import ShardingPlan
from shardrules.mesh.processes import exchange

_COMPARE, _EXPLAIN = "the plan of every process", "how the plans differ"
"""The names of the two exchanges, for the errors of processes that wait at another barrier."""

_SHOWN = 16
"""The most devices of a mesh that are shown, enough to tell two orders of a host's devices apart. Chosen by hand."""


def check_same_plan(plan: ShardingPlan, *, timeout: float = 200) -> ShardingPlan:
    """Returns the plan once every process has called this with the same one. Call it before arrays are placed.

    Processes whose plans differ would each wait for collectives that the others never start. Fingerprints are compared,
    and the meshes: their devices in order and the types of their axes. Only where these differ, the plans are, too.
    A plan without devices, on an `AbstractMesh` for example, agrees with any devices.

    **Arguments:**

    - `plan`: the plan of this process.
    - `timeout`: the seconds to wait for the others.

    **Returns:**

    `plan`. With one process there is nothing to compare.

    **Raises:**

    `DisagreementError`, on every process, with the leaves and the meshes that differ from process 0's;
    `BarrierTimeoutError` and `BarrierError` as in `barrier_sync`. An argument that is not a plan raises
    `ConfigTypeError` on its own process, and `DisagreementError` on the others.

    ```python
    plan = sr.FSDPShardingRule("data").plan({"w": np.ones((1024, 1024))}, sr.create_mesh("data:8"))
    assert sr.check_same_plan(plan) is plan
    ```
    """
    texts = exchange(json.dumps(_summary(plan)), _COMPARE, "check_same_plan", timeout)
    summaries = [json.loads(str(text)) for text in texts]
    types = [(process, summary["type"]) for process, summary in enumerate(summaries) if summary["type"]]
    not_plans = [f"process {process} passed a {name}" for process, name in types]
    if not_plans:
        error = DisagreementError if isinstance(plan, ShardingPlan) else ConfigTypeError
        raise error(
            f"{', '.join(not_plans)}, which is not a plan: check_same_plan compares what rule.plan(tree, mesh) returns"
        )
    # Mostly they agree, so the first exchange carries fingerprints only.
    fields = {name: [summary[name] for summary in summaries] for name in ("plan", "axis_types", "devices")}
    if all(len(_distinct(values)) < 2 for values in fields.values()):
        return plan
    # Plans can be large: of the processes that have the same one, only the first sends it.
    is_first = texts.index(texts[process_id()]) == process_id()
    details = json.dumps({"plan": plan.to_json(), **_mesh_facts(plan.mesh)}) if is_first else None
    answers = exchange(details, _EXPLAIN, "check_same_plan", timeout)
    by_process = [json.loads(str(answers[texts.index(text)])) for text in texts]
    count = len(_distinct(fields["plan"]))
    disagreement = f"{count} different plans" if count > 1 else "plans for different meshes"
    raise DisagreementError(
        f"{len(texts)} processes have {disagreement}. Make each from the same rules, shapes and mesh\n"
        + "\n".join([*_plan_lines(fields["plan"], by_process), *_mesh_lines(fields, by_process)])
    )


def _summary(plan: object) -> dict[str, Any]:
    if not isinstance(plan, ShardingPlan):
        return {"type": type(plan).__name__}
    facts = _mesh_facts(plan.mesh)
    if facts["devices"] is not None:
        facts["devices"] = hashlib.sha256(str(facts["devices"]).encode()).hexdigest()
    return {"type": None, "plan": plan.fingerprint, **facts}


def _mesh_facts(mesh: AnyMesh | None) -> dict[str, Any]:
    """Returns the types of the axes and the ids of the devices; `None` where the mesh has none."""
    return {
        "axis_types": [axis_type.name for axis_type in mesh.axis_types]
        if isinstance(mesh, Mesh | AbstractMesh)
        else None,
        "devices": [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else None,
    }


def _distinct(values: list[Any]) -> list[Any]:
    """Returns each value once, without `None`, in the order of the processes."""
    return [value for index, value in enumerate(values) if value is not None and value not in values[:index]]


def _plan_lines(fingerprints: list[str], details: list[dict[str, Any]]) -> list[str]:
    # The first process that has a fingerprint speaks for all that share its plan.
    first_processes = map(fingerprints.index, fingerprints)
    plans = {process: ShardingPlan.from_json(details[process]["plan"]) for process in first_processes}
    lines: list[str] = []
    for fingerprint in _distinct(fingerprints)[1:]:
        processes = [process for process, other in enumerate(fingerprints) if other == fingerprint]
        lines.append(f"from the plan of process 0 to the plan of process {', '.join(map(str, processes))}:")
        lines += [f"  {line}" for line in str(plans[0].diff(plans[processes[0]])).splitlines()]
    return lines


def _mesh_lines(fields: dict[str, list[Any]], details: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for name, words in (("axis_types", "the axes of the mesh are"), ("devices", "the mesh has devices")):
        first, *others = [fields[name].index(value) for value in _distinct(fields[name])] or [0]
        for other in others:
            processes = [str(process) for process, value in enumerate(fields[name]) if value == fields[name][other]]
            theirs, expected = _difference(details[other][name], details[first][name])
            lines.append(f"process {', '.join(processes)}: {words} {theirs}; process {first}: {expected}")
    return lines


def _difference(left: list[Any], right: list[Any]) -> tuple[str, str]:
    """Returns both lists as text, from their first difference on."""
    pairs = enumerate(zip(left, right, strict=False))
    start = next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))

    def text(values: list[Any]) -> str:
        shown = ", ".join(map(str, values[start : start + _SHOWN]))
        return f"{'..., ' if start else ''}{shown}{', ...' if len(values) > start + _SHOWN else ''}"

    return text(left), text(right)
