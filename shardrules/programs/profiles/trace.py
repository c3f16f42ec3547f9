"""The instructions that ran on each device in a profiler trace, with their times and runs of programs.

JAX's profiler writes planes, which have lines, which have events. Each platform has its own planes:

- A TPU core has a plane `/device:TPU:0`. Its line `XLA Modules` has an event for each run of a program, `jit_step(12)`.
  The line `XLA Ops` has one for each run of an instruction, named by the instruction's text, and those of a loop
  enclose those of its rounds. `Async XLA Ops` has transfers from their start to their end.
- A GPU has a plane `/device:GPU:0` whose lines are streams. Events have the names of kernels, and the instruction and
  the program among their stats. Nothing says where a run of the program begins.
- All CPU devices share the plane `/host:CPU`, whose lines are threads. Events of instructions have stats as on GPUs,
  and with them the device and the run.
"""

import bisect
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

import attrs
from jax.profiler import ProfileData

from shardrules.core.errors import ConfigTypeError, TraceError

Trace: TypeAlias = str | Path | Any
"""A trace as `compare` takes it: the folder that `jax.profiler.trace` wrote to, a file in it, or a
`jax.profiler.ProfileData`, which has no type for checkers."""

_TPU_PLANE = re.compile(r"/device:TPU:\d+")
_GPU_PLANE = re.compile(r"/device:GPU:\d+")
_HOST_PLANE = "/host:CPU"
_SUFFIX = ".xplane.pb"

# %fusion.3 = bf16[8,128]{1,0:T(8,128)} fusion(...), or the name alone
_INSTRUCTION = re.compile(r"%?([^\s=%]+)(?: = .*)?", re.DOTALL)
# The name of a program with its fingerprint: jit_step(1234567)
_RUN = re.compile(r"(.*)\((\d+)\)")

_HOST_TRANSFER = re.compile(
    r"(TransferToDevice|TransferFromDevice|Transfer(Preprocessed)?H2D|TransferD2H|CopyToDevice)"
)
"""Parts of the names that runtimes give to copies between a host and its devices."""


@final
@attrs.frozen
class _Event:
    name: str
    start_ns: float
    end_ns: float
    stats: Mapping[str, Any]

    @property
    def duration_ns(self) -> float:
        return self.end_ns - self.start_ns


@final
@attrs.frozen
class ProfiledProgram:
    """A compiled program in a trace. Several may have one name: a function that was compiled for several shapes."""

    name: str
    program_id: str = ""

    def __str__(self) -> str:
        return f"{self.name}({self.program_id})" if self.program_id else self.name


@final
@attrs.frozen
class Activity:
    """An event of a device: the run of an instruction, or of a kernel."""

    name: str
    """The name of the instruction; that of the kernel where the trace names no instruction."""
    program: ProfiledProgram | None
    """`None` where the trace names no instruction."""
    start_ns: float
    end_ns: float
    self_ns: float
    """Its duration without that of events which it encloses."""
    run: int | None = None
    """The id of the run of the program, where the trace has one."""
    text: str = ""
    """The instruction as the program has it; only TPUs write it."""
    in_flight: bool = False
    """A transfer from its start to its end, beside which other events run."""
    kernel: str = ""
    """The name of the kernel on a GPU, where the trace names an instruction, too, or the CUDA graph it is in."""
    launch: int | None = None
    """The id of the call that launched a CUDA graph with this kernel in it; `None` for kernels outside of graphs."""


@final
@attrs.frozen
class RunSpan:
    """A run of a program on a device, as TPUs write it."""

    program: ProfiledProgram
    start_ns: float
    end_ns: float


@final
@attrs.frozen
class DeviceTrace:
    """The events of one device, in the order of time."""

    device: str
    activities: tuple[Activity, ...] = attrs.field(repr=False)
    spans: tuple[RunSpan, ...] = attrs.field(default=(), repr=False)
    """Empty on CPUs and GPUs."""

    @property
    def has_kernels(self) -> bool:
        """Returns whether events are kernels, as on GPUs, so that their instructions have to be found."""
        return any(activity.kernel for activity in self.activities)

    @property
    def host(self) -> str:
        """The host that the name begins with in traces of several; empty in those of a single host."""
        return self.device.rpartition(" ")[0]


@final
@attrs.frozen
class ProfileTrace:
    """A trace: its devices, and the copies that its hosts saw."""

    source: str
    """The file or folder, as messages name it."""
    devices: tuple[DeviceTrace, ...]
    host_transfers: tuple[Activity, ...] = attrs.field(default=(), repr=False)
    """Copies between a host and its devices."""


