"""A lower bound for the time of a compiled step: a roofline for each kernel, a ring for each collective.

A kernel takes as long as its FLOPs at the peak rate of their dtype, or as long as its memory traffic at the peak
bandwidth, whichever is longer. Collectives run after all kernels, or all of them at the same time: a real step is
between these two sums, and slower by the part of the peak rates that is never reached.
"""

import re
from collections.abc import Iterable
from typing import Literal, TypeAlias, final

import attrs

from shardrules.analysis.machine.hardware import Hardware
from shardrules.analysis.program.collectives import Collective
from shardrules.analysis.program.flops import Matmul
from shardrules.analysis.program.kernels import Kernel, find_kernels
from shardrules.analysis.program.program import CompiledProgram

Bound: TypeAlias = Literal["compute", "memory", "communication"]
"""What limits a step."""

_PASSES = re.compile(r"_x(\d+)$")
"""How many matmuls in a smaller dtype an algorithm adds up: 3 in `dot_bf16_bf16_f32_x3`."""

_DTYPES = {"tf32": "f32", "any": "f8"}
"""Dtypes that only the names of algorithms have, as `dot_any_f8_any_f8_f32`, and what hardware sheets call them."""


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
        sum(max(flops_seconds, traffic_seconds) * count for flops_seconds, traffic_seconds, count in timings),
        sum(collective_seconds(collective, hardware) for collective in collectives),
        sum(
            traffic_seconds * count
            for flops_seconds, traffic_seconds, count in timings
            if traffic_seconds > flops_seconds
        ),
    )


def compute_seconds(kernels: Iterable[Kernel], hardware: Hardware) -> float:
    """Models how long all runs of kernels take, one after the other. Launch times are not modelled."""
    return sum(max(_kernel_seconds(kernel, hardware)) * kernel.times.count for kernel in kernels)


def collective_seconds(collective: Collective, hardware: Hardware) -> float:
    """Models how long all runs of a collective take in one call of a program. A single device takes no time.

    Inside a host or a slice the devices of a group form a ring over their links. On a torus a group uses the links of
    the dimensions that it spans. Not modelled: a ring along a dimension without wrap-around has half of these links,
    and other groups may share them. Over several hosts the ring enters and leaves each host once, over the network
    shares of all its members there. An all-to-all sends what is for another host over each device's own share, and so
    does a permute.

    ```python
    import attrs
    from shardrules.analysis.audits.roofline import collective_seconds
    from shardrules.analysis.program.collectives import Collective
    from shardrules.analysis.program.flow import Times

    h100 = sr.Hardware.named("cuda:h100")
    wire = 7 * 2**27
    inside = Collective("all-gather", ("data",), ("data",), 8, (), 2**30, wire, Times(3), "main", "all-gather.1")
    assert np.isclose(collective_seconds(inside, h100), 3 * (wire / 450e9 + 7 * 3.4e-6))
    across = attrs.evolve(inside, host_count=8)
    assert np.isclose(collective_seconds(across, h100), 3 * (wire / 50e9 + 7 * 14e-6))
    ```
    """
    size, host_count = collective.group_size, _host_count(collective)
    if size < 2:
        return 0.0
    # A ring of n devices has n - 1 steps, an all-reduce twice as many, and each step waits for a message. All steps but
    # those that change hosts are over links. A permute is one step.
    is_permute = collective.kind == "collective-permute"
    rounds = 2 if collective.kind == "all-reduce" else 1
    network_steps = min(1, host_count - 1) if is_permute else rounds * (host_count - 1)
    link_steps = 1 - network_steps if is_permute else rounds * (size - host_count)
    latency = link_steps * hardware.link_latency_seconds + network_steps * hardware.network_latency_seconds
    link_bytes, network_bytes = _sent_bytes(collective, size, host_count)
    # Links and network work at the same time, on different parts of the data.
    transfer = max(
        link_bytes / (hardware.link_bytes_per_second * _link_share(collective, hardware)),
        network_bytes / hardware.network_bytes_per_second,
    )
    return (transfer + latency) * collective.times.count


def _host_count(collective: Collective) -> int:
    """How many hosts or slices a group spans; without a target this is known only of collectives between slices."""
    if collective.between_slices and collective.host_count == 1:
        return collective.group_size
    return collective.host_count


def _link_share(collective: Collective, hardware: Hardware) -> float:
    """The share of a device's links that a group uses; all of them if its place in the torus is unknown."""
    if not hardware.torus_dims or not collective.torus_dims:
        return 1.0
    return min(collective.torus_dims, hardware.torus_dims) / hardware.torus_dims


def _sent_bytes(collective: Collective, size: int, host_count: int) -> tuple[float, float]:
    """What a device sends over its links, and what its share of the network carries."""
    wire_bytes, devices_per_host = collective.wire_bytes, size / host_count
    if host_count == 1:
        return wire_bytes, 0.0
    if collective.kind == "collective-permute":
        return 0.0, wire_bytes
    if collective.kind.endswith("all-to-all"):
        # Of the other `size - 1` devices, `size - devices_per_host` are on other hosts, and each gets an equal part.
        outside = wire_bytes * (size - devices_per_host) / (size - 1)
        return wire_bytes - outside, outside
    # The ring's bytes leave a host once, over the network shares of all its members.
    return wire_bytes if devices_per_host > 1 else 0.0, wire_bytes / devices_per_host


def _kernel_seconds(kernel: Kernel, hardware: Hardware) -> tuple[float, float]:
    """The time of a kernel's FLOPs, and of its memory traffic, each time it runs."""
    flops_seconds = sum(_flops_seconds(flops, dtype, precision, hardware) for (dtype, precision), flops in kernel.flops)
    return flops_seconds, (kernel.read_bytes + kernel.written_bytes) / hardware.memory_bytes_per_second


def _flops_seconds(flops: int, dtype: str, precision: str, hardware: Hardware) -> float:
    # `precision` is one of JAX's, or the name of an algorithm. `dot_f32_f32_f32` is what "highest" asks for: full f32,
    # not the TF32 or bf16 that a matmul of f32 may run in.
    highest = precision == "highest" or precision.startswith("dot_f32")
    passes = _PASSES.search(precision)
    rate = hardware.flops_per_second(_DTYPES.get(dtype, dtype), highest=highest)
    return flops * (int(passes[1]) if passes else 1) / rate


def _ms(seconds: float) -> str:
    """Milliseconds with three significant digits."""
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
