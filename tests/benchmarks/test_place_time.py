"""The placement benchmark runs, and measures what it says it measures. Its times are nobody's business here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import shardrules as sr

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "place_time.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(sr.__file__).parents[1])}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def test_smoke_run_gives_every_contestant_on_every_tree_both_ways() -> None:
    done = run("--smoke", "--json")
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


def test_targets_are_refused_at_toy_sizes() -> None:
    done = run("--smoke", "--check")
    assert done.returncode == 2
    assert "use --check without --smoke" in done.stderr
