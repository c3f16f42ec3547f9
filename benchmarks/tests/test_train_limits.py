"""The benchmark of training plans within limits runs on a toy. Its ratios are not checked here."""

import json

from benchmarks.tests.smoke import run


def test_smoke_run_compares_a_compiled_plan_with_compiled_experts() -> None:
    done = run("train_limits.py", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)["answers"]
    assert answer["expert"]["peak_bytes"] <= answer["limit_bytes"]
    assert any(plan["fits"] for plan in answer["plans"])
    assert answer["ratio"] > 0
