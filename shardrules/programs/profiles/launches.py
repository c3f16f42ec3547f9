"""Which instruction launched each kernel of a GPU.

Events on GPUs are named after what the machine's own compiler made of a program. Most kernels run in a CUDA graph, of
which their events only have the name: `command_buffer_1`. And that compiler tries out which library or generator is
fastest for each matmul, so that `gemm_fusion_dot.3` of a program that was compiled without a GPU is `custom-call.12`
there. The order of kernels is about that of the program in both cases, and so are the names of the kernels that XLA
generates. Both sequences are aligned, and each event gets the name of its instruction.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs
import numpy as np

from shardrules.programs.profiles.alignment import align
from shardrules.programs.profiles.modelled import KernelFamily, ModelledProgram
from shardrules.programs.profiles.trace import Activity, DeviceTrace, ProfiledProgram, ProfileTrace

_FAMILIES: tuple[tuple[KernelFamily, re.Pattern[str]], ...] = (
    ("collective", re.compile(r"nccl|nvshmem|AllReduce|all_reduce", re.IGNORECASE)),
    ("attention", re.compile(r"fmha|sdpa|flash|attention", re.IGNORECASE)),
    ("convolution", re.compile(r"conv(?!ert)|implicit_?gemm|dgrad|wgrad|fprop|winograd", re.IGNORECASE)),
    ("matmul", re.compile(r"gemm|gemv|nvjet|cutlass|cublas|matmul|splitk|xmma|tensorop", re.IGNORECASE)),
    ("sort", re.compile(r"cub::|sort", re.IGNORECASE)),
    ("copy", re.compile(r"memcpy", re.IGNORECASE)),
)
"""What kernels of libraries compute, by their names; the first that matches counts."""

_GENERATED = re.compile(r"[a-z_]*fusion(_+\d+)*|wrapped_[a-z_]+(_+\d+)*")
"""The names of kernels that XLA generated from several operations."""

_PLAIN = re.compile(r"[a-z_]+(_*\d+)*")
"""The names of all kernels that XLA generated; libraries have signatures in C++."""

_COUNTER, _PART_OF_KERNEL = re.compile(r"(_\d+)+$"), re.compile(r"__\d+$")
"""The end of a name that tells it apart from others of its kind, and that of the kernels of one instruction."""

_SAME_NAME, _SAME_KIND = 4, 3
"""What it is worth that an event has the name of an instruction, or is of its kind. Alike kernels share one, so that
names alone do not tell layers apart; the order does, as any two kernels of a kind are worth more than a name."""

_ALIKE, _UNLIKE, _DOUBTFUL = 2.0, 4.0, 0.45
"""An event that takes so many times as long as an instruction is modelled, or as short, is still alike, or rather
another of its kind: two matmuls that ran in the other order are told apart by their sizes. Between both it is worth
less than half. With 1.5 a model that is off by as much misleads; with 4 and 8 the matmuls of a layer are mixed up."""

_Unit: TypeAlias = tuple[str, tuple[str, ...]]
"""A graph, or an instruction outside of graphs: its name in the trace, and the kernels that it launches, sorted."""


def with_instructions(trace: ProfileTrace, modelled: ModelledProgram) -> ProfileTrace:
    """Returns a trace whose GPU kernels have the names of those instructions of a program that launched them."""
    aligned: dict[frozenset[_Unit], dict[_Unit, dict[str, list[str]]]] = {}
    devices = []
    for device in trace.devices:
        activities = [activity for activity in device.activities if not activity.kernel]
        for groups in _launches(device):
            wholes = _wholes(groups)
            # A loop launches the same graphs again and again: each counts once, where it first runs.
            units = {
                _unit(group): group for group, whole in zip(groups, wholes, strict=True) if len(group) == len(whole)
            }
            if frozenset(units) not in aligned:
                aligned[frozenset(units)] = _align_units(units, modelled)
            for group, whole in zip(groups, wholes, strict=True):
                activities += _renamed(group, aligned[frozenset(units)][_unit(whole)], is_first=group is groups[0])
        in_order = sorted(activities, key=lambda activity: (activity.start_ns, activity.end_ns))
        devices.append(attrs.evolve(device, activities=tuple(in_order)))
    return attrs.evolve(trace, devices=tuple(devices))


def _renamed(group: Sequence[Activity], names: Mapping[str, list[str]], *, is_first: bool) -> Iterator[Activity]:
    """The kernels of a launch under the names of their instructions, given those of all of its graph.

    Kernels on several streams overlap in another order each time, equal ones in the same. The first launch may have
    begun before the trace, and the last may end after it.
    """
    counts = Counter(activity.kernel for activity in group)
    left = {kernel: iter(names[kernel][-count:] if is_first else names[kernel]) for kernel, count in counts.items()}
    for activity in group:
        yield attrs.evolve(activity, name=next(left[activity.kernel]))


def _wholes(groups: Sequence[list[Activity]]) -> list[list[Activity]]:
    """For each launch one of the same graph that a trace has all of."""
    longest: dict[str, list[Activity]] = {}
    for group in groups:
        if len(group) >= len(longest.get(group[0].name, ())):
            longest[group[0].name] = group
    kernels = {name: Counter(activity.kernel for activity in group) for name, group in longest.items()}
    return [
        group if Counter(activity.kernel for activity in group) - kernels[group[0].name] else longest[group[0].name]
        for group in groups
    ]


def _launches(device: DeviceTrace) -> Iterable[list[list[Activity]]]:
    """For each program its kernels, those together that one call launched as a graph."""
    programs: dict[ProfiledProgram | None, dict[tuple[str, int], list[Activity]]] = {}
    for index, activity in enumerate(device.activities):
        if activity.kernel:
            launches = programs.setdefault(activity.program, {})
            key = (activity.kernel, -1 - index) if activity.launch is None else (activity.name, activity.launch)
            launches.setdefault(key, []).append(activity)
    return [[*launches.values()] for launches in programs.values()]


def _unit(group: Sequence[Activity]) -> _Unit:
    return group[0].name, tuple(sorted(activity.kernel for activity in group))


def _align_units(
    units: Mapping[_Unit, Sequence[Activity]], modelled: ModelledProgram
) -> dict[_Unit, dict[str, list[str]]]:
    """For each unit and each name of a kernel the instructions of the kernels of this name, in their order."""
    instructions = iter(_instructions([activity for group in units.values() for activity in group], modelled))
    names: dict[_Unit, dict[str, list[str]]] = {}
    for unit, group in units.items():
        for activity, name in zip(group, instructions, strict=False):
            names.setdefault(unit, {}).setdefault(activity.kernel, []).append(name)
    return names


def _instructions(events: Sequence[Activity], modelled: ModelledProgram) -> list[str]:
    """The instruction of each event; what is none has its name in the trace, in a graph with that of its kernel."""
    names = [_named(event, modelled) for event in events]
    if all(names):
        return [str(name) for name in names]
    named_parts = {*names}
    # Collectives run beside other kernels, in an order of their own.
    for is_collective in (True, False):
        rows = [i for i, event in enumerate(events) if (_family(event.kernel) == "collective") == is_collective]
        parts = [modelled.parts[name] for name in modelled.launches]
        parts = [part for part in parts if (part.kind == "collective") == is_collective]
        left = [_Kernel.of(events[row].kernel, events[row].self_ns / 1e9, named=names[row]) for row in rows]
        right = [
            _Kernel.of(
                part.name, part.seconds / part.count, part.family, part.name if part.name in named_parts else None
            )
            for part in parts
        ]
        for row, column in _pairs(left, right):
            names[rows[row]] = names[rows[row]] or parts[column].name
    kernels = [event.kernel for event in events]
    # A library may clear its result before, and add up parts of it after.
    _join([kernel if kernel.startswith("Memset") else None for kernel in kernels], names, modelled, reverse=True)
    _join(kernels, names, modelled)
    _join(kernels, names, modelled, reverse=True)
    in_trace = [event.name if event.launch is None else f"{event.name}: {event.kernel}" for event in events]
    return [name or other for name, other in zip(names, in_trace, strict=True)]


def _named(event: Activity, modelled: ModelledProgram) -> str | None:
    """The instruction that an event names, unless the program has another kernel under this name."""
    part, family = modelled.find(event.name), _family(event.kernel)
    if part is None or not family or not part.family:
        return None if part is None else part.name
    # A convolution of single pixels is a matmul.
    is_alike = family == part.family or {family, part.family} == {"matmul", "convolution"}
    # Libraries have counters for names, which differ with what the compiler chose for others. A collective also waits.
    seconds, modelled_seconds = event.self_ns / 1e9, part.seconds / max(1, part.count)
    is_as_long = modelled_seconds / _UNLIKE < seconds < modelled_seconds * _UNLIKE or family == "collective"
    return part.name if is_alike and is_as_long else None


def _family(kernel: str) -> KernelFamily:
    if _GENERATED.fullmatch(kernel):
        return ""
    for family, pattern in _FAMILIES:
        if pattern.search(kernel):
            return family
    return ""


def _join(
    kernels: Sequence[str | None], names: list[str | None], modelled: ModelledProgram, *, reverse: bool = False
) -> None:
    """Names kernels of libraries after the nearest instruction before, or after, that libraries have kernels for."""
    nearest: str | None = None
    for index in range(len(kernels))[:: -1 if reverse else 1]:
        kernel, name = kernels[index], names[index]
        if name is not None:
            nearest = name if modelled.parts[name].family else None
        elif kernel is None or nearest is None:
            continue
        elif _family(kernel) != modelled.parts[nearest].family and (_family(kernel) or _PLAIN.fullmatch(kernel)):
            nearest = None
        else:
            names[index] = nearest


@final
@attrs.frozen
class _Kernel:
    """What is compared of kernels and instructions."""

    name: str
    kind: str
    """What libraries have kernels for is of one kind, under any names; the rest by its name without the counter."""
    seconds: float
    """Of one run, measured or modelled."""

    @classmethod
    def of(cls, name: str, seconds: float, family: KernelFamily | None = None, named: str | None = None) -> "_Kernel":
        """Describes a kernel; what is `named` in the trace is like nothing but the instruction of this name."""
        if named is not None:
            return cls(f"={named}", f"={named}", seconds)
        plain = _PART_OF_KERNEL.sub("", re.sub(r"\W", "_", name).removeprefix("wrapped_"))
        return cls(plain, (_family(name) if family is None else family) or _COUNTER.sub("", plain), seconds)


def _pairs(events: Sequence[_Kernel], parts: Sequence[_Kernel]) -> list[tuple[int, int]]:
    """The events and the instructions that launched them, by their indices.

    First those in the same order that take about as long. Compilers order what does not depend on each other
    differently, so that of the rest the nearest are paired that are alike.
    """
    if not events or not parts:
        return []
    ids: dict[str, int] = {}
    event_ids, part_ids = (
        np.array([[ids.setdefault(text, len(ids)) for text in (each.name, each.kind)] for each in kernels])
        for kernels in (events, parts)
    )
    worth = np.array((_SAME_NAME, _SAME_KIND))
    event_seconds, part_seconds = (np.array([each.seconds for each in kernels]) for kernels in (events, parts))
    part_seconds = part_seconds * event_seconds.sum() / part_seconds.sum()  # the whole machine may be slower

    def ratios(event: int, columns: Any) -> Any:
        return np.exp(np.abs(np.log(event_seconds[event] / part_seconds[columns])))

    def alike(event: int, left: int, right: int) -> Any:
        same = np.where(part_ids[left:right] == event_ids[event], worth, 0).max(1, initial=0)
        size = ratios(event, slice(left, right))
        return same * np.where(size < _ALIKE, 1, np.where(size < _UNLIKE, _DOUBTFUL, 0))

    pairs = align(alike, (0, len(events)), (0, len(parts)))
    rows, columns = np.array([*pairs, (len(events), len(parts))]).T
    positions = np.interp(np.arange(len(events)), rows, columns)
    unpaired = {*range(len(events))} - {row for row, _ in pairs}
    free: dict[str, list[int]] = {}
    for column in sorted({*range(len(parts))} - {column for _, column in pairs}):
        free.setdefault(parts[column].kind, []).append(column)
    for most in (_ALIKE, _UNLIKE, np.inf):
        for row in sorted(unpaired, key=lambda row: (-event_seconds[row], row)):
            columns = np.array(free.get(events[row].kind, ()), np.int64)
            columns = columns[ratios(row, columns) < most]
            if columns.size:
                column = int(columns[np.argmin(np.abs(columns - positions[row]))])
                free[events[row].kind].remove(column)
                unpaired.remove(row)
                pairs.append((row, column))
    return pairs
