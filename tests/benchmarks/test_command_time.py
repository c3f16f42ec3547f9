"""The benchmark of the command line runs. Its times are nobody's business here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import shardrules as sr

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "command_time.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(sr.__file__).parents[1])}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def test_smoke_run_times_a_command_and_the_floor() -> None:
    done = run("--smoke", "--json")
    assert done.returncode == 0, done.stderr
    floor, plan = json.loads(done.stdout)["rows"]
    assert (floor["name"], floor["over_floor"]) == ("import jax", 1)
    assert plan["seconds"] > 0


def test_limits_are_refused_at_toy_sizes() -> None:
    done = run("--smoke", "--check")
    assert done.returncode == 2
    assert "use --check without --smoke" in done.stderr
