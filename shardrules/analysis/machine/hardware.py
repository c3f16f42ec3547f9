"""What hardware can do: peak rates, memory and links, each figure with its source."""

import math
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, final

import attrs
import numpy as np

from shardrules.core.errors import HardwareError, suggest

RATES = ("bf16", "f16", "f32", "f32_highest", "f8", "s8", "f64")
"""The kinds of product that a sheet has rates for.

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
"""The figures of a sheet, which are also what `Hardware.sources` names."""

_CHECKED_APART = ("peak_flops", "devices_per_host", "torus_dims")

# What is done instead of a product that the hardware has no rate for: the first of these that it has.
_INSTEAD = {
    "bf16": ("f32",),
    "f16": ("bf16", "f32"),
    "f8": ("bf16", "f16", "f32"),
    "s8": ("bf16", "f16", "f32"),
    "f32_highest": ("f32",),
}
_DTYPE = re.compile(r"(?P<brain>bf|bfloat)16|(?P<kind>float|f|uint|int|u|s|complex|c)(?P<bits>\d+)\w*")


def _rates(value: Mapping[str, float] | Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple((str(name), float(rate)) for name, rate in pairs)


def _sources(value: Mapping[str, str] | Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple((str(name), str(source)) for name, source in pairs)


@final
@attrs.frozen
class Hardware:
    """What one device can do, and what joins it to others. All rates are peaks: nothing reaches them.

    `attrs.evolve` makes a sheet of your own from one that is there: with bandwidths that were measured, for instance.

    **Arguments:**

    - `name`: what it is called.
    - `peak_flops`: the most operations per second for each kind of product in `RATES`, dense, with no use made of
        sparsity. A mapping, or pairs; kinds that it has no rate for are left out.
    - `memory_bytes`: what a program may use of the memory of a device.
    - `memory_bytes_per_second`: how fast it is read and written.
    - `link_bytes_per_second`: what a device can send to others nearby, and receive at the same time, over all of its
        links: NVLink, or the links of a TPU in its torus.
    - `link_latency_seconds`: what a message over a link takes at least, per step of a ring or per hop.
    - `network_bytes_per_second`: what a device can send to others afar, and receive at the same time: its share of what
        its host has.
    - `network_latency_seconds`: what a message over that network takes at least.
    - `devices_per_host`: how many devices the links join; `None` where they join all that there are, as those of a TPU
        do in a slice.
    - `torus_dims`: how many dimensions the torus has that the links form; 0 where a switch joins every device to every
        other. An axis of a mesh along one dimension of the torus has that part of the links, and half as much where
        the torus is not closed.
    - `sources`: where each figure is from, by the name of its field.

    **Raises:**

    `HardwareError`, which lists all figures that cannot be meant.

    ```python
    h100 = SHEETS["cuda:h100"]
    mine = attrs.evolve(h100, name="our H100", link_bytes_per_second=360e9)
    assert mine.memory_bytes == h100.memory_bytes
    ```
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...] = attrs.field(converter=_rates)
    memory_bytes: int
    memory_bytes_per_second: float
    link_bytes_per_second: float
    link_latency_seconds: float
    network_bytes_per_second: float
    network_latency_seconds: float
    devices_per_host: int | None = None
    torus_dims: int = 0
    sources: tuple[tuple[str, str], ...] = attrs.field(default=(), converter=_sources, repr=False)

    def __attrs_post_init__(self) -> None:
        rates = dict(self.peak_flops)
        problems = [
            f"peak_flops has no kind {name!r}{suggest(name, RATES)}: the kinds are {', '.join(RATES)}"
            for name in rates
            if name not in RATES
        ]
        if not rates:
            problems.append("peak_flops is empty")
        if len(rates) < len(self.peak_flops):
            problems.append("peak_flops names a kind twice")
        figures = {
            **{f"peak_flops[{name!r}]": rate for name, rate in self.peak_flops},
            **{field: getattr(self, field) for field in FIGURES if field not in _CHECKED_APART},
        }
        problems += [
            f"{field} is a number above 0, got {value!r}"
            for field, value in figures.items()
            if not 0 < value < math.inf
        ]
        if self.devices_per_host is not None and self.devices_per_host < 1:
            problems.append(f"devices_per_host is 1 or more, or None for all; got {self.devices_per_host}")
        if self.torus_dims < 0:
            problems.append(f"torus_dims is 0 or more, got {self.torus_dims}")
        problems += [
            f"sources has no figure {name!r}{suggest(name, FIGURES)}: the figures are {', '.join(FIGURES)}"
            for name, _ in self.sources
            if name not in FIGURES
        ]
        if problems:
            raise HardwareError(f"hardware {self.name!r}: {'; '.join(problems)}")

    def flops_per_second(self, dtype: Any, *, highest: bool = False) -> float:
        """Returns how many operations per second a product of this dtype runs at, at the most.

        **Arguments:**

        - `dtype`: the dtype of what is multiplied: as NumPy and JAX have it, or its name, `"bfloat16"` or `"bf16"`.
        - `highest`: whether it is done at `precision="highest"`; only float32 knows a difference.

        **Returns:**

        The rate of that kind. Where the hardware has none, that of what is done instead: float8 on an A100 as bfloat16.
        Where nothing is known of that either, such as float64 on a TPU, the slowest rate of the sheet.

        **Raises:**

        `HardwareError` for what is no dtype of numbers.

        ```python
        a100 = SHEETS["cuda:a100"]
        assert a100.flops_per_second(jnp.bfloat16) == a100.flops_per_second("f8e4m3fn") == 312e12
        assert a100.flops_per_second("f32") == 8 * a100.flops_per_second("f32", highest=True)
        ```
        """
        rates = dict(self.peak_flops)
        kind = _kind(dtype)
        kind = "f32_highest" if kind == "f32" and highest else kind
        for name in (kind, *_INSTEAD.get(kind, ())):
            if name in rates:
                return rates[name]
        return min(rates.values())

    def source(self, figure: str) -> str:
        """Returns where a figure is from.

        **Arguments:**

        - `figure`: the name of its field.

        **Returns:**

        An address or the name of a document; empty where none was given.

        **Raises:**

        `HardwareError` for a name that is no figure's.

        ```python
        assert "nvidia.com" in SHEETS["cuda:h100"].source("peak_flops")
        ```
        """
        if figure not in FIGURES:
            raise HardwareError(f"there is no figure {figure!r}{suggest(figure, FIGURES)}: {', '.join(FIGURES)}")
        return dict(self.sources).get(figure, "")


