"""Schedules of real programs, and what each line of a program takes."""

import attrs
import pytest

import shardrules as sr
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.flops import find_matmuls
from shardrules.programs.compiled.kernels import find_kernels
from shardrules.programs.compiled.program import CompiledProgram, read_program
from shardrules.programs.costs.kernels import kernel_seconds
from shardrules.programs.costs.schedule import PlayedSchedule, play_schedule
from shardrules.programs.costs.tasks import collective_seconds
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.machine.targets import Target
from tests.programs.costs.handmade import STATE, body, done, kernel, loop, play, start
from tests.programs.examples import CLOSED_FORMS, CPU, CUDA, TARGETS, text_of

close = pytest.approx
H100 = Hardware.named("cuda:h100")
MESH = sr.mesh_shape("data:4,model:2")


def schedule_of(program: CompiledProgram, hardware: Hardware, target: str = CPU) -> PlayedSchedule:
    collectives = find_collectives(program, MESH, Target.parse(target))
    return play_schedule(program, collectives, find_kernels(program, find_matmuls(program)), hardware)


@pytest.mark.parametrize("target", TARGETS)
def test_a_step_is_its_kernels_and_its_collectives(target: str) -> None:
    program = read_program(text_of("scanned", target))
    hardware = attrs.evolve(Target.parse(target).hardware, overlap_fraction=1.0)
    kernels = find_kernels(program, find_matmuls(program))
    collectives = find_collectives(program, MESH, Target.parse(target))
    time = schedule_of(program, hardware, target).time
    assert time.compute_seconds == close(
        sum(kernel_seconds(kernel, hardware) * kernel.times.count for kernel in kernels)
    )
    sent = sum(collective_seconds(collective, hardware) for collective in collectives)
    if target.startswith("tpu"):  # collectives along different dimensions of the torus may overlap
        assert time.communication_seconds <= sent * (1 + 1e-9)
    else:
        assert time.communication_seconds == close(sent)
    assert 0 < time.memory_seconds <= time.compute_seconds * (1 + 1e-9)
    assert 0 < time.exposed_seconds <= time.communication_seconds
    # Beside collectives of GPUs, kernels are slower.
    assert time.compute_seconds <= schedule_of(program, Target.parse(target).hardware, target).time.compute_seconds


def test_a_closed_form() -> None:
    """Column then row on CPU devices: two matmuls, and one adds its part to the other devices'."""
    (case,) = [case for case in CLOSED_FORMS if case.name == "column then row"]
    sheet = Hardware("round figures", {"f32": 500.0}, 10**9, 1e9, 10.0, 0.1, 1.0, 0.5)
    time = schedule_of(read_program(text_of(case.name, CPU)), sheet).time
    assert time.memory_seconds < 1e-3 * time.compute_seconds
    assert time.compute_seconds == close(case.flops / 500.0, rel=1e-3)
    assert time.exposed_seconds == time.communication_seconds == close(4 * 32 * 64 * 4 / 10 + 2 * 0.1)


def test_lines_take_what_they_compute_and_what_they_wait_for() -> None:
    inside = start("s", 4, line=20) + kernel("k", 3, line=10) + done("d", "s", 4) + kernel("l", 2, line=11)
    schedule = play(STATE + loop("w", 100, "b") + kernel("m", 5, line=10), body("b", inside))
    lines = {line.line.rpartition(":")[2]: line for line in schedule.lines}
    assert list(lines) == ["10", "11", "20"]
    assert lines["10"].compute_seconds == lines["10"].seconds == close(305)
    assert lines["11"].seconds == close(200)
    sends = lines["20"]
    assert (sends.communication_seconds, sends.exposed_seconds, sends.seconds) == close((400, 100, 100))
    assert sends.hidden_by == "/home/me/m.py:10"
    assert sum(line.seconds for line in schedule.lines) == close(schedule.time.seconds)


def test_unknown_lines_stay_unknown() -> None:
    schedule = play(kernel("k", 3).partition(", metadata")[0] + "\n" + kernel("l", 1))
    assert [(line.line, line.seconds) for line in schedule.lines] == [("", close(3)), ("/home/me/m.py:1", close(1))]


@pytest.mark.slow
def test_gathers_of_gpus_are_hidden_where_the_compiler_says_so() -> None:
    """What starts before a kernel and is waited for behind it costs less than its time."""
    program = read_program(text_of("scanned", CUDA))
    time = schedule_of(program, H100, CUDA).time
    assert 0 < time.hidden_seconds < time.communication_seconds
