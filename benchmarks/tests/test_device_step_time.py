"""The benchmark of steps on a device runs on a toy. Its times are not checked here."""

import json

from benchmarks.tests.smoke import run


def test_smoke_run_compares_steps_with_their_profiles() -> None:
    done = run("device_step_time.py", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in rows] == ["conv_net", "sorted_experts"]
    assert all(row["measured"] > 0 and row["modelled"] > 0 and row["matched"] > 0.9 for row in rows)
