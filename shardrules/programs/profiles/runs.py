"""The audited program among those of a trace, and its runs on each device."""

import bisect
import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import attrs

from shardrules.core.errors import TraceError, suggest
from shardrules.programs.profiles.modelled import ModelledProgram
from shardrules.programs.profiles.trace import Activity, DeviceTrace, ProfiledProgram, ProfileTrace

_LEAST_SHARE = 0.5
"""The share of a program's time in instructions of the audited program from which on both count as the same. Chosen by
hand: programs of other functions have some names in common, `fusion` and `copy.1`; another version of the compiler
gives most of them again."""

_WHOLE_RUN = 0.9
"""A run with fewer than this share of the usual events was cut off when the trace began or ended. Chosen by hand."""

_SHOWN = 5
"""The programs of a trace that an error lists, chosen by hand: most of the others convert a scalar."""


@final
@attrs.frozen
class Run:
    """One run of the program on one device."""

    start_ns: float
    end_ns: float
    activities: tuple[Activity, ...] = attrs.field(repr=False)


@final
@attrs.frozen
class DeviceRuns:
    """The runs of the program on one device that are compared, in order."""

    device: DeviceTrace
    program: ProfiledProgram
    """The ids of one program differ from host to host."""
    runs: tuple[Run, ...]
    left_out: tuple[Run, ...]
    """The first run, which may have warmed up, and runs that the trace cuts off."""

    @functools.cached_property
    def period_ns(self) -> float:
        """The usual time from the start of a run to that of the next; of a single run its duration."""
        starts = [run.start_ns for run in self.runs]
        periods = [later - earlier for earlier, later in itertools.pairwise(starts)]
        return statistics.median(periods) if periods else self.runs[0].end_ns - self.runs[0].start_ns


@final
@attrs.frozen
class _Candidate:
    """A program of the trace: its time on all devices, and the share of it in instructions of the audited program.

    Kernels of GPUs are matched by what they are: then it is no more than the share of the modelled time that has any.
    """

    program: ProfiledProgram
    seconds: float
    share: float
    unmatched: tuple[str, ...]

    def __str__(self) -> str:
        share = f"{self.share:.0%} of it in instructions of the audited program"
        return f"{self.program} ({self.seconds * 1e3:,.3g} ms, {share})"


def find_programs(
    trace: ProfileTrace, modelled: ModelledProgram, module: str | None = None
) -> dict[str, ProfiledProgram]:
    """Returns the program that is the audited one, by device. The `TraceError` for another trace lists its programs.

    `module` is the program's name in the trace; by default it has the same name as the audited one.
    """
    name = modelled.name if module is None else module
    programs: dict[str, ProfiledProgram] = {}
    # Devices that ran one program are judged together, since each may wait in other instructions. Every host counts the
    # ids of its programs.
    for host in dict.fromkeys(device.host for device in trace.devices):
        devices = [device for device in trace.devices if device.host == host]
        alike = {each.program: each for each in _candidates(devices, modelled) if each.share >= _LEAST_SHARE}
        for device in devices:
            ran = dict.fromkeys(activity.program for activity in device.activities)
            best = _best((alike[program] for program in ran if program in alike), name)
            if best is not None:
                programs[device.device] = best.program
    if programs:
        return programs
    candidates = _candidates(trace.devices, modelled)
    best = _best(candidates, name)
    shown = [str(candidate) for candidate in candidates[:_SHOWN]]
    rest = [f"{len(candidates) - _SHOWN} more"] if len(candidates) > _SHOWN else []
    listing = "; ".join([*shown, *rest])
    if best is None:
        near = suggest(name, [candidate.program.name for candidate in candidates])
        alike = [candidate.program.name for candidate in candidates if candidate.share >= _LEAST_SHARE]
        hint = f". If {alike[0]} is this function, pass module={alike[0]!r}" if alike else ""
        raise TraceError(f"{trace.source} has no program {name!r}{near}. Its programs: {listing}{hint}")
    raise TraceError(
        f"{trace.source}: its program {name!r} is not the audited one: {best.share:.0%} of its time is in instructions "
        f"of the audited program, and {', '.join(best.unmatched[:3])} are not. Audit with the mesh, the shapes, the "
        f"target and the flags that it ran with. Its programs: {listing}"
    )


def _best(candidates: Iterable[_Candidate], name: str) -> _Candidate | None:
    matching = [candidate for candidate in candidates if candidate.program.name == name]
    return max(matching, key=lambda candidate: (candidate.share, candidate.seconds), default=None)


