"""Puts the measured times of a trace beside the modelled ones: by line of code, by collective, by kernel."""

import re
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TypeAlias, final

import attrs

from shardrules.programs.profiles.comparison import (
    ComparedTime,
    DeviceTime,
    MissingPart,
    TraceComparison,
    UnmatchedKind,
    UnmatchedTime,
)
from shardrules.programs.profiles.launches import with_instructions
from shardrules.programs.profiles.modelled import ModelledPart, ModelledProgram
from shardrules.programs.profiles.runs import DeviceRuns, Run, find_programs, find_runs
from shardrules.programs.profiles.trace import Activity, ProfileTrace

Intervals: TypeAlias = list[tuple[float, float]]
"""Intervals in the order of time, none of which meets another."""

_NS = 1e-9
_HOST_COPY = re.compile(r"Memcpy(H2D|D2H|HtoD|DtoH)")
"""The names that GPUs give to copies from their host and to it, which no instruction of a program asks for."""


@final
@attrs.frozen
class _RunTimes:
    parts: Mapping[str, tuple[float, float]]
    """Measured and exposed seconds of each part."""
    control: Mapping[str, float]
    """The time of loops and calls in which nothing inside of them runs."""
    unknown: Mapping[str, tuple[float, int]]
    """Instructions that the program does not have: seconds and how often."""
    device: DeviceTime


def compare_trace(
    trace: ProfileTrace, modelled: ModelledProgram, name: str, modelled_seconds: float, module: str | None
) -> TraceComparison:
    """Compares a program with its runs in a trace; `module` is its name there, by default its own."""
    trace = with_instructions(trace, modelled)
    programs = find_programs(trace, modelled, module)
    devices = find_runs(trace, programs, modelled)
    parts = {part.name: part for part in modelled.all_parts}
    times = [[_run_times(run, modelled, device) for run in device.runs] for device in devices]
    names = dict.fromkeys(name for runs in times for run in runs for name in run.parts)
    # A loop or a call that is one event for all that is inside stands for its parts.
    in_trace = [_with_inside(parts[name], parts) for name in names]
    compared = {part.name: _compared([part], part.name, part.label, devices, times) for part in in_trace}
    lines: dict[str, list[ModelledPart]] = {}
    for part in in_trace:
        lines.setdefault(part.line, []).append(part)
    measured = sum(seconds for runs in times for run in runs for seconds, _ in run.parts.values())
    unknown = sum(seconds for runs in times for run in runs for seconds, _ in run.unknown.values())
    share = measured / (measured + unknown) if measured + unknown else 0.0
    # Kernels of GPUs are matched by their order, which another program may fit as well: it would not cover this one.
    if any(device.device.has_kernels for device in devices):
        share = min(share, modelled.covered(names))
    covered = {inner for part in in_trace if part.kind == "control" for inner in part.inside}
    return TraceComparison(
        name,
        trace.source,
        ", ".join(dict.fromkeys(map(str, programs.values()))),
        min(len(device.runs) for device in devices),
        max(len(device.left_out) for device in devices),
        _count_devices(trace, {program.name for program in programs.values()}) - len(devices),
        modelled_seconds,
        tuple(
            _median_device(device, [run.device for run in runs]) for device, runs in zip(devices, times, strict=True)
        ),
        _sorted(_compared(group, line, "", devices, times) for line, group in lines.items()),
        _sorted(compared[part.name] for part in in_trace if part.kind == "collective"),
        _sorted(compared[part.name] for part in in_trace if part.kind != "collective"),
        _unmatched(trace, devices, times),
        _missing(modelled, names, covered),
        share,
    )


def _count_devices(trace: ProfileTrace, names: Container[str]) -> int:
    """The number of devices that ran a program of one of these names."""
    return sum(
        any(activity.program is not None and activity.program.name in names for activity in device.activities)
        for device in trace.devices
    )


def _with_inside(part: ModelledPart, parts: Mapping[str, ModelledPart]) -> ModelledPart:
    return attrs.evolve(part, seconds=part.seconds + sum(parts[name].seconds for name in part.inside))


