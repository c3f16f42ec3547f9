"""Tables of measurements: what they hold, and what is wrong with them."""

from typing import Any

import attrs
import pytest

from shardrules.core.errors import HardwareError
from shardrules.programs.machine.hardware import Hardware, sheets
from shardrules.programs.machine.measured import CollectiveTimes, MatmulRates

PEAKS = Hardware("peaks", {"bf16": 1e12}, 10**9, 1e12, 1e11, 1e-6, 1e10, 1e-5)
RATES = {"kind": "bf16", "m": [1, 2], "n": [4], "k": [8], "flops_per_second": [1e11, 2e11], "peak": 1e12}
TIMES = {
    "kind": "all-reduce",
    "group_size": 8,
    "payload_bytes": [8, 64],
    "seconds": [1e-6, 2e-6],
    "link_bytes_per_second": 1e11,
}


def test_mappings_become_tables() -> None:
    sheet = attrs.evolve(PEAKS, matmul_rates=[RATES], collective_times=[TIMES])
    assert sheet.matmul_rates == (MatmulRates("bf16", (1, 2), (4,), (8,), (1e11, 2e11), 1e12),)
    assert sheet.collective_times == (CollectiveTimes("all-reduce", 8, (8, 64), (1e-6, 2e-6), 1e11),)
    assert hash(sheet) != hash(PEAKS)
    assert attrs.evolve(sheet, name="other").matmul_rates == sheet.matmul_rates


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"matmul_rates": [{**RATES, "kind": "bf17"}]}, "matmul_rates: unknown kind 'bf17'"),
        ({"matmul_rates": [RATES, RATES]}, "matmul_rates has the same kind twice"),
        ({"matmul_rates": [{**RATES, "m": [2, 1]}]}, "matmul_rates of 'bf16': m must be ascending positive sizes"),
        ({"matmul_rates": [{**RATES, "k": []}]}, "k must be ascending positive sizes, got ()"),
        ({"matmul_rates": [{**RATES, "flops_per_second": [1e11]}]}, "needs 2 rates, one for each m, n and k; got 1"),
        ({"matmul_rates": [{**RATES, "peak": 0}]}, "rates and peak must be positive and finite"),
        ({"collective_times": [{**TIMES, "kind": "sum"}]}, "collective_times: unknown kind 'sum'"),
        ({"collective_times": [TIMES, TIMES]}, "collective_times has the same kind and group size twice"),
        ({"collective_times": [{**TIMES, "group_size": 1}]}, "a group has at least 2 devices"),
        ({"collective_times": [{**TIMES, "seconds": [1e-6]}]}, "with one of seconds for each"),
        ({"collective_times": [{**TIMES, "seconds": [1e-6, 0]}]}, "must be positive and finite"),
        ({"collective_times": [{**TIMES, "seconds": [2e-6, 1e-6]}]}, "seconds must not fall"),
    ],
)
def test_invalid_tables_raise(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError, match="hardware 'peaks'") as caught:
        attrs.evolve(PEAKS, **tables)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", sheets())
def test_tables_of_sheets_are_of_their_chip(name: str) -> None:
    sheet = sheets()[name]
    assert all(table.peak == dict(sheet.peak_flops)[table.kind] for table in sheet.matmul_rates)
    assert all(table.link_bytes_per_second == sheet.link_bytes_per_second for table in sheet.collective_times)