def _candidates(devices: Iterable[DeviceTrace], modelled: ModelledProgram) -> list[_Candidate]:
    """The programs of devices, those that take most time first."""
    times: dict[ProfiledProgram, dict[tuple[str, str], float]] = {}
    for device in devices:
        for activity in device.activities:
            # A transfer in flight takes no time of the device.
            if activity.program is not None and not activity.in_flight:
                by_name = times.setdefault(activity.program, {})
                key = activity.name, activity.text
                by_name[key] = by_name.get(key, 0.0) + activity.self_ns
    candidates = []
    for program, by_name in times.items():
        total = sum(by_name.values())
        unmatched = {name: ns for (name, text), ns in by_name.items() if modelled.find(name, text) is None}
        names = sorted(unmatched, key=lambda name: -unmatched[name])
        share = 1 - sum(unmatched.values()) / total if total else 0.0
        if any(device.has_kernels for device in devices):
            share = min(share, modelled.covered(name for name, _ in by_name))
        candidates.append(_Candidate(program, total / 1e9, share, tuple(names)))
    return sorted(candidates, key=lambda candidate: -candidate.seconds)


def find_runs(
    trace: ProfileTrace, programs: Mapping[str, ProfiledProgram], modelled: ModelledProgram
) -> tuple[DeviceRuns, ...]:
    """Returns the runs of the program on each device that has it, without the first where there are several."""
    by_device = []
    for device in trace.devices:
        program = programs.get(device.device)
        runs = _split(device, program, modelled.times) if program is not None else []
        usual = statistics.median(len(run.activities) for run in runs) if runs else 0
        # A trace may begin or end within a run, which then has fewer activities than usual.
        whole = [run for run in runs if run.activities and len(run.activities) >= _WHOLE_RUN * usual]
        kept = whole[1:] if len(whole) > 1 else whole
        if kept and program is not None:
            starts = {run.start_ns for run in kept}
            left_out = tuple(run for run in runs if run.start_ns not in starts)
            by_device.append(DeviceRuns(device, program, tuple(kept), left_out))
    return tuple(by_device)


def _split(device: DeviceTrace, program: ProfiledProgram, times: Callable[[str], int]) -> list[Run]:
    activities = [activity for activity in device.activities if activity.program == program]
    if not activities:
        return []
    # TPUs write the runs themselves, CPUs the id of each; on GPUs they have to be found.
    if device.spans:
        spans = [span for span in device.spans if span.program == program]
        groups = _grouped(activities, [span.start_ns for span in spans])
        return [Run(span.start_ns, span.end_ns, tuple(group)) for span, group in zip(spans, groups, strict=True)]
    if all(activity.run is not None for activity in activities):
        by_id: dict[int | None, list[Activity]] = {}
        for activity in activities:
            by_id.setdefault(activity.run, []).append(activity)
        groups = list(by_id.values())
    else:
        groups = _grouped(activities, _starts(activities, times))
    return [
        Run(min(activity.start_ns for activity in group), max(activity.end_ns for activity in group), tuple(group))
        for group in groups
        if group
    ]


def _grouped(activities: Iterable[Activity], starts: Sequence[float]) -> list[list[Activity]]:
    """The activities from each start to the next. Those before the first are of a run that began before the trace."""
    groups: list[list[Activity]] = [[] for _ in starts]
    for activity in activities:
        index = bisect.bisect_right(starts, activity.start_ns) - 1
        if index >= 0:
            groups[index].append(activity)
    return groups


def _starts(activities: Sequence[Activity], times: Callable[[str], int]) -> list[float]:
    """The starts of a program's runs on a device whose trace does not have them.

    The instruction that runs first begins a run. One in a loop has an event for each round, and one that launches
    several kernels has as many.
    """
    counts = Counter(activity.name for activity in activities)
    rounds = {name: max(1, times(name)) for name in counts}
    # Loops may end early, and a trace may cut one off: what runs outside of them counts. Most of that is one kernel.
    outside = [count for name, count in counts.items() if rounds[name] == 1]
    if outside:
        run_count = Counter(outside).most_common(1)[0][0]
        first = next(name for name, count in counts.items() if count == run_count * rounds[name])
    else:
        run_count = math.gcd(*(count // rounds[name] for name, count in counts.items())) or 1
        first = activities[0].name
    starts = [activity.start_ns for activity in activities if activity.name == first]
    return starts[:: max(1, len(starts) // run_count)]
