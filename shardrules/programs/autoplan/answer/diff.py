"""Differences between two plans of one function."""

from typing import final

import attrs

from shardrules.core.text import bytes_text
from shardrules.core.views.diff import PlanDiff


@final
@attrs.frozen
class AutoPlanDiff:
    """The differences of another plan of the same function, before and after. `AutoPlan.diff` makes them."""

    arguments: PlanDiff
    seconds: tuple[float, float]
    """The modelled time of a call."""
    wire_bytes: tuple[int, int]
    """The bytes that a device sends in a call."""
    peak_bytes: tuple[int, int]
    host_bytes: tuple[int, int] = (0, 0)
    """The bytes that a device has in the memory of its host."""
    recipe: tuple[str, str] = ("", "")
    """The recipe of a training plan, in words."""

    def __str__(self) -> str:
        recipe = f"recipe {' -> '.join(self.recipe)}\n" if self.recipe[0] != self.recipe[1] else ""
        time = " -> ".join(f"{1000 * seconds:.4g} ms" for seconds in self.seconds)
        wire = " -> ".join(map(bytes_text, self.wire_bytes))
        peak = " -> ".join(map(bytes_text, self.peak_bytes))
        host = "\nhost " + " -> ".join(map(bytes_text, self.host_bytes)) if any(self.host_bytes) else ""
        return f"{recipe}time {time}\nwire {wire}\nmemory {peak}{host}\n{self.arguments}"