def _kind(dtype: Any) -> str:
    """Which of `RATES` a dtype is multiplied at."""
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name if dtype is not None else ""
    except TypeError:
        name = ""
    if name in ("bool", "pred"):
        return "s8"
    found = _DTYPE.fullmatch(name)
    if found is None:
        raise HardwareError(f"a dtype is wanted, or its name, such as 'bfloat16' or 'bf16'; got {dtype!r}")
    if found["brain"]:
        return "bf16"
    kind, bits = found["kind"][0], int(found["bits"])
    if kind == "f":
        return {64: "f64", 32: "f32", 16: "f16"}.get(bits, "f8")
    if kind == "c":
        return "f64" if bits == 128 else "f32_highest"
    return "s8" if bits <= 8 else "f32_highest"  # wider integers have no unit that multiplies matrices


_GIB = 2**30
_NCCL = "NCCL's own model, https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc, ring, protocol Simple: "
_LIBTPU = "what libtpu says is available when a program does not fit; "
_BOOK = "https://jax-ml.github.io/scaling-book/"
_CLOUD = "https://cloud.google.com/tpu/docs/"
_PASSES = (
    "; float32: one pass of bf16 at default precision, six at highest, "
    "https://docs.jax.dev/en/latest/jax.lax.html#jax.lax.Precision"
)
_HOP = f"{_BOOK}sharding: about a microsecond per hop"
_NO_DCN_LATENCY = "assumed: Google publishes none"
_SLICE = "the links join a whole slice"


def _gpu(
    name: str,
    flops: dict[str, float],
    memory_bytes: int,
    memory_bytes_per_second: float,
    nvlink: float,
    network: float,
    sources: dict[str, str],
) -> Hardware:
    return Hardware(
        name,
        flops,
        memory_bytes,
        memory_bytes_per_second,
        link_bytes_per_second=nvlink,
        link_latency_seconds=3.4e-6,
        network_bytes_per_second=network,
        network_latency_seconds=14e-6,
        devices_per_host=8,
        sources={
            **sources,
            "link_latency_seconds": f"{_NCCL}3.4 µs over NVLink",
            "network_latency_seconds": f"{_NCCL}14 µs over a network",
            "torus_dims": "NVSwitch joins every GPU of a host to every other",
        },
    )


