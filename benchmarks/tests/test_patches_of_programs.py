"""The benchmark of patches runs on a toy, which is patched as planned on both kinds of meshes."""

import json

from benchmarks.tests.smoke import run


def test_smoke_run_patches_a_toy() -> None:
    done = run("patches_of_programs.py", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in rows] == ["layers, auto", "layers, explicit"]
    for row in rows:
        assert not row["refusal"]
        assert row["is_equal"]
        assert row["is_verified"]
        assert row["operations"] > 10 * row["annotations"]
        assert 0 < row["patched_seconds"] <= 1.03 * row["planned_seconds"]
    assert rows[0]["before_seconds"] > 0
