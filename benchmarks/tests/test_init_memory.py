"""The benchmark of making a model runs, and what is made is the same. Its times are nobody's business here."""

import json

from benchmarks.tests.smoke import run


def test_smoke_run_gives_every_contestant_and_equal_values() -> None:
    done = run("init_memory.py", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["jit", "filter_init", "eager"]
    assert rows["filter_init"]["same_values"]
    assert found["missed"] == []
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["mb"] > 0
