"""All processes hold the same plan, or all of them are told how theirs differ."""

import hashlib
import json
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardrules.core.axes import AnyMesh
from shardrules.core.errors import DisagreementError, RuleTypeError
from shardrules.core.jax_state import process_id
from shardrules.core.rule import ShardingPlan
from shardrules.mesh.processes import exchange

_AGREE, _DIFFER = "the plan of every process", "how the plans differ"
_SHOWN = 16  # devices of a mesh


def check_same_plan(plan: ShardingPlan, *, timeout: float = 200) -> ShardingPlan:
    """Returns the plan, once every process has come here with the same one. Call it before arrays are placed.

    Processes whose plans differ would each wait for collectives that the others never start. Fingerprints are compared,
    and the meshes: their devices in order and the types of their axes. Where these differ, so are the plans themselves.
    A plan without devices, on an `AbstractMesh` say, agrees with any devices.

    **Arguments:**

    - `plan`: the plan of this process.
    - `timeout`: the seconds to wait for the others.

    **Returns:**

    `plan`. With one process there is nobody to ask.

    **Raises:**

    `DisagreementError`, on every process, with the leaves and the meshes that differ from those of process 0;
    `BarrierTimeoutError` and `BarrierError` as `barrier_sync`. What is no plan is a `RuleTypeError` where it was
    passed, and a `DisagreementError` elsewhere.

    ```python
    plan = sr.FSDPShardingRule("data").plan({"w": np.ones((1024, 1024))}, sr.create_mesh("data:8"))
    assert sr.check_same_plan(plan) is plan
    ```
    """
    told = exchange(json.dumps(_mark(plan)), _AGREE, "check_same_plan", timeout)
    marks = [json.loads(str(text)) for text in told]
    strange = [f"process {process} came with a {mark['kind']}" for process, mark in enumerate(marks) if mark["kind"]]
    if strange:
        kind = DisagreementError if isinstance(plan, ShardingPlan) else RuleTypeError
        raise kind(
            f"{', '.join(strange)}, which is no plan: check_same_plan compares what rule.plan(tree, mesh) returns"
        )
    fields = {name: [mark[name] for mark in marks] for name in ("plan", "types", "devices")}
    if all(len(_different(values)) < 2 for values in fields.values()):
        return plan
    # One process speaks for all that hold the same.
    speaks = told.index(told[process_id()]) == process_id()
    note = json.dumps({"plan": plan.to_json(), **_mesh_facts(plan.mesh)}) if speaks else None
    heard = exchange(note, _DIFFER, "check_same_plan", timeout)
    found = [json.loads(str(heard[told.index(text)])) for text in told]
    count = len(_different(fields["plan"]))
    what = f"{count} different plans" if count > 1 else "plans that are for different meshes"
    raise DisagreementError(
        f"{len(told)} processes hold {what}. Make each from the same rules, shapes and mesh\n"
        + "\n".join([*_plan_lines(fields["plan"], found), *_mesh_lines(fields, found)])
    )


def _mark(plan: object) -> dict[str, Any]:
    """What must be the same everywhere, in short."""
    if not isinstance(plan, ShardingPlan):
        return {"kind": type(plan).__name__}
    facts = _mesh_facts(plan.mesh)
    if facts["devices"] is not None:
        facts["devices"] = hashlib.sha256(str(facts["devices"]).encode()).hexdigest()
    return {"kind": None, "plan": plan.fingerprint, **facts}


def _mesh_facts(mesh: AnyMesh | None) -> dict[str, Any]:
    """The types of the axes and the ids of the devices; `None` where there are none."""
    return {
        "types": [kind.name for kind in mesh.axis_types] if isinstance(mesh, Mesh | AbstractMesh) else None,
        "devices": [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else None,
    }


def _different(values: list[Any]) -> list[Any]:
    """Those that differ, in order of the processes."""
    found: list[Any] = []
    for value in values:
        if value is not None and value not in found:
            found.append(value)
    return found


def _plan_lines(fingerprints: list[str], found: list[dict[str, Any]]) -> list[str]:
    plans = {place: ShardingPlan.from_json(found[place]["plan"]) for place in map(fingerprints.index, fingerprints)}
    lines: list[str] = []
    for fingerprint in _different(fingerprints)[1:]:
        holders = [process for process, one in enumerate(fingerprints) if one == fingerprint]
        lines.append(f"from the plan of process 0 to that of process {', '.join(map(str, holders))}:")
        lines += [f"  {line}" for line in str(plans[0].diff(plans[holders[0]])).splitlines()]
    return lines


def _mesh_lines(fields: dict[str, list[Any]], found: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for name, words in (("types", "the axes of the mesh are"), ("devices", "the mesh holds devices")):
        first, *others = [fields[name].index(value) for value in _different(fields[name])] or [0]
        for other in others:
            holders = [str(process) for process, one in enumerate(fields[name]) if one == fields[name][other]]
            here, there = _where_they_differ(found[other][name], found[first][name])
            lines.append(f"process {', '.join(holders)}: {words} {here}; process {first}: {there}")
    return lines


def _where_they_differ(here: list[Any], there: list[Any]) -> tuple[str, str]:
    """Both lists as text. Of long ones, a part that begins near the first difference."""
    same = next(
        (place for place, (one, other) in enumerate(zip(here, there, strict=False)) if one != other),
        min(len(here), len(there)),
    )
    start = same if max(len(here), len(there)) > _SHOWN else 0

    def text(values: list[Any]) -> str:
        shown = ", ".join(map(str, values[start : start + _SHOWN]))
        return f"{'..., ' if start else ''}{shown}{', ...' if len(values) > start + _SHOWN else ''}"

    return text(here), text(there)
