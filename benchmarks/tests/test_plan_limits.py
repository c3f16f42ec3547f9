"""The benchmark of limits runs on toy steps. Its figures are not checked here."""

import json
import runpy
from typing import Any

import attrs
import pytest

from benchmarks.tests.smoke import BENCHMARKS, run


def test_smoke_run_answers_every_limit_of_every_kind() -> None:
    done = run("plan_limits.py", "--smoke", "--json", "--prove", "--no-small-step")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert [step["model"] for step in figures["steps"]] == ["decode"]
    for step in figures["steps"]:
        assert [result["case"].split()[0] for result in step["results"]] == ["0.9", "0.8", "0.7", "1.05"]
        assert all(result["row"] is not None or result["error"] for result in step["results"])
        assert step["unlimited"]["row"]["peak_bytes"] > 0
    assert figures["summary"]["cases"] == 4


def test_smoke_run_plans_a_small_step_alone_and_beside_busy_processes() -> None:
    done = run("plan_limits.py", "--smoke", "--json", "--kinds")
    assert done.returncode == 0, done.stderr
    plans = json.loads(done.stdout)["small"]
    assert [plan["setting"] for plan in plans] == ["alone", "another hash seed", "busy"]
    assert len({plan["digest"] for plan in plans}) == 1


def test_unknown_kinds_are_errors() -> None:
    done = run("plan_limits.py", "--smoke", "--kinds", "gpt3")
    assert done.returncode == 2
    assert "unknown kind gpt3; the kinds are grouped_queries, sorted_experts" in done.stderr


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return runpy.run_path(str(BENCHMARKS / "plan_limits.py"))


def test_a_limit_that_an_expert_keeps_must_be_kept(names: dict[str, Any]) -> None:
    expert = names["Row"]("FSDP", 1, 1, 1, 100, 10.0, 10.0, 10.0, 1.0, 0.0)
    larger = attrs.evolve(expert, name="autoplan", peak_bytes=120)
    answer = names["Result"]("llama", "data:8", "0.9", 110, larger, "FSDP", 10.0, seconds=60)

    def faults(answer: Any) -> list[str]:
        return list(names["faults_of"](answer, [expert, larger], 60.0))

    assert faults(answer) == ["a plan of 0.000 GB fits"]
    refused = attrs.evolve(answer, row=None, error="DoesNotFitError: no plan")
    assert faults(refused)[1:] == ["refused without a proof"]
    assert faults(attrs.evolve(refused, limit_bytes=99)) == []  # nothing that was tried fits either
    fitting = attrs.evolve(answer, row=attrs.evolve(larger, peak_bytes=105))
    assert faults(fitting) == []
    assert faults(attrs.evolve(fitting, row=attrs.evolve(fitting.row, ms=10.6))) == ["1.060 of FSDP"]
    assert faults(attrs.evolve(fitting, seconds=67)) == ["67 s for 60"]


def test_small_steps_must_be_planned_the_same(names: dict[str, Any]) -> None:
    plan = names["SmallPlan"]("data:8", "alone", 2.0, 2.0, 1.0, 0.0, "a")
    assert names["small_faults"]([plan, plan]) == []
    slow, other = attrs.evolve(plan, processor_seconds=11), attrs.evolve(plan, setting="busy", cost_ms=2.0, digest="b")
    assert names["small_faults"]([plan, slow]) == ["small step on data:8: 11.0 s of processors"]
    assert names["small_faults"]([plan, other]) == [
        "small step on data:8: different plans: 1.0000 ms (alone), 2.0000 ms (busy)"
    ]
