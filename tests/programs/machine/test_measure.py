"""Devices are measured within a time limit, alone and together. No test says how fast they are."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import pytest

import shardrules as sr
from shardrules.core.errors import ConfigError, HardwareError, ShardingWarning
from shardrules.programs.machine import measure as measuring
from shardrules.programs.machine.measure import COLLECTIVE_KINDS, Sizes, measure
from tests.mesh.cluster import run_processes

TINY = Sizes((8, 16), 2**14, (2**8, 2**12), 2**12)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sizes, "of", lambda _: TINY)


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Every benchmark takes a millisecond, without running; tests replace one."""
    for name in ("launch_seconds", "memory_seconds", "host_link_seconds", "matmul_seconds"):
        monkeypatch.setattr(measuring.microbenchmarks, name, lambda *_: 1e-3)
    monkeypatch.setattr(measuring.microbenchmarks, "device_overhead", lambda *_: measuring.Overhead(0.0, 0.0))
    return monkeypatch


@pytest.mark.slow
def test_everything_is_measured_where_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MATMUL_KINDS", ("f32_highest", "f8", "s8"))
    monkeypatch.setattr(measuring.microbenchmarks, "_LAUNCHES", (2, 4))
    measurements = measure(jax.devices()[:4], 120, attrs.evolve(TINY, collective_bytes=(2**8,)))
    assert measurements.skipped == ()
    assert (measurements.device_kind, measurements.device_count, measurements.host_count) == ("cpu", 4, 1)
    dims = {(matmul.kind, matmul.m, matmul.n, matmul.k) for matmul in measurements.matmuls}
    assert dims == {*itertools.product(("f32_highest", "f8", "s8"), *[TINY.matmuls] * 3)}
    assert [access for access, _ in measurements.memory] == ["copy", "read", "gather"]
    assert [direction for direction, _ in measurements.host_links] == ["to device", "to host"]
    groups = {(each.kind, each.group_size, each.payload_bytes) for each in measurements.collectives}
    assert groups == {*itertools.product(COLLECTIVE_KINDS, (2, 4), (2**8,))}
    seconds = [each.seconds for each in (*measurements.matmuls, *measurements.collectives)]
    assert all(second > 0 for second in (*seconds, measurements.launch_seconds))


def test_a_short_limit_leaves_out_and_says_so(tiny: None) -> None:
    start = time.monotonic()
    with pytest.warns(
        ShardingWarning,
        match=r"not measured peak_flops of .*f32.*, matmul_rates: .*bf16 matmuls of some sizes \(the time limit.* s: ",
    ):
        hardware = sr.Hardware.measure(jax.devices()[:1], time_limit=0.01, name="one core")
    # What is always taken compiles a dozen small programs.
    assert time.monotonic() - start < 60
    assert hardware.name == "one core"
    assert hardware.flops_per_second("f64") == pytest.approx(hardware.flops_per_second("f32") / 2, rel=1e-2)
    assert hardware.source("link_bytes_per_second").startswith("not measured: a single device has no links; ")
    report = sr.audit(
        lambda x: x @ x.T, jax.ShapeDtypeStruct((64, 64), "float32"), mesh=sr.mesh_shape("data:8"), hardware=hardware
    )
    assert report.hardware == hardware
    assert report.step_time() > 0


@pytest.mark.parametrize("time_limit", [0, -1, float("inf"), float("nan"), "60", True, None])
def test_bad_time_limits_are_refused(time_limit: Any) -> None:
    with pytest.raises(ConfigError, match="time_limit must be a positive number of seconds, got"):
        sr.Hardware.measure(time_limit=time_limit)


def test_devices_must_be_of_one_kind() -> None:
    devices = [SimpleNamespace(device_kind=kind) for kind in ("TPU v4", "TPU v5")]
    with pytest.raises(HardwareError, match="must be of one kind, got TPU v4, TPU v5"):
        measure(devices, 1)