def _tpu(
    name: str,
    bf16: float,
    others: dict[str, float],
    memory_gib: float,
    memory_bytes_per_second: float,
    ici: float,
    dcn: float,
    torus_dims: int,
    sources: dict[str, str],
) -> Hardware:
    memory = f"{_LIBTPU}{sources['memory_bytes']}"
    return Hardware(
        name,
        {"bf16": bf16, "f32": bf16, "f32_highest": bf16 / 6, **others},
        int(memory_gib * _GIB),
        memory_bytes_per_second,
        link_bytes_per_second=ici,
        link_latency_seconds=1e-6,
        network_bytes_per_second=dcn,
        network_latency_seconds=10e-6,
        devices_per_host=None,
        torus_dims=torus_dims,
        sources={
            **sources,
            "peak_flops": f"{sources['peak_flops']}{_PASSES}",
            "memory_bytes": memory,
            "link_latency_seconds": _HOP,
            "network_latency_seconds": _NO_DCN_LATENCY,
            "devices_per_host": _SLICE,
        },
    )


def _cuda_bytes(gib: float) -> int:
    """What CUDA reports as total, which is printed to the hundredth of a GiB, down to a MiB."""
    return int(gib * 1024) * 2**20


_CACM = "Jouppi et al., A Domain-Specific Supercomputer for Training Deep Neural Networks, CACM 63(7), 2020: "
_TPU4 = "Jouppi et al., TPU v4, https://arxiv.org/abs/2304.01433, table 4: "
_HALF = "; a device is half a chip"
_DGX_H100 = "https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html: "
_DGX_B200 = "https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html: "
_DGX_A100 = "https://developer.nvidia.com/blog/defining-ai-innovation-with-dgx-a100: "
_A100_SHEET = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_H100_PAGE = "https://www.nvidia.com/en-us/data-center/h100/, SXM"
_H200_PAGE = "https://www.nvidia.com/en-us/data-center/h200/, SXM"
_HGX_PAGE = "https://www.nvidia.com/en-us/data-center/hgx/, HGX B200"
_NOMINAL = "nominal: a round figure, of no machine"

