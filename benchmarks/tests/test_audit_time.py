"""The benchmark of audits runs on a toy. Its times are not checked here."""

import json

from benchmarks.tests.smoke import run


def test_smoke_run_reads_a_program() -> None:
    done = run("audit_time.py", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    (row,) = figures["rows"]
    assert row["mb"] > 0.1
    assert 0 < row["floor_seconds"] < row["read_seconds"]
    assert figures["skipped"] == figures["missed"] == []
