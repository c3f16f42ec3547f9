"""What differs in another plan of the same function."""

from typing import TypeAlias, final

import attrs

from shardrules.core.check import bytes_text
from shardrules.core.views.diff import Placements, PlanDiff

Side: TypeAlias = tuple[Placements, float, int, int]
"""Where arguments are, and what a call costs: seconds, bytes on the wire, bytes of memory."""


@final
@attrs.frozen
class AutoPlanDiff:
    """What differs in another plan of the same function, before and after. `AutoPlan.diff` makes them."""

    arguments: PlanDiff
    seconds: tuple[float, float]
    """The modelled time of a call."""
    wire_bytes: tuple[int, int]
    """What a device sends in a call."""
    peak_bytes: tuple[int, int]

    @classmethod
    def between(cls, before: Side, after: Side) -> "AutoPlanDiff":
        """Returns what differs."""
        placements, *figures = zip(before, after, strict=True)
        return cls(PlanDiff.between(*placements), *figures)

    def __str__(self) -> str:
        time = " -> ".join(f"{1000 * seconds:.4g} ms" for seconds in self.seconds)
        wire = " -> ".join(map(bytes_text, self.wire_bytes))
        peak = " -> ".join(map(bytes_text, self.peak_bytes))
        return f"time {time}\nwire {wire}\nmemory {peak}\n{self.arguments}"
