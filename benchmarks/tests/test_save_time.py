"""The benchmark of saving runs on a toy tree, with every row. Its times are not checked here."""

import json

from benchmarks.tests.smoke import run


def test_smoke_run_gives_every_contestant() -> None:
    done = run("save_time.py", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in rows] == [
        "save_safetensors",
        "save_equinox",
        "save_orbax",
        "safetensors.save_file",
        "np.savez",
    ]
    for row in rows:
        assert row["seconds"] > 0
        assert row["ratio"] > 0
        assert row["met"] is None  # toy sizes have no limits
