"""A sheet from measurements says what was measured, and takes the rest from the sheet of the devices."""

from typing import Any

import attrs
import pytest

import shardrules as sr
from shardrules.core.errors import HardwareError
from shardrules.programs.costs.collective import Group, collective_cost
from shardrules.programs.costs.matmul import matmul_seconds
from shardrules.programs.machine.measure import COLLECTIVE_KINDS, CollectiveTime, MatmulTime, Measurements
from shardrules.programs.machine.measured import CollectiveTimes
from shardrules.programs.machine.measured_sheet import MeasuredSheet

SIZES = (256, 1024, 4096)
MATMULS = tuple(
    MatmulTime("bf16", m, n, k, 4.5e-6 + 2 * m * n * k / 700e12) for m in SIZES for n in SIZES for k in SIZES
)
H100 = Measurements(
    device_kind="NVIDIA H100 80GB HBM3",
    platform="gpu",
    device_count=8,
    host_count=1,
    memory_bytes=70 * 10**9,
    launch_seconds=3e-6,
    matmuls=(*MATMULS, MatmulTime("f32", 4096, 4096, 4096, 2 * 4096**3 / 380e12)),
    memory=(("copy", 2.9e12), ("read", 3.0e12), ("gather", 1.5e12)),
    host_links=(("to device", 52e9), ("to host", 48e9)),
    collectives=tuple(
        CollectiveTime(kind, size, 1, 0, 0, payload, 20e-6 + payload / 300e9)
        for kind in COLLECTIVE_KINDS
        for size in (2, 8)
        for payload in (2**10, 2**20, 2**30)
    ),
    skipped=("f16 matmuls (the time limit)",),
)
UNKNOWN = attrs.evolve(H100, device_kind="NVIDIA Z1")


def sheet(measurements: Measurements, base: str, **changes: Any) -> tuple[sr.Hardware, list[str]]:
    fields = attrs.asdict(sr.Hardware.named(base))
    built = MeasuredSheet.of(attrs.evolve(measurements, **changes), fields, is_nominal=base == "cpu")
    return sr.Hardware(**built.values, sources=built.sources), built.missing


def test_peaks_are_those_of_the_sheet_and_fractions_are_measured() -> None:
    hardware, missing = sheet(H100, "cuda:h100")
    named = sr.Hardware.named("cuda:h100")
    assert missing == []
    assert hardware.name == f"{named.name} (measured)"
    assert hardware.peak_flops == named.peak_flops
    assert hardware.source("peak_flops").startswith("not measured; ")
    assert dict(hardware.memory_fractions) == pytest.approx(
        {"copy": 2.9 / 3.35, "read": 3 / 3.35, "gather": 1.5 / 3.35}, rel=1e-3
    )
    assert (hardware.memory_bytes, hardware.launch_seconds) == (70 * 10**9, 3e-6)
    assert hardware.host_link_bytes_per_second == 48e9
    assert "to device 52 GB/s, to host 48 GB/s" in hardware.source("host_link_bytes_per_second")
    assert hardware.devices_per_host == 8
    assert hardware.source("network_bytes_per_second").startswith("not measured: a single host has no network; ")


def test_a_rate_that_no_clock_explains_is_left_out() -> None:
    absurd = MatmulTime("bf16", 1024, 1024, 1024, 2 * 1024**3 / 5.9e15)
    hardware, missing = sheet(H100, "cuda:h100", matmuls=(*(each for each in MATMULS if each.m != 1024), absurd))
    assert hardware.peak_flops == sr.Hardware.named("cuda:h100").peak_flops
    assert dict(hardware.matmul_fractions)["bf16"] == pytest.approx(0.7, rel=0.02)
    assert missing == []


def test_matmuls_that_were_measured_take_what_they_took() -> None:
    hardware, _ = sheet(H100, "cuda:h100")
    table = next(table for table in hardware.matmul_rates if table.kind == "bf16")
    assert (table.kind, table.m, table.k) == ("bf16", SIZES, SIZES)
    for time in MATMULS[::5]:
        # Measured times hold a launch, which the cost of a kernel adds again.
        modelled = matmul_seconds(1, time.m, time.n, time.k, "bf16", "default", hardware) + hardware.launch_seconds
        assert modelled == pytest.approx(time.seconds, rel=0.01)


def test_collectives_that_were_measured_take_what_they_took() -> None:
    hardware, _ = sheet(H100, "cuda:h100")
    for time in H100.collectives:
        cost = collective_cost(time.kind, time.wire_bytes, Group(time.group_size), hardware)
        assert cost.seconds == pytest.approx(time.seconds, rel=0.01)


