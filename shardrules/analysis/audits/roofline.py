"""A lower bound for the time of a compiled step: a roofline for each kernel, a ring for each collective.

A kernel takes as long as its FLOPs at the peak rate of their dtype, or as long as its memory traffic at the peak
bandwidth, whichever is longer. Collectives run after all kernels, or all of them at the same time: a real step is
between these two sums, and slower by the part of the peak rates that is never reached.
"""

from collections.abc import Iterable
from typing import Literal, TypeAlias, final

import attrs

from shardrules.analysis.costs.collective import collective_seconds
from shardrules.analysis.costs.matmul import flops_seconds
from shardrules.analysis.costs.memory import traffic_seconds
from shardrules.analysis.machine.hardware import Hardware
from shardrules.analysis.program.collectives import Collective
from shardrules.analysis.program.flops import Matmul
from shardrules.analysis.program.kernels import Kernel, find_kernels
from shardrules.analysis.program.program import CompiledProgram

Bound: TypeAlias = Literal["compute", "memory", "communication"]
"""What limits a step."""


@final
@attrs.frozen
class StepTime:
    """The modelled time of one call of a program on one device.

    Kernels and collectives each run one after the other; `memory_seconds` is the part of `compute_seconds` in kernels
    that are limited by memory bandwidth.

    ```python
    time = sr.reports.StepTime(0.012, 0.0051, 0.004)
    assert time.overlapped_seconds == 0.012 and time.bound == "compute"
    assert str(time) == "12 ms to 17.1 ms: compute 12 ms (4 ms of it memory-bound), communication 5.1 ms"
    ```
    """

    compute_seconds: float
    communication_seconds: float
    memory_seconds: float = 0.0

    @property
    def serial_seconds(self) -> float:
        """The time without any overlap."""
        return self.compute_seconds + self.communication_seconds

    @property
    def overlapped_seconds(self) -> float:
        """The time if compute and communication overlap perfectly."""
        return max(self.compute_seconds, self.communication_seconds)

    @property
    def bound(self) -> Bound:
        """Which of the two is longer; for kernels, what limits most of their time."""
        if self.communication_seconds > self.compute_seconds:
            return "communication"
        return "memory" if 2 * self.memory_seconds > self.compute_seconds else "compute"

    def __str__(self) -> str:
        return (
            f"{_ms(self.overlapped_seconds)} to {_ms(self.serial_seconds)}: compute {_ms(self.compute_seconds)} "
            f"({_ms(self.memory_seconds)} of it memory-bound), communication {_ms(self.communication_seconds)}"
        )


def step_time(
    program: CompiledProgram, collectives: Iterable[Collective], matmuls: Iterable[Matmul], hardware: Hardware
) -> StepTime:
    """Models how long a program takes. `collectives` have to be read with a target, so that hosts are known.

    A conditional takes as long as all of its branches, and a loop of unknown length as long as one round.
    """
    timings = [(*_kernel_seconds(kernel, hardware), kernel.times.count) for kernel in find_kernels(program, matmuls)]
    return StepTime(
        sum(max(computing, moving) * count for computing, moving, count in timings),
        sum(collective_seconds(collective, hardware) for collective in collectives),
        sum(moving * count for computing, moving, count in timings if moving > computing),
    )


def compute_seconds(kernels: Iterable[Kernel], hardware: Hardware) -> float:
    """Models how long all runs of kernels take, one after the other. Launch times are not modelled."""
    return sum(max(_kernel_seconds(kernel, hardware)) * kernel.times.count for kernel in kernels)


def _kernel_seconds(kernel: Kernel, hardware: Hardware) -> tuple[float, float]:
    """The time of a kernel's FLOPs, and of its memory traffic, each time it runs."""
    computing = sum(flops_seconds(flops, dtype, precision, hardware) for (dtype, precision), flops in kernel.flops)
    return computing, traffic_seconds(kernel.read_bytes + kernel.written_bytes, hardware)


def _ms(seconds: float) -> str:
    """Milliseconds with three significant digits."""
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
