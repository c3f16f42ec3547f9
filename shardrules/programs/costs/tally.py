"""The purposes of a step's time, added up while a schedule is played."""

from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias, final

import attrs

Purpose: TypeAlias = Literal["compute", "memory", "exposed", "copy", "sent", "resource", "busy", "hidden"]
"""The purposes that seconds are added up for: kernels, their memory-bound part, waiting for collectives, waiting for
copies, collectives with or without kernels beside them, each resource, the moments at which anything is sent, and
kernels beside hidden collectives."""

Key: TypeAlias = tuple[Purpose, str, str]
"""A purpose with a line of code or a resource; the second line is of the kernels beside a hidden collective."""


@final
@attrs.define
class Tally:
    """Seconds by purpose and line."""

    seconds: dict[Key, float] = attrs.field(factory=dict)

    def add(self, purpose: Purpose, seconds: float, line: str = "", beside: str = "") -> None:
        """Adds seconds to a line."""
        key = purpose, line, beside
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds

    def merge(self, other: "Tally", times: float = 1) -> None:
        """Adds another tally, as often as it occurs."""
        for key, seconds in other.seconds.items():
            self.seconds[key] = self.seconds.get(key, 0.0) + times * seconds

    def total(self, purpose: Purpose) -> float:
        """Returns the sum over all lines."""
        return sum(seconds for (name, _, _), seconds in self.seconds.items() if name == purpose)

    def of(self, purpose: Purpose) -> Mapping[str, float]:
        """Returns the seconds of each line."""
        return {line: seconds for (name, line, _), seconds in self.seconds.items() if name == purpose}

    def hidden(self) -> Iterator[tuple[str, str, float]]:
        """Yields the line of a collective, the line of kernels beside it, and for how long both run."""
        for (name, line, beside), seconds in self.seconds.items():
            if name == "hidden":
                yield line, beside, seconds
