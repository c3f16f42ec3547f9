"""The end of a search."""

import time
from typing import Self, final

import attrs


@final
@attrs.frozen
class Deadline:
    """The moment at which a search has to end; by default never."""

    moment: float = float("inf")
    """As `time.monotonic` counts."""

    @classmethod
    def after(cls, seconds: float) -> Self:
        """Returns the deadline that is some seconds away."""
        return cls(time.monotonic() + seconds)

    @property
    def seconds_left(self) -> float:
        """The seconds until it; negative once it is over."""
        return self.moment - time.monotonic()

    @property
    def is_over(self) -> bool:
        return self.seconds_left <= 0

    def earlier(self, seconds: float) -> "Deadline":
        """Returns the deadline that is some seconds before it."""
        return Deadline(self.moment - seconds)

    def share(self, count: int) -> "Deadline":
        """Returns the deadline of the first of several searches that divide what is left."""
        return Deadline.after(max(0.0, self.seconds_left) / count)

    def solver_options(self) -> dict[str, float]:
        """Returns the time limit of one call of HiGHS, as options of SciPy."""
        # HiGHS returns nothing at all if it gets no time, and small programs are solved in a tenth of a second. A few
        # solvers are called after a deadline.
        return {} if self.moment == float("inf") else {"time_limit": max(0.1, self.seconds_left)}


NO_DEADLINE = Deadline()
"""A deadline that is never over."""
