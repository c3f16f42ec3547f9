"""The benchmark of stages runs on a toy. Its ratios are not checked here."""

import json

from benchmarks.stage_plans import missed
from benchmarks.tests.smoke import run


def test_smoke_run_plans_a_toy_with_stages_and_without() -> None:
    done = run("stage_plans.py", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout)["cases"]
    assert case["ratio"] <= 1.001
    assert case["seconds"] > 0


def test_slower_plans_and_long_searches_are_named() -> None:
    figure = {
        "name": "8B on 64",
        "ratio": 1.1,
        "effort": 1.6,
        "is_slow": False,
        "processor_seconds": 121.0,
        "late": True,
    }
    assert missed([figure]) == [
        "8B on 64: with stages allowed 1.100 x the best plan",
        "8B on 64: the search took 1.60 x that without stages",
        "8B on 64: the search took 121 s of a core",
        "8B on 64: the search was cut short",
    ]
    assert missed([figure | {"ratio": 1.0, "effort": 1.1, "processor_seconds": 120.0, "late": False}]) == []
    assert missed([figure | {"name": "70B", "ratio": 1.0, "effort": 1.1}]) == []
    assert missed([figure | {"name": "70B", "ratio": 1.0, "effort": 1.3, "is_slow": True}]) == []
