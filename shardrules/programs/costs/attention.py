"""The time of attention kernels: their matmuls do not reach the rate of a matmul alone, and vectors are in the way.

On TPUs the units for vectors compute the softmax while the units for matmuls wait, or the other way around, and every
block of scores costs some cycles beside. The cycles are counted in the programs that libtpu 0.0.42 makes of
`splash_attention` for a v5e, v5p and v6e, with blocks of 512 x 512 and heads of 128: instructions in its loop over
blocks, and around it.

On GPUs the kernels reach a fraction of the peak that was measured on an H100: FlashAttention-3, arXiv 2407.08608,
figures 5 and 6, which measures cuDNN and Triton as well, at 16 thousand tokens and lengths of 512 to 16 thousand.
"""

import math
from types import MappingProxyType

from shardrules.programs.compiled.flops import Matmul
from shardrules.programs.costs.matmul import flops_seconds, multiplication, padded_size
from shardrules.programs.machine.hardware import Hardware, fraction

_PHASES = MappingProxyType({2: "fwd", 3: "dq", 4: "dkv", 5: "backward"})
"""The pass that a kernel computes, by the number of its matmuls."""

_VECTOR_CYCLES = MappingProxyType(
    {
        128: {"fwd": 1172 / 256, "dq": 1494 / 256, "dkv": 1897 / 256, "backward": 2300 / 256},
        256: {"fwd": 904 / 256, "dq": 1016 / 256, "dkv": 1284 / 256, "backward": 1550 / 256},
    }
)
"""The cycles of a core for 1,024 scores, by the size of the units for matmuls. Those of the fused backward pass are
estimated: what it does besides is one more matmul."""

_BLOCK_CYCLES = MappingProxyType({"fwd": 500, "dq": 220, "dkv": 330, "backward": 400})
"""The cycles around a block of scores: its own, and its share of skipped blocks and of the first and last of a row, for
a causal mask of 4 x 4 blocks. With longer rows it falls, by a quarter with 8 x 8."""

_CUDNN = MappingProxyType(
    {
        ("fwd", 64): (415, 120),
        ("fwd", 128): (620, 110),
        ("fwd", 256): (590, 130),
        ("backward", 64): (445, 330),
        ("backward", 128): (533, 310),
        ("backward", 256): (533, 310),
    }
)
"""For each head size the TFLOP/s at infinite length, and the length at which half of it is reached. The gradient for
heads of 256 was not measured: it is as for heads of 128."""

_SHORT_RUNS = 794 / 989.4
"""The fraction of its peak that a large bf16 matmul reaches on an H100 in short runs, such as those in which kernels of
attention were measured: https://github.com/stas00/ml-engineering, compute/accelerator."""

_TRITON = MappingProxyType({"fwd": 395, "backward": 322})
"""The TFLOP/s of kernels written in Triton; the gradient is FlashAttention-2's, which is no better on an H100."""


def sustained_part(hardware: Hardware) -> float:
    """The part of a rate measured in short runs that is left under load, when power limits the clock: of attention as
    much as of large matmuls."""
    return min(1.0, fraction(hardware.matmul_fractions, "bf16") / _SHORT_RUNS)


def is_attention(matmul: Matmul) -> bool:
    """It has several matmuls, and more than a single query, whose limit is memory."""
    return len(matmul.products) in _PHASES and matmul.products[0].m > 1


def attention_seconds(matmul: Matmul, hardware: Hardware) -> float:
    """Returns how long an attention kernel computes."""
    phase, scores = _PHASES[len(matmul.products)], matmul.products[0]
    kind, _ = multiplication(matmul.dtype, matmul.precision, hardware)
    peak = dict(hardware.peak_flops)[kind]
    if hardware.clock_hertz:
        tile = 256 if hardware.matmul_tile > 128 else 128
        padded = sum(
            2 * product.batch * math.prod(padded_size(size, tile) for size in (product.m, product.n, product.k))
            for product in matmul.products
        )
        # A core of all TPUs since the v4 has four units for matmuls.
        cores = max(1, round(hardware.flops_per_second("bf16") / (2 * 4 * tile**2 * hardware.clock_hertz)))
        score_count = scores.batch * scores.m * scores.n
        # Kernels without a mask do not say how large their blocks are.
        blocks = scores.batch if matmul.is_masked else max(scores.batch, score_count / 512**2)
        vector = score_count / 1024 * _VECTOR_CYCLES[tile][phase]
        around = blocks * _BLOCK_CYCLES[phase]
        return max(padded / peak, vector / cores / hardware.clock_hertz) + around / cores / hardware.clock_hertz
    if not hardware.launch_seconds and not hardware.matmul_rates:  # a sheet of peaks alone
        return flops_seconds(matmul.flops, matmul.dtype, matmul.precision, hardware)
    pass_name = "fwd" if phase == "fwd" else "backward"
    per_rate = peak / 989.4 * sustained_part(hardware)  # the TFLOP/s of the H100 in the paper
    if not matmul.op.startswith("__cudnn"):
        return matmul.flops / (_TRITON[pass_name] * per_rate)
    size = 64 if scores.k <= 96 else 128 if scores.k <= 192 else 256
    rate, half = _CUDNN[pass_name, size]
    if matmul.is_masked:
        rate *= 550 / 620  # cuDNN's forward pass for heads of 128, in blocks of 128 x 128
    return matmul.flops / (rate * per_rate) * (1 + half / scores.m)
