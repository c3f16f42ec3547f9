"""The modelled time of steps: kernels and collectives by hand, and what has to hold for all of them."""

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardrules as sr
from shardrules.analysis.audits.roofline import StepTime, collective_seconds, compute_seconds, step_time
from shardrules.analysis.machine.hardware import Hardware
from shardrules.analysis.machine.targets import Target
from shardrules.analysis.program.collectives import find_collectives
from shardrules.analysis.program.flops import find_matmuls
from shardrules.analysis.program.flow import Times
from shardrules.analysis.program.kernels import Kernel, find_kernels
from shardrules.analysis.program.program import read_program
from tests.analysis.programs import CLOSED_FORMS, CPU, TARGETS, array, program_of, text_of

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


@pytest.mark.parametrize(
    ("compute", "communication", "memory", "bound"),
    [
        (2.0, 1.0, 0.5, "compute"),
        (2.0, 1.0, 1.5, "memory"),
        (1.0, 2.0, 0.9, "communication"),
        (0.0, 0.0, 0.0, "compute"),
    ],
)
def test_step_times(compute: float, communication: float, memory: float, bound: str) -> None:
    step = StepTime(compute, communication, memory)
    assert step.serial_seconds == compute + communication
    assert step.overlapped_seconds == max(compute, communication)
    assert step.bound == bound
    assert eval(repr(step)) == step


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (1.23456e-6, "0.00123 ms"), (0.0123456, "12.3 ms"), (0.0996, "99.6 ms"), (12.3456, "12,346 ms")],
)
def test_step_times_for_people(seconds: float, text: str) -> None:
    assert (
        str(StepTime(seconds, 0.0)) == f"{text} to {text}: compute {text} (0 ms of it memory-bound), communication 0 ms"
    )


@pytest.mark.parametrize("target", TARGETS)
def test_a_step_is_its_kernels_and_its_collectives(target: str) -> None:
    program, mesh = read_program(text_of("scanned", target)), sr.mesh_shape("data:4,model:2")
    matmuls, hardware = find_matmuls(program), Target.parse(target).hardware
    kernels, collectives = find_kernels(program, matmuls), find_collectives(program, mesh, Target.parse(target))
    step = step_time(program, collectives, matmuls, hardware)
    assert step.compute_seconds == pytest.approx(compute_seconds(kernels, hardware))
    assert step.communication_seconds == pytest.approx(
        sum(collective_seconds(collective, hardware) for collective in collectives)
    )
    at_memory = [
        kernel
        for kernel in kernels
        if compute_seconds([attrs.evolve(kernel, flops=())], hardware) >= compute_seconds([kernel], hardware)
    ]
    assert step.memory_seconds == pytest.approx(compute_seconds(at_memory, hardware))
    assert 0 < step.memory_seconds <= step.compute_seconds


def test_a_closed_form() -> None:
    """Column then row on CPU devices: two matmuls, and one adds its part to the other devices'."""
    (case,) = [case for case in CLOSED_FORMS if case.name == "column then row"]
    program = read_program(text_of(case.name, CPU))
    collectives = find_collectives(program, sr.mesh_shape(case.axes))
    step = step_time(program, collectives, find_matmuls(program), attrs.evolve(ROUND, memory_bytes_per_second=1e9))
    assert step.memory_seconds < 1e-3 * step.compute_seconds
    assert step.compute_seconds == pytest.approx(case.flops / 500.0, rel=1e-3)
    x = 4 * 32 * 64 * 4
    assert step.communication_seconds == pytest.approx(x / 10 + 2 * 0.1)


def test_a_kernel_on_an_h100() -> None:
    copy = Kernel("add.1", "body", "fusion", "", (), 2 * 335 * 10**6, 335 * 10**6, (), Times(12))
    assert np.isclose(compute_seconds([copy], H100), 12 * 300e-6)
    matmul = attrs.evolve(copy, flops=((("bf16", "default"), 10**12),))
    assert np.isclose(compute_seconds([matmul], H100), 12 * 10**12 / 989.4e12)


def test_small_collectives_are_all_latency() -> None:
    mesh = sr.create_mesh("data:8")
    program = program_of(lambda x: (x @ x.T).sum(), array(mesh, (64, 512), "data"))
    step = step_time(program, find_collectives(program, mesh), find_matmuls(program), H100)
    assert step.bound == "communication"
    assert step.overlapped_seconds < step.serial_seconds


def test_more_of_everything_takes_longer() -> None:
    def seconds(width: int) -> float:
        program = program_of(lambda x: jnp.tanh(x @ x), jax.ShapeDtypeStruct((width, width), jnp.bfloat16))
        return step_time(program, (), find_matmuls(program), H100).overlapped_seconds

    assert seconds(256) < seconds(512) < seconds(1024)
