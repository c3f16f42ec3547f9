"""How long a step of a compiled program takes at least: a roofline for each kernel, a ring for each collective.

Every kernel takes as long as its FLOPs at the peak rate of what they multiply, or as long as its traffic with memory at
the peak bandwidth, whichever is longer. Collectives then run after the kernels, or all of them beside these: the truth
lies between both sums, further up by what nothing ever reaches of its peak.
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
"""What a step waits for most."""

_PASSES = re.compile(r"_x(\d+)$")
_NAMES = {"tf32": "f32", "any": "f8"}
"""What XLA calls the types of some algorithms, and what they are multiplied as."""


@final
@attrs.frozen
class StepTime:
    """The modelled time of one call of a program on one device.

    **Arguments:**

    - `compute_seconds`: what its kernels take, one after the other.
    - `communication_seconds`: what its collectives take, one after the other.
    - `memory_seconds`: the part of `compute_seconds` in kernels that wait for memory.

    ```python
    time = StepTime(0.012, 0.0051, 0.004)
    assert time.overlapped_seconds == 0.012 and time.bound == "compute"
    assert str(time) == "12 ms to 17.1 ms: compute 12 ms (4 ms of it at memory), communication 5.1 ms"
    ```
    """

    compute_seconds: float
    communication_seconds: float
    memory_seconds: float = 0.0

    @property
    def serial_seconds(self) -> float:
        """What both take if nothing overlaps."""
        return self.compute_seconds + self.communication_seconds

    @property
    def overlapped_seconds(self) -> float:
        """What both take if the shorter is hidden behind the longer one."""
        return max(self.compute_seconds, self.communication_seconds)

    @property
    def bound(self) -> Bound:
        """Which of them is longer, and, where that is the kernels, what most of their time is spent on."""
        if self.communication_seconds > self.compute_seconds:
            return "communication"
        return "memory" if 2 * self.memory_seconds > self.compute_seconds else "compute"

    def __str__(self) -> str:
        return (
            f"{_ms(self.overlapped_seconds)} to {_ms(self.serial_seconds)}: compute {_ms(self.compute_seconds)} "
            f"({_ms(self.memory_seconds)} of it at memory), communication {_ms(self.communication_seconds)}"
        )


def step_time(
    program: CompiledProgram, collectives: Iterable[Collective], matmuls: Iterable[Matmul], hardware: Hardware
) -> StepTime:
    """Models how long a program takes.

    **Arguments:**

    - `program`: the program.
    - `collectives`: its collectives, as `find_collectives` returns them: with a target, so that it is known which of
        them go between hosts.
    - `matmuls`: its matmuls, as `find_matmuls` returns them.
    - `hardware`: what it runs on.

    **Returns:**

    A `StepTime`. A conditional takes as long as all of its branches, and a loop that runs until something happens as
    long as one round.

    ```python
    from shardrules.analysis.program.collectives import find_collectives
    from shardrules.analysis.program.flops import find_matmuls
    from shardrules.analysis.program.program import read_program

    mesh = sr.create_mesh("data:8")
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, P("data")))
    program = read_program(jax.jit(lambda x: (x @ x.T).sum()).lower(x).compile().as_text())
    time = step_time(program, find_collectives(program, mesh), find_matmuls(program), sr.Hardware.named("cuda:h100"))
    assert time.bound == "communication"  # waiting for each other is all there is to do for so little
    assert time.overlapped_seconds < time.serial_seconds
    ```
    """
    spent = [(_seconds(one, hardware), one.times.count) for one in find_kernels(program, matmuls)]
    return StepTime(
        sum(max(computing, moving) * count for (computing, moving), count in spent),
        sum(collective_seconds(one, hardware) for one in collectives),
        sum(moving * count for (computing, moving), count in spent if moving > computing),
    )


def compute_seconds(kernels: Iterable[Kernel], hardware: Hardware) -> float:
    """Models how long kernels take, one after the other.

    **Arguments:**

    - `kernels`: the kernels.
    - `hardware`: what they run on.

    **Returns:**

    The sum over all runs of the longer of two times: that of the FLOPs at their peak rates, and that of the traffic
    with memory at its bandwidth. Nothing is added for launching them.

    ```python
    from shardrules.analysis.program.flow import Times

    h100 = sr.Hardware.named("cuda:h100")
    kernel = Kernel("add.1", "body", "fusion", "", (), 2 * 335 * 10**6, 335 * 10**6, (), Times(12))
    assert np.isclose(compute_seconds([kernel], h100), 12 * 300e-6)
    busy = attrs.evolve(kernel, flops=((("bf16", "default"), 10**12),))
    assert np.isclose(compute_seconds([busy], h100), 12 * 10**12 / 989.4e12)
    ```
    """
    return sum(max(_seconds(one, hardware)) * one.times.count for one in kernels)


def collective_seconds(collective: Collective, hardware: Hardware) -> float:
    """Models how long a collective takes in one call of a program, all of its runs together.

    Inside a host or a slice the devices of a group form a ring over their links. Of those of a torus a group has the
    part of the dimensions along which it lies; that a ring along a dimension that is not closed has half of that, and
    that others may go along the same links, is left out. Over several hosts the ring enters and leaves each of them
    once, over the network shares of all its members there. An all-to-all sends what is for another host over each
    device's own share, and so does a permute.

    **Arguments:**

    - `collective`: the collective. One that was found without a target is taken to stay inside a host.
    - `hardware`: what it runs on.

    **Returns:**

    The time to send, and the latency of every step: one for a permute, else one less than there are devices, twice
    that for an all-reduce; of these, one less than there are hosts go over the network. A single device takes none.

    ```python
    from shardrules.analysis.program.flow import Times

    h100 = sr.Hardware.named("cuda:h100")
    wire = 7 * 2**27
    inside = Collective("all-gather", ("data",), ("data",), 8, (), 2**30, wire, Times(3), "main", "all-gather.1")
    assert np.isclose(collective_seconds(inside, h100), 3 * (wire / 450e9 + 7 * 3.4e-6))
    across = attrs.evolve(inside, host_count=8)
    assert np.isclose(collective_seconds(across, h100), 3 * (wire / 50e9 + 7 * 14e-6))
    ```
    """
    count, hosts = collective.group_size, _host_count(collective)
    if count < 2:
        return 0.0
    permute = collective.kind == "collective-permute"
    rounds = 2 if collective.kind == "all-reduce" else 1
    far = min(1, hosts - 1) if permute else rounds * (hosts - 1)
    near = 1 - far if permute else rounds * (count - hosts)
    waiting = near * hardware.link_latency_seconds + far * hardware.network_latency_seconds
    linked, networked = _sent(collective, count, hosts)
    sending = max(
        linked / (hardware.link_bytes_per_second * _links(collective, hardware)),
        networked / hardware.network_bytes_per_second,
    )
    return (sending + waiting) * collective.times.count


def _host_count(collective: Collective) -> int:
    """How many hosts or slices it spans. Without a target only one between slices is known to span several."""
    if collective.between_slices and collective.host_count == 1:
        return collective.group_size
    return collective.host_count


def _links(collective: Collective, hardware: Hardware) -> float:
    """The part of the links of a device that a group has. One whose place in the torus is not known has all."""
    if not hardware.torus_dims or not collective.torus_dims:
        return 1.0
    return min(collective.torus_dims, hardware.torus_dims) / hardware.torus_dims


def _sent(collective: Collective, count: int, hosts: int) -> tuple[float, float]:
    """What a device sends over its links, and what its share of the network carries."""
    wire, members = collective.wire_bytes, count / hosts
    if hosts == 1:
        return wire, 0.0
    if collective.kind == "collective-permute":
        return 0.0, wire
    if collective.kind.endswith("all-to-all"):
        outside = wire * (count - members) / (count - 1)
        return wire - outside, outside
    return wire if members > 1 else 0.0, wire / members


def _seconds(kernel: Kernel, hardware: Hardware) -> tuple[float, float]:
    """What the FLOPs of a kernel take, and what its traffic with memory takes, each time it runs."""
    computing = sum(_flops_seconds(flops, *kind, hardware) for kind, flops in kernel.flops)
    return computing, (kernel.read_bytes + kernel.written_bytes) / hardware.memory_bytes_per_second


def _flops_seconds(flops: int, dtype: str, precision: str, hardware: Hardware) -> float:
    passes = _PASSES.search(precision)  # an algorithm that adds up several products of a smaller type
    highest = precision == "highest" or precision.startswith("dot_f32")
    rate = hardware.flops_per_second(_NAMES.get(dtype, dtype), highest=highest)
    return flops * (int(passes[1]) if passes else 1) / rate


def _ms(seconds: float) -> str:
    """Milliseconds with three digits that count."""
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
