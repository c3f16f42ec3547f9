"""The benchmark of training plans runs on toys. Its ratios are not checked here."""

import json

from benchmarks.tests.smoke import run


def test_smoke_run_plans_toys_as_their_authors_and_by_itself() -> None:
    done = run("train_plans.py", "--smoke", "--json", "--row", "toy, eager")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["seconds"] > 0
    assert row["expert_seconds"] > 0
    assert row["bytes"] <= row["limit_bytes"]
