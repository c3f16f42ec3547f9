"""Sheets of hardware: their figures and sources, and the tables of the page on targets.

`python -m tests.programs.machine.test_hardware` rewrites the tables.
"""

import math
import pickle
import re
from collections.abc import Iterator
from typing import Any

import attrs
import jax.numpy as jnp
import numpy as np
import pytest

import shardrules as sr
from shardrules.core.errors import HardwareError, TargetError
from shardrules.programs.machine.hardware import FIGURES, RATES, Hardware, sheets
from shardrules.programs.machine.targets import Target
from tests.house.source import REPOSITORY
from tests.programs.machine.test_targets import needs

SHEETS = sheets()
TABLES = ("matmul_rates", "collective_times")
PAGE = REPOSITORY / "docs" / "api" / "targets.md"
DESCRIPTIONS = REPOSITORY / "shardrules" / "programs" / "machine" / "gpus"


def description(chip: str) -> Iterator[tuple[str, str]]:
    """The fields of a GPU's description for the compiler."""
    for line in (DESCRIPTIONS / f"{chip}.txtpb").read_text().splitlines():
        name, colon, value = line.strip().partition(": ")
        if colon and not name.startswith("#"):
            yield name, value


GPUS = [name.partition(":")[2] for name in SHEETS if name.startswith("cuda")]


