"""A sheet of hardware from measurements: what was measured, and where that is missing the figures of another sheet."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import attrs
import jax

from shardrules.core.errors import HardwareError
from shardrules.programs.machine.measure import (
    COLLECTIVE_KINDS,
    MATMUL_KINDS,
    CollectiveTime,
    MatmulTime,
    Measurements,
    Sizes,
    cubes,
)

_AS_THEY_ARE = (
    *("torus_dims", "devices_per_chip", "matmul_tile", "clock_hertz", "collective_launch_seconds"),
    "vector_memory_bytes",
)
"""Figures that no benchmark tells."""

_LARGE = 0.5
"""The growth of time, over the growth of bytes or FLOPs, from which on a size is large enough to tell a rate. Chosen
by hand: sizes grow 16 times and more, so that fixed costs are then below a tenth."""

_OVER_PEAK = 1.25
"""Rates above so many times a chip's peak are errors. Chosen by hand: a clock may be higher than the peak's."""


@final
@attrs.define
class MeasuredSheet:
    """The figures of a sheet as they come together, each with its source."""

    measurements: Measurements
    base: Mapping[str, Any]
    """The fields of the sheet of these devices, or of the nominal one."""
    is_nominal: bool
    """A `base` of no real device, whose peaks say nothing of these."""
    values: dict[str, Any] = attrs.field(factory=dict)
    sources: dict[str, str] = attrs.field(factory=dict)
    missing: list[str] = attrs.field(factory=list)
    """The figures that could have been measured and were not."""
    small: tuple[str, ...] = ()
    """The kinds of multiplication whose peaks are those of small matmuls, for want of large ones."""

    @classmethod
    def of(cls, measurements: Measurements, base: Mapping[str, Any], is_nominal: bool) -> "MeasuredSheet":
        """Returns the sheet of some measurements. A `HardwareError` says which figure nothing is known of."""
        if not is_nominal:
            # A rate far above the peak was mistimed.
            peaks = dict(base["peak_flops"])
            possible = [
                time
                for time in measurements.matmuls
                if time.flops_per_second <= _OVER_PEAK * peaks.get(time.kind, math.inf)
            ]
            measurements = attrs.evolve(measurements, matmuls=tuple(possible))
        sheet = cls(measurements, base, is_nominal)
        best = sheet._best_rates()
        if not best or not measurements.memory:
            lacking = " and ".join(["no matmul"] * (not best) + ["no memory bandwidth"] * (not measurements.memory))
            raise HardwareError(
                f"{lacking} of {measurements.device_kind} could be measured: {'; '.join(measurements.skipped)}"
            )
        sheet.values["name"] = f"{measurements.device_kind} (measured)" if is_nominal else f"{base['name']} (measured)"
        sheet._add_compute(best)
        sheet._add_memory()
        sheet._add_collectives()
        for figure in () if is_nominal else _AS_THEY_ARE:
            sheet._keep(figure)
        return sheet

    def gaps(self, base_name: str) -> str:
        """Returns what was not measured and why, what is in the sheet in its place, and how long all of it takes."""
        measurements = self.measurements
        figures = list(dict.fromkeys(self.missing)) or ["large matmuls"]
        text = f"{', '.join(figures)}: {'; '.join(measurements.skipped)}"
        if self.missing:
            ratio = f" (peaks by their ratio to {_reference(self._best_rates())})" * self.is_nominal
            text += f". They are as in the sheet {base_name!r}{ratio}"
        if self.small:
            text += f". The rates of {', '.join(self.small)} are those of small matmuls, and large ones are faster"
        if measurements.whole_seconds:
            text += f". To measure all takes about {_in_tens(measurements.whole_seconds)} s: pass that as time_limit"
        return text

    def _measured(self, figure: str, value: Any, how: str = "") -> None:
        self.values[figure] = _rounded(value)
        devices = f"{self.measurements.device_count} x {self.measurements.device_kind}"
        self.sources[figure] = f"measured on {devices} with JAX {jax.__version__}{how}"

    def _keep(self, figure: str, reason: str = "") -> None:
        """Takes a figure of the other sheet, with its source."""
        self.values[figure] = self.base[figure]
        source = dict(self.base["sources"]).get(figure, "")
        self.sources[figure] = f"not measured{f': {reason}' if reason else ''}; {source}".rstrip("; ")

    def _overwrite(self, figure: str, measured: Mapping[str, float] | list[dict[str, Any]], how: str = "") -> None:
        """Takes fractions or tables: what was measured, and of other kinds and groups what the other sheet has."""
        # The nominal sheet is of no real device: its figures cannot stand in for those of one.
        base = {} if self.is_nominal else _by_kind(self.base[figure])
        ours = _by_kind(_rounded(measured))
        if not ours:
            if base:
                self._keep(figure, "; ".join(self.measurements.skipped))
            return
        self._measured(figure, measured, how)
        if base.keys() - ours.keys():
            self.sources[figure] += f"; the rest: {dict(self.base['sources']).get(figure, '')}".removesuffix(": ")
        both = base | ours
        self.values[figure] = both if isinstance(measured, Mapping) else [*both.values()]

    @property
    def _sizes(self) -> Sizes:
        return Sizes.of(self.measurements.platform)

    def _best_rates(self) -> dict[str, float]:
        best: dict[str, float] = {}
        for time in self.measurements.matmuls:
            best[time.kind] = max(best.get(time.kind, 0.0), time.flops_per_second)
        return best

    def _add_compute(self, best: Mapping[str, float]) -> None:
        matmuls = self.measurements.matmuls
        cut = [kind for kind in best if not _is_large_matmul(matmuls, kind, self._sizes.matmuls[-1])]
        large = {kind: rate for kind, rate in best.items() if kind not in cut}
        how = ": the fastest matmul of each kind" + ", none of them large" * (not large)
        if self.is_nominal:
            # Of a device without a sheet nothing else is known than its small matmuls.
            best, self.small = large or dict(best), () if large else tuple(best)
            peaks = self._peaks_like(best)
            unmeasured = [kind for kind in peaks if kind not in best]
            rest = f"; {', '.join(unmeasured)} by their ratio to {_reference(best)} in the sheet {self.base['name']!r}"
            self._measured("peak_flops", peaks, how + rest * bool(unmeasured))
            lacking = [kind for kind in unmeasured if kind in MATMUL_KINDS]
            self.missing += [f"peak_flops of {', '.join(lacking)}"] * bool(lacking)
        else:
            best = large
            # A clock above the one that peaks are quoted for.
            peaks = dict(self.base["peak_flops"])
            peaks |= {kind: rate for kind, rate in best.items() if kind in peaks and rate > peaks[kind]}
            self._keep("peak_flops")
            self.values["peak_flops"] = peaks
            self.missing += [f"matmul_fractions of {', '.join(cut)}"] * bool(cut)
        peaks = {kind: _rounded(rate) for kind, rate in peaks.items()}
        fractions = {kind: min(1.0, rate / peaks[kind]) for kind, rate in best.items() if kind in peaks}
        self._overwrite("matmul_fractions", fractions, how)
        tables = [table for kind in fractions if (table := _matmul_table(matmuls, kind, peaks[kind]))]
        self._overwrite("matmul_rates", tables)
        self.missing += ["matmul_rates"] * (not tables)
        if self.measurements.launch_seconds:
            self._measured("launch_seconds", self.measurements.launch_seconds)
        else:
            self._miss("launch_seconds")

    def _peaks_like(self, best: Mapping[str, float]) -> dict[str, float]:
        """The measured rates, and for all other kinds what keeps the ratio that they have in the nominal sheet."""
        nominal, reference = dict(self.base["peak_flops"]), _reference(best)
        scale = best[reference] / nominal[reference]
        return {kind: best.get(kind, scale * rate) for kind, rate in nominal.items()}

    def _miss(self, figure: str) -> None:
        self.missing.append(figure)
        self._keep(figure, "; ".join(self.measurements.skipped))

    def _add_memory(self) -> None:
        rates = dict(self.measurements.memory)
        if self.measurements.memory_bytes:
            self._measured("memory_bytes", self.measurements.memory_bytes, ": what the device says")
        else:
            self._keep("memory_bytes", "the device does not say")
        peak = max(rates.values())
        # Memory that is faster than the sheet says is believed: fractions of it must not exceed 1.
        if self.is_nominal or peak > self.base["memory_bytes_per_second"]:
            self._measured("memory_bytes_per_second", peak, ": the fastest access")
        else:
            peak = self.base["memory_bytes_per_second"]
            self._keep("memory_bytes_per_second")
        self._overwrite("memory_fractions", {access: min(1.0, rate / peak) for access, rate in rates.items()})
        links = dict(self.measurements.host_links)
        if links:
            how = ", ".join(f"{direction} {rate / 1e9:.3g} GB/s" for direction, rate in links.items())
            # A sheet has one figure for both directions: the slower one is safe.
            self._measured("host_link_bytes_per_second", min(links.values()), f": {how}")
        else:
            self._miss("host_link_bytes_per_second")

    def _add_collectives(self) -> None:
        everywhere = self.measurements.collectives
        inside = [time for time in everywhere if time.host_count == 1]
        across = [time for time in everywhere if time.host_count > 1]
        per_host = self.measurements.device_count // self.measurements.host_count
        self._add_links(inside, per_host)
        self._add_network(across)
        if self.is_nominal or self.base["devices_per_host"] is not None:
            # The number of CPU devices on a host is what JAX was asked for, and no property of the host.
            on_one_host = self.measurements.host_count == 1 and self.measurements.platform == "cpu"
            self._measured("devices_per_host", None if on_one_host else per_host)
        else:
            self._keep("devices_per_host")

    def _add_links(self, times: Sequence[CollectiveTime], per_host: int) -> None:
        figures = ("link_bytes_per_second", "link_latency_seconds")
        if not times:
            for figure in figures:
                self._keep(figure, "a single device has no links" if per_host == 1 else "")
            self.missing += ["collective_times"] * (per_host > 1)
            return
        # On a torus the share of the links decides, and collectives are modelled by it; behind a switch by their times.
        torus_dims = 0 if self.is_nominal else self.base["torus_dims"]
        large = _large_collectives(times, self._sizes.collective_bytes[-1])
        cut = [kind for kind in COLLECTIVE_KINDS if not any(time.kind == kind for time in large)]
        cut += [time.kind for time in times if time not in large]
        if cut:
            figure = "link_fractions" if torus_dims else "collective_times"
            self.missing.append(f"{figure} of {', '.join(dict.fromkeys(cut))}")
        rates = _best_bandwidths(large, torus_dims)
        for figure in figures:
            self._keep(figure)
        if self.is_nominal:
            if rates:
                self._measured("link_bytes_per_second", max(rates.values()), ": the fastest collective")
            self._measured("link_latency_seconds", _latency(times), ": the smallest collective")
        peak = self.values["link_bytes_per_second"]
        self._overwrite("link_fractions", {kind: min(1.0, rate / peak) for kind, rate in rates.items()})
        if not torus_dims:
            self._overwrite("collective_times", _collective_tables(large, peak))

    def _add_network(self, times: Sequence[CollectiveTime]) -> None:
        if not times:
            one_host = self.measurements.host_count == 1
            for figure in ("network_bytes_per_second", "network_latency_seconds", "network_fraction"):
                self._keep(figure, "a single host has no network" if one_host else "")
            self.missing += ["network_bytes_per_second"] * (not one_host)
            return
        # What leaves a host goes over the shares of all devices of the group there.
        shares = [
            attrs.evolve(time, payload_bytes=time.payload_bytes * time.host_count // time.group_size)
            for time in _large_collectives(times, self._sizes.collective_bytes[-1])
        ]
        rate = max(_best_bandwidths(shares).values(), default=0.0)
        if not rate:
            for figure in ("network_bytes_per_second", "network_fraction"):
                self._miss(figure)
        elif self.is_nominal or rate > self.base["network_bytes_per_second"]:
            self._measured("network_bytes_per_second", rate, ": the fastest collective between hosts")
            self._measured("network_fraction", 1.0)
        else:
            self._keep("network_bytes_per_second")
            self._measured("network_fraction", rate / self.base["network_bytes_per_second"])
        self._measured("network_latency_seconds", _latency(times), ": the smallest collective between hosts")


def _in_tens(seconds: float) -> int:
    return 10 * math.ceil(seconds / 10)


def _reference(rates: Mapping[str, float]) -> str:
    return next(kind for kind in MATMUL_KINDS if kind in rates)


def _rounded(value: Any) -> Any:
    """Numbers with four digits: no measurement has more."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def _by_kind(entries: Any) -> dict[Any, Any]:
    """Fractions by kind, or tables by kind and size of group."""
    pairs = entries.items() if isinstance(entries, Mapping) else entries
    return dict(((pair["kind"], pair.get("group_size")), pair) if isinstance(pair, Mapping) else pair for pair in pairs)


