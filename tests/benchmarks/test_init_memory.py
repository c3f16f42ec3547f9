"""The benchmark of making a model runs, and what is made is the same. Its times are nobody's business here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import shardrules as sr

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "init_memory.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(sr.__file__).parents[1])}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def test_smoke_run_gives_every_contestant_and_equal_values() -> None:
    done = run("--smoke", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["jit", "filter_init", "eager"]
    assert rows["filter_init"]["same_values"]
    assert found["missed"] == []
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["mb"] > 0


def test_targets_are_refused_at_toy_sizes() -> None:
    done = run("--smoke", "--check")
    assert done.returncode == 2
    assert "use --check without --smoke" in done.stderr
