"""The benchmark of the audit runs. Its times are nobody's business here."""

import json

from benchmarks.tests.smoke import run


def test_smoke_run_reads_a_program() -> None:
    done = run("audit_time.py", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (row,) = found["rows"]
    assert row["mb"] > 0.1
    assert 0 < row["floor_seconds"] < row["read_seconds"]
    assert found["skipped"] == found["missed"] == []
