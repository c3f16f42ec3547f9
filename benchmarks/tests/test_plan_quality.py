"""The benchmark of plans runs on toy models. Its figures are not checked here."""

import importlib
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

import shardrules as sr
from benchmarks.tests.smoke import BENCHMARKS, run


def test_smoke_run_compiles_plans_of_experts_and_of_autoplan(tmp_path: Path) -> None:
    options = ("--json", "--cache", str(tmp_path))
    done = run("plan_quality.py", "--smoke", *options)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert [case["model"] for case in figures["cases"]] == ["llama", "lstm"]
    for case in figures["cases"]:
        first, last = case["experts"]
        assert first["name"] == "data parallel"
        assert last["name"] != first["name"]
        assert all(row["wire_bytes"] > 0 and row["flops"] > 0 for row in (first, last))
    planned = [(result["model"], result["case"], result["error"]) for result in figures["planned"]]
    assert planned == [(model, case, "") for model in ("llama", "lstm") for case in ("device", "tight")]
    cached = run("plan_quality.py", "--smoke", *options, "--experts-only", "--models", "lstm", "mixture")
    assert cached.returncode == 0, cached.stderr
    lstm, mixture = json.loads(cached.stdout)["cases"]
    assert lstm == figures["cases"][1]  # with its seconds: nothing was compiled again
    assert len({row["wire_bytes"] for row in mixture["experts"]}) == 2
    assert cached.stderr.count("data parallel") == 2


def test_kinds_of_steps_are_rated_with_the_bytes_that_kernels_move() -> None:
    done = run("plan_quality.py", "--smoke", "--json", "--kinds")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert [(result["model"], result["case"], result["error"]) for result in figures["planned"]] == [
        ("decode", "device", ""),
        ("switch_experts", "device", ""),
    ]
    rows = [row for case in figures["cases"] for row in case["experts"]]
    assert all(row["memory_bytes"] > 0 and row["ms"] > row["flops_and_wire_ms"] > 0 for row in rows)


def test_each_kind_has_a_few_plans_that_its_mesh_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    kinds: dict[str, Any] = vars(importlib.import_module("plan_models"))["KINDS"]
    assert len(kinds) == 16
    for kind in kinds.values():
        _, args = kind.build(8, False)
        for text in ("data:8", "data:4,model:2"):
            mesh = sr.mesh_shape(text)
            suiting = [expert for expert in kind.experts if expert.suits(mesh)]
            assert [expert.name for expert in suiting if not expert.fits(args, mesh)] == []
            assert 3 <= len({expert.name for expert in suiting}) == len(suiting) <= 7


def test_unknown_models_are_errors() -> None:
    done = run("plan_quality.py", "--smoke", "--models", "gpt3")
    assert done.returncode == 2
    assert "unknown model gpt3; the models are gpt2, llama" in done.stderr


def test_limits_apply_to_plans_within_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = runpy.run_path(str(BENCHMARKS / "plan_quality.py"))
    row = names["Row"]("autoplan", 1, 100, 50, 10, 1.0, 0.5, 1.0, 1.0, 0.0)
    within = names["Result"](
        *("llama", "data:8", "device", 20, row, "FSDP", 1.0, 0.5, 1.0, 100, 10),
        modelled_seconds=1.0,
        audited_seconds=1.0,
    )
    failed = names["Result"]("llama", "data:8", "tight", 5, None, "FSDP", 1.0, error="does not fit")
    totals = names["summary"]([within, failed])
    assert (totals["share"], totals["worst"], totals["tight_fits"]) == (1.0, 1.0, 0.0)
    assert (totals["worst_without_memory"], totals["mean"]) == (1.0, 1.0)
    assert names["missed"](totals) == []
    late = names["summary"]([names["attrs"].evolve(within, best_ms=0.5), failed])
    assert [line.split()[0] for line in names["missed"](late)] == ["share", "worst"]
    far = names["summary"]([names["attrs"].evolve(within, modelled_seconds=0.8), failed])
    assert [line.split()[0] for line in names["missed"](far)] == ["time_within_10"]
