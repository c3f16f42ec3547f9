"""The modelled time of steps: kernels and collectives by hand, and what has to hold for all of them."""

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.analysis.audits.roofline import StepTime, collective_seconds, compute_seconds, step_time
from shardrules.analysis.machine.hardware import Hardware
from shardrules.analysis.machine.targets import Target
from shardrules.analysis.program.collectives import KINDS, Collective, find_collectives
from shardrules.analysis.program.flops import find_matmuls
from shardrules.analysis.program.flow import Times
from shardrules.analysis.program.kernels import Kernel, find_kernels
from shardrules.analysis.program.program import read_program
from tests.analysis.programs import CLOSED_FORMS, CPU, TARGETS, array, mesh_on, program_of, text_of

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


def collective(kind: str, size: int, wire: int, **more: Any) -> Collective:
    return Collective(kind, ("data",), ("data",), size, (), wire, wire, Times(1), "main", "c", **more)


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


@pytest.mark.parametrize(
    ("collective", "sending", "waiting"),
    [
        (collective("all-gather", 8, 70), 7.0, 7 * 0.1),
        (collective("reduce-scatter", 8, 70), 7.0, 7 * 0.1),
        (collective("all-to-all", 8, 70), 7.0, 7 * 0.1),
        (collective("all-reduce", 8, 140), 14.0, 14 * 0.1),
        (collective("collective-permute", 8, 70), 7.0, 0.1),
        (collective("all-gather", 1, 0), 0.0, 0.0),
        # On two hosts the eight network shares of each carry the ring's bytes, which all go over the links too.
        (collective("all-gather", 16, 160), max(16.0, 160 / 8), 14 * 0.1 + 0.5),
        (collective("all-reduce", 16, 160), max(16.0, 160 / 8), 28 * 0.1 + 2 * 0.5),
        (collective("all-gather", 32, 160), max(16.0, 160 / 16), 30 * 0.1 + 0.5),
        # With one device on each, all goes over its own share.
        (collective("all-gather", 2, 70), 70.0, 0.5),
        (collective("collective-permute", 16, 70), 70.0, 0.5),
        # 8 of the 15 parts that are sent go to the other host.
        (collective("all-to-all", 16, 150), 80.0, 14 * 0.1 + 0.5),
    ],
)
def test_a_collective_sends_and_waits(collective: Collective, sending: float, waiting: float) -> None:
    hosts = 2 if collective.group_size > 8 or (collective.kind, collective.group_size) == ("all-gather", 2) else 1
    collective = attrs.evolve(collective, host_count=hosts)
    assert collective_seconds(collective, ROUND) == pytest.approx(sending + waiting)
    assert collective_seconds(attrs.evolve(collective, times=Times(12)), ROUND) == pytest.approx(
        12 * (sending + waiting)
    )


@pytest.mark.parametrize(
    ("dims", "share"), [(0, 1.0), (1, 1 / 3), (2, 2 / 3), (3, 1.0)], ids=["unknown", "one", "two", "three"]
)
def test_a_group_has_the_links_along_which_it_lies(dims: int, share: float) -> None:
    gather = collective("all-gather", 4, 600, torus_dims=dims)
    torus = attrs.evolve(ROUND, torus_dims=3)
    assert collective_seconds(gather, torus) == pytest.approx(60 / share + 0.3)
    assert collective_seconds(gather, ROUND) == pytest.approx(60.3), "a switch joins all to all"
    flat = attrs.evolve(ROUND, torus_dims=2)  # a chip of two devices, or a group that is not on this hardware
    assert collective_seconds(gather, flat) == pytest.approx(60 / min(1.0, (dims or 2) / 2) + 0.3)


def test_one_device_on_each_host_uses_no_links() -> None:
    fast = attrs.evolve(ROUND, network_bytes_per_second=100.0)
    gather = collective("all-gather", 2, 70, host_count=2)
    assert collective_seconds(gather, fast) == pytest.approx(0.7 + 0.5)
    assert collective_seconds(attrs.evolve(gather, group_size=4), fast) == pytest.approx(7 + 0.5 + 2 * 0.1)


def test_between_slices_uses_the_network_without_a_target() -> None:
    reduce = collective("all-reduce", 2, 70, between_slices=True)
    assert collective_seconds(reduce, ROUND) == pytest.approx(70 + 2 * 0.5)
    assert collective_seconds(attrs.evolve(reduce, host_count=2), ROUND) == pytest.approx(70 + 2 * 0.5)


