"""Traces are read as the profilers of CPUs, GPUs and TPUs write them."""

import os
from pathlib import Path
from typing import Any

import pytest
from jax.profiler import ProfileData

from shardrules.core.errors import ConfigTypeError, TraceError
from shardrules.programs.profiles.trace import ProfiledProgram, read_trace
from tests.programs.profiles.planes import gpu_trace, tpu_trace, trace


def read(data: bytes) -> Any:
    return ProfileData.from_serialized_xspace(data)


def test_instructions_of_tpus_are_named_by_their_texts() -> None:
    profile = read_trace(read(tpu_trace(steps=1, devices=1)))
    (device,) = profile.devices
    assert device.device == "/device:TPU:0"
    assert [activity.name for activity in device.activities if not activity.in_flight] == [
        *("all-gather-start.1", "fusion.1", "all-gather-done.1", "dot.1", "while.1", "dot.2", "dot.2", "dot.2"),
        "convert.1",
    ]
    assert [activity.name for activity in device.activities if activity.in_flight] == ["all-gather-start.1"]
    programs = {activity.program for activity in device.activities}
    assert programs == {ProfiledProgram("jit_step", str(2**60)), ProfiledProgram("jit_convert", "5")}
    assert [transfer.name for transfer in profile.host_transfers] == ["tpu::System::TransferToDevice"]


def test_a_loop_has_the_time_in_which_nothing_inside_runs() -> None:
    (device,) = read_trace(read(tpu_trace(steps=2, devices=1))).devices
    loops = [activity for activity in device.activities if activity.name == "while.1"]
    assert [loop.self_ns for loop in loops] == [2 * 20_000, 20_000]


def test_kernels_of_gpus_have_their_instruction_in_stats() -> None:
    (device,) = read_trace(read(gpu_trace(steps=1))).devices
    # The line "XLA Ops" repeats the events of the streams.
    assert [activity.name for activity in device.activities] == [
        *("fusion.1", "all-gather-start.1", "MemcpyH2D", "dot.1", "dot.1", "dot.2", "dot.2", "dot.2")
    ]
    assert [activity.program for activity in device.activities if activity.name == "MemcpyH2D"] == [None]


def test_threads_of_cpus_are_sorted_by_device() -> None:
    stats = {"hlo_module": "jit_f", "program_id": 3}

    def thunk(op: str, start: float, device: int, **more: int) -> tuple[str, float, float, dict[str, int | str]]:
        return op, start, 5, {"hlo_op": op, **stats, "device_ordinal": device, "run_id": 9, **more}

    lines = {
        "tf_XLAEigen/1": [thunk("dot.1", 0, 1), thunk("add.1", 6, 0), ("$script.py:1 f", 0, 50, {})],
        "tf_XLAEigen/2": [thunk("dot.1", 0, 0, _p=77), ("end: dot.1", 8, 0, {"_c": 77}), ("Rendezvous", 1, 2, {})],
    }
    devices = read_trace(read(trace({"/host:CPU": lines}))).devices
    spans = {
        device.device: [(each.name, (each.end_ns - each.start_ns) / 1e3) for each in device.activities]
        for device in devices
    }
    # The matmul of device 0 goes on after the thread that started it: until its end is noted.
    assert spans == {"CPU:0": [("dot.1", 8), ("add.1", 5)], "CPU:1": [("dot.1", 5)]}
    assert {each.run for device in devices for each in device.activities} == {9}


def test_hosts_of_a_folder_are_read_together(tmp_path: Path) -> None:
    session = tmp_path / "plugins" / "profile" / "2026_11_22_15_40_33"
    session.mkdir(parents=True)
    for host in ("host-a", "host-b"):
        (session / f"{host}.xplane.pb").write_bytes(tpu_trace(steps=1, devices=1))
    names = [device.device for device in read_trace(tmp_path).devices]
    assert names == ["host-a /device:TPU:0", "host-b /device:TPU:0"]
    assert read_trace(session / "host-a.xplane.pb").devices[0].device == "/device:TPU:0"


def test_the_newest_trace_of_a_folder_is_read(tmp_path: Path) -> None:
    for name, steps in (("2026_11_22_15_40_33", 1), ("2026_11_22_15_41_02", 2)):
        session = tmp_path / "plugins" / "profile" / name
        session.mkdir(parents=True)
        (session / "host.xplane.pb").write_bytes(tpu_trace(steps=steps, devices=1))
        os.utime(session / "host.xplane.pb", (0, 0))
    profile = read_trace(str(tmp_path))
    assert profile.source.endswith(f"2026_11_22_15_41_02, the last of 2 traces in {tmp_path}")
    assert len(profile.devices[0].spans) == 3  # two steps and a conversion


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("trace.xplane.pb", b"\x0a\xff\xff", "is not a trace as jax.profiler.trace writes it"),
        (
            "trace.xplane.pb",
            trace({"/host:CPU": {"python": [("f", 0, 1, {})]}}),
            "has no events of devices: its planes",
        ),
        ("trace.json", b"{}", r"has no \*.xplane.pb: name the folder"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path)


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nothing does not exist"):
        read_trace(tmp_path / "nothing")
    with pytest.raises(ConfigTypeError, match=r"a trace must be the folder or file .* got 3"):
        read_trace(3)  # pyright: ignore[reportArgumentType]
