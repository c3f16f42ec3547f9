"""The peak of memory of a plan, as far as it is known before it is compiled."""

import enum
from typing import Self, final

import attrs

from shardrules.core.text import bytes_text
from shardrules.programs.autoplan.solve.solver import LIMIT_TOLERANCE


@final
class Certainty(enum.StrEnum):
    """The certainty that a plan fits. Only `"no"` is false."""

    CERTAIN = "certain"
    POSSIBLE = "possible"
    NO = "no"

    def __bool__(self) -> bool:
        return self is not Certainty.NO


@final
@attrs.frozen
class Peak:
    """The range of the most bytes that a device uses: the compiler decides where in it.

    ```python
    peak = sr.autoplan(lambda w, x: x @ w, jnp.ones((64, 64)), jnp.ones((4096, 64)), mesh=sr.mesh_shape("data:8")).peak
    assert peak.at_least <= peak.expected <= peak.at_most and peak.fit(2**30) == "certain"
    ```
    """

    at_least: float
    expected: float
    at_most: float
    margin: float = 1.0
    """The factor by which a compiler may exceed `at_most`: programs of which it leaves more than expected in memory."""

    def __str__(self) -> str:
        least, most = bytes_text(self.at_least), bytes_text(self.at_most)
        return least if least == most else f"{least} to {most}"

    @classmethod
    def point(cls, nbytes: float) -> Self:
        """Returns a range without width, as of a plan that was compiled."""
        return cls(nbytes, nbytes, nbytes)

    def plus(self, nbytes: float) -> "Peak":
        """Returns the range with more bytes throughout."""
        return Peak(self.at_least + nbytes, self.expected + nbytes, self.at_most + nbytes, self.margin)

    def fit(self, limit_bytes: float) -> Certainty:
        """Returns the certainty that it is within a limit."""
        limit = limit_bytes * (1 + LIMIT_TOLERANCE)
        return (
            Certainty.CERTAIN
            if self.margin * self.at_most <= limit
            else Certainty.POSSIBLE
            if self.at_least <= limit
            else Certainty.NO
        )
