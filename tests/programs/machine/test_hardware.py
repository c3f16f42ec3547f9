"""Sheets of hardware: their figures and sources, and the tables of the page on targets."""

import math
import pickle
import re
from collections.abc import Iterator
from typing import Any

import attrs
import jax.numpy as jnp
import numpy as np
import pytest

from docs.sheets import MARK, figure_text, on_page_markdown
from shardrules.core.errors import HardwareError, TargetError
from shardrules.programs.machine.hardware import FIGURES, Hardware, sheets
from shardrules.programs.machine.targets import Target
from tests.house.source import REPOSITORY
from tests.programs.machine.test_targets import needs

SHEETS = sheets()
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


def test_peaks_alone_are_a_sheet() -> None:
    sheet = Hardware("peaks", {"bf16": 1e12}, 10**9, 1e12, 1e11, 1e-6, 1e10, 1e-5)
    assert (sheet.matmul_fractions, sheet.memory_fractions, sheet.link_fractions) == ((), (), ())
    assert sheet.network_fraction == 1
    assert sheet.launch_seconds == sheet.collective_launch_seconds == 0
    assert sheet.host_link_bytes_per_second == 25e9
    assert attrs.evolve(sheet, matmul_fractions=0.5).matmul_fractions == (("all", 0.5),)


@pytest.mark.parametrize("name", ["cuda:h1000", "h100", "", 8])
def test_unknown_names_raise_with_all_names(name: Any) -> None:
    with pytest.raises(
        HardwareError, match=rf"unknown hardware {name!r}.*; the sheets are cpu, cuda:a100, .*, tpu:v7x$"
    ):
        Hardware.named(name)


# The page.


def test_the_page_shows_every_figure_with_its_source() -> None:
    page = (REPOSITORY / "docs" / "api" / "targets.md").read_text()
    assert page.count(MARK) == 1
    built = on_page_markdown(page)
    assert MARK not in built
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", built[built.index("### CPU") :], re.MULTILINE)
    assert rows == [*FIGURES] * len(SHEETS)
    for name, sheet in SHEETS.items():
        assert f"### {sheet.name}: `{name}`" in built
    plain = re.sub(r"<(https://[^>]+)>", r"\1", built)
    assert [
        (name, figure)
        for name, sheet in SHEETS.items()
        for figure in FIGURES
        if f"| `{figure}` | {figure_text(sheet, figure)} | {sheet.source(figure)} |" not in plain
    ] == []


def test_other_pages_stay_as_they_are() -> None:
    assert on_page_markdown("# A page\n") == "# A page\n"
