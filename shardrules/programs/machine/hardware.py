"""Sheets of hardware: peak rates, memory and links. `sheets.toml` has ready ones, every figure with its source."""

import functools
import math
import re
import tomllib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import attrs
import jax
import numpy as np

from shardrules.core.errors import ConfigError, ConfigTypeError, HardwareError, ShardingWarning, suggest
from shardrules.core.storage.files import as_path, read_text, write_text
from shardrules.core.storage.records import read_toml
from shardrules.programs.machine.kinds import sheet_name
from shardrules.programs.machine.measure import measure
from shardrules.programs.machine.measured import (
    CollectiveTimes,
    Fractions,
    MatmulRates,
    as_fractions,
    as_pairs,
    as_tables,
)
from shardrules.programs.machine.measured_sheet import MeasuredSheet
from shardrules.programs.machine.sheet_checks import hardware_problems
from shardrules.programs.machine.sheet_files import sheet_problems, sheet_text

RATES = ("bf16", "f16", "f32", "f32_highest", "f8", "s8", "f64")
"""The kinds of multiplication that a sheet has rates for.

`f32` is what JAX does at its default precision: TF32 on a GPU, one pass of bf16 on a TPU. `f32_highest` is what it does
at `precision="highest"`. `f8` is any float of 8 bits or fewer, `s8` any integer of 8 bits or fewer.
"""

# Hardware without a unit for a kind converts to a wider one: the first of these that has a rate.
_FALLBACKS = {
    "bf16": ("f32",),
    "f16": ("bf16", "f32"),
    "f8": ("bf16", "f16", "f32"),
    "s8": ("bf16", "f16", "f32"),
    "f32_highest": ("f32",),
}
# NumPy's names and XLA's: "bfloat16" and "bf16", "float8_e4m3fn" and "f8e4m3fn", "uint8" and "u8".
_DTYPE = re.compile(r"(?P<brain>bf|bfloat)16|(?P<kind>float|f|uint|int|u|s|complex|c)(?P<bits>\d+)\w*")


