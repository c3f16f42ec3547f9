"""The benchmark of the audit runs. Its times are nobody's business here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import shardrules as sr

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "audit_time.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment = {**known, "PYTHONPATH": str(Path(sr.__file__).parents[1])}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def test_smoke_run_reads_a_program() -> None:
    done = run("--smoke", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (row,) = found["rows"]
    assert row["mb"] > 0.1
    assert 0 < row["floor_seconds"] < row["read_seconds"]
    assert found["skipped"] == found["missed"] == []


def test_limits_are_refused_at_toy_sizes() -> None:
    done = run("--smoke", "--check")
    assert done.returncode == 2
    assert "use --check without --smoke" in done.stderr
