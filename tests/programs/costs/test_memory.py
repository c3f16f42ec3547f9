"""What memory traffic takes."""

import attrs
import pytest

from shardrules.programs.costs.memory import host_seconds, traffic_seconds
from shardrules.programs.machine.hardware import Hardware

ROUND = Hardware("round", {"bf16": 1e12}, 10**9, 1e9, 1e9, 1e-6, 1e8, 1e-5)


def test_traffic_takes_its_bytes_at_what_is_reached() -> None:
    assert traffic_seconds(1e9, ROUND) == traffic_seconds(1e9, ROUND, "gather") == 1
    reached = attrs.evolve(ROUND, memory_fractions={"all": 0.5, "read": 0.8})
    assert traffic_seconds(1e9, reached) == pytest.approx(2)
    assert traffic_seconds(1e9, reached, "read") == pytest.approx(1.25)
    assert traffic_seconds(1e9, attrs.evolve(ROUND, memory_fractions=0.25), "gather") == pytest.approx(4)


def test_host_memory_is_behind_its_link() -> None:
    assert host_seconds(50e9, ROUND) == 2
    assert host_seconds(50e9, attrs.evolve(ROUND, host_link_bytes_per_second=50e9)) == 1
