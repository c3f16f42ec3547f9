"""The modelled time of a step: how long it takes, and what that time goes to."""

from typing import Literal, TypeAlias, final

import attrs

Bound: TypeAlias = Literal["compute", "memory", "communication"]
"""The limit of a step."""


def _nothing_is_hidden(time: "StepTime") -> float:
    return time.communication_seconds


@final
@attrs.frozen
class StepTime:
    """The modelled time of one call of a program on one device.

    At each moment the device computes or waits: for a collective (`exposed_seconds`), or for a copy between memories
    (`copy_seconds`). What it sends while it computes costs no time.

    ```python
    time = sr.reports.StepTime(0.012, 0.0051, 0.004, 0.001)
    assert np.isclose(time.seconds, 0.013) and time.bound == "compute"
    assert str(time) == "13 ms: compute 12 ms (4 ms of it memory-bound), communication 5.1 ms (1 ms of it exposed)"
    ```
    """

    compute_seconds: float
    """All kernels together."""
    communication_seconds: float
    """The time that links or networks are busy."""
    memory_seconds: float = 0.0
    """The part of `compute_seconds` in kernels that are limited by memory bandwidth."""
    exposed_seconds: float = attrs.field(default=attrs.Factory(_nothing_is_hidden, takes_self=True))
    """The part of `communication_seconds` in which no kernel runs. By default all of it."""
    copy_seconds: float = 0.0
    """The time that the device waits for copies between its memories, or to and from its host."""

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return self.compute_seconds + self.exposed_seconds + self.copy_seconds

    @property
    def hidden_seconds(self) -> float:
        """The part of `communication_seconds` that costs no time: kernels run meanwhile."""
        return max(0.0, self.communication_seconds - self.exposed_seconds)

    @property
    def bound(self) -> Bound:
        """Communication if links are busy for longer than kernels; otherwise the limit in most of the kernels' time."""
        if self.communication_seconds > self.compute_seconds:
            return "communication"
        return "memory" if 2 * self.memory_seconds > self.compute_seconds else "compute"

    def __str__(self) -> str:
        compute = (
            f"compute {seconds_text(self.compute_seconds)} ({seconds_text(self.memory_seconds)} of it memory-bound)"
        )
        exposed = f" ({seconds_text(self.exposed_seconds)} of it exposed)" * bool(self.communication_seconds)
        communication = f"communication {seconds_text(self.communication_seconds)}{exposed}"
        copies = f", copies {seconds_text(self.copy_seconds)}" if self.copy_seconds else ""
        return f"{seconds_text(self.seconds)}: {compute}, {communication}{copies}"


def seconds_text(seconds: float) -> str:
    """Returns a time with three significant digits and a unit."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        value = seconds * factor
        # What rounds to 1 takes the larger unit.
        if abs(value) >= 0.9995:
            return f"{value:,.0f} {unit}" if abs(value) >= 99.95 else f"{value:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 ms"
