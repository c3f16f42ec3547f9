"""The benchmark of placement runs on toy trees, with every row. Its times are not checked here."""

import json

from benchmarks.tests.smoke import run


def test_smoke_run_gives_every_contestant_on_every_tree_both_ways() -> None:
    done = run("place_time.py", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {(row["case"], row["kind"], row["name"]) for row in rows} == {
        (case, kind, name)
        for case in ("150 leaves", "1,500 leaves")
        for kind in ("place cold", "place warm", "back cold", "back warm")
        for name in ("floor", "shardings", "plan", "rule", "equinox", "jits")
    }
    for row in rows:
        assert row["seconds"] > 0
        assert row["ratio"] > 0
        assert row["met"] is None  # toy sizes have no targets
