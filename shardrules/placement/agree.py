"""All processes hold the same plan, or all of them are told how theirs differ."""

from shardrules.core.errors import DisagreementError
from shardrules.core.rule import ShardingPlan
from shardrules.mesh.processes import exchange

_AGREE, _DIFFER = "the plan of every process", "how the plans differ"


def check_same_plan(plan: ShardingPlan, *, timeout: float = 200) -> ShardingPlan:
    """Returns the plan, once every process has come here with the same one. Call it before arrays are placed.

    Processes whose plans differ would each wait for collectives that the others never start. Fingerprints are compared,
    and where they differ the plans themselves.

    **Arguments:**

    - `plan`: the plan of this process.
    - `timeout`: the seconds to wait for the others.

    **Returns:**

    `plan`. With one process there is nobody to ask.

    **Raises:**

    `DisagreementError`, on every process, with the leaves that differ from the plan of process 0;
    `BarrierTimeoutError` and `BarrierError` as `barrier_sync`.

    ```python
    plan = sr.FSDPShardingRule("data").plan({"w": np.ones((1024, 1024))}, sr.create_mesh("data:8"))
    assert sr.check_same_plan(plan) is plan
    ```
    """
    fingerprints = exchange(plan.fingerprint, _AGREE, "check_same_plan", timeout)
    if all(one == plan.fingerprint for one in fingerprints):
        return plan
    plans = [
        ShardingPlan.from_json(str(text)) for text in exchange(plan.to_json(), _DIFFER, "check_same_plan", timeout)
    ]
    lines: list[str] = []
    for fingerprint in dict.fromkeys(fingerprints):
        holders = [process for process, one in enumerate(fingerprints) if one == fingerprint]
        if 0 not in holders:
            lines.append(f"from the plan of process 0 to that of process {', '.join(map(str, holders))}:")
            lines += [f"  {line}" for line in str(plans[0].diff(plans[holders[0]])).splitlines()]
    raise DisagreementError(
        f"{len(fingerprints)} processes hold {len(dict.fromkeys(fingerprints))} different plans. "
        "Make each from the same rules, shapes and mesh\n" + "\n".join(lines)
    )
