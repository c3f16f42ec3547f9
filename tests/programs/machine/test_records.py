"""Hardware in JSON."""

import json

import attrs
import pytest

from shardrules.core.storage.records import record
from shardrules.programs.machine.hardware import Hardware, sheets
from shardrules.programs.machine.records import hardware_from_json, hardware_to_json


def read(text: str) -> Hardware:
    return record(Hardware, hardware_from_json(json.loads(text)), "hardware")


@pytest.mark.parametrize("name", sheets())
def test_sheets_survive_json_without_their_tables(name: str) -> None:
    text = json.dumps(hardware_to_json(sheets()[name]))
    assert read(text) == sheets()[name]
    assert len(text) < 10_000


def test_tables_of_your_own_are_written_out() -> None:
    h100 = sheets()["cuda:h100"]
    ours = attrs.evolve(h100, name="ours", matmul_rates=h100.matmul_rates[:1], launch_seconds=1e-6)
    data = hardware_to_json(ours)
    assert data["collective_times"] == "cuda:h100"
    assert len(data["matmul_rates"]) == 1
    assert read(json.dumps(data)) == ours


def test_invalid_tables_say_what_is_wrong() -> None:
    data = json.loads(json.dumps(hardware_to_json(sheets()["cuda:h100"])))
    with pytest.raises(LookupError, match=r"unknown sheet 'cuda:h10' \(did you mean 'cuda:h100'\?\)"):
        hardware_from_json({**data, "matmul_rates": "cuda:h10"})
    with pytest.raises(TypeError, match=r"hardware\.matmul_rates must be a list, got 7"):
        read(json.dumps({**data, "matmul_rates": 7}))
    with pytest.raises(TypeError, match="hardware must be an object, got 7"):
        read("7")
