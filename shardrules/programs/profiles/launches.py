"""The instructions that launched the kernels of a GPU.

Most kernels run in a CUDA graph, whose events only have its name: `command_buffer_1`. And the machine's own compiler
tries out which library is fastest for each matmul, so that its program has other names than one that was compiled
without a GPU. The order of kernels is about that of the program in both cases. So both sequences are aligned by the
names that XLA gives kernels and by what libraries have kernels for, and each event gets the name of its instruction.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import attrs
import numpy as np

from shardrules.programs.profiles.modelled import ModelledProgram
from shardrules.programs.profiles.trace import Activity, DeviceTrace, ProfiledProgram, ProfileTrace

_KINDS = (
    ("helper", re.compile(r"memset|splitk", re.IGNORECASE)),  # a library runs it beside the kernel that computes
    ("collective", re.compile(r"nccl|nvshmem|AllReduce|all_reduce", re.IGNORECASE)),
    ("attention", re.compile(r"fmha|sdpa|flash|attention", re.IGNORECASE)),
    ("convolution", re.compile(r"conv(?!ert)|implicit_?gemm|dgrad|wgrad|fprop|winograd", re.IGNORECASE)),
    ("matmul", re.compile(r"gemm|gemv|nvjet|cutlass|cublas|matmul|xmma|tensorop", re.IGNORECASE)),
    ("sort", re.compile(r"cub::|sort", re.IGNORECASE)),
    ("copy", re.compile(r"memcpy", re.IGNORECASE)),
)
"""The kinds of kernels of libraries, by their names; the first that matches counts."""

_GENERATED = re.compile(r"([a-z_]*fusion|wrapped_[a-z_]+)(_+\d+)*")
"""The names of kernels that XLA generated from several operations."""

_COUNTER = re.compile(r"(_+\d+)+$")
"""The end of a name that tells it apart from others of its kind."""

_Unit: TypeAlias = tuple[str, str]
"""The instruction or graph that an event names, and outside of graphs its kernel."""


def with_instructions(trace: ProfileTrace, modelled: ModelledProgram) -> ProfileTrace:
    """Returns a trace whose GPU kernels have the names of those instructions of a program that launched them."""
    return attrs.evolve(trace, devices=tuple(_with_instructions(device, modelled) for device in trace.devices))


def _with_instructions(device: DeviceTrace, modelled: ModelledProgram) -> DeviceTrace:
    activities = [activity for activity in device.activities if not activity.kernel]
    for launches in _launches(device):
        # A loop launches the same graphs again and again: each counts once, where it first runs. The launch with most
        # kernels stands for all, since a trace may cut off the first and the last.
        units: dict[_Unit, list[Activity]] = {}
        for launch in launches:
            unit = _unit(launch[0])
            units[unit] = max(units.get(unit, []), launch, key=len)
        names = _unit_names(units, modelled)
        for launch in launches:
            # Kernels on several streams overlap in another order each time, equal ones in the same. The first launch
            # may have begun before the trace.
            left = {
                kernel: iter(names[_unit(launch[0])].get(kernel, [])[-count if launch is launches[0] else 0 :])
                for kernel, count in Counter(each.kernel for each in launch).items()
            }
            activities += [attrs.evolve(each, name=next(left[each.kernel], each.name)) for each in launch]
    in_order = sorted(activities, key=lambda activity: (activity.start_ns, activity.end_ns))
    return attrs.evolve(device, activities=tuple(in_order))


def _launches(device: DeviceTrace) -> Iterable[list[list[Activity]]]:
    """For each program its kernels, those together that one call launched as a graph."""
    programs: dict[ProfiledProgram | None, dict[tuple[str, int], list[Activity]]] = {}
    for index, activity in enumerate(device.activities):
        if activity.kernel:
            launches = programs.setdefault(activity.program, {})
            key = ("", index) if activity.launch is None else (activity.name, activity.launch)
            launches.setdefault(key, []).append(activity)
    return [[*launches.values()] for launches in programs.values()]


def _unit(activity: Activity) -> _Unit:
    return activity.name, activity.kernel if activity.launch is None else ""


def _unit_names(
    units: Mapping[_Unit, Sequence[Activity]], modelled: ModelledProgram
) -> dict[_Unit, dict[str, list[str]]]:
    """For each unit and each name of a kernel the instructions of the kernels of this name, in their order."""
    instructions = iter(_instructions([activity for launch in units.values() for activity in launch], modelled))
    names: dict[_Unit, dict[str, list[str]]] = {unit: {} for unit in units}
    for unit, launch in units.items():
        for activity in launch:
            names[unit].setdefault(activity.kernel, []).append(next(instructions))
    return names


def _instructions(events: Sequence[Activity], modelled: ModelledProgram) -> list[str]:
    """The instruction of each event; an event without one keeps its name, in a graph with that of its kernel."""
    parts = [modelled.find(event.name) for event in events]
    if not all(parts):
        # Libraries number their calls, and the numbers differ with what the compiler chose for others.
        parts = [None if part is None or part.family else part for part in parts]
    named = {part.name for part in parts if part is not None}
    free = [modelled.parts[name] for name in modelled.launches if name not in named]
    rows = [row for row, part in enumerate(parts) if part is None]
    kinds = [_library_kind(events[row].kernel) or _plain(events[row].kernel) for row in rows]
    pairs = _pairs(kinds, [part.family or _plain(part.name) for part in free])
    for row, column in pairs.items():
        parts[rows[row]] = free[column]
    for row, event in enumerate(events):
        # A library may add up parts of its result, or convert it.
        before = parts[row - 1] if row else None
        if parts[row] is None and before is not None and before.family and not _GENERATED.fullmatch(event.kernel):
            parts[row] = before
    in_trace = [event.name if event.launch is None else f"{event.name}: {event.kernel}" for event in events]
    return [name if part is None else part.name for part, name in zip(parts, in_trace, strict=True)]


def _library_kind(kernel: str) -> str:
    """The kind of a library's kernel; empty for others."""
    if _GENERATED.fullmatch(kernel):
        return ""
    return next((kind for kind, pattern in _KINDS if pattern.search(kernel)), "")