def _run_times(run: Run, modelled: ModelledProgram, device: DeviceRuns) -> _RunTimes:
    matched: dict[str, list[Activity]] = {}
    parts: dict[str, ModelledPart] = {}
    unknown: dict[str, list[Activity]] = {}
    for activity in run.activities:
        part = modelled.find(activity.name, activity.text)
        if part is None:
            unknown.setdefault(activity.name, []).append(activity)
        else:
            parts[part.name] = part
            matched.setdefault(part.name, []).append(activity)
    # A loop, or a call, has an event around those of what is inside, or one for all of it.
    around = [part for part in parts.values() if any(name in matched for name in part.inside)]
    whole = [part for part in parts.values() if part.kind == "control" and part not in around]
    kernels = [part for part in parts.values() if part.kind == "kernel"]
    copies = [part for part in parts.values() if part.kind == "copy"]
    collectives = [part for part in parts.values() if part.kind == "collective"]
    # A copy that is in flight keeps no kernel from running.
    working = [*(matched[part.name] for part in (*kernels, *whole)), *unknown.values()]
    busy = _extent(activity for group in working for activity in group if not activity.in_flight)
    sent = _extent(activity for part in collectives for activity in matched[part.name])
    seen = union([*busy, *sent, *_extent(activity for part in copies for activity in matched[part.name])])
    return _RunTimes(
        {
            **{part.name: (_direct_seconds(matched[part.name]), 0.0) for part in (*kernels, *whole)},
            **{part.name: _transfer_time(part, matched[part.name], busy) for part in (*collectives, *copies)},
        },
        {part.name: outside(_extent(matched[part.name]), seen) * _NS for part in around},
        {name: (_direct_seconds(group), len(group)) for name, group in unknown.items()},
        DeviceTime(
            device.device.device,
            (run.end_ns - run.start_ns) * _NS,
            device.period_ns * _NS,
            length(busy) * _NS,
            length(sent) * _NS,
            outside(sent, busy) * _NS,
            outside([(run.start_ns, run.end_ns)], seen) * _NS,
        ),
    )


def _extent(activities: Iterable[Activity]) -> Intervals:
    return union((activity.start_ns, activity.end_ns) for activity in activities)


def _direct_seconds(activities: Iterable[Activity]) -> float:
    """The time of events that are not transfers beside others."""
    return sum(activity.self_ns for activity in activities if not activity.in_flight) * _NS


def _transfer_time(part: ModelledPart, activities: Sequence[Activity], busy: Intervals) -> tuple[float, float]:
    """The measured and the exposed seconds of a transfer."""
    extent = _extent(activities)
    exposed = outside(extent, busy) * _NS
    if not any(activity.in_flight for activity in activities):
        return _direct_seconds(activities), exposed
    # The trace has its start and its end, but not how long in between it was sending.
    return min(max(part.seconds, exposed), length(extent) * _NS), exposed


def _compared(
    group: Sequence[ModelledPart],
    name: str,
    label: str,
    devices: Sequence[DeviceRuns],
    times: Sequence[Sequence[_RunTimes]],
) -> ComparedTime:
    """The time of some parts together: the median over runs on each device, then that over the devices."""

    seconds = [[[run.parts[part.name] for part in group if part.name in run.parts] for run in runs] for runs in times]
    # The parts of a run are added up before the median is taken: medians do not add up.
    measured = [statistics.median(sum(each for each, _ in run) for run in runs) for runs in seconds]
    exposed = [statistics.median(sum(each for _, each in run) for run in runs) for runs in seconds]
    slowest = max(range(len(devices)), key=lambda index: measured[index])
    return ComparedTime(
        name,
        label,
        group[0].line,
        sum(part.count for part in group),
        sum(part.seconds for part in group),
        statistics.median(measured),
        measured[slowest],
        devices[slowest].device.device,
        statistics.median(exposed),
    )


def _sorted(times: Iterable[ComparedTime]) -> tuple[ComparedTime, ...]:
    return tuple(sorted(times, key=lambda time: (-abs(time.difference), time.name)))


def _median_device(device: DeviceRuns, runs: Sequence[DeviceTime]) -> DeviceTime:
    figures = [field.name for field in attrs.fields(DeviceTime) if field.name != "device"]
    return DeviceTime(
        device.device.device, *(statistics.median(getattr(run, figure) for run in runs) for figure in figures)
    )