def _is_large(points: Iterable[tuple[float, float]], last: float) -> bool:
    """Sizes, as pairs of work and seconds, that grew until they tell a rate: up to the last, or until time grows
    with them. Those that a time limit has cut short tell what the smallest take."""
    ordered = sorted(points)
    if not ordered or ordered[-1][0] >= last:
        return bool(ordered)
    (work, seconds), (more_work, more_seconds) = ordered[-2:] if len(ordered) > 1 else ordered * 2
    return more_work > work and more_seconds / seconds >= _LARGE * more_work / work


def _is_large_matmul(matmuls: Sequence[MatmulTime], kind: str, last: int) -> bool:
    equal = [time for time in matmuls if time.kind == kind and time.m == time.n == time.k]
    return _is_large([(time.m**3, time.seconds) for time in equal], last**3)


def _large_collectives(times: Sequence[CollectiveTime], last: int) -> list[CollectiveTime]:
    """The collectives of each kind and group whose sizes tell a rate."""
    groups: dict[tuple[str, int, int], list[CollectiveTime]] = {}
    for time in times:
        groups.setdefault((time.kind, time.group_size, time.host_count), []).append(time)
    return [
        time
        for group in groups.values()
        if _is_large([(time.payload_bytes, time.seconds) for time in group], last)
        for time in group
    ]


