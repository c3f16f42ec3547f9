"""The benchmark of importing runs. Its times are not checked here."""

import json

import pytest

from benchmarks.tests.smoke import run


def test_smoke_run_measures_both_parts() -> None:
    process = run("import_time.py", "--smoke", "--json")
    assert process.returncode == 0, process.stderr
    figures = json.loads(process.stdout)
    assert figures["ratio"] == pytest.approx(1 + figures["shardrules_ms"] / figures["peers_ms"])
    assert figures["peers_ms"] > 0
