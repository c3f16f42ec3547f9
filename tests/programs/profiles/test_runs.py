"""The runs of a program are found on devices that say where they begin, and on those that do not."""

from pathlib import Path

import attrs
import pytest
from jax.profiler import ProfileData

import shardrules as sr
from shardrules.core.errors import TraceError
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.program import read_program
from shardrules.programs.profiles.launches import with_instructions
from shardrules.programs.profiles.modelled import ModelledPart, ModelledProgram, model_program
from shardrules.programs.profiles.runs import find_programs, find_runs
from shardrules.programs.profiles.trace import Activity, DeviceTrace, ProfiledProgram, ProfileTrace, read_trace
from tests.programs.profiles.planes import PROGRAM, gpu_trace, tpu_trace


def modelled(text: str = PROGRAM) -> ModelledProgram:
    program = read_program(text)
    return model_program(program, find_collectives(program), sr.Hardware.named("tpu:v5e"))


def read(data: bytes) -> ProfileTrace:
    return read_trace(ProfileData.from_serialized_xspace(data))


def test_the_first_run_is_left_out() -> None:
    profile = read(tpu_trace(steps=4, devices=2))
    devices = find_runs(profile, find_programs(profile, modelled()), modelled())
    lengths = [[run.end_ns - run.start_ns for run in device.runs] for device in devices]
    assert lengths == [[100_000] * 3, [110_000] * 3]
    assert [len(device.left_out) for device in devices] == [1, 1]
    assert [device.period_ns for device in devices] == [240_000, 240_000]


@pytest.mark.parametrize(
    ("data", "runs", "left_out"),
    [(gpu_trace(steps=1), 1, 0), (gpu_trace(steps=4, cut=True), 2, 2)],
    ids=["a single run", "cut off"],
)
def test_whole_runs_are_compared(data: bytes, runs: int, left_out: int) -> None:
    profile = read(data)
    (device,) = find_runs(profile, find_programs(profile, modelled()), modelled())
    assert (len(device.runs), len(device.left_out)) == (runs, left_out)


@pytest.mark.parametrize("graph", [False, True])
def test_runs_on_gpus_begin_with_the_first_instruction(graph: bool) -> None:
    profile = with_instructions(read(gpu_trace(steps=4, graph=graph)), modelled())
    (device,) = find_runs(profile, find_programs(profile, modelled()), modelled())
    assert [run.start_ns for run in device.runs] == [1000 + 100_000 * step for step in (1, 2, 3)]
    # The library clears its result in a graph, which no instruction asks for.
    names = {"fusion.1", "all-gather-start.1", "dot.1", "dot.2", *(["command_buffer_1: Memset 0"] if graph else [])}
    assert all({activity.name for activity in run.activities} == names for run in device.runs)


LOOP = ("loop.1", "loop.2", "loop.3")


@pytest.mark.parametrize(
    ("events", "starts"),
    [
        ([*["first", *LOOP * 4, "last"] * 2, "first", *LOOP * 2], [0, 14, 28]),
        (["first", *LOOP * 3, "last"] * 2, [0, 11]),
        ([*LOOP * 3, "last", *["first", *LOOP * 4, "last"] * 2], [9, 23, 37]),
        ([*LOOP * 4, "last"] * 3, [0, 13, 26]),
        (["loop.1", "loop.1", "loop.2", "loop.2", "loop.3"] * 12, [0, 20, 40]),
    ],
    ids=["cut off", "a loop ends early", "begun before the trace", "a loop comes first", "a loop is all"],
)
def test_what_runs_outside_of_loops_tells_runs_apart(events: list[str], starts: list[float]) -> None:
    step = ProfiledProgram("jit_step", "7")
    parts = {
        name: ModelledPart(name, "kernel", 1.0, 4 if name in LOOP else 1, "", "fusion")
        for name in ("first", *LOOP, "last")
    }
    kernels = tuple(Activity(name, step, start, start + 1.0, 1.0) for start, name in enumerate(events))
    profile = ProfileTrace("a trace", (DeviceTrace("/device:GPU:0", kernels),))
    (device,) = find_runs(profile, {"/device:GPU:0": step}, ModelledProgram("jit_step", parts, {}, tuple(parts)))
    assert sorted(run.start_ns for run in (*device.runs, *device.left_out)) == starts


def test_a_trace_of_another_program_lists_its_programs() -> None:
    profile = read(gpu_trace(module="jit_train_step"))
    message = (
        r"has no program 'jit_step'.*Its programs: jit_train_step\(7\) \(.* ms, 100% of it in instructions of the "
        r"audited program\). If jit_train_step is this function, pass module='jit_train_step'"
    )
    with pytest.raises(TraceError, match=message):
        find_programs(profile, modelled())
    assert find_programs(profile, modelled(), "jit_train_step") == {
        "/device:GPU:0": ProfiledProgram("jit_train_step", "7")
    }


def test_a_program_with_other_instructions_is_refused() -> None:
    other = PROGRAM.replace("dot.1", "dot.7").replace("dot.2", "dot.8").replace("fusion.1", "fusion.9")
    with pytest.raises(
        TraceError, match=r"program 'jit_step' is not the audited one: .* dot.2, fusion.1, dot.1 are not"
    ):
        find_programs(read(gpu_trace()), modelled(other))


def late(device: DeviceTrace, name: str, times: float) -> DeviceTrace:
    """A device on which an instruction takes `times` as long."""
    activities = [
        attrs.evolve(activity, self_ns=activity.self_ns * (times if activity.name == name else 1))
        for activity in device.activities
    ]
    return attrs.evolve(device, activities=tuple(activities))


def test_devices_that_ran_one_program_are_judged_together() -> None:
    # 69 of 89 microseconds are in instructions of this program.
    other, (device,) = modelled(PROGRAM.replace("fusion.1", "fusion.9")), read(gpu_trace()).devices
    devices = [attrs.evolve(device, device=f"/device:GPU:{index}") for index in range(4)]
    some_late = [late(device, "fusion.1", 10) for device in devices[:1]] + devices[1:]
    profile = ProfileTrace("a trace", tuple(some_late))
    assert list(find_programs(profile, other)) == [device.device for device in devices]
    most_late = [*devices[:1], *(late(device, "fusion.1", 10) for device in devices[1:])]
    with pytest.raises(TraceError, match=r"is not the audited one: 31% of its time .* and fusion.1 are not"):
        find_programs(ProfileTrace("a trace", tuple(most_late)), other)


def test_instructions_of_another_shape_are_told_apart_on_tpus() -> None:
    # The same names, for another batch: only the texts of the events differ.
    other = PROGRAM.replace("1024,1024]", "2048,1024]")
    with pytest.raises(TraceError, match="is not the audited one"):
        find_programs(read(tpu_trace()), modelled(other))
    assert find_programs(read(gpu_trace()), modelled(other)) == {"/device:GPU:0": ProfiledProgram("jit_step", "7")}


def test_ids_of_programs_may_differ_from_host_to_host(tmp_path: Path) -> None:
    for host, program_id in (("a", 7), ("b", 8)):
        (tmp_path / f"{host}.xplane.pb").write_bytes(gpu_trace(program_id=program_id))
    profile = read_trace(tmp_path)
    programs = find_programs(profile, modelled())
    assert [program.program_id for program in programs.values()] == ["7", "8"]
    assert [len(device.runs) for device in find_runs(profile, programs, modelled())] == [3, 3]
