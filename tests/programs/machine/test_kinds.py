"""Every device that has a sheet has one that exists."""

import pytest

import shardrules as sr
from shardrules.programs.machine.hardware import sheets
from shardrules.programs.machine.kinds import _GPUS, _TPUS, sheet_name


def test_every_sheet_is_of_a_device() -> None:
    assert {"cpu", *_GPUS.values(), *_TPUS.values()} == {*sheets()}


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", "cuda:h100"),
        ("gpu", "NVIDIA H200", "cuda:h200"),
        ("gpu", "NVIDIA A100-SXM4-40GB", "cuda:a100"),
        ("tpu", "TPU v5", "tpu:v5p"),
        ("tpu", "TPU v5 lite", "tpu:v5e"),
        ("cpu", "cpu", "cpu"),
        ("gpu", "NVIDIA L4", None),
        ("rocm", "AMD Instinct MI300X", None),
    ],
)
def test_devices_are_known_by_their_kind(platform: str, kind: str, name: str | None) -> None:
    assert sheet_name(platform, kind) == name
    assert name is None or sr.Hardware.named(name)
