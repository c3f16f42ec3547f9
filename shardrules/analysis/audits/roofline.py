"""What kernels take by a roofline: their FLOPs or their memory traffic, whichever takes longer."""

from collections.abc import Iterable

from shardrules.analysis.costs.matmul import flops_seconds
from shardrules.analysis.costs.memory import traffic_seconds
from shardrules.analysis.machine.hardware import Hardware
from shardrules.analysis.program.kernels import Kernel


def compute_seconds(kernels: Iterable[Kernel], hardware: Hardware) -> float:
    """Models how long all runs of kernels take, one after the other. Launch times are not modelled."""
    return sum(max(_kernel_seconds(kernel, hardware)) * kernel.times.count for kernel in kernels)


def _kernel_seconds(kernel: Kernel, hardware: Hardware) -> tuple[float, float]:
    """The time of a kernel's FLOPs, and of its memory traffic, each time it runs."""
    computing = sum(flops_seconds(flops, dtype, precision, hardware) for (dtype, precision), flops in kernel.flops)
    return computing, traffic_seconds(kernel.read_bytes + kernel.written_bytes, hardware)
