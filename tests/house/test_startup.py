"""What JAX's plugins print at startup is separated from other output. The plugin here is planted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import plant
from tests.house.startup import beyond_startup

START = "import jax\njax.devices()\n"

PLUGIN = """
import os, sys, time
def log(text):
    print(f"I0000 00:00:{time.time():.6f} {os.getpid():7} planted.cc:1] {text}", file=sys.stderr)
def initialize():
    print("WARNING: not ready", file=sys.stderr)
    log("no hardware")
    log("no hardware")
"""

OWN = "from jax_plugins import planted\n"


def remaining(code: str, folder: Path) -> list[str]:
    """What remains of the stderr of a process that runs `code` with the plugin installed."""
    plant(folder / "jax_plugins", {"__init__.py": PLUGIN})
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(folder)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.stderr.count("] no hardware\n") >= 2
    return beyond_startup(run.stderr, START, environment).splitlines()


def test_startup_output_is_removed(tmp_path: Path) -> None:
    assert remaining(START, tmp_path) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("import sys\nsys.stderr.write('psst')", "psst"),
        (f"{OWN}planted.log('lost hardware')", "] lost hardware"),
        (f"{OWN}planted.log('no hardware')", "] no hardware"),  # a third time
        ("raise SystemExit('WARNING: not ready')", "WARNING: not ready"),
        ("import warnings\nwarnings.warn('old')", "UserWarning: old"),
    ],
)
def test_other_output_remains(tmp_path: Path, code: str, line: str) -> None:
    assert any(output.endswith(line) for output in remaining(START + code, tmp_path))


def test_a_failing_startup_raises(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="No module named 'absent'"):
        beyond_startup("No module named 'absent'", "import absent", {**os.environ, "PYTHONPATH": str(tmp_path)})