def read_trace(trace: Trace) -> ProfileTrace:
    """Reads a trace. One without events of devices is a `TraceError`."""
    profiles: dict[str, Any]
    if isinstance(trace, ProfileData):
        source, profiles = "a trace in memory", {"": trace}
    elif isinstance(trace, str | Path):
        files, source = trace_files(Path(trace))
        # Each host writes a file of its own, and all of them begin to count their devices at 0.
        hosts = [file.name.removesuffix(_SUFFIX) for file in files]
        profiles = {host if len(files) > 1 else "": _read_file(file) for host, file in zip(hosts, files, strict=True)}
    else:
        raise ConfigTypeError(
            "a trace must be the folder or file that jax.profiler.trace wrote, or a jax.profiler.ProfileData; "
            f"got {trace!r:.60}"
        )
    devices: list[DeviceTrace] = []
    transfers: list[Activity] = []
    # Some versions of jaxlib make the classes of iterators when they are first used, with a warning: as an error it
    # would end the process.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        for host, profile in profiles.items():
            planes = list(profile.planes)
            devices += _devices(planes, f"{host} " if host else "")
            transfers += _host_transfers(planes)
    if not any(device.activities for device in devices):
        names = [plane.name for profile in profiles.values() for plane in profile.planes]
        raise TraceError(
            f"{source} has no events of devices: its planes are {', '.join(names) or 'none'}. Call the step inside of "
            "`with jax.profiler.trace(folder):`, and wait for its result there with jax.block_until_ready"
        )
    return ProfileTrace(source, tuple(devices), _in_order(transfers))


def trace_files(path: Path) -> tuple[list[Path], str]:
    """Returns the files of the newest trace in a folder, one for each host, and their name in messages."""
    if path.is_file():
        return [path], str(path)
    if not path.is_dir():
        raise TraceError(f"{path} does not exist: name the folder that jax.profiler.trace wrote to")
    # The folder of a trace is named by its time: plugins/profile/2026_11_22_15_40_33.
    sessions: dict[Path, list[Path]] = {}
    for file in sorted(path.rglob(f"*{_SUFFIX}")):
        sessions.setdefault(file.parent, []).append(file)
    if not sessions:
        raise TraceError(f"{path} has no *{_SUFFIX}: name the folder that jax.profiler.trace wrote to")
    newest = max(sessions, key=lambda folder: (folder.name, max(file.stat().st_mtime for file in sessions[folder])))
    others = f", the last of {len(sessions)} traces in {path}" if len(sessions) > 1 else ""
    return sessions[newest], f"{newest}{others}"


def _read_file(file: Path) -> Any:
    try:
        return ProfileData.from_serialized_xspace(file.read_bytes())
    except (OSError, RuntimeError, ValueError) as error:
        raise TraceError(f"{file} is not a trace as jax.profiler.trace writes it: {error}") from error


def _devices(planes: Sequence[Any], prefix: str) -> list[DeviceTrace]:
    accelerators: dict[str, list[Any]] = {}
    for plane in planes:
        # "/device:TPU:0 SparseCore 1" belongs to the same device.
        match = _TPU_PLANE.match(plane.name) or _GPU_PLANE.match(plane.name)
        if match:
            accelerators.setdefault(match[0], []).append(plane)
    devices = [
        _tpu(f"{prefix}{name}", group) if _TPU_PLANE.match(name) else _gpu(f"{prefix}{name}", group)
        for name, group in accelerators.items()
    ]
    devices = [device for device in devices if device.activities]
    # The host of an accelerator may have run programs on its CPU, too; these are no devices of the program.
    return devices or [device for plane in planes if plane.name == _HOST_PLANE for device in _cpus(plane, prefix)]


def _tpu(device: str, planes: Sequence[Any]) -> DeviceTrace:
    lines = [(line.name, _events(line)) for plane in planes for line in plane.lines]
    runs = [event for name, events in lines if name == "XLA Modules" for event in events]
    spans = [RunSpan(_span_program(event.name), event.start_ns, event.end_ns) for event in runs]
    spans.sort(key=lambda span: span.start_ns)
    starts = [span.start_ns for span in spans]
    activities: list[Activity] = []
    for name, events in lines:
        if name in ("XLA Ops", "Async XLA Ops", "Sparse Core Ops"):
            in_flight = name != "XLA Ops"
            # Transfers in flight overlap, and none encloses another.
            for event, self_ns in _with_self_times(events, nested=not in_flight):
                index = bisect.bisect_right(starts, event.start_ns) - 1
                inside = index >= 0 and event.start_ns < spans[index].end_ns
                activities.append(_tpu_activity(event, self_ns, spans[index].program if inside else None, in_flight))
    return DeviceTrace(device, _in_order(activities), tuple(spans))


def _span_program(text: str) -> ProfiledProgram:
    match = _RUN.fullmatch(text)
    return ProfiledProgram(match[1], match[2]) if match else ProfiledProgram(text)