@given(
    kind=st.sampled_from(KINDS),
    members=st.integers(1, 8),
    hosts=st.integers(1, 8),
    wire=st.integers(0, 10**12),
    dims=st.integers(0, 3),
    count=st.integers(1, 100),
    hardware=st.sampled_from([H100, V5E, V5P, ROUND]),
)
def test_laws_of_collectives(
    kind: str, members: int, hosts: int, wire: int, dims: int, count: int, hardware: Hardware
) -> None:
    sample = collective(kind, members * hosts, wire, host_count=hosts, torus_dims=dims)
    seconds = collective_seconds(sample, hardware)
    assert seconds >= 0
    assert (seconds == 0) == (members * hosts == 1)
    slack = 1 + 1e-9
    assert seconds <= collective_seconds(attrs.evolve(sample, wire_bytes=wire + 1000), hardware) * slack
    assert count * seconds == pytest.approx(collective_seconds(attrs.evolve(sample, times=Times(count)), hardware))
    for figure in ("link_bytes_per_second", "network_bytes_per_second"):
        faster = attrs.evolve(hardware, **{figure: 2 * getattr(hardware, figure)})
        assert seconds / 2 / slack <= collective_seconds(sample, faster) <= seconds * slack
    if hosts == 1 and members > 1:
        spread = attrs.evolve(sample, host_count=members)
        assert collective_seconds(spread, hardware) * slack >= seconds
    if dims:
        assert collective_seconds(attrs.evolve(sample, torus_dims=dims + 1), hardware) <= seconds * slack


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


def summed(target: str, text: str, axes: Any, spec: P) -> float:
    """The seconds to add up 64 MiB on each device along axes of a mesh."""
    mesh = mesh_on(target, text)
    mapped = jax.shard_map(lambda x: lax.psum(x, axes), mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
    program = program_of(mapped, array(mesh, (mesh.size * 2**12, 2**12), spec[0]))
    collectives = find_collectives(program, mesh, Target.parse(target))
    return sum(collective_seconds(collective, Target.parse(target).hardware) for collective in collectives)


PART = 2**26


@pytest.mark.slow
def test_on_one_host_and_on_two() -> None:
    single = summed("cuda:h100:8", "data:8", "data", P("data"))
    assert single == pytest.approx(2 * PART * 7 / 8 / 450e9 + 14 * 3.4e-6, rel=1e-3)
    two = summed("cuda:h100:16", "data:16", "data", P("data"))
    assert two == pytest.approx(2 * PART * 15 / 16 / (8 * 50e9) + 28 * 3.4e-6 + 2 * 14e-6, rel=1e-3)
    across = summed("cuda:h100:16", "data:2,model:8", "data", P(("data", "model")))
    assert across == pytest.approx(PART / 50e9 + 2 * 14e-6, rel=1e-3)
    inside = summed("cuda:h100:16", "data:2,model:8", "model", P(("data", "model")))
    assert inside == pytest.approx(single)


@pytest.mark.slow
def test_torus_dimensions_add_bandwidth() -> None:
    along_row = summed("tpu:v5e:4x4", "data:4,model:4", "data", P(("data", "model")))
    assert along_row == pytest.approx(2 * PART * 3 / 4 / 100e9 + 6e-6, rel=1e-3)
    two = summed("tpu:v5e:4x4", "data:16", "data", P("data"))
    assert two == pytest.approx(2 * PART * 15 / 16 / 200e9 + 30e-6, rel=1e-3)


@pytest.mark.slow
def test_between_two_slices() -> None:
    inside = summed("tpu:v5e:2x2:2", "data:2,model:4", "model", P(("data", "model")))
    assert inside == pytest.approx(2 * PART * 3 / 4 / 200e9 + 6e-6, rel=1e-3)
    across = summed("tpu:v5e:2x2:2", "data:2,model:4", "data", P(("data", "model")))
    assert across == pytest.approx(PART / 3.125e9 + 2 * 10e-6, rel=1e-3)
    # Each slice sums for itself, every chip a quarter, and shares that with its like in the other slice.
    both = summed("tpu:v5e:2x2:2", "data:8", "data", P("data"))
    assert both == pytest.approx(2 * PART * 3 / 4 / 200e9 + PART / 4 / 3.125e9 + 26e-6, rel=0.01)


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
