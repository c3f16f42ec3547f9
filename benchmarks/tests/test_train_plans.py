"""The benchmark of training plans runs on toys. Its ratios are not checked here."""

import json

import pytest

from benchmarks.tests.smoke import run
from benchmarks.train_plans import line, missed


def test_smoke_run_plans_toys_as_their_authors_and_by_itself() -> None:
    done = run("train_plans.py", "--smoke", "--json", "--row", "toy, eager")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["seconds"] > 0
    assert row["expert_seconds"] > 0
    assert row["bytes"] <= row["limit_bytes"]


@pytest.mark.parametrize("late", [False, True])
def test_searches_that_were_cut_short_are_named(late: bool) -> None:
    times = {"seconds": 1.1, "expert_seconds": 1.0, "ratio": 1.1, "processor_seconds": 1.0, "late": late}
    sizes = dict.fromkeys(("bytes", "expert_bytes", "limit_bytes"), 2**30)
    names = {"name": "49", "target": "cuda:h100:8", "mesh": "data:8", "recipe": "whole batch"}
    figure = times | sizes | names
    (message,) = missed([figure])
    assert "1.100 x the published configuration, by the model" in message
    assert ("cut short" in message, "cut short" in line(figure)) == (late, late)