def test_what_a_device_refuses_is_skipped(instant: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> float:
        raise NotImplementedError("no unit for it\nat all")

    instant.setattr(measuring.microbenchmarks, "launch_seconds", refuse)
    measurements = measure(jax.devices()[:1], 60, TINY)
    assert measurements.skipped == ("launches (no unit for it)",)
    assert measurements.launch_seconds == 0
    assert len(measurements.matmuls) == 6 * 8


def test_large_matmuls_of_the_most_used_kinds_are_measured_first(instant: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []

    def measure_matmul(kind: str, dims: tuple[int, int, int], *_: Any) -> float:
        order.append((kind, dims[0]))
        return 1e-3

    instant.setattr(measuring.microbenchmarks, "matmul_seconds", measure_matmul)
    measure(jax.devices()[:1], 60, TINY)
    assert order[:4] == [("bf16", 8), ("bf16", 16), ("f32", 8), ("f32", 16)]


def test_matmuls_that_fail_are_listed_and_not_tried_again(instant: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, tuple[int, int, int]]] = []

    def measure_matmul(kind: str, dims: tuple[int, int, int], *_: Any) -> float:
        tried.append((kind, dims))
        if (kind, dims) == ("f16", (16, 16, 16)):
            raise ValueError("no memory for it")
        return 1e-3

    instant.setattr(measuring.microbenchmarks, "matmul_seconds", measure_matmul)
    assert measure(jax.devices()[:1], 60, TINY).skipped == ("f16 matmuls of some sizes (no memory for it)",)
    # Of f16 a single size is left.
    assert len(tried) == len(set(tried)) == 5 * 8 + 2


def test_the_largest_matmuls_of_accelerators_run_as_long_as_a_chip_takes_to_slow_down() -> None:
    session = measuring._Session([device(0, 0)], TINY, 0.0, 60.0)
    assert measuring._matmul_rounds(session, (16, 16, 16), 1e-3) == 500
    assert measuring._matmul_rounds(session, (16, 8, 16), 1e-3) == 5
    cpu = SimpleNamespace(process_index=0, platform="cpu")
    assert measuring._matmul_rounds(measuring._Session([cpu], TINY, 0.0, 60.0), (16, 16, 16), 1e-3) == 5


def device(index: int, process: int, **more: Any) -> Any:
    return SimpleNamespace(id=index, process_index=process, platform="gpu", **more)


def test_groups_grow_inside_a_host_and_span_hosts() -> None:
    devices = [device(index, index // 4) for index in range(8)]
    ids = [[each.id for each in group] for group in measuring._groups(devices, ["a", "b"])]
    assert ids == [[0, 1], [0, 1, 2, 3], [0, 4], [*range(8)]]
    # Two processes of one host: links join them.
    ids = [[each.id for each in group] for group in measuring._groups(devices, ["a", "a"])]
    assert ids == [[0, 1], [0, 1, 2, 3], [*range(8)]]


@pytest.mark.parametrize(
    ("extents", "dims"),
    [((2, 4, 1), (2, 2)), ((16, 16, 1), (2, 0)), ((4, 4, 4), (3, 0)), ((2, 2, 4), (3, 2)), ((1, 1, 1), (0, 0))],
)
def test_lines_of_a_torus_close_where_they_are_long(extents: tuple[int, int, int], dims: tuple[int, int]) -> None:
    corners = [
        SimpleNamespace(platform="tpu", coords=coords) for coords in ((0, 0, 0), tuple(size - 1 for size in extents))
    ]
    assert measuring._torus_dims(corners) == dims


@pytest.mark.slow
def test_processes_get_the_figures_of_the_first() -> None:
    code = """
        from shardrules.programs.machine import measure as measuring
        measuring.MATMUL_KINDS, measuring.COLLECTIVE_KINDS = ("f32",), ("all-gather",)
        measuring.microbenchmarks._LAUNCHES = (2, 4)
        print(measuring.measure(jax.devices(), 60, measuring.Sizes((8,), 2**12, (2**8,), 2**10)))
    """
    ended = run_processes(code, processes=2, devices=2)
    assert [process.code for process in ended] == [0, 0], ended[0].err[-2000:]
    first, second = (process.out.splitlines()[-1] for process in ended)
    assert first == second
    # Links join the processes of a host, so that groups span them.
    for size in (2, 4):
        assert f"CollectiveTime(kind='all-gather', group_size={size}, host_count=1" in first
