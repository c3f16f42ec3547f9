"""The benchmark of initialization runs on a toy, with equal values. Its times are not checked here."""

import json

from benchmarks.tests.smoke import run


def test_smoke_run_gives_every_contestant_and_equal_values() -> None:
    done = run("init_memory.py", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    rows = {row["name"]: row for row in figures["rows"]}
    assert list(rows) == ["jit", "filter_init", "eager"]
    assert rows["filter_init"]["same_values"]
    assert figures["missed"] == []
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["mb"] > 0
