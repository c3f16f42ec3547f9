"""Programs written by hand in which a kernel or a collective of n elements takes n seconds."""

from collections.abc import Callable
from typing import Any

import attrs

from shardrules.programs.compiled.collectives import Collective, find_collectives
from shardrules.programs.compiled.flops import find_matmuls
from shardrules.programs.compiled.kernels import find_kernels
from shardrules.programs.compiled.program import read_program
from shardrules.programs.costs.schedule import PlayedSchedule, play_schedule
from shardrules.programs.machine.hardware import Hardware

CLOCK = Hardware(
    "a clock",
    {"f32": 1e30},
    10**9,
    memory_bytes_per_second=4.0,
    link_bytes_per_second=4.0,
    link_latency_seconds=1e-15,
    network_bytes_per_second=4.0,
    network_latency_seconds=1e-15,
)
"""It writes one element of f32 in a second, and sends one."""

HEADER = "HloModule made_by_hand, is_scheduled=true, num_partitions=2\n\n"
PAIRS = "channel_id={channel}, source_target_pairs={{{{0,1}},{{1,0}}}}"


def at(line: int) -> str:
    return f'metadata={{op_name="jit(f)/op" source_file="/home/me/m.py" source_line={line}}}'


def kernel(name: str, seconds: int, line: int = 1) -> str:
    """A kernel that writes, and reads nothing."""
    return f"  %{name} = f32[{seconds}]{{0}} iota(), iota_dimension=0, {at(line)}\n"


def blocking(name: str, seconds: int, line: int = 2, channel: int = 1) -> str:
    """A collective that kernels wait for where it is printed."""
    pairs = PAIRS.format(channel=channel)
    return (
        f"  %{name}.in = f32[{seconds}]{{0}} constant({{...}})\n"
        f"  %{name} = f32[{seconds}]{{0}} collective-permute(%{name}.in), {pairs}, {at(line)}\n"
    )


def start(name: str, seconds: int, line: int = 2, channel: int = 1) -> str:
    pairs, shape = PAIRS.format(channel=channel), f"f32[{seconds}]{{0}}"
    return (
        f"  %{name}.in = {shape} constant({{...}})\n"
        f"  %{name} = ({shape}, {shape}, u32[], u32[]) collective-permute-start(%{name}.in), {pairs}, {at(line)}\n"
    )


def done(name: str, of: str, seconds: int) -> str:
    return f"  %{name} = f32[{seconds}]{{0}} collective-permute-done(%{of})\n"


def loop(name: str, rounds: int, body: str, operand: str = "state", types: str = "s32[]", line: int = 3) -> str:
    count = f'backend_config={{"known_trip_count":{{"n":"{rounds}"}}}}'
    return f"  %{name} = ({types}) while(%{operand}), condition=%cond.{body}, body=%{body}, {at(line)}, {count}\n"


def body(name: str, lines: str, root: str = "", types: str = "s32[]") -> str:
    """The body of a loop, and a condition that takes no time."""
    root = root or f"  ROOT %{name}.out = ({types}) tuple(%{name}.i)\n"
    return (
        f"%{name} ({name}.p: ({types})) -> ({types}) {{\n  %{name}.p = ({types}) parameter(0)\n"
        f"  %{name}.i = s32[] get-tuple-element(%{name}.p), index=0\n{lines}{root}}}\n\n"
        f"%cond.{name} (cond.{name}.p: ({types})) -> pred[] {{\n  %cond.{name}.p = ({types}) parameter(0)\n"
        f"  ROOT %cond.{name}.t = pred[] constant(true)\n}}\n\n"
    )


STATE = "  %zero = s32[] constant(0)\n  %state = (s32[]) tuple(%zero)\n"


def text_of(entry: str, *computations: str) -> str:
    return f"{HEADER}{''.join(computations)}ENTRY %main () -> s32[] {{\n{entry}  ROOT %end = s32[] constant(1)\n}}\n"


def play(
    entry: str,
    *computations: str,
    hardware: Hardware = CLOCK,
    change: Callable[[Collective], dict[str, Any]] = lambda collective: {},
) -> PlayedSchedule:
    """Plays a program; `change` returns what a compiler for real devices would know about a collective."""
    program = read_program(text_of(entry, *computations))
    collectives = [attrs.evolve(each, **change(each)) for each in find_collectives(program)]
    return play_schedule(program, collectives, find_kernels(program, find_matmuls(program)), hardware)