def _plain(name: str) -> str:
    """The part of its name that XLA gives both an instruction and its kernels."""
    return _COUNTER.sub("", re.sub(r"\W", "_", name).removeprefix("wrapped_"))


def _pairs(left: Sequence[str], right: Sequence[str]) -> dict[int, int]:
    """Equal items, by their indices: a longest common subsequence, and of the rest the next in order."""
    # Collectives run beside other kernels, in an order of their own.
    pairs = _common_subsequence(left, [None if item == "collective" else item for item in right])
    free = sorted({*range(len(right))} - {*pairs.values()})
    # Compilers order what does not depend on each other differently.
    for row, item in enumerate(left):
        column = next((column for column in free if right[column] == item), None)
        if row not in pairs and column is not None:
            pairs[row] = column
            free.remove(column)
    return pairs


def _common_subsequence(left: Sequence[str], right: Sequence[str | None]) -> dict[int, int]:
    """The longest subsequence that both have, as indices of the first with those of the second."""
    ids = {item: index for index, item in enumerate(dict.fromkeys([*left, *right]))}
    columns = np.array([ids[item] for item in right], np.int64)
    # The lengths for the first rows and columns; two bytes each, as a long program has ten thousand kernels.
    lengths = np.zeros((len(left) + 1, len(right) + 1), np.uint16)
    for row, item in enumerate(left):
        longer = lengths[row, :-1] + (columns == ids[item])
        lengths[row + 1, 1:] = np.maximum.accumulate(np.maximum(lengths[row, 1:], longer))
    pairs = {}
    row, column = len(left), len(right)
    while row and column:
        if lengths[row, column] == lengths[row - 1, column]:
            row -= 1
        elif lengths[row, column] == lengths[row, column - 1]:
            column -= 1
        else:
            row, column = row - 1, column - 1
            pairs[row] = column
    return pairs
