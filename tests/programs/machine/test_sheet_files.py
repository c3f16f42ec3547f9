"""Sheets of hardware are written as TOML and read back; what is no sheet is refused with all that is wrong."""

from pathlib import Path

import attrs
import pytest

import shardrules as sr
from shardrules.core.errors import ConfigError, HardwareError
from shardrules.programs.machine.hardware import sheets

ODD = attrs.evolve(
    sr.Hardware.named("tpu:v5p"),
    name='our "v5p" \\ größe 🚀',
    matmul_rates=(
        {"kind": "bf16", "m": (8, 16), "n": (8,), "k": (8,), "flops_per_second": (1.5e12, 3e16), "peak": 4e16},
    ),
    collective_times=(
        {
            "kind": "all-gather",
            "group_size": 4,
            "payload_bytes": (1, 2),
            "seconds": (1e-9, 2.0),
            "link_bytes_per_second": 1e9,
        },
    ),
    sources=(("peak_flops", "line one\nline two"), ("devices_per_host", "a whole slice")),
)


@pytest.mark.parametrize("name", [*sheets(), "odd"])
def test_a_sheet_is_read_back(tmp_path: Path, name: str) -> None:
    hardware = ODD if name == "odd" else sr.Hardware.named(name)
    hardware.save(tmp_path / "folder" / "sheet.toml")
    assert sr.Hardware.load(str(tmp_path / "folder" / "sheet.toml")) == hardware


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not a sheet of hardware, which is TOML"),
        ("", "name is missing; peak_flops is missing; memory_bytes is missing; .* network_latency_seconds is missing$"),
        ("peak_flop = 1", r"unknown figure 'peak_flop' \(did you mean 'peak_flops'\?\)"),
        ("memory_bytes = 3", "memory_bytes must be a table with a value, and perhaps a source, as text"),
        ("[memory_bytes]\nsource = 'x'", "memory_bytes has no value"),
    ],
)
def test_what_is_no_sheet_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "sheet.toml").write_text(text)
    with pytest.raises(HardwareError, match=message):
        sr.Hardware.load(tmp_path / "sheet.toml")


def test_bad_figures_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "sheet.toml"
    sr.Hardware.named("cpu").save(file)
    file.write_text(file.read_text().replace("value = 20000000000.0", "value = -1.0"))
    with pytest.raises(HardwareError, match=r"memory_bytes_per_second must be positive and finite, got -1\.0"):
        sr.Hardware.load(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"file .*nowhere\.toml does not exist"):
        sr.Hardware.load(tmp_path / "nowhere.toml")