SHEETS: Mapping[str, Hardware] = MappingProxyType(
    {
        "cpu": Hardware(
            "CPU (nominal)",
            {"bf16": 1e11, "f16": 1e11, "f32": 1e11, "f32_highest": 1e11, "f8": 1e11, "s8": 1e11, "f64": 5e10},
            16 * _GIB,
            memory_bytes_per_second=2e10,
            link_bytes_per_second=1e10,
            link_latency_seconds=1e-6,
            network_bytes_per_second=1e9,
            network_latency_seconds=1e-5,
            sources=dict.fromkeys(FIGURES, _NOMINAL),
        ),
        "cuda:a100": _gpu(
            "NVIDIA A100 SXM4 80 GB",
            {"bf16": 312e12, "f16": 312e12, "f32": 156e12, "f32_highest": 19.5e12, "s8": 624e12, "f64": 19.5e12},
            _cuda_bytes(79.14),
            2039e9,
            nvlink=300e9,
            network=25e9,
            sources={
                "peak_flops": _A100_SHEET,
                "memory_bytes": "80 GB, of which CUDA reports 79.14 GiB: "
                "https://github.com/lianqi1008/Control-GIC/issues/6",
                "memory_bytes_per_second": _A100_SHEET,
                "link_bytes_per_second": f"{_A100_SHEET}: 600 GB/s, half of it each way",
                "network_bytes_per_second": f"{_DGX_A100}8 ConnectX-6 of 200 Gb/s for 8 GPUs",
                "devices_per_host": _DGX_A100 + "8 GPUs",
            },
        ),
        "cuda:h100": _gpu(
            "NVIDIA H100 SXM5 80 GB",
            {
                "bf16": 989.4e12,
                "f16": 989.4e12,
                "f32": 494.7e12,
                "f32_highest": 66.9e12,
                "f8": 1978.9e12,
                "s8": 1978.9e12,
                "f64": 66.9e12,
            },
            _cuda_bytes(79.11),
            3350e9,
            nvlink=450e9,
            network=50e9,
            sources={
                "peak_flops": "NVIDIA H100 Tensor Core GPU Architecture (white paper), as "
                f"{_H100_PAGE}, half of what that counts with sparsity",
                "memory_bytes": "80 GB, of which CUDA reports 79.11 GiB: "
                "https://github.com/vllm-project/vllm/issues/27508",
                "memory_bytes_per_second": _H100_PAGE,
                "link_bytes_per_second": f"{_H100_PAGE}: 900 GB/s, half of it each way",
                "network_bytes_per_second": f"{_DGX_H100}8 ConnectX-7 of 400 Gb/s for 8 GPUs",
                "devices_per_host": _DGX_H100 + "8 GPUs",
            },
        ),
        "cuda:h200": _gpu(
            "NVIDIA H200 SXM5 141 GB",
            {
                "bf16": 989.4e12,
                "f16": 989.4e12,
                "f32": 494.7e12,
                "f32_highest": 66.9e12,
                "f8": 1978.9e12,
                "s8": 1978.9e12,
                "f64": 66.9e12,
            },
            _cuda_bytes(139.81),
            4800e9,
            nvlink=450e9,
            network=50e9,
            sources={
                "peak_flops": "the chip of the H100, NVIDIA H100 Tensor Core GPU Architecture (white paper), as "
                f"{_H200_PAGE}, half of what that counts with sparsity",
                "memory_bytes": "141 GB, of which CUDA reports 139.81 GiB: "
                "https://github.com/modelscope/ms-swift/issues/9191",
                "memory_bytes_per_second": _H200_PAGE,
                "link_bytes_per_second": f"{_H200_PAGE}: 900 GB/s, half of it each way",
                "network_bytes_per_second": f"{_DGX_H100}8 ConnectX-7 of 400 Gb/s for 8 GPUs",
                "devices_per_host": _DGX_H100 + "8 GPUs",
            },
        ),
        "cuda:b200": _gpu(
            "NVIDIA B200 SXM6 180 GB",
            {
                "bf16": 2250e12,
                "f16": 2250e12,
                "f32": 1125e12,
                "f32_highest": 75e12,
                "f8": 4500e12,
                "s8": 4500e12,
                "f64": 37e12,
            },
            _cuda_bytes(178.35),
            7672e9,
            nvlink=900e9,
            network=50e9,
            sources={
                "peak_flops": f"{_HGX_PAGE}: an eighth of what 8 GPUs have, halved where it counts sparsity",
                "memory_bytes": "180 GB, of which CUDA reports 178.35 GiB: https://github.com/pytorch/ao/pull/4002",
                "memory_bytes_per_second": "7,680 bits at 3,996 MHz, twice a cycle: "
                "https://github.com/pytorch/ao/pull/4002; the data sheet rounds it to 8 TB/s",
                "link_bytes_per_second": f"{_HGX_PAGE}: 1.8 TB/s, half of it each way",
                "network_bytes_per_second": f"{_DGX_B200}8 ConnectX-7 of 400 Gb/s for 8 GPUs",
                "devices_per_host": _DGX_B200 + "8 GPUs",
            },
        ),
        "tpu:v2": _tpu(
            "TPU v2 (one of the two cores of a chip)",
            23e12,
            {},
            7.48,
            350e9,
            ici=124e9,
            dcn=3.125e9,
            torus_dims=2,
            sources={
                "peak_flops": f"{_CACM}46 TFLOPS{_HALF}",
                "memory_bytes": f"{_CACM}16 GB{_HALF}",
                "memory_bytes_per_second": f"{_CACM}700 GB/s{_HALF}",
                "link_bytes_per_second": f"{_CACM}4 links of 496 Gb/s each way{_HALF}",
                "network_bytes_per_second": f"{_BOOK}tpus: typically 25 GB/s for each host, of 8 devices here",
                "torus_dims": f"{_CLOUD}v2: 2D torus",
            },
        ),
        "tpu:v3": _tpu(
            "TPU v3 (one of the two cores of a chip)",
            61.5e12,
            {},
            15.48,
            450e9,
            ici=164e9,
            dcn=3.125e9,
            torus_dims=2,
            sources={
                "peak_flops": f"{_CACM}123 TFLOPS{_HALF}",
                "memory_bytes": f"{_CACM}32 GB{_HALF}",
                "memory_bytes_per_second": f"{_CACM}900 GB/s{_HALF}",
                "link_bytes_per_second": f"{_CACM}4 links of 656 Gb/s each way{_HALF}",
                "network_bytes_per_second": f"{_BOOK}tpus: typically 25 GB/s for each host, of 8 devices here",
                "torus_dims": f"{_CLOUD}v3: 2D torus",
            },
        ),
        "tpu:v4": _tpu(
            "TPU v4",
            275e12,
            {"s8": 275e12},
            30.75,
            1200e9,
            ici=300e9,
            dcn=6.25e9,
            torus_dims=3,
            sources={
                "peak_flops": f"{_CLOUD}v4: 275 TFLOPS, bf16 or int8",
                "memory_bytes": f"{_CLOUD}v4: 32 GiB",
                "memory_bytes_per_second": f"{_CLOUD}v4: 1,200 GB/s",
                "link_bytes_per_second": f"{_TPU4}6 links of 50 GB/s each way",
                "network_bytes_per_second": f"{_BOOK}tpus: typically 25 GB/s for each host, of 4 chips here",
                "torus_dims": f"{_CLOUD}v4: 3D torus",
            },
        ),
        "tpu:v5e": _tpu(
            "TPU v5e",
            197e12,
            {"s8": 393e12},
            15.75,
            819e9,
            ici=200e9,
            dcn=3.125e9,
            torus_dims=2,
            sources={
                "peak_flops": f"{_CLOUD}v5e: 197 TFLOPS, 393 int8",
                "memory_bytes": f"{_CLOUD}v5e: 16 GB",
                "memory_bytes_per_second": f"{_CLOUD}v5e: 819 GB/s",
                "link_bytes_per_second": f"{_CLOUD}v5e: 400 GB/s, half of it each way",
                "network_bytes_per_second": f"{_CLOUD}v5e: 6.4 Tb/s for a pod of 256 chips",
                "torus_dims": f"{_CLOUD}v5e: 2D torus",
            },
        ),
        "tpu:v5p": _tpu(
            "TPU v5p",
            459e12,
            {"f8": 459e12, "s8": 918e12},
            95.73,
            2765e9,
            ici=600e9,
            dcn=6.25e9,
            torus_dims=3,
            sources={
                "peak_flops": f"{_CLOUD}v5p: 459 TFLOPS, bf16 or fp8; int8: {_BOOK}tpus",
                "memory_bytes": f"{_CLOUD}v5p: 95 GiB",
                "memory_bytes_per_second": f"{_CLOUD}v5p: 2,765 GB/s",
                "link_bytes_per_second": f"{_CLOUD}v5p: 1,200 GB/s, half of it each way",
                "network_bytes_per_second": f"{_CLOUD}v5p: 50 Gb/s for each chip",
                "torus_dims": f"{_CLOUD}v5p: 3D torus",
            },
        ),
        "tpu:v6e": _tpu(
            "TPU v6e",
            918e12,
            {"f8": 918e12, "s8": 1836e12},
            31.24,
            1638e9,
            ici=400e9,
            dcn=12.5e9,
            torus_dims=2,
            sources={
                "peak_flops": f"{_CLOUD}v6e: 918 TFLOPS, 1,836 int8; fp8: {_CLOUD}tpu7x",
                "memory_bytes": f"{_CLOUD}v6e: 32 GB",
                "memory_bytes_per_second": f"{_CLOUD}tpu7x, which lists the v6e beside it: 1,638 GB/s",
                "link_bytes_per_second": f"{_CLOUD}v6e: 800 GB/s, half of it each way",
                "network_bytes_per_second": f"{_CLOUD}v6e: 25.6 Tb/s for a pod of 256 chips",
                "torus_dims": f"{_CLOUD}v6e: 2D torus",
            },
        ),
        "tpu:v7x": _tpu(
            "TPU7x (one of the two devices of a chip)",
            1153.5e12,
            {"f8": 2307e12},
            94.74,
            3690e9,
            ici=300e9,
            dcn=6.25e9,
            torus_dims=3,
            sources={
                "peak_flops": f"{_CLOUD}tpu7x: 2,307 TFLOPS, 4,614 fp8{_HALF}",
                "memory_bytes": f"{_CLOUD}tpu7x: 192 GiB{_HALF}",
                "memory_bytes_per_second": f"{_CLOUD}tpu7x: 7,380 GB/s{_HALF}",
                "link_bytes_per_second": f"{_CLOUD}tpu7x: 1,200 GB/s, half of it each way{_HALF}",
                "network_bytes_per_second": f"{_CLOUD}tpu7x: 100 Gb/s for each chip{_HALF}",
                "torus_dims": f"{_CLOUD}tpu7x: 3D torus",
            },
        ),
    }
)
"""The sheets that are known: `"cpu"`, and platform and chip joined by a colon, such as `"tpu:v5e"`.

```python
assert SHEETS["cuda:h200"].memory_bytes > SHEETS["cuda:h100"].memory_bytes
```
"""