def _tpu_activity(event: _Event, self_ns: float, program: ProfiledProgram | None, in_flight: bool) -> Activity:
    # Transfers may be named by their kind, and have the instruction among their stats.
    text = event.name if " = " in event.name else str(event.stats.get("hlo_op", event.name))
    match = _INSTRUCTION.fullmatch(text)
    return Activity(
        match[1] if match else text,
        program,
        event.start_ns,
        event.end_ns,
        self_ns,
        text=text if " = " in text else "",
        in_flight=in_flight,
    )


def _gpu(device: str, planes: Sequence[Any]) -> DeviceTrace:
    # Programs that convert traces add lines with the same events under other names.
    streams = [line for plane in planes for line in plane.lines if line.name.startswith("Stream")]
    activities = [_gpu_activity(event) for line in streams for event in _events(line)]
    return DeviceTrace(device, _in_order(activity for activity in activities if activity.self_ns))


def _gpu_activity(event: _Event) -> Activity:
    activity = _activity(event, event.duration_ns)
    if activity.program is None:
        return activity
    launch = event.stats.get("correlation_id") if "cuda_graph_id" in event.stats else None
    return attrs.evolve(activity, kernel=event.name, launch=None if launch is None else int(launch))


def _cpus(plane: Any, prefix: str) -> list[DeviceTrace]:
    thunks: list[tuple[_Event, float]] = []
    ends: dict[Any, float] = {}
    for line in plane.lines:
        # Python's own frames are most of the events of a host, and belong to no program.
        events = _events(line, skip="$")
        thunks += _with_self_times([event for event in events if "hlo_op" in event.stats])
        # What a thread only starts ends where an event on any thread says so.
        ends |= {event.stats.get("_c"): event.start_ns for event in events if event.name.startswith("end: ")}
    by_device: dict[int, list[Activity]] = {}
    for event, self_ns in thunks:
        later = max(0.0, ends.get(event.stats.get("_p"), 0.0) - event.end_ns)
        activity = _activity(attrs.evolve(event, end_ns=event.end_ns + later), self_ns + later)
        by_device.setdefault(int(event.stats.get("device_ordinal", 0)), []).append(activity)
    return [DeviceTrace(f"{prefix}CPU:{ordinal}", _in_order(by_device[ordinal])) for ordinal in sorted(by_device)]


def _activity(event: _Event, self_ns: float) -> Activity:
    """An event whose instruction and program are among its stats."""
    if "hlo_op" not in event.stats:
        return Activity(event.name, None, event.start_ns, event.end_ns, self_ns)
    program = ProfiledProgram(str(event.stats.get("hlo_module", "")), str(event.stats.get("program_id", "")))
    run = event.stats.get("run_id")
    return Activity(
        str(event.stats["hlo_op"]), program, event.start_ns, event.end_ns, self_ns, None if run is None else int(run)
    )


def _events(line: Any, skip: str | None = None) -> list[_Event]:
    """The events of a line, without those whose names begin with `skip`."""
    return [
        # A stat whose name is not in the file is named `None`.
        _Event(event.name, event.start_ns, event.end_ns, {name: value for name, value in event.stats if name})
        for event in line.events
        if skip is None or not event.name.startswith(skip)
    ]


def _with_self_times(events: Iterable[_Event], nested: bool = True) -> list[tuple[_Event, float]]:
    """The events of a line, each with its duration less that of the events that it encloses."""
    # Of events that begin together the longest encloses the others.
    ordered = sorted(events, key=lambda event: (event.start_ns, -event.end_ns))
    self_times = [event.duration_ns for event in ordered]
    enclosing: list[int] = []
    for index, event in enumerate(ordered if nested else ()):
        while enclosing and ordered[enclosing[-1]].end_ns <= event.start_ns:
            enclosing.pop()
        # Events may overlap without one enclosing the other: then each keeps its whole duration.
        if enclosing and ordered[enclosing[-1]].end_ns >= event.end_ns:
            self_times[enclosing[-1]] -= event.duration_ns
        enclosing.append(index)
    return [(event, max(0.0, self_ns)) for event, self_ns in zip(ordered, self_times, strict=True)]


def _in_order(activities: Iterable[Activity]) -> tuple[Activity, ...]:
    return tuple(sorted(activities, key=lambda activity: (activity.start_ns, activity.end_ns)))


def _host_transfers(planes: Sequence[Any]) -> list[Activity]:
    return [
        Activity(event.name, None, event.start_ns, event.end_ns, event.duration_ns)
        for plane in planes
        if plane.name.startswith("/host:")
        for line in plane.lines
        for event in line.events
        # Names with a dollar are those of Python functions.
        if event.duration_ns and not event.name.startswith("$") and _HOST_TRANSFER.search(event.name)
    ]
