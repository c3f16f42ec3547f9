"""The benchmark of moves runs on toy arrays, and every value arrives. Its times are not checked here."""

import json
import sys

from benchmarks.tests.smoke import run

ALL = {"floor", "device_put", "reshard", "reshard, by pieces"}


def test_smoke_run_gives_every_contestant_on_every_move() -> None:
    done = run("reshard_time.py", "--smoke", "--donate", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    rows = figures["rows"]
    assert {(row["case"], row["name"]) for row in rows} == {
        (case, name)
        for case, others in (
            ("one array to 8", {"jit"}),
            ("one array to 4, twice", {"jit", "intermediate"}),
            ("one array to 4 of 8", {"intermediate"}),
            ("many arrays to 8", {"jit", "jit, in hundreds"}),
        )
        for name in ALL | others
    }
    donated = figures["donated"]
    assert [row["name"] for row in donated] == ["reshard", "reshard, by pieces"]
    assert figures["missed"] == []  # toy sizes have no targets
    for row in (*rows, *donated):
        assert row["seconds"] > 0
        if sys.platform == "linux":
            assert row["added_mb"] > 0
    for row in rows:
        assert row["floor_ratio"] > 0
        assert row["peer_ratio"] > 0


def test_memory_is_what_a_move_adds() -> None:
    case = {"name": "one array", "leaves": 1, "rows": 4096, "columns": 4096, "target": "x:1,y:8"}
    worker = json.dumps([case, "floor", None])
    done = run("reshard_time.py", "--worker", worker, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert done.returncode == 0, done.stderr
    added = json.loads(done.stdout)["added_bytes"]
    if sys.platform == "linux":
        assert 0.95 < added / (4096 * 4096 * 4) < 1.1


def test_zero_rounds_are_an_error() -> None:
    done = run("reshard_time.py", "--rounds", "0")
    assert done.returncode == 2
    assert "--rounds must be at least 1" in done.stderr
