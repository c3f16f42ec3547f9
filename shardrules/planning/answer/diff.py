"""What is other in another plan of the same function."""

from typing import TypeAlias, final

import attrs

from shardrules.core.check import bytes_text
from shardrules.core.views.diff import Placements, PlanDiff

Side: TypeAlias = tuple[Placements, float, int, int]
"""Where arguments are, and what a call costs: seconds, bytes on the wire, bytes of memory."""


@final
@attrs.frozen
class AutoPlanDiff:
    """What is other in another plan of the same function. `AutoPlan.diff` makes them.

    **Arguments:**

    - `arguments`: what is other with the arguments.
    - `seconds`: the modelled time of a call, before and after.
    - `wire_bytes`: what a device sends in one, before and after.
    - `peak_bytes`: the most that lies in its memory, before and after.
    """

    arguments: PlanDiff
    seconds: tuple[float, float]
    wire_bytes: tuple[int, int]
    peak_bytes: tuple[int, int]

    def __str__(self) -> str:
        time = " -> ".join(f"{1000 * one:.4g} ms" for one in self.seconds)
        wire = " -> ".join(map(bytes_text, self.wire_bytes))
        peak = " -> ".join(map(bytes_text, self.peak_bytes))
        return f"time {time}\nwire {wire}\nmemory {peak}\n{self.arguments}"


def difference(before: Side, after: Side) -> AutoPlanDiff:
    """Returns what is other.

    **Arguments:**

    - `before`, `after`: the plans.

    **Returns:**

    An `AutoPlanDiff`.
    """
    return AutoPlanDiff(
        PlanDiff.between(before[0], after[0]), (before[1], after[1]), (before[2], after[2]), (before[3], after[3])
    )
