"""The time of one run of a compiled kernel, from its most reliable description.

The user's costs come first. Then the compiler's own estimate in cycles, which libtpu prints for the kernels that it
compiles itself: of a matmul it knows the tiles and how they fill the units. Then the shapes of the matmuls, at the
rates that the hardware reaches for them, or the memory traffic, whichever takes longer.

The estimate is believed for matmuls only. Held against measurements, the estimate for 8192x8192x8192 on a v6e is within
1 %. Of other kernels it is twice too long in bfloat16: it gives a copy as many cycles as the copy of the same elements
in float32.
"""

import math

import attrs

from shardrules.programs.compiled.flops import Matmul
from shardrules.programs.compiled.kernels import Kernel
from shardrules.programs.costs.attention import attention_seconds, is_attention
from shardrules.programs.costs.matmul import flops_seconds, matmul_seconds
from shardrules.programs.costs.memory import host_seconds, traffic_seconds
from shardrules.programs.machine.hardware import Hardware

READS_PER_WRITE = 20
"""A kernel that reads this many times the bytes that it writes is as fast as one that only reads, within 1 %: on GPUs
reads are up to 10 % faster than copies."""


def kernel_seconds(kernel: Kernel, hardware: Hardware) -> float:
    """Returns how long one run of a kernel takes, its launch included."""
    estimate = estimated_seconds(kernel, hardware)
    if hardware.clock_hertz and kernel.is_scalar and not kernel.matmuls and estimate is None:
        return traffic_part(kernel, hardware)  # TPUs have a core for scalars: nothing is launched
    roofline = hardware.launch_seconds + max(flops_part(kernel, hardware), traffic_part(kernel, hardware))
    if estimate is None or any(matmul.origin == "user" for matmul in kernel.matmuls):
        return roofline
    # What stays in the memory beside the cores counts as traffic, too, and the compiler knows better.
    return estimate if kernel.flops else min(estimate, roofline)


def estimated_seconds(kernel: Kernel, hardware: Hardware) -> float | None:
    """The compiler's own estimate; `None` without any, or where the clock is unknown."""
    if not kernel.estimated_cycles or not hardware.clock_hertz:
        return None
    return kernel.estimated_cycles / hardware.clock_hertz


def flops_part(kernel: Kernel, hardware: Hardware) -> float:
    """The time of a kernel's matmuls, one after the other."""
    if kernel.matmuls:
        return math.fsum(_matmul_seconds(matmul, hardware) for matmul in kernel.matmuls)
    return math.fsum(flops_seconds(flops, dtype, precision, hardware) for (dtype, precision), flops in kernel.flops)


def traffic_part(kernel: Kernel, hardware: Hardware) -> float:
    """The time of a kernel's memory traffic, all of its passes together."""
    access = "read" if kernel.read_bytes >= READS_PER_WRITE * kernel.written_bytes else "copy"
    gathered = min(kernel.gathered_bytes, kernel.device_bytes)
    seconds = traffic_seconds(gathered, hardware, "gather")
    seconds += traffic_seconds(kernel.device_bytes - gathered, hardware, access)
    # What it reads and writes in the memory of the host is on its way at the same time.
    return max(seconds * kernel.pass_count, *(host_seconds(nbytes, hardware) for nbytes in kernel.host_bytes))


def _matmul_seconds(matmul: Matmul, hardware: Hardware) -> float:
    if not matmul.products:
        return flops_seconds(matmul.flops, matmul.dtype, matmul.precision, hardware)
    formula_flops = sum(product.flops for product in matmul.products)
    if matmul.origin == "estimate" and formula_flops:
        # The author says how much it computes, the formula in which shapes.
        whole = attrs.evolve(matmul, flops=formula_flops, origin="formula")
        return matmul.flops / formula_flops * _matmul_seconds(whole, hardware)
    if is_attention(matmul):
        return attention_seconds(matmul, hardware)
    return math.fsum(
        matmul_seconds(
            product.batch,
            *(product.whole_blocks or (product.m, product.n, product.k)),
            matmul.dtype,
            matmul.precision,
            hardware,
        )
        for product in matmul.products
    )