def _as_sources(value: Mapping[str, str] | Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple((str(figure), str(source)) for figure, source in pairs)


@final
@attrs.frozen(cache_hash=True)
class Hardware:
    """The abilities of one device, the part of them that programs reach, and its links to others.

    Rates are peaks; fractions and tables say what is reached. `Hardware.named` returns a ready sheet with both.
    `attrs.evolve` makes your own from it. A sheet of peaks alone assumes that all of them are reached, that nothing
    takes time to start, and that a device exchanges 25 GB/s with its host.

    **Arguments:**

    - `name`: what it is called.
    - `peak_flops`: the most operations per second for each kind of multiplication, dense: sparsity is not counted. A
        mapping, or pairs, from `"bf16"`, `"f16"`, `"f32"` (at JAX's default precision), `"f32_highest"`, `"f8"`, `"s8"`
        and `"f64"`. Leave out kinds without a rate.
    - `memory_bytes`: the memory of a device that a program may use.
    - `memory_bytes_per_second`: how fast that memory is read and written.
    - `link_bytes_per_second`: what a device can send to nearby devices, and receive at the same time, over all of its
        links: NVLink, or the links of a TPU in its torus.
    - `link_latency_seconds`: the least time of a message over a link, per step of a ring or per hop.
    - `network_bytes_per_second`: what a device can send to distant devices, and receive at the same time: its share of
        its host's network.
    - `network_latency_seconds`: the least time of a message over that network.
    - `devices_per_host`: how many devices the links connect; `None` where they connect all devices, as in a TPU slice.
    - `torus_dims`: how many dimensions the torus of the links has; 0 where a switch connects every device to every
        other. A mesh axis along one dimension of the torus has that part of the links, and half as much where the torus
        is not closed.
    - `sources`: where each figure comes from, by the name of its field.
    - `devices_per_chip`: how many devices share a chip and its links.
    - `matmul_fractions`: which fraction of `peak_flops` large matmuls reach: a number, or a mapping by kind of
        multiplication, with `"all"` for the kinds that are not named.
    - `matmul_tile`: the rows and columns of the unit that multiplies: sizes are rounded up to multiples of it.
    - `matmul_rates`: measured matmuls: for each kind a mapping of `kind`, the lists of sizes `m`, `n` and `k`,
        `flops_per_second` for each `m`, `n` and `k`, and the `peak` of the chip that was measured.
    - `memory_fractions`: which fraction of `memory_bytes_per_second` is reached, a number or by access: `"copy"` (reads
        and writes), `"read"`, or `"gather"` (of rows at any positions); `"all"` is for the others.
    - `link_fractions`: which fraction of `link_bytes_per_second` is reached: a number, or by kind of collective.
    - `collective_times`: measured collectives inside a host: for each kind and size of group a mapping of `kind`,
        `group_size`, the lists `payload_bytes` and `seconds`, and `link_bytes_per_second` of the links that were
        measured.
    - `network_fraction`: which fraction of `network_bytes_per_second` is reached.
    - `host_link_bytes_per_second`: what a device exchanges with the memory of its host, in each direction: PCIe.
    - `launch_seconds`: what a kernel takes that does nothing, with the pause before it.
    - `collective_launch_seconds`: what a collective takes to start, besides its latencies; `collective_times` have it.
    - `clock_hertz`: the clock in whose cycles the compiler estimates kernels, as libtpu does; 0 where it does not.
    - `overlap_fraction`: which fraction of its speed a kernel keeps while a collective runs: on GPUs both take
        multiprocessors.
    - `rate_spread`: the standard deviation of the rate of large matmuls among devices of a kind, as a fraction of it. A
        step takes as long as its slowest device.
    - `vector_memory_bytes`: the memory on a TPU core in which compilers keep arrays instead of the device's.

    **Raises:**

    `HardwareError`, which lists all invalid figures.

    ```python
    import attrs

    h100 = sr.Hardware.named("cuda:h100")
    ours = attrs.evolve(h100, name="our H100", link_bytes_per_second=360e9)
    assert ours.memory_bytes == h100.memory_bytes
    ```
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...] = attrs.field(converter=as_pairs)
    memory_bytes: int
    memory_bytes_per_second: float
    link_bytes_per_second: float
    link_latency_seconds: float
    network_bytes_per_second: float
    network_latency_seconds: float
    devices_per_host: int | None = None
    torus_dims: int = 0
    sources: tuple[tuple[str, str], ...] = attrs.field(default=(), converter=_as_sources, repr=False)
    devices_per_chip: int = attrs.field(default=1, kw_only=True)
    matmul_fractions: tuple[tuple[str, float], ...] = attrs.field(default=(), converter=as_fractions, kw_only=True)
    matmul_tile: int = attrs.field(default=1, kw_only=True)
    matmul_rates: tuple[MatmulRates, ...] = attrs.field(
        default=(), converter=as_tables(MatmulRates), repr=False, kw_only=True
    )
    memory_fractions: tuple[tuple[str, float], ...] = attrs.field(default=(), converter=as_fractions, kw_only=True)
    link_fractions: tuple[tuple[str, float], ...] = attrs.field(default=(), converter=as_fractions, kw_only=True)
    collective_times: tuple[CollectiveTimes, ...] = attrs.field(
        default=(), converter=as_tables(CollectiveTimes), repr=False, kw_only=True
    )
    network_fraction: float = attrs.field(default=1.0, kw_only=True)
    # What a device on PCIe 4.0 x16 reaches.
    host_link_bytes_per_second: float = attrs.field(default=25e9, kw_only=True)
    launch_seconds: float = attrs.field(default=0.0, kw_only=True)
    collective_launch_seconds: float = attrs.field(default=0.0, kw_only=True)
    clock_hertz: float = attrs.field(default=0.0, kw_only=True)
    overlap_fraction: float = attrs.field(default=1.0, kw_only=True)
    rate_spread: float = attrs.field(default=0.0, kw_only=True)
    vector_memory_bytes: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        problems = hardware_problems({figure: getattr(self, figure) for figure in FIGURES}, RATES)
        problems += [f"sources: {_unknown_figure(figure)}" for figure, _ in self.sources if figure not in FIGURES]
        if problems:
            raise HardwareError(f"hardware {self.name!r}: {'; '.join(problems)}")

    @staticmethod
    def named(name: str) -> "Hardware":
        """Returns a ready sheet.

        **Arguments:**

        - `name`: `"cpu"`, or platform and chip joined by a colon: `"cuda:h100"`, `"tpu:v5e"`.

        **Returns:**

        A `Hardware` with the source of every figure.

        **Raises:**

        `HardwareError` for an unknown name; it lists the names of all sheets.

        ```python
        assert sr.Hardware.named("cuda:h200").memory_bytes > sr.Hardware.named("cuda:h100").memory_bytes
        ```
        """
        if name not in sheets():
            raise HardwareError(
                f"unknown hardware {name!r}{suggest(str(name), sheets())}; the sheets are {', '.join(sheets())}"
            )
        return sheets()[name]

    @staticmethod
    def of(hardware: "Hardware | str") -> "Hardware":
        """Returns a sheet, or the ready one that a string names.

        **Arguments:**

        - `hardware`: a `Hardware`, or a name as for `named`.

        **Returns:**

        A `Hardware`.

        **Raises:**

        `HardwareError` for an unknown name, `ConfigTypeError` for anything else.
        """
        if isinstance(hardware, str):
            return Hardware.named(hardware)
        if not isinstance(hardware, Hardware):
            raise ConfigTypeError(
                f"hardware must be a Hardware or the name of a sheet, such as 'cuda:h100'; got {hardware!r:.60}"
            )
        return hardware

    @staticmethod
    def measure(
        devices: Sequence[Any] | None = None, *, time_limit: float = 60.0, name: str | None = None
    ) -> "Hardware":
        """Measures the devices that are there: matmuls, memory, launches, collectives, the link to the host.

        What is most worth knowing is measured first: the rate of large matmuls, memory and collectives, then matmuls of
        other sizes. No program is compiled while anything is timed, and of several runs the fastest counts. Run it
        while the devices do nothing else. Several processes measure together, and all get the figures of process 0.

        **Arguments:**

        - `devices`: the devices, all of one kind; by default `jax.devices()`. Each process must have one of them.
        - `time_limit`: the seconds after which no other measurement begins. A few are always taken. All of them take
            one to three minutes, most of it for compiling; the warning says how long on these devices.
        - `name`: what the sheet is called; by default what the devices are called.

        **Returns:**

        A `Hardware`; `sources` say what was measured. Peaks are those of the ready sheet of the devices, or for
        devices without one the best that was measured. What was not measured is as in that sheet; without one, peaks of
        kinds of multiplication that were not measured have the ratio to `"bf16"` that the nominal sheet has.

        **Raises:**

        `HardwareError` where the devices differ, are no devices, or multiply and copy nothing; `ConfigError` for a bad
        time limit. Warns with a `ShardingWarning` of figures that it could not measure although the devices have them.

        ```python
        import warnings

        with warnings.catch_warnings(action="ignore"):  # of matmul sizes for which a second is too short
            ours = sr.Hardware.measure(jax.devices()[:1], time_limit=1)
        ours.save("ours.toml")
        assert sr.Hardware.load("ours.toml") == ours and "measured" in ours.source("memory_fractions")
        ```
        """
        if isinstance(time_limit, bool) or not isinstance(time_limit, int | float) or not 0 < time_limit < math.inf:
            raise ConfigError(f"time_limit must be a positive number of seconds, got {time_limit!r}")
        devices = jax.devices() if devices is None else devices
        if not isinstance(devices, Sequence) or not all(isinstance(device, jax.Device) for device in devices):
            raise HardwareError(f"devices must be a list of JAX devices, such as jax.devices(); got {devices!r:.80}")
        measurements = measure(devices, time_limit)
        base = sheet_name(measurements.platform, measurements.device_kind) or "cpu"
        sheet = MeasuredSheet.of(measurements, attrs.asdict(Hardware.named(base)), is_nominal=base == "cpu")
        if sheet.missing or sheet.small:
            warnings.warn(f"Hardware.measure has not measured {sheet.gaps(base)}", ShardingWarning, stacklevel=2)
        values = sheet.values if name is None else {**sheet.values, "name": name}
        return Hardware(
            **values, sources=[(figure, sheet.sources[figure]) for figure in FIGURES if figure in sheet.sources]
        )

    def save(self, file: str | Path) -> None:
        """Writes the sheet as TOML, with the source of each figure; `load` reads it.

        **Arguments:**

        - `file`: where to; its folder is made.

        ```python
        sr.Hardware.named("cuda:h100").save("h100.toml")
        ```
        """
        write_text(as_path(file, "Hardware.save"), sheet_text(attrs.asdict(self), FIGURES))

    @staticmethod
    def load(file: str | Path) -> "Hardware":
        """Returns the sheet that `save` wrote, or that you wrote in the same form.

        **Arguments:**

        - `file`: a file of TOML: `name`, and a table for each figure with its `value` and perhaps its `source`.

        **Returns:**

        A `Hardware`.

        **Raises:**

        `HardwareError` for a file that is no sheet, with all that is wrong; `ConfigError` for one that cannot be read.

        ```python
        sr.Hardware.named("tpu:v5e").save("v5e.toml")
        assert sr.Hardware.load("v5e.toml") == sr.Hardware.named("tpu:v5e")
        ```
        """
        text = read_text(as_path(file, "Hardware.load"))
        try:
            table = read_toml(text)
        except ValueError as error:
            raise HardwareError(f"{file} is not a sheet of hardware, which is TOML: {error}") from error
        required = [field.name for field in attrs.fields(Hardware) if field.default is attrs.NOTHING]
        problems = sheet_problems(table, FIGURES, required)
        if problems:
            raise HardwareError(f"{file} is not a sheet of hardware: {'; '.join(problems)}")
        try:
            return _read_sheet(table)
        except (TypeError, ValueError) as error:
            raise HardwareError(f"{file}: {error}") from error

    @property
    def is_cpu(self) -> bool:
        """Returns whether it is a CPU, whose memory is its host's."""
        return self.name.lower().startswith("cpu")

    @property
    def is_gpu(self) -> bool:
        """Returns whether it is a GPU: neither a CPU nor a TPU, whose links are a torus."""
        return not (self.is_cpu or self.torus_dims)

    def flops_per_second(self, dtype: Any, *, highest: bool = False) -> float:
        """Returns the peak rate that a matmul of a dtype runs at.

        **Arguments:**

        - `dtype`: the dtype that is multiplied: NumPy's or JAX's, or its name, `"bfloat16"` or `"bf16"`.
        - `highest`: whether it runs at `precision="highest"`, which makes a difference for float32 only.

        **Returns:**

        The rate of that kind. Hardware without a rate for it multiplies in a wider type, so its rate is returned: an
        A100 multiplies float8 as bfloat16. Where no wider type has a rate either, such as float64 on a TPU, the slowest
        rate of the sheet.

        **Raises:**

        `HardwareError` when `dtype` is not a numeric dtype.

        ```python
        a100 = sr.Hardware.named("cuda:a100")
        assert a100.flops_per_second(jnp.bfloat16) == a100.flops_per_second("f8e4m3fn") == 312e12
        assert a100.flops_per_second("f32") == 8 * a100.flops_per_second("f32", highest=True)
        ```
        """
        return dict(self.peak_flops)[multiplied_as(self, dtype, highest=highest)]

    def source(self, figure: str) -> str:
        """Returns where a figure comes from.

        **Arguments:**

        - `figure`: the name of its field.

        **Returns:**

        An address or the name of a document; empty for a figure without a source.

        **Raises:**

        `HardwareError` for an unknown figure.

        ```python
        assert "nvidia.com" in sr.Hardware.named("cuda:h100").source("peak_flops")
        ```
        """
        if figure not in FIGURES:
            raise HardwareError(_unknown_figure(figure))
        return dict(self.sources).get(figure, "")


FIGURES = tuple(field.name for field in attrs.fields(Hardware) if field.name not in ("name", "sources"))
"""The figures of a sheet, which are also the names that `Hardware.sources` may use."""


def multiplied_as(hardware: Hardware, dtype: Any, *, highest: bool = False) -> str:
    """Returns the kind of multiplication that a dtype runs as: its own, a wider one, or else the slowest."""
    rates = dict(hardware.peak_flops)
    kind = _rate_kind(dtype)
    kind = "f32_highest" if kind == "f32" and highest else kind
    candidates = [candidate for candidate in (kind, *_FALLBACKS.get(kind, ())) if candidate in rates]
    return candidates[0] if candidates else min(rates, key=rates.__getitem__)


def fraction(fractions: Fractions, *names: str) -> float:
    """The fraction for the first of the names that has any, else the one for everything, else 1."""
    by_name = dict(fractions)
    return next((by_name[name] for name in (*names, "all") if name in by_name), 1.0)


def _unknown_figure(name: str) -> str:
    return f"unknown figure {name!r}{suggest(name, FIGURES)}; the figures are {', '.join(FIGURES)}"


def _rate_kind(dtype: Any) -> str:
    """The one of `RATES` that a dtype is multiplied at."""
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name if dtype is not None else ""
    except TypeError:
        name = ""
    if name in ("bool", "pred"):
        return "s8"
    match = _DTYPE.fullmatch(name)
    if match is None:
        raise HardwareError(f"expected a dtype or its name, such as 'bfloat16' or 'bf16'; got {dtype!r}")
    if match["brain"]:
        return "bf16"
    kind, bits = match["kind"][0], int(match["bits"])
    if kind == "f":
        return {64: "f64", 32: "f32", 16: "f16"}.get(bits, "f8")
    # A complex product is several products of its parts; complex64 has float32 parts.
    if kind == "c":
        return "f64" if bits == 128 else "f32_highest"
    return "s8" if bits <= 8 else "f32_highest"  # no unit multiplies matrices of wider integers


@functools.cache
def sheets() -> Mapping[str, Hardware]:
    """All sheets by name, in the order of `sheets.toml`."""
    tables = tomllib.loads(_machine_text("sheets.toml"))
    return MappingProxyType({name: _read_sheet(table) for name, table in tables.items()})


def ready_name(hardware: Hardware) -> str:
    """Returns the name of the ready sheet of a device; empty if there is none."""
    return next((name for name, sheet in sheets().items() if sheet.name == hardware.name), "")


def _read_sheet(table: Mapping[str, Any]) -> Hardware:
    # A figure without a value keeps its default: all devices of a TPU slice are connected.
    values = {figure: table[figure]["value"] for figure in FIGURES if "value" in table.get(figure, ())}
    sources = {figure: table[figure]["source"] for figure in FIGURES if "source" in table.get(figure, ())}
    if "table" in table.get("matmul_rates", ()):
        values["matmul_rates"] = _read_matmuls(table["matmul_rates"]["table"], values["peak_flops"])
    if "table" in table.get("collective_times", ()):
        values["collective_times"] = _read_collectives(
            table["collective_times"]["table"], values["link_bytes_per_second"]
        )
    return Hardware(table["name"], **values, sources=sources)


@functools.cache
def _read_tables(name: str) -> Mapping[str, Any]:
    return tomllib.loads(_machine_text(f"tables/{name}"))


def _read_matmuls(name: str, peaks: Mapping[str, float]) -> tuple[MatmulRates, ...]:
    table = _read_tables(name)["matmul"]
    sizes = table["sizes"]
    # A row for each m and n, a column for each k, in TFLOP/s.
    return tuple(
        MatmulRates(kind, sizes, sizes, sizes, [rate * 1e12 for row in rows for rate in row], peaks[kind])
        for kind, rows in table.items()
        if kind != "sizes"
    )


def _read_collectives(name: str, link_bytes_per_second: float) -> tuple[CollectiveTimes, ...]:
    # Microseconds, for 2^10 bytes and each doubling.
    return tuple(
        CollectiveTimes(
            kind,
            int(size),
            [2 ** (10 + index) for index in range(len(times))],
            [microseconds * 1e-6 for microseconds in times],
            link_bytes_per_second,
        )
        for kind, groups in _read_tables(name)["collectives"].items()
        for size, times in groups.items()
    )


def _machine_text(name: str) -> str:
    return files("shardrules.programs.machine").joinpath(*name.split("/")).read_text("utf-8")