def _unmatched(
    trace: ProfileTrace, devices: Sequence[DeviceRuns], times: Sequence[Sequence[_RunTimes]]
) -> tuple[UnmatchedTime, ...]:
    """Everything that only the trace has, on the device that has most of it."""
    pairs = zip(devices, times, strict=True)
    everything = [time for device, runs in pairs for time in (*_in_runs(device, runs), *_beside_runs(trace, device))]
    ascending = sorted(everything, key=lambda time: (time.seconds, time.outside_seconds))
    most = {(time.kind, time.name): time for time in ascending}
    return tuple(sorted(most.values(), key=lambda time: (-time.seconds, -time.outside_seconds, time.name)))


def _in_runs(device: DeviceRuns, runs: Sequence[_RunTimes]) -> list[UnmatchedTime]:
    medians = _median_device(device, [run.device for run in runs])
    between = medians.period_seconds - medians.step_seconds
    times = [UnmatchedTime("idle", "nothing runs within a step", medians.idle_seconds, 1)]
    if len(runs) > 1 and between > 0:
        times.append(UnmatchedTime("between steps", "from the end of a step to the next", between, 1))
    control = statistics.median(sum(run.control.values()) for run in runs)
    if control:
        count = statistics.median(len(run.control) for run in runs)
        times.append(UnmatchedTime("loops and calls", "while nothing inside of them runs", control, count))
    for name in dict.fromkeys(name for run in runs for name in run.unknown):
        # An instruction that a run lacks takes no time there.
        pairs = [run.unknown.get(name, (0.0, 0)) for run in runs]
        seconds, count = (statistics.median(figures) for figures in zip(*pairs, strict=True))
        times.append(UnmatchedTime("instruction", name, seconds, count))
    return times


def _beside_runs(trace: ProfileTrace, device: DeviceRuns) -> list[UnmatchedTime]:
    """Runs that are not compared, other programs, kernels of no program, and copies that the host saw."""
    first, last = device.runs[0], device.runs[-1]
    totals: dict[tuple[UnmatchedKind, str], list[float]] = {}

    def add(kind: UnmatchedKind, name: str, start_ns: float, seconds: float) -> None:
        figures = totals.setdefault((kind, name), [0.0, 0.0, 0.0])
        inside = first.start_ns <= start_ns < last.end_ns
        figures[0 if inside else 1] += seconds
        figures[2] += inside

    for activity in device.device.activities:
        if activity.program is None:
            kind = "host transfer" if _HOST_COPY.match(activity.name) else "kernel"
            add(kind, activity.name, activity.start_ns, activity.self_ns * _NS)
        elif activity.program != device.program:
            add("other program", str(activity.program), activity.start_ns, activity.self_ns * _NS)
    for run in device.left_out:
        # Runs that are left out count as outside of the others, wherever they are.
        add("run left out", str(device.program), float("-inf"), (run.end_ns - run.start_ns) * _NS)
    for transfer in trace.host_transfers:
        add("host transfer", transfer.name, transfer.start_ns, transfer.self_ns * _NS)
    steps = len(device.runs)
    return [
        UnmatchedTime(kind, name, inside / steps, count / steps, outside_seconds)
        for (kind, name), (inside, outside_seconds, count) in totals.items()
    ]


def _missing(modelled: ModelledProgram, names: Mapping[str, None], covered: Iterable[str]) -> tuple[MissingPart, ...]:
    present = {*names, *covered}
    missing = [
        MissingPart(part.name, part.label, part.line, part.seconds, part.conditional)
        for part in modelled.all_parts
        if part.name not in present and part.seconds and part.count
    ]
    return tuple(sorted(missing, key=lambda part: (-part.modelled_seconds, part.name)))


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Returns the union of intervals."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > start:
            merged.append((start, end))
    return merged


def length(intervals: Intervals) -> float:
    """Returns the length of intervals together."""
    return sum(end - start for start, end in intervals)


def outside(intervals: Intervals, others: Intervals) -> float:
    """Returns the length of the intervals that none of `others` covers."""
    covered, index = 0.0, 0
    for start, end in intervals:
        while index < len(others) and others[index][1] <= start:
            index += 1
        # The next interval may begin inside the same other one, so the index stays.
        position = index
        while position < len(others) and others[position][0] < end:
            covered += min(end, others[position][1]) - max(start, others[position][0])
            position += 1
    return length(intervals) - covered
