"""A benchmark as a process of its own, at toy size: its times are nobody's business."""

import os
import subprocess
import sys
from pathlib import Path

import shardrules as sr

BENCHMARKS = Path(__file__).parents[1]


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of this folder, on CPUs and with the shardrules of this test, installed or not."""
    known = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(sr.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**known, **own, **variables},
    )