def test_a_device_without_a_sheet_has_the_best_that_was_measured() -> None:
    hardware, _ = sheet(UNKNOWN, "cpu")
    assert hardware.name == "NVIDIA Z1 (measured)"
    peaks = dict(hardware.peak_flops)
    assert (peaks["bf16"], peaks["f32"]) == pytest.approx((680e12, 380e12), rel=0.1)
    assert dict(hardware.matmul_fractions) == {"bf16": 1, "f32": 1}
    assert hardware.memory_bytes_per_second == 3e12
    # The best ring, and the least that a step of one takes.
    assert hardware.link_bytes_per_second == pytest.approx(2 * 7 / 8 * 300e9, rel=1e-2)
    assert hardware.link_latency_seconds == pytest.approx(20e-6 / 14, rel=1e-2)


def test_links_of_a_torus_have_fractions_instead_of_tables() -> None:
    # A line of 2 x 4 chips of a v5e: 2 of its 4 links lead nowhere.
    times = (CollectiveTime("all-gather", 8, 1, 2, 2, 8 * 2**27, 7 * 2**27 / 80e9),)
    slower = tuple(attrs.evolve(matmul, seconds=5 * matmul.seconds) for matmul in MATMULS)
    chips = attrs.evolve(H100, device_kind="TPU v5 lite", platform="tpu", matmuls=slower)
    hardware, missing = sheet(chips, "tpu:v5e", collectives=times)
    named = sr.Hardware.named("tpu:v5e")
    assert dict(hardware.link_fractions) == pytest.approx({**dict(named.link_fractions), "all-gather": 0.8})
    assert missing == ["link_fractions of all-reduce, reduce-scatter, all-to-all, collective-permute"]
    assert hardware.collective_times == ()
    assert (hardware.torus_dims, hardware.devices_per_host) == (2, None)
    cost = collective_cost("all-gather", times[0].wire_bytes, Group(8, torus_dims=2, open_dims=2), hardware)
    assert cost.link_seconds == pytest.approx(times[0].seconds)


def test_the_network_is_measured_between_hosts() -> None:
    between = (CollectiveTime("all-gather", 16, 2, 0, 0, 2**30, 15 / 16 * 2**30 / 8 / 40e9),)
    hardware, _ = sheet(H100, "cuda:h100", device_count=16, host_count=2, collectives=(*H100.collectives, *between))
    assert hardware.network_fraction == pytest.approx(0.8, rel=1e-3)
    assert hardware.network_bytes_per_second == 50e9
    assert hardware.devices_per_host == 8


def test_what_could_not_be_measured_is_listed() -> None:
    hardware, missing = sheet(H100, "cuda:h100", launch_seconds=0.0, host_links=(), collectives=(), matmuls=MATMULS[:1])
    assert missing == [
        "matmul_fractions of bf16",
        "matmul_rates",
        "launch_seconds",
        "host_link_bytes_per_second",
        "collective_times",
    ]
    assert hardware.launch_seconds == sr.Hardware.named("cuda:h100").launch_seconds
    assert hardware.source("launch_seconds").startswith("not measured: f16 matmuls (the time limit)")
    with pytest.raises(HardwareError, match=r"no matmul and no memory bandwidth of NVIDIA .* could be measured: f16"):
        sheet(H100, "cuda:h100", matmuls=(), memory=())


def test_noise_never_makes_fewer_bytes_slower() -> None:
    times = tuple(
        CollectiveTime("all-reduce", 8, 1, 0, 0, 2**power, seconds)
        for power, seconds in ((10, 9e-6), (12, 7e-6), (30, 3e-3))
    )
    hardware, _ = sheet(H100, "cuda:h100", collectives=times)
    assert table_of("all-reduce", 8, hardware).seconds == (7e-6, 7e-6, 3e-3)


def table_of(kind: str, group_size: int, hardware: sr.Hardware) -> CollectiveTimes:
    (table,) = [each for each in hardware.collective_times if (each.kind, each.group_size) == (kind, group_size)]
    return table


def up_to(kind: str, largest: int) -> tuple[CollectiveTime, ...]:
    """The measurements whose time was up after a size of one kind."""
    return tuple(time for time in H100.collectives if time.kind != kind or time.payload_bytes <= largest)


@pytest.mark.parametrize("largest", [0, 2**10])
def test_kinds_that_were_cut_short_are_as_in_the_sheet(largest: int) -> None:
    hardware, missing = sheet(H100, "cuda:h100", collectives=up_to("reduce-scatter", largest))
    named = sr.Hardware.named("cuda:h100")
    assert missing == ["collective_times of reduce-scatter"]
    for size in (2, 4, 8):
        assert table_of("reduce-scatter", size, hardware) == table_of("reduce-scatter", size, named)
    fractions = dict(hardware.link_fractions)
    assert fractions["reduce-scatter"] == dict(named.link_fractions)["reduce-scatter"]
    assert fractions["all-gather"] != dict(named.link_fractions)["all-gather"]


