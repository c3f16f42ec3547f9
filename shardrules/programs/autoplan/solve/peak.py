"""The peak of memory of a plan, as far as it is known before it is compiled."""

import enum
from typing import final

import attrs

from shardrules.programs.autoplan.solve.solver import LIMIT_TOLERANCE


@final
class Fit(enum.StrEnum):
    """The certainty that a plan fits. Only `"no"` is false."""

    CERTAIN = "certain"
    POSSIBLE = "possible"
    NO = "no"

    def __bool__(self) -> bool:
        return self is not Fit.NO


@final
@attrs.frozen
class Peak:
    """The range of the most bytes that a device uses: the compiler decides where in it."""

    at_least: float
    at_most: float

    @property
    def middle(self) -> float:
        """The bytes that are expected."""
        return (self.at_least + self.at_most) / 2

    def fit(self, limit_bytes: float) -> Fit:
        """Returns whether it is within a limit."""
        limit = limit_bytes * (1 + LIMIT_TOLERANCE)
        return Fit.CERTAIN if self.at_most <= limit else Fit.POSSIBLE if self.at_least <= limit else Fit.NO
