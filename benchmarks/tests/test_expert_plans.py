"""The benchmark of mixtures of experts runs on toys. Its figures are not checked here."""

import json
import runpy

import pytest

from benchmarks.tests.smoke import BENCHMARKS, run


@pytest.mark.slow
def test_smoke_run_compiles_plans_by_hand_and_of_autoplan() -> None:
    done = run("expert_plans.py", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    by_hand, planned = json.loads(done.stdout)["rows"]
    assert by_hand["name"] == "experts over expert, FSDP over data, all-to-all"
    assert by_hand["time_ratio"] is None
    assert by_hand["wire_bytes"] > 0
    assert planned["name"] == "autoplan, expert_exchange"
    assert planned["time_ratio"] > 0
    assert planned["peak_ratio"] > 0
    assert planned["regions"]


def test_limits_apply_to_plans_of_autoplan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = runpy.run_path(str(BENCHMARKS / "expert_plans.py"))
    row = names["Row"]("dense", "cpu:8", "data:2,expert:4", "autoplan", 1.0, 1.0, 1, 1, 1, True, 0.0)
    with_ratios = [names["attrs"].evolve(row, time_ratio=1.1, peak_ratio=0.9)]
    assert names["missed"]([row]) == []
    assert names["missed"](with_ratios) == ["dense on cpu:8, autoplan: 1.100 of the time, at most 1.0"]
