"""Figures of the wrong type, or out of range, are named with what they must be, all in one error."""

import math
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
    ({"memory_bytes": 0}, "memory_bytes must be positive and finite, got 0"),
    ({"link_bytes_per_second": math.inf}, "link_bytes_per_second must be positive and finite, got inf"),
    ({"network_latency_seconds": math.nan}, "network_latency_seconds must be positive and finite, got nan"),
    ({"collective_launch_seconds": -1e-6}, "collective_launch_seconds must be at least 0, got -1e-06"),
    ({"devices_per_chip": 0}, "devices_per_chip must be at least 1, got 0"),
    ({"sources": {"link": "me"}}, "sources: unknown figure 'link'"),
    ({"network_fraction": 3}, "network_fraction must be at most 1, got 3"),
    ({"overlap_fraction": 1.5}, "overlap_fraction must be at most 1, got 1.5"),
    ({"torus_dims": True}, "torus_dims must be a whole number, got True"),
    ({"matmul_tile": 8.5}, "matmul_tile must be a whole number, got 8.5"),
    ({"devices_per_host": 8.5}, "devices_per_host must be at least 1, or None for all devices; got 8.5"),
    ({"peak_flops": "fast"}, "peak_flops must be a mapping of names to numbers, got 'fast'"),
    ({"peak_flops": {"bf16": "fast"}}, "peak_flops['bf16'] must be a number, got 'fast'"),
    ({"peak_flops": {"fp8": 1}}, "peak_flops: unknown kind 'fp8' (did you mean 'f8'?); the kinds are bf16,"),
    ({"peak_flops": {"bf16": -1}}, "peak_flops['bf16'] must be positive and finite, got -1.0"),
    ({"peak_flops": {}}, "peak_flops is empty"),
    ({"peak_flops": [("bf16", 1), ("bf16", 2)]}, "peak_flops has the same kind twice"),
    ({"matmul_fractions": {"all": 1.5}}, "matmul_fractions['all'] must be above 0 and at most 1, got 1.5"),
    ({"link_fractions": {"all-gathr": 0.5}}, "link_fractions: unknown kind 'all-gathr' (did you mean 'all-gather'?)"),
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


def test_sources_are_of_figures() -> None:
    with pytest.raises(HardwareError, match=r"unknown figure 'memory_byte' \(did you mean 'memory_bytes'\?\)"):
        H100.source("memory_byte")


def test_only_devices_are_measured() -> None:
    for devices in ([1], jax.devices()[0], "cpu"):
        with pytest.raises(HardwareError, match="devices must be a list of JAX devices"):
            sr.Hardware.measure(devices)  # pyright: ignore[reportArgumentType]
