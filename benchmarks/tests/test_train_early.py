"""The benchmark of searches with little time runs on a toy. Its ratios are not checked here."""

import json

from benchmarks.tests.smoke import run


def test_smoke_run_compares_compiled_plans_with_fully_sharded_steps() -> None:
    done = run("train_early.py", "--smoke", "--json", "--time-limit", "10", "--model", "gpt", "llama lora")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["answers"]
    for answer in (first, second):
        assert [expert["name"] for expert in answer["experts"]] == ["full", "dots"]
        (plan,) = answer["plans"]
        assert plan["fits"]
        assert plan["ratio"] > 0
