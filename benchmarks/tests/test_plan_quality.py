"""The benchmark of plans runs, and its models do what they say. Its figures are nobody's business here."""

import json
import runpy
from pathlib import Path

from benchmarks.tests.smoke import BENCHMARKS, run


def test_smoke_run_compiles_what_experts_write_and_what_autoplan_finds(tmp_path: Path) -> None:
    kept = ("--json", "--cache", str(tmp_path))
    done = run("plan_quality.py", "--smoke", *kept)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["model"] for one in found["cases"]] == ["llama", "lstm"]
    for one in found["cases"]:
        first, last = one["experts"]
        assert first["name"] == "data parallel"
        assert last["name"] != first["name"]
        assert all(row["wire_bytes"] > 0 and row["flops"] > 0 for row in (first, last))
    planned = [(one["model"], one["case"], one["error"]) for one in found["found"]]
    assert planned == [(model, case, "") for model in ("llama", "lstm") for case in ("device", "tight")]
    again = run("plan_quality.py", "--smoke", *kept, "--experts-only", "--models", "lstm", "mixture")
    assert again.returncode == 0, again.stderr
    lstm, mixture = json.loads(again.stdout)["cases"]
    assert lstm == found["cases"][1]  # seconds too: nothing was compiled
    assert len({one["wire_bytes"] for one in mixture["experts"]}) == 2
    assert again.stderr.count("data parallel") == 2


def test_unknown_models_are_refused() -> None:
    done = run("plan_quality.py", "--smoke", "--models", "gpt3")
    assert done.returncode == 2
    assert "there is no model gpt3; there are gpt2, llama" in done.stderr


def test_limits_are_for_plans_within_the_device() -> None:
    names = runpy.run_path(str(BENCHMARKS / "plan_quality.py"))
    row = names["Row"]("autoplan", 1, 100, 10, 1.0, 1.0, 1.0, 0.0)
    within = names["Found"]("llama", "data:8", "device", 20, row, "FSDP", 1.0, 100, 10, 1.0)
    failed = names["Found"]("llama", "data:8", "tight", 5, None, "FSDP", 1.0, error="does not fit")
    totals = names["summary"]([within, failed])
    assert (totals["share"], totals["worst"], totals["tight_fits"]) == (1.0, 1.0, 0.0)
    assert names["missed"](totals) == []
    late = names["summary"]([names["attrs"].evolve(within, best_ms=0.5), failed])
    assert [line.split()[0] for line in names["missed"](late)] == ["share", "worst"]