@pytest.mark.parametrize("chip", GPUS)
def test_sheets_agree_with_the_descriptions(chip: str) -> None:
    sheet, fields = SHEETS[f"cuda:{chip}"], dict(description(chip))
    assert int(fields["device_memory_size"]) == sheet.memory_bytes
    assert float(fields["memory_bandwidth"]) == sheet.memory_bytes_per_second
    assert chip.upper() in fields["device_description_str"]
    # Each FP32 unit of a multiprocessor does two operations per cycle: a multiplication and an addition.
    vectors = 2 * int(fields["core_count"]) * int(fields["fpus_per_core"]) * float(fields["clock_rate_ghz"]) * 1e9
    assert dict(sheet.peak_flops)["f32_highest"] == pytest.approx(vectors, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("chip", GPUS)
def test_cuda_devices_are_called_as_described(chip: str) -> None:
    needs("cuda")
    name = dict(description(chip))["device_description_str"][1:-1]
    assert Target("cuda", chip, (8,)).devices()[0].device_kind == name


def test_every_chip_has_a_sheet_and_every_gpu_a_description() -> None:
    with pytest.raises(TargetError, match="unknown platform") as caught:
        Target.parse("")
    tpus, gpus = [names.split("|") for names in re.findall(r"<(\w+\|[\w|]+)>", str(caught.value))]
    chips = [*(f"tpu:{chip}" for chip in tpus), *(f"cuda:{chip}" for chip in gpus)]
    assert sorted(chips) == sorted(name for name in SHEETS if name != "cpu")
    assert sorted(path.stem for path in DESCRIPTIONS.iterdir()) == sorted(GPUS)


@pytest.mark.parametrize("name", SHEETS)
def test_every_figure_has_a_source(name: str) -> None:
    sheet = SHEETS[name]
    assert [figure for figure in FIGURES if not sheet.source(figure)] == []
    assert eval(repr(sheet)) == attrs.evolve(sheet, sources=(), matmul_rates=(), collective_times=())
    assert hash(sheet) == hash(attrs.evolve(sheet))
    assert pickle.loads(pickle.dumps(sheet)) == sheet


@pytest.mark.parametrize("name", SHEETS)
def test_figures_are_in_proportion(name: str) -> None:
    sheet = SHEETS[name]
    rates = dict(sheet.peak_flops)
    assert rates["f32_highest"] <= rates["f32"] <= rates["bf16"] <= rates.get("f8", math.inf)
    assert sheet.network_bytes_per_second < sheet.link_bytes_per_second < sheet.memory_bytes_per_second
    assert sheet.link_latency_seconds < sheet.network_latency_seconds


@pytest.mark.parametrize(
    ("name", "dtype", "highest", "rate"),
    [
        ("cuda:h100", jnp.bfloat16, False, 989.4e12),
        ("cuda:h100", "bf16", False, 989.4e12),
        ("cuda:h100", np.float32, False, 494.7e12),
        ("cuda:h100", np.dtype("float32"), True, 66.9e12),
        ("cuda:h100", "f8e4m3fn", False, 1978.9e12),
        ("cuda:h100", jnp.float8_e5m2, False, 1978.9e12),
        ("cuda:h100", jnp.int4, False, 1978.9e12),
        ("cuda:h100", "pred", False, 1978.9e12),
        ("cuda:h100", "s32", False, 66.9e12),
        ("cuda:h100", np.complex64, False, 66.9e12),
        ("cuda:h100", "c128", False, 66.9e12),
        ("cuda:a100", "float8_e4m3fn", False, 312e12),
        ("cuda:a100", np.float64, False, 19.5e12),
        ("tpu:v5e", "f32", False, 197e12),
        ("tpu:v5e", "f32", True, 197e12 / 6),
        ("tpu:v5e", "f16", False, 197e12),
        ("tpu:v5e", "f8e5m2", False, 197e12),
        ("tpu:v5e", "u8", False, 393e12),
        ("tpu:v5e", "f64", False, 197e12 / 6),
        ("tpu:v3", "s8", False, 61.5e12),
        ("cpu", "f64", False, 5e10),
    ],
)
def test_the_rate_of_a_dtype(name: str, dtype: Any, highest: bool, rate: float) -> None:
    assert SHEETS[name].flops_per_second(dtype, highest=highest) == rate


@pytest.mark.parametrize("dtype", ["token", "bf17", None, "f", 8, str])
def test_only_numeric_dtypes_have_a_rate(dtype: Any) -> None:
    with pytest.raises(HardwareError, match="expected a dtype or its name"):
        SHEETS["cpu"].flops_per_second(dtype)


def test_a_sheet_can_be_evolved() -> None:
    ours = attrs.evolve(SHEETS["cuda:h100"], name="ours", link_bytes_per_second=3.6e11, peak_flops={"bf16": 6e14})
    assert ours.flops_per_second("f32") == 6e14
    assert ours != SHEETS["cuda:h100"]
    assert hash(ours)


def test_errors_list_every_invalid_figure() -> None:
    with pytest.raises(HardwareError, match="hardware 'odd': ") as caught:
        Hardware("odd", {"bf16": -1, "fp8": 1}, 0, 1, math.inf, 1, 1, float("nan"), 0, -1, {"link": "me"})
    for part in (
        r"unknown kind 'fp8' \(did you mean 'f8'\?\); the kinds are bf16,",
        r"peak_flops\['bf16'\] must be positive and finite, got -1\.0",
        "memory_bytes must be positive and finite, got 0",
        "link_bytes_per_second must be positive and finite, got inf",
        "network_latency_seconds must be positive and finite, got nan",
        "devices_per_host must be at least 1, or None for all devices; got 0",
        "torus_dims must be at least 0, got -1",
        "sources: unknown figure 'link'",
    ):
        assert re.search(part, str(caught.value))
    with pytest.raises(HardwareError, match="hardware 'odd'") as caught:
        Hardware(
            *("odd", {"bf16": 1}, 1, 1, 1, 1, 1, 1),
            devices_per_chip=0,
            matmul_fractions={"bf17": 0.5, "all": 1.5},
            matmul_tile=0,
            memory_fractions=0,
            link_fractions={"all-gathr": 0.5},
            network_fraction=-1,
            host_link_bytes_per_second=0,
            launch_seconds=-1e-6,
            collective_launch_seconds=math.inf,
        )
    for part in (
        "devices_per_chip must be at least 1, got 0",
        "matmul_fractions: unknown kind 'bf17' (did you mean 'bf16'?); the kinds are bf16,",
        "matmul_fractions['all'] must be above 0 and at most 1, got 1.5",
        "matmul_tile must be at least 1, got 0",
        "memory_fractions['all'] must be above 0 and at most 1, got 0.0",
        "link_fractions: unknown kind 'all-gathr' (did you mean 'all-gather'?)",
        "network_fraction must be positive and finite, got -1",
        "host_link_bytes_per_second must be positive and finite, got 0",
        "launch_seconds must be at least 0, got -1e-06",
        "collective_launch_seconds must be at least 0, got inf",
    ):
        assert part in str(caught.value)
    with pytest.raises(HardwareError, match="peak_flops is empty"):
        attrs.evolve(SHEETS["cpu"], peak_flops={})
    with pytest.raises(HardwareError, match="has the same kind twice"):
        attrs.evolve(SHEETS["cpu"], peak_flops=[("bf16", 1), ("bf16", 2)])
    with pytest.raises(HardwareError, match=r"unknown figure 'memory_byte' \(did you mean 'memory_bytes'\?\)"):
        SHEETS["cpu"].source("memory_byte")


def test_peaks_alone_are_a_sheet() -> None:
    sheet = Hardware("peaks", {"bf16": 1e12}, 10**9, 1e12, 1e11, 1e-6, 1e10, 1e-5)
    assert (sheet.matmul_fractions, sheet.memory_fractions, sheet.link_fractions) == ((), (), ())
    assert sheet.network_fraction == 1
    assert sheet.launch_seconds == sheet.collective_launch_seconds == 0
    assert sheet.host_link_bytes_per_second == 25e9
    assert attrs.evolve(sheet, matmul_fractions=0.5).matmul_fractions == (("all", 0.5),)


def test_named_returns_the_sheet() -> None:
    for name, sheet in SHEETS.items():
        assert sr.Hardware.named(name) is sheet


@pytest.mark.parametrize("name", ["cuda:h1000", "h100", "", 8])
def test_unknown_names_raise_with_all_names(name: Any) -> None:
    with pytest.raises(
        HardwareError, match=rf"unknown hardware {name!r}.*; the sheets are cpu, cuda:a100, .*, tpu:v7x$"
    ):
        Hardware.named(name)


# The page.


def figure_text(sheet: Hardware, figure: str) -> str:
    value = getattr(sheet, figure)
    if figure == "peak_flops":
        return ", ".join(f"{name} {rate / 1e12:.6g}" for name, rate in value) + " TFLOP/s"
    if figure == "memory_bytes":
        return f"{value / 2**30:.2f} GiB"
    if figure.endswith("_fractions"):
        return ", ".join(f"{name} {number:.6g}" for name, number in value)
    if figure == "matmul_rates":
        return ", ".join(f"{table.kind}: {len(table.flops_per_second)} sizes" for table in value) or "none"
    if figure == "collective_times":
        kinds = dict.fromkeys(table.kind for table in value)
        groups = {kind: [str(table.group_size) for table in value if table.kind == kind] for kind in kinds}
        return ", ".join(f"{kind} of {'/'.join(sizes)}" for kind, sizes in groups.items()) or "none"
    if figure == "clock_hertz":
        return f"{value / 1e9:.6g} GHz" if value else "none"
    if figure == "devices_per_host":
        return "all" if value is None else str(value)
    if figure.endswith("bytes_per_second"):
        return f"{value / 1e9:.6g} GB/s"
    return f"{value * 1e6:.6g} µs" if figure.endswith("seconds") else f"{value:.6g}"


def tables() -> str:
    """The sheets as markdown: an overview, then every figure with its source."""
    peaks = [figure for figure in FIGURES[: FIGURES.index("torus_dims")] if figure != "peak_flops"]
    reached = [figure for figure in FIGURES[FIGURES.index("matmul_fractions") :] if figure not in TABLES]
    lines = [
        f"| sheet | {' | '.join(f'`{name}`' for name in RATES)} |",
        f"|---|{'--:|' * len(RATES)}",
    ]
    for name, sheet in SHEETS.items():
        rates = dict(sheet.peak_flops)
        cells = [f"{rates[kind] / 1e12:.5g}" if kind in rates else "" for kind in RATES]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    for columns in (peaks, reached):
        lines += [
            "",
            f"| sheet | {' | '.join(column.replace('_', ' ') for column in columns)} |",
            f"|---|{'--:|' * len(columns)}",
        ]
        lines += [
            f"| `{name}` | {' | '.join(figure_text(sheet, column) for column in columns)} |"
            for name, sheet in SHEETS.items()
        ]
    for name, sheet in SHEETS.items():
        lines += ["", f"### {sheet.name}: `{name}`", "", "| figure | value | source |", "|---|---|---|"]
        for figure in FIGURES:
            source = re.sub(r"https://[^\s,;]*[^\s,;:]", r"<\g<0>>", sheet.source(figure))
            lines.append(f"| `{figure}` | {figure_text(sheet, figure)} | {source} |")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """The page with new tables."""
    before, start, rest = page.partition("<!-- the sheets -->\n")
    _, end, after = rest.partition("\n<!-- the end of the sheets -->")
    assert start
    assert end
    return f"{before}{start}\n{tables()}\n{end}{after}"


def test_the_page_shows_every_figure_with_its_source() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "python -m tests.programs.machine.test_hardware rewrites the tables"


def test_a_changed_table_is_detected() -> None:
    page = PAGE.read_text()
    assert with_tables(page.replace("450 GB/s", "451 GB/s")) == page != page.replace("450 GB/s", "451 GB/s")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
