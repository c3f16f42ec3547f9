"""Measures the devices that are there, within a time limit: what is most worth knowing first.

Several processes measure together: process 0 measures what a device does alone while the others wait, and says before
each collective whether there is time for it. All of them get its figures.
"""

import itertools
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import attrs
import jax

from shardrules.core.errors import HardwareError
from shardrules.core.jax_state import process_count, process_id
from shardrules.core.storage.records import record
from shardrules.core.text import bytes_text
from shardrules.mesh.processes import exchange
from shardrules.programs.machine import microbenchmarks
from shardrules.programs.machine.microbenchmarks import Overhead

MATMUL_KINDS = ("bf16", "f32", "f32_highest", "f16", "f8", "s8")
"""The kinds of matmuls that are measured, the most used first."""

COLLECTIVE_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""The kinds of collectives that are measured, the most used first."""

_SHARES = {"device": 0.2, "large matmuls": 0.4, "collectives": 0.75, "matmuls": 1.0}
"""The part of the time limit until which each step may begin another measurement, in this order. Chosen by hand: large
matmuls and collectives decide most of a step. The time that one step leaves is for the next."""

_PROGRAM_SECONDS = 5e-3
"""The time of the rounds of one program, chosen by hand: hundreds of times as much as a clock and a call vary."""

_LOAD_SECONDS = 0.5
"""The time of the rounds of the largest matmuls on accelerators: a chip at its limit of power runs slower after a
fraction of a second, as it does in training. With a tenth an H100 is measured at a rate that it does not keep."""

_MOST_ROUNDS = 200
"""The rounds of the smallest operations, chosen by hand."""

_RUNS = 6
"""The runs of a program: once to warm up, and as often as it is timed."""

_CPU_RATES, _RATES = (1e10, 1e10, 1e-4), (1e13, 1e12, 1e-5)
"""The rates of CPUs and accelerators before anything is measured, chosen by hand: FLOPs and bytes per second, and the
seconds of the smallest collective. They only decide the rounds of the first programs."""

_WAIT_SECONDS = 300.0
"""The time that processes wait for process 0 beyond the time limit, as it may be compiling. Chosen by hand."""

_MEMORY_SHARE = 1 / 8
"""The share of a device's memory that the arrays of one measurement may have, chosen by hand: others may be using the
rest."""

_TIME_LIMIT = "the time limit"

_ALONE_COUNT = 6
"""The measurements of launches, of memory and of the link to the host: one, three and two."""


@final
@attrs.frozen
class Sizes:
    """The sizes of the operations that are measured."""

    matmuls: tuple[int, ...]
    """The sizes of m, n and k, ascending."""
    memory_bytes: int
    collective_bytes: tuple[int, ...]
    host_bytes: int

    @classmethod
    def of(cls, platform: str) -> "Sizes":
        """Returns the sizes for a platform. Memory is measured with more than a cache holds."""
        if platform == "cpu":
            return cls((64, 256, 1024), 2**26, tuple(2**power for power in range(10, 23, 4)), 2**22)
        return cls((256, 1024, 4096), 2**30, tuple(2**power for power in range(10, 31, 4)), 2**28)


@final
@attrs.frozen
class MatmulTime:
    """A matmul of (m, k) by (k, n) on one device."""

    kind: str
    m: int
    n: int
    k: int
    seconds: float

    @property
    def flops_per_second(self) -> float:
        """The rate that it reaches."""
        return 2 * self.m * self.n * self.k / self.seconds


@final
@attrs.frozen
class CollectiveTime:
    """A collective over a group of devices. The bytes are those of `Collective.payload_bytes`."""

    kind: str
    group_size: int
    host_count: int
    """The hosts, or slices of TPUs, that the group is on."""
    dims: int
    """The dimensions of a torus along which its devices differ; 0 without coordinates."""
    open_dims: int
    """Those of them that are too short to close to a ring."""
    payload_bytes: int
    seconds: float

    @property
    def wire_bytes(self) -> float:
        """The bytes that a device sends in a ring."""
        if self.kind == "collective-permute":
            return self.payload_bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.payload_bytes * (self.group_size - 1) / self.group_size


@final
@attrs.frozen
class Measurements:
    """The measurements of some devices, and those that are missing."""

    device_kind: str
    platform: str
    device_count: int
    host_count: int
    memory_bytes: int
    """The part of a device's memory that a program may use; 0 if the device does not say."""
    launch_seconds: float
    """0 if it was not measured."""
    matmuls: tuple[MatmulTime, ...]
    memory: tuple[tuple[str, float], ...]
    """Bytes per second by access."""
    host_links: tuple[tuple[str, float], ...]
    """Bytes per second by direction."""
    collectives: tuple[CollectiveTime, ...]
    skipped: tuple[str, ...]
    """The measurements that the time limit left out, and those that failed."""
    whole_seconds: float = 0.0
    """About how long it takes to measure all; 0 if the time limit left nothing out."""


