"""What others measured of single operations, against what the sheets make of them."""

import attrs
import pytest

from shardrules.programs.costs.collective import Group, collective_cost
from shardrules.programs.costs.matmul import matmul_seconds
from shardrules.programs.costs.memory import traffic_seconds
from shardrules.programs.machine.hardware import Hardware

A100, H100, B200 = (Hardware.named(f"cuda:{chip}") for chip in ("a100", "h100", "b200"))
BURST = attrs.evolve(H100, matmul_fractions={"f8": 0.71, "bf16": 0.8})
"""A cool chip that multiplies for less than a second: no power limit slows its clock yet."""

V5E, V5P, V6E, V7X = (Hardware.named(f"tpu:{chip}") for chip in ("v5e", "v5p", "v6e", "v7x"))

TOLERANCE = 0.1
"""Machines, clocks and versions of libraries differ by about as much between those who measure."""


def holds(modelled: float, measured: float, tolerance: float = TOLERANCE) -> bool:
    return 1 - tolerance <= modelled / measured <= 1 + tolerance


@pytest.mark.parametrize(
    ("hardware", "dtype", "sizes", "tera"),
    [
        (V6E, "bf16", (1, 8192, 8192, 8192), 827),
        (BURST, "bf16", (1, 256, 2048, 1024), 132),
        (BURST, "bf16", (1, 2048, 2048, 4096), 742),
        (BURST, "bf16", (4, 4096, 4096, 4096), 794),
        # https://github.com/Azure/AI-benchmarking-guide
        (A100, "f16", (1, 1024, 1024, 1024), 119.4),
        (A100, "f16", (1, 2048, 2048, 2048), 221.8),
        (A100, "f16", (1, 8192, 8192, 8192), 253.7),
        (A100, "f16", (1, 16384, 16384, 16384), 256.5),
        (H100, "f8e4m3fn", (1, 8192, 8192, 8192), 1290),
        (H100, "f8e4m3fn", (1, 16384, 16384, 16384), 1377),
        # https://rocm.blogs.amd.com/software-tools-optimization/Understanding_Peak_and_Max-Achievable_FLOPS
        (H100, "bf16", (1, 16384, 16384, 16384), 680),
        # https://github.com/stas00/ml-engineering
        (BURST, "bf16", (1, 2048, 2048, 13312), 794.5),
        (B200, "bf16", (1, 8192, 8192, 8192), 1745),
        # https://github.com/yangwhale/gpu-tpu-pedia
        (V7X, "bf16", (1, 8192, 8192, 8192), 1081),
        (V7X, "bf16", (1, 16384, 16384, 16384), 1103),
    ],
)
def test_matmuls(hardware: Hardware, dtype: str, sizes: tuple[int, int, int, int], tera: float) -> None:
    batch, m, n, k = sizes
    seconds = hardware.launch_seconds + matmul_seconds(batch, m, n, k, dtype, "default", hardware)
    assert holds(2 * batch * m * n * k / seconds / 1e12, tera)


@pytest.mark.parametrize(
    ("hardware", "size", "microseconds"),
    [
        *((V5E, 256, 3.44), (V5E, 512, 6.77), (V5E, 1024, 20.0), (V5E, 2048, 95.2), (V5E, 4096, 721)),
        *((V5P, 256, 2.84), (V5P, 512, 4.02), (V5P, 1024, 9.65), (V5P, 2048, 42.8), (V5P, 4096, 311)),
        *((V6E, 256, 2.83), (V6E, 512, 4.04), (V6E, 1024, 9.93), (V6E, 2048, 31.9), (V6E, 4096, 172)),
    ],
)
def test_cubes_on_tpus_take_what_their_compiler_expects(hardware: Hardware, size: int, microseconds: float) -> None:
    """The `estimated_cycles` of libtpu for a matmul of bf16, at the clock of the sheet."""
    seconds = hardware.launch_seconds + matmul_seconds(1, size, size, size, "bf16", "default", hardware)
    assert holds(seconds * 1e6, microseconds, 0.2)


