"""The benchmark of plans runs, and its models do what they say. Its figures are nobody's business here."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

import shardrules as sr

pytestmark = pytest.mark.usefixtures("compiled_fast")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment = {**known, "PYTHONPATH": str(Path(sr.__file__).parents[1])}
    command = [sys.executable, str(BENCHMARKS / "plan_quality.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def test_smoke_run_compiles_what_experts_write(tmp_path: Path) -> None:
    arguments = ("--smoke", "--experts-only", "--json", "--models", "mixture", "lstm", "--cache", str(tmp_path))
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout)["cases"]
    assert [one["model"] for one in cases] == ["mixture", "lstm"]
    for one in cases:
        first, last = one["experts"]
        assert first["name"] == "data parallel"
        assert last["name"] != first["name"]
        assert all(row["wire_bytes"] > 0 and row["flops"] > 0 for row in (first, last))
    again = run(*arguments)
    assert json.loads(again.stdout)["cases"] == cases  # seconds too: nothing was compiled
    assert "data parallel" in again.stderr


def test_limits_are_refused_at_toy_sizes() -> None:
    done = run("--smoke", "--check")
    assert done.returncode == 2
    assert "use --check on its own" in done.stderr


def test_unknown_models_are_refused() -> None:
    done = run("--smoke", "--models", "gpt3")
    assert done.returncode == 2
    assert "there is no model gpt3; there are gpt2, llama" in done.stderr


def toy(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Any, Any, Any]:
    """What the file of models has, one of its models, its step, and arrays for that."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = runpy.run_path(str(BENCHMARKS / "plan_models.py"))
    model: Any = names["MODELS"][name]
    step, _ = model.build(8, True)
    return names, model, step, model.arrays(jax.random.key(0))


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixture", "vit", "encoder_decoder", "conv_net", "lstm"])
def test_planned_models_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, step, args = toy(name, monkeypatch)
    planned = sr.autoplan(step, *args, mesh=sr.create_mesh("data:4,model:2"))
    _, loss = eqx.filter_jit(step)(*args)
    state, same = planned.jit(step)(*args)
    np.testing.assert_allclose(same, loss, rtol=1e-2)
    assert eqx.filter_jit(step)(state, args[1])[1] < loss  # it learns


@pytest.mark.parametrize("name", ["mixture", "vit"])
def test_experts_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names, model, step, args = toy(name, monkeypatch)
    arrays, rest = eqx.partition(args, eqx.is_array)

    def whole(*given: Any) -> Any:
        state, loss = step(*eqx.combine(given, rest))
        return eqx.filter(state, eqx.is_array), loss

    loss = jax.jit(whole)(*arrays)[1]
    mesh = sr.create_mesh("data:4,model:2", axis_types="auto")
    suiting = [one for one in model.experts if one.suits(mesh)]
    assert len({one.name for one in suiting}) == len(suiting)
    expert = suiting[-1]
    shardings = expert.shardings(args, mesh)
    placed = jax.tree.map(jax.device_put, arrays, shardings)
    with names["constrained"](mesh, expert):
        found, same = jax.jit(whole, out_shardings=(shardings[0], None))(*placed)
    np.testing.assert_allclose(same, loss, rtol=1e-2)
    assert any(not one.sharding.is_fully_replicated for one in jax.tree.leaves(found))


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