@final
@attrs.define
class _Session:
    devices: Sequence[Any]
    sizes: Sizes
    start: float
    time_limit: float
    matmuls: list[MatmulTime] = attrs.field(factory=list)
    collectives: list[CollectiveTime] = attrs.field(factory=list)
    memory: dict[str, float] = attrs.field(factory=dict)
    host_links: dict[str, float] = attrs.field(factory=dict)
    launch_seconds: float = 0.0
    overhead: Overhead = Overhead(0.0, 0.0)
    skipped: dict[str, str] = attrs.field(factory=dict)
    tried: set[tuple[str, tuple[int, int, int]]] = attrs.field(factory=set)
    """The matmuls that were measured, or failed."""
    compile_seconds: float = 0.0
    """The time of the last program beside its runs."""
    count: int = 0
    """The measurements that were made, or failed."""

    @property
    def rates(self) -> tuple[float, float, float]:
        """The assumed rates before anything is measured."""
        return _CPU_RATES if self.devices[0].platform == "cpu" else _RATES

    @property
    def device(self) -> Any:
        """The device of this process that measures what a device does alone."""
        return next(device for device in self.devices if device.process_index == jax.process_index())

    def end(self, step: str) -> float:
        """Returns the time after which a step begins no other measurement."""
        return self.start + self.time_limit * _SHARES[step]

    def has_time(self, step: str, seconds: float) -> bool:
        """Returns whether a measurement whose programs run for so long would end in time."""
        return time.monotonic() + seconds * _RUNS + self.compile_seconds <= self.end(step)

    def whole_seconds(self, group_count: int) -> float:
        """About how long all measurements take: most of it is compiling, and so alike for each of them. 0 where the
        time limit left nothing out."""
        if _TIME_LIMIT not in self.skipped.values():
            return 0.0
        sizes = self.sizes
        whole = _ALONE_COUNT + len(MATMUL_KINDS) * len(sizes.matmuls) ** 3
        whole += group_count * len(COLLECTIVE_KINDS) * len(sizes.collective_bytes)
        return (time.monotonic() - self.start) * whole / max(1, self.count)

    def measured(self, name: str, run: Callable[[], float], program_seconds: float = _PROGRAM_SECONDS) -> float | None:
        """Runs a measurement, whose programs take about so long; `None` where it fails."""
        self.count += 1
        start = time.monotonic()
        try:
            value = run()
        # Compilers and runtimes refuse in many ways what a device has no unit or no memory for.
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError, TypeError) as error:
            self.skipped[name] = str(error).splitlines()[0] if str(error) else type(error).__name__
            return None
        self.compile_seconds = max(0.0, time.monotonic() - start - _RUNS * program_seconds)
        return value


def measure(devices: Sequence[Any], time_limit: float, sizes: Sizes | None = None) -> Measurements:
    """Measures devices, which must include one of every process. All processes must call it, with the same limit."""
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) != 1:
        raise HardwareError(f"the devices to measure must be of one kind, got {', '.join(kinds) or 'none'}")
    start = time.monotonic()
    hosts = [str(host) for host in exchange(socket.gethostname(), "hosts", "Hardware.measure", _WAIT_SECONDS)]
    session = _Session(devices, sizes or Sizes.of(devices[0].platform), start, time_limit)
    if process_id() == 0:
        _measure_device(session)
        _measure_large_matmuls(session)
    groups = _groups(devices, hosts)
    _measure_collectives(session, groups, hosts)
    if process_id() == 0:
        _measure_matmuls(session)
    measurements = Measurements(
        kinds[0],
        devices[0].platform,
        len(devices),
        len(dict.fromkeys(_host(device, hosts) for device in devices)),
        _memory_bytes(session.device),
        session.launch_seconds,
        tuple(session.matmuls),
        tuple(session.memory.items()),
        tuple(session.host_links.items()),
        tuple(session.collectives),
        tuple(f"{name} ({reason})" for name, reason in session.skipped.items()),
        session.whole_seconds(len(groups)),
    )
    # Devices differ a little, and sheets that differ make plans that differ: all have that of process 0.
    text = json.dumps(attrs.asdict(measurements)) if process_id() == 0 else None
    answers = exchange(text, "measurements", "Hardware.measure", time_limit + _WAIT_SECONDS)
    return measurements if answers[0] is None else record(Measurements, json.loads(answers[0]), "measurements")


