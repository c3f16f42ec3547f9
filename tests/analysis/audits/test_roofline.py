"""The modelled time of steps: kernels and collectives by hand, and what has to hold for all of them."""

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardrules as sr
from shardrules.analysis.audits.roofline import compute_seconds
from shardrules.analysis.machine.hardware import Hardware
from shardrules.analysis.program.flow import Times
from shardrules.analysis.program.kernels import Kernel

H100, V5E, V5P = (sr.Hardware.named(name) for name in ("cuda:h100", "tpu:v5e", "tpu:v5p"))
ROUND = Hardware(
    "round figures",
    {"bf16": 1000.0, "f32": 500.0, "f32_highest": 100.0, "f8": 2000.0},
    10**9,
    memory_bytes_per_second=100.0,
    link_bytes_per_second=10.0,
    link_latency_seconds=0.1,
    network_bytes_per_second=1.0,
    network_latency_seconds=0.5,
    devices_per_host=8,
)


def kernel(read: int, written: int, *flops: tuple[tuple[str, str], int], count: int = 1) -> Kernel:
    return Kernel("k", "main", "fusion", "", (), read, written, flops, Times(count))


@pytest.mark.parametrize(
    ("kernel", "seconds"),
    [
        (kernel(150, 50), 2.0),
        (kernel(150, 50, count=12), 24.0),
        (kernel(0, 0), 0.0),
        (kernel(150, 50, (("bf16", "default"), 1000)), 2.0),
        (kernel(150, 50, (("bf16", "default"), 4000)), 4.0),
        (kernel(0, 0, (("f32", "default"), 1000)), 2.0),
        (kernel(0, 0, (("f32", "highest"), 1000)), 10.0),
        (kernel(0, 0, (("bf16", "highest"), 1000)), 1.0),
        (kernel(0, 0, (("f32", "dot_f32_f32_f32"), 1000)), 10.0),
        (kernel(0, 0, (("tf32", "dot_tf32_tf32_f32"), 1000)), 2.0),
        (kernel(0, 0, (("bf16", "dot_bf16_bf16_f32_x3"), 1000)), 3.0),
        (kernel(0, 0, (("any", "dot_any_f8_any_f8_f32_fast_accum"), 1000)), 0.5),
        (kernel(0, 0, (("bf16", "default"), 1000), (("f32", "default"), 1000)), 3.0),
    ],
)
def test_a_kernel_takes_its_longer_time(kernel: Kernel, seconds: float) -> None:
    assert compute_seconds([kernel], ROUND) == pytest.approx(seconds)
    assert compute_seconds([kernel, kernel], ROUND) == pytest.approx(2 * seconds)


@given(
    read=st.integers(0, 10**12),
    written=st.integers(0, 10**12),
    flops=st.integers(0, 10**15),
    dtype=st.sampled_from(["bf16", "f32", "f8e4m3fn", "s8", "f64"]),
    hardware=st.sampled_from([H100, V5E, V5P, ROUND]),
)
def test_laws_of_kernels(read: int, written: int, flops: int, dtype: str, hardware: Hardware) -> None:
    sample = kernel(read, written, ((dtype, "default"), flops))
    seconds = compute_seconds([sample], hardware)
    more = (
        attrs.evolve(sample, read_bytes=read + 10),
        attrs.evolve(sample, written_bytes=written + 10),
        attrs.evolve(sample, flops=(((dtype, "default"), flops + 10),)),
        attrs.evolve(sample, flops=(((dtype, "highest"), flops),)),
    )
    assert all(compute_seconds([each], hardware) >= seconds for each in more)
    faster = attrs.evolve(hardware, memory_bytes_per_second=2 * hardware.memory_bytes_per_second)
    assert compute_seconds([sample], faster) <= seconds
    assert compute_seconds([sample, *more], hardware) >= 5 * seconds


def test_a_kernel_on_an_h100() -> None:
    copy = Kernel("add.1", "body", "fusion", "", (), 2 * 335 * 10**6, 335 * 10**6, (), Times(12))
    assert np.isclose(compute_seconds([copy], H100), 12 * 300e-6)
    matmul = attrs.evolve(copy, flops=((("bf16", "default"), 10**12),))
    assert np.isclose(compute_seconds([matmul], H100), 12 * 10**12 / 989.4e12)
