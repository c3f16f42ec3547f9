"""What hardware can do: peak rates, memory and links. `sheets.toml` has ready sheets, every figure with its source."""

import functools
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Any, final

import attrs
import numpy as np

from shardrules.core.errors import HardwareError, suggest

RATES = ("bf16", "f16", "f32", "f32_highest", "f8", "s8", "f64")
"""The kinds of multiplication that a sheet has rates for.

`f32` is what JAX does at its default precision: TF32 on a GPU, one pass of bf16 on a TPU. `f32_highest` is what it does
at `precision="highest"`. `f8` is any float of 8 bits or fewer, `s8` any integer of 8 bits or fewer.
"""

FIGURES = (
    "peak_flops",
    "memory_bytes",
    "memory_bytes_per_second",
    "link_bytes_per_second",
    "link_latency_seconds",
    "network_bytes_per_second",
    "network_latency_seconds",
    "devices_per_host",
    "torus_dims",
)
"""The figures of a sheet, which are also the names that `Hardware.sources` may use."""

_POSITIVE = tuple(figure for figure in FIGURES if figure not in ("peak_flops", "devices_per_host", "torus_dims"))

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


def _as_rates(value: Mapping[str, float] | Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple((str(kind), float(rate)) for kind, rate in pairs)


def _as_sources(value: Mapping[str, str] | Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple((str(figure), str(source)) for figure, source in pairs)


@final
@attrs.frozen
class Hardware:
    """What one device can do, and what connects it to others. All rates are peaks: no program reaches them.

    `Hardware.named` returns a ready sheet. `attrs.evolve` makes your own from it, say with measured bandwidths.

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
    peak_flops: tuple[tuple[str, float], ...] = attrs.field(converter=_as_rates)
    memory_bytes: int
    memory_bytes_per_second: float
    link_bytes_per_second: float
    link_latency_seconds: float
    network_bytes_per_second: float
    network_latency_seconds: float
    devices_per_host: int | None = None
    torus_dims: int = 0
    sources: tuple[tuple[str, str], ...] = attrs.field(default=(), converter=_as_sources, repr=False)

    def __attrs_post_init__(self) -> None:
        rates = dict(self.peak_flops)
        problems = [
            f"peak_flops: unknown kind {kind!r}{suggest(kind, RATES)}; the kinds are {', '.join(RATES)}"
            for kind in rates
            if kind not in RATES
        ]
        if not rates:
            problems.append("peak_flops is empty")
        if len(rates) < len(self.peak_flops):
            problems.append("peak_flops has the same kind twice")
        figures = {
            **{f"peak_flops[{kind!r}]": rate for kind, rate in self.peak_flops},
            **{figure: getattr(self, figure) for figure in _POSITIVE},
        }
        problems += [
            f"{figure} must be positive and finite, got {value!r}"
            for figure, value in figures.items()
            if not 0 < value < math.inf
        ]
        if self.devices_per_host is not None and self.devices_per_host < 1:
            problems.append(
                f"devices_per_host must be at least 1, or None for all devices; got {self.devices_per_host}"
            )
        if self.torus_dims < 0:
            problems.append(f"torus_dims must be at least 0, got {self.torus_dims}")
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

    def flops_per_second(self, dtype: Any, *, highest: bool = False) -> float:
        """Returns the most operations per second that a matmul of a dtype runs at.

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
        rates = dict(self.peak_flops)
        kind = _rate_kind(dtype)
        kind = "f32_highest" if kind == "f32" and highest else kind
        for candidate in (kind, *_FALLBACKS.get(kind, ())):
            if candidate in rates:
                return rates[candidate]
        return min(rates.values())

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


def _unknown_figure(name: str) -> str:
    return f"unknown figure {name!r}{suggest(name, FIGURES)}; the figures are {', '.join(FIGURES)}"


def _rate_kind(dtype: Any) -> str:
    """Which of `RATES` a dtype is multiplied at."""
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
    text = files("shardrules.analysis.machine").joinpath("sheets.toml").read_text("utf-8")
    return MappingProxyType({name: _read_sheet(table) for name, table in tomllib.loads(text).items()})


def _read_sheet(table: Mapping[str, Any]) -> Hardware:
    # A figure without a value keeps its default: all devices of a TPU slice are connected.
    values = {figure: table[figure]["value"] for figure in FIGURES if "value" in table[figure]}
    sources = {figure: table[figure]["source"] for figure in FIGURES}
    return Hardware(table["name"], **values, sources=sources)