def _host(device: Any, hosts: Sequence[str]) -> str:
    """The devices that links join: a slice of TPUs, or a host, which may have several processes."""
    if device.platform == "tpu":
        return f"slice {getattr(device, 'slice_index', 0)}"
    return hosts[int(device.process_index)]


def _memory_bytes(device: Any) -> int:
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform == "cpu" and "SC_PHYS_PAGES" in os.sysconf_names:
        # All CPU devices of a host share its memory.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(jax.local_devices(backend="cpu"))
    return 0


def _measure_device(session: _Session) -> None:
    """Launches, memory and the link to the host."""
    device, sizes = session.device, session.sizes
    end = session.end("device")
    # These have few sizes: each of them is measured, so that every sheet has them.
    session.launch_seconds = session.measured("launches", lambda: microbenchmarks.launch_seconds(device, end)) or 0.0
    session.overhead = microbenchmarks.device_overhead(device, end)
    limit = _memory_bytes(device)
    nbytes = min(sizes.memory_bytes, int(limit * _MEMORY_SHARE)) if limit else sizes.memory_bytes
    for access in ("copy", "read", "gather"):
        rounds = _rounds(nbytes / session.rates[1])
        seconds = session.measured(
            f"memory: {access}",
            lambda access=access, rounds=rounds: microbenchmarks.memory_seconds(
                access, nbytes, device, rounds, session.overhead, end
            ),
        )
        if seconds:
            session.memory[access] = nbytes / seconds
    for direction in ("to device", "to host"):
        seconds = session.measured(
            f"copies {direction}",
            lambda direction=direction: microbenchmarks.host_link_seconds(direction, sizes.host_bytes, device, end),
        )
        if seconds:
            session.host_links[direction] = sizes.host_bytes / seconds


def _rounds(seconds: float) -> int:
    return max(2, min(_MOST_ROUNDS, math.ceil(_PROGRAM_SECONDS / seconds)))


def _matmul_rounds(session: _Session, dims: tuple[int, int, int], seconds: float) -> int:
    is_large = set(dims) == {session.sizes.matmuls[-1]} and session.device.platform != "cpu"
    return max(2, math.ceil(_LOAD_SECONDS / seconds)) if is_large else _rounds(seconds)


def _measure_large_matmuls(session: _Session) -> None:
    """Growing matmuls of each kind, up to the largest of the most used kinds first."""
    # What copies and launches took says nothing of matmuls.
    session.compile_seconds = 0.0
    for kind in MATMUL_KINDS:
        _measure_cubes(session, kind, "large matmuls")


def _measure_cubes(session: _Session, kind: str, step: str) -> None:
    for size in session.sizes.matmuls:
        _measure_matmul(session, kind, (size, size, size), step)


def _measure_matmuls(session: _Session) -> None:
    """Matmuls of unequal sizes, for one kind after the other: of the smallest and the largest, then of all."""
    for kind in MATMUL_KINDS:
        _measure_cubes(session, kind, "matmuls")  # those that there was no time for
    for kind in MATMUL_KINDS:
        sizes = cubes(session.matmuls, kind)
        for some in (sizes[:1] + sizes[1:][-1:], sizes):
            for m, n, k in itertools.product(some, some, some):
                _measure_matmul(session, kind, (m, n, k), "matmuls")


def cubes(matmuls: Iterable[MatmulTime], kind: str) -> tuple[int, ...]:
    """The sizes of which a matmul of equal sizes was measured."""
    return tuple(sorted(time.m for time in matmuls if time.kind == kind and time.m == time.n == time.k))


def _measure_matmul(session: _Session, kind: str, dims: tuple[int, int, int], step: str) -> None:
    like = [time for time in session.matmuls if time.kind == kind]
    if (kind, dims) in session.tried:
        return
    # By the fastest so far; the first of a kind by what any device does.
    seconds = 2 * math.prod(dims) / max((time.flops_per_second for time in like), default=session.rates[0])
    rounds, end = _matmul_rounds(session, dims, seconds), session.end(step)
    name = f"{kind} matmuls{' of some sizes' if like else ''}"
    # A sheet needs the rate of at least one matmul.
    if session.matmuls and not session.has_time(step, seconds * rounds):
        if step == "matmuls":  # the first step leaves to the last what there is no time for
            session.skipped.setdefault(name, _TIME_LIMIT)
        return
    session.tried.add((kind, dims))
    measured = session.measured(
        name,
        lambda: microbenchmarks.matmul_seconds(kind, dims, session.device, rounds, session.overhead, end),
        rounds * seconds,
    )
    if measured:
        session.matmuls.append(MatmulTime(kind, *dims, measured))