@pytest.mark.parametrize(
    ("hardware", "copied_bytes", "rate"),
    [(V6E, 32 * 2**20, 1360e9), (V5P, 65e6, 2.29e12), (V5P, 2**30, 2.38e12), (H100, 2**30, 2.90e12)],
)
def test_copies(hardware: Hardware, copied_bytes: float, rate: float) -> None:
    seconds = hardware.launch_seconds + traffic_seconds(2 * copied_bytes, hardware)
    assert holds(2 * copied_bytes / seconds, rate)


@pytest.mark.parametrize(
    ("sent_bytes", "rate"), [(1.6e6, 71.8e9), (6.3e6, 129e9), (25e6, 162e9), (101e6, 175e9), (403e6, 178.8e9)]
)
def test_all_gathers_on_four_chips_of_two_devices(sent_bytes: float, rate: float) -> None:
    """Six of the eight shards come over the links of a chip."""
    group = Group(8, torus_dims=2, open_dims=2, chip_devices=2)
    cost = collective_cost("all-gather", sent_bytes * 7 / 6, group, V7X)
    assert holds(sent_bytes / cost.seconds, rate)


def test_all_reduces_on_a_pod_and_between_slices() -> None:
    reduced = 606e6
    inside = 2 * reduced * 255 / 256
    assert holds(inside / collective_cost("all-reduce", inside, Group(256, torus_dims=2), V6E).seconds, 235.8e9)
    # Each of two slices has half of the array, and every chip a copy of that.
    between = reduced / 2
    assert holds(between / collective_cost("all-reduce", between, Group(2, host_count=2), V6E).seconds, 4.11e9)


def test_a_ring_of_four_chips() -> None:
    ring, array = Group(4, torus_dims=2, open_dims=2), 400e6
    scatter = collective_cost("reduce-scatter", array * 3 / 4, ring, V5P).seconds
    reduce = collective_cost("all-reduce", array * 3 / 2, ring, V5P).seconds
    assert 91.7e9 <= array * 3 / 4 / scatter <= 99.3e9
    assert 130e9 <= array * 3 / 2 / reduce <= 139e9
    assert 0.66 <= scatter / reduce <= 0.76


@pytest.mark.parametrize(
    ("hardware", "kind", "size", "payload_bytes", "seconds"),
    [
        # Points of XLA's tables.
        (H100, "all-gather", 8, 2**20, 31.1e-6),
        (H100, "all-gather", 8, 2**30, 2730e-6),
        (H100, "all-reduce", 2, 2**24, 101e-6),
        (H100, "reduce-scatter", 4, 2**27, 404e-6),
        (H100, "all-to-all", 8, 2**31, 5533e-6),
        (H100, "collective-permute", 8, 2**30, 3697e-6),
        # https://github.com/Azure/AI-benchmarking-guide
        (A100, "all-reduce", 8, 2**30, 2**30 * 1.75 / 228.1e9),
    ],
)
def test_tables_of_collectives(hardware: Hardware, kind: str, size: int, payload_bytes: int, seconds: float) -> None:
    rounds = {"all-reduce": 2 * (size - 1) / size, "collective-permute": 1.0}.get(kind, (size - 1) / size)
    assert holds(collective_cost(kind, rounds * payload_bytes, Group(size), hardware).seconds, seconds, 0.01)


@pytest.mark.parametrize(("payload_bytes", "rate"), [(2**30, 366e9), (2**34, 376.7e9)])
def test_all_reduces_over_four_hosts(payload_bytes: int, rate: float) -> None:
    """https://github.com/stas00/ml-engineering, network/benchmarks; smaller ones take longer than modelled."""
    wire_bytes = 2 * payload_bytes * 31 / 32
    assert holds(wire_bytes / collective_cost("all-reduce", wire_bytes, Group(32, host_count=4), B200).seconds, rate)