def _matmul_table(matmuls: Sequence[MatmulTime], kind: str, peak: float) -> dict[str, Any] | None:
    """The largest grid of sizes of which every combination was measured."""
    rates = {(time.m, time.n, time.k): time.flops_per_second for time in matmuls if time.kind == kind}
    sizes = cubes(matmuls, kind)
    # The time limit may have cut sizes in the middle: then the smallest and the largest are a grid.
    grids = [sizes, sizes[:1] + sizes[1:][-1:]]
    for grid in grids:
        combinations = list(itertools.product(grid, grid, grid))
        if len(grid) > 1 and all(dims in rates for dims in combinations):
            rows = [rates[dims] for dims in combinations]
            return {"kind": kind, "m": grid, "n": grid, "k": grid, "flops_per_second": rows, "peak": peak}
    return None


def _best_bandwidths(times: Sequence[CollectiveTime], torus_dims: int = 0) -> dict[str, float]:
    """The most bytes per second that a device sends in collectives of each kind: on a torus, as if over all links."""
    best: dict[str, float] = {}
    for time in times:
        rate = time.wire_bytes / time.seconds
        if torus_dims and time.dims:
            # At the ends of a line one of two links leads nowhere.
            rate *= 2 * torus_dims / (2 * min(time.dims, torus_dims) - time.open_dims)
        best[time.kind] = max(best.get(time.kind, 0.0), rate)
    return best


def _latency(times: Sequence[CollectiveTime]) -> float:
    """The least time of a message: that of the smallest collectives, over the steps of their rings."""
    smallest = min(time.payload_bytes for time in times)
    return min(time.seconds / _steps(time) for time in times if time.payload_bytes == smallest)


def _steps(time: CollectiveTime) -> int:
    if time.kind == "collective-permute":
        return 1
    return (time.group_size - 1) * (2 if time.kind == "all-reduce" else 1)


def _collective_tables(times: Sequence[CollectiveTime], link_bytes_per_second: float) -> list[dict[str, Any]]:
    tables = []
    for kind, size in dict.fromkeys((time.kind, time.group_size) for time in times):
        rows = sorted(
            (time.payload_bytes, time.seconds) for time in times if (time.kind, time.group_size) == (kind, size)
        )
        seconds = [seconds for _, seconds in rows]
        # Fewer bytes never take longer: what seems so is noise.
        least = [min(seconds[index:]) for index in range(len(seconds))]
        tables.append(
            {
                "kind": kind,
                "group_size": size,
                "payload_bytes": [payload for payload, _ in rows],
                "seconds": least,
                "link_bytes_per_second": link_bytes_per_second,
            }
        )
    return tables