def _measure_collectives(session: _Session, groups: Sequence[Sequence[Any]], hosts: Sequence[str]) -> None:
    """Collectives of each kind and group: those of the largest groups first."""
    end = session.end("collectives")
    for group in sorted(groups, key=len, reverse=True):
        takes_part = jax.process_index() in [device.process_index for device in group]
        overhead = None
        for kind in COLLECTIVE_KINDS:
            # The overhead of a group is measured once, by the processes that take part in it.
            if takes_part and session.has_time("collectives", 0.0):
                overhead = overhead or microbenchmarks.group_overhead(group, end)
            _measure_collective(session, kind, group, hosts, overhead)


def _measure_collective(
    session: _Session, kind: str, group: Sequence[Any], hosts: Sequence[str], overhead: Overhead | None
) -> None:
    """One kind over one group, of growing sizes."""
    limit, end = _memory_bytes(session.device), session.end("collectives")
    # The next one is larger: it takes at least as long, and at most that many times.
    seconds, growth = session.rates[2], _growth(session.sizes.collective_bytes)
    host_count = len(dict.fromkeys(_host(device, hosts) for device in group))
    for payload_bytes in session.sizes.collective_bytes:
        name = f"{kind} of {bytes_text(payload_bytes)} over {len(group)} devices"
        fits = not limit or payload_bytes <= limit * _MEMORY_SHARE
        rounds = _agreed_rounds(session, name, seconds, growth, fits)
        if not rounds:
            return
        if jax.process_index() not in [device.process_index for device in group]:
            continue

        def run(payload_bytes: int = payload_bytes, rounds: int = rounds) -> float:
            return microbenchmarks.collective_seconds(
                kind, payload_bytes, group, rounds, overhead or Overhead(0.0, 0.0), end
            )

        measured = session.measured(name, run)
        if measured:
            dims = _torus_dims(group)
            session.collectives.append(
                CollectiveTime(kind, len(group), host_count, *dims, payload_bytes=payload_bytes, seconds=measured)
            )
            seconds = measured


def _growth(sizes: Sequence[int]) -> float:
    return max((later / earlier for earlier, later in itertools.pairwise(sizes)), default=1.0)


def _agreed_rounds(session: _Session, name: str, seconds: float, growth: float, fits: bool) -> int:
    """The rounds of a collective that all processes run; 0 where process 0 has no time or no memory for it."""
    rounds = _rounds(seconds)
    if not fits:
        session.skipped.setdefault("large collectives", "the memory of a device")
    elif not session.has_time("collectives", seconds * growth * rounds):
        session.skipped.setdefault("some collectives", _TIME_LIMIT)
        fits = False
    if process_count() == 1:
        return rounds * fits
    answers = exchange(str(rounds * fits), name, "Hardware.measure", session.time_limit + _WAIT_SECONDS)
    return int(str(answers[0]))


def _torus_dims(group: Sequence[Any]) -> tuple[int, int]:
    """The dimensions of a torus along which devices differ, and those of them that do not close to a ring: numbers."""
    coords = [device.coords for device in group if device.platform == "tpu"]
    extents = [max(column) - min(column) + 1 for column in zip(*coords, strict=True)]
    spanned = [extent for extent in extents if extent > 1]
    # A torus of three dimensions closes along multiples of 4 chips, one of two dimensions along all 16.
    closed = [
        extent for extent in spanned if (extent % 4 == 0 if len(extents) > 2 and extents[2] > 1 else extent == 16)
    ]
    return len(spanned), len(spanned) - len(closed)


def _groups(devices: Sequence[Any], hosts: Sequence[str]) -> list[tuple[Any, ...]]:
    """The groups to measure: inside a host 2, 4, 8, ... and all; a device of each host; all devices."""
    by_host: dict[str, list[Any]] = {}
    for device in devices:
        by_host.setdefault(_host(device, hosts), []).append(device)
    # Process 0 measures what all get, so the groups inside a host are on its own.
    first = by_host[_host(next(device for device in devices if device.process_index == 0), hosts)]
    sizes = itertools.takewhile(len(first).__gt__, (2**power for power in itertools.count(1)))
    groups = [tuple(first[:size]) for size in (*sizes, len(first)) if size > 1]
    if len(by_host) > 1:
        groups.append(tuple(group[0] for group in by_host.values()))
        # With one device on each host, the group before has all of them.
        groups += [tuple(devices)] * (len(first) > 1)
    return groups
