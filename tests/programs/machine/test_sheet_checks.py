"""Figures of the wrong type, or out of range, are named with what they must be, all in one error."""

import re
from typing import Any

import attrs
import jax
import pytest

import shardrules as sr
from shardrules.core.errors import HardwareError

H100 = sr.Hardware.named("cuda:h100")
WRONG = [
    ({"memory_bytes_per_second": True}, "memory_bytes_per_second must be a number, got True"),
    ({"launch_seconds": "fast"}, "launch_seconds must be a number, got 'fast'"),
    ({"network_fraction": 3}, "network_fraction must be at most 1, got 3"),
    ({"overlap_fraction": 1.5}, "overlap_fraction must be at most 1, got 1.5"),
    ({"torus_dims": True}, "torus_dims must be a whole number, got True"),
    ({"matmul_tile": 8.5}, "matmul_tile must be a whole number, got 8.5"),
    ({"devices_per_host": 8.5}, "devices_per_host must be at least 1, or None for all devices; got 8.5"),
    ({"peak_flops": "fast"}, "peak_flops must be a mapping of names to numbers, got 'fast'"),
    ({"peak_flops": {"bf16": "fast"}}, "peak_flops['bf16'] must be a number, got 'fast'"),
    ({"memory_fractions": True}, "memory_fractions must be a number or a mapping of names to numbers, got True"),
    ({"matmul_rates": 3}, "matmul_rates must be a list of tables, got 3"),
    ({"matmul_rates": [{"kind": "bf16"}]}, "matmul_rates[0] has no m, n, k, flops_per_second, peak"),
    ({"collective_times": [7]}, "collective_times[0] must be a table of kind, group_size, payload_bytes, seconds, "),
    (
        {"matmul_rates": [{"kind": "bf16", "m": ["x"], "n": [1], "k": [1], "flops_per_second": [1], "peak": 1}]},
        "matmul_rates[0]: invalid literal for int",
    ),
]


@pytest.mark.parametrize(("figures", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_figures_are_named(figures: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError, match=re.escape(message)):
        attrs.evolve(H100, **figures)


def test_one_error_lists_types_and_ranges() -> None:
    figures = {name: value for wrong, _ in WRONG for name, value in wrong.items()}
    with pytest.raises(HardwareError, match="hardware 'NVIDIA H100") as caught:
        attrs.evolve(H100, **figures)
    assert all(re.search(rf"\b{name}\b", str(caught.value)) for name in figures)


def test_only_devices_are_measured() -> None:
    for devices in ([1], jax.devices()[0], "cpu"):
        with pytest.raises(HardwareError, match="devices must be a list of JAX devices"):
            sr.Hardware.measure(devices)  # pyright: ignore[reportArgumentType]