def test_a_kind_counts_once_its_time_grows_with_its_bytes() -> None:
    cut = [attrs.evolve(time, payload_bytes=2**26, seconds=240e-6) for time in up_to("reduce-scatter", 2**10)[:1]]
    for seconds, is_measured in ((240e-6 / 10, True), (240e-6 / 4, False)):
        times = (*cut, attrs.evolve(cut[0], payload_bytes=2**22, seconds=seconds))
        hardware, _ = sheet(H100, "cuda:h100", collectives=times)
        table = table_of(cut[0].kind, cut[0].group_size, hardware)
        assert (table.payload_bytes == (2**22, 2**26)) is is_measured


def test_a_device_without_a_sheet_has_no_peak_of_small_messages() -> None:
    times = tuple(time for time in H100.collectives if time.payload_bytes == 2**10)
    hardware, missing = sheet(UNKNOWN, "cpu", collectives=times)
    assert hardware.link_bytes_per_second == sr.Hardware.named("cpu").link_bytes_per_second
    assert hardware.collective_times == ()
    lacking = f"collective_times of {', '.join(COLLECTIVE_KINDS)}"
    assert missing == ["peak_flops of f16, f32_highest, f8, s8", lacking]
    small = MatmulTime("f8", 256, 256, 256, 5e-6)
    hardware, missing = sheet(UNKNOWN, "cpu", matmuls=(*H100.matmuls, small))
    peaks = dict(hardware.peak_flops)
    assert peaks["f8"] == peaks["bf16"] > peaks["f32"]
    assert 2 * peaks["f64"] == pytest.approx(peaks["bf16"], rel=1e-3)
    assert missing == ["peak_flops of f16, f32_highest, f8, s8"]


@pytest.mark.parametrize("whole_seconds", [0.0, 84.0])
def test_warnings_agree_with_the_sources(whole_seconds: float) -> None:
    fields = attrs.asdict(sr.Hardware.named("cpu"))
    cut = attrs.evolve(UNKNOWN, matmuls=MATMULS[:1], whole_seconds=whole_seconds)
    built = MeasuredSheet.of(cut, fields, is_nominal=True)
    text, source = built.gaps("cpu"), built.sources["peak_flops"]
    assert source.startswith("measured on ")
    assert source.endswith(
        "none of them large; f16, f32, f32_highest, f8, s8, f64 by their ratio to bf16 in the sheet 'CPU (nominal)'"
    )
    assert "of bf16 are those of small matmuls" in text
    before, _, after = text.partition(". They are as in the sheet 'cpu' (peaks by their ratio to bf16)")
    assert after
    assert before == "peak_flops of f16, f32, f32_highest, f8, s8, matmul_rates: f16 matmuls (the time limit)"
    assert ("all takes about 90 s" in text) == bool(whole_seconds)


def test_networks_are_not_as_slow_as_small_messages() -> None:
    between = (CollectiveTime("all-gather", 16, 2, 0, 0, 2**10, 50e-6),)
    hardware, missing = sheet(H100, "cuda:h100", device_count=16, host_count=2, collectives=between)
    named = sr.Hardware.named("cuda:h100")
    assert hardware.network_fraction == named.network_fraction
    assert hardware.network_latency_seconds == pytest.approx(50e-6 / 15, rel=1e-3)
    assert {"network_bytes_per_second", "network_fraction"} < {*missing}


def test_what_was_not_measured_is_as_in_the_sheet() -> None:
    measured = tuple(time for time in H100.collectives if (time.kind, time.group_size) == ("all-reduce", 8))
    hardware, _ = sheet(H100, "cuda:h100", collectives=measured, memory=(("copy", 2.9e12),))
    named = sr.Hardware.named("cuda:h100")
    ours, theirs = dict(hardware.matmul_fractions), dict(named.matmul_fractions)
    assert (ours["f8"], ours["all"]) == (theirs["f8"], theirs["all"])
    assert ours["bf16"] != theirs["bf16"]
    rest = [table for table in named.matmul_rates if table.kind != "bf16"]
    assert [table for table in hardware.matmul_rates if table.kind != "bf16"] == rest != []
    assert table_of("all-reduce", 8, hardware).payload_bytes == (2**10, 2**20, 2**30)
    for kind, size in (("all-reduce", 4), ("all-gather", 8)):
        assert table_of(kind, size, hardware) == table_of(kind, size, named)
    assert dict(hardware.link_fractions) == {
        **dict(named.link_fractions),
        "all-reduce": dict(hardware.link_fractions)["all-reduce"],
    }
    assert dict(hardware.memory_fractions)["gather"] == dict(named.memory_fractions)["gather"]
    assert hardware.source("link_fractions").startswith("measured on 8 x ")
    assert hardware.source("link_fractions").endswith(f"; the rest: {named.source('link_fractions')}")
