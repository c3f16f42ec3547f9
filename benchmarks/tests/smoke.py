"""Runs a benchmark as a process, at toy size, where its times mean nothing."""

import os
import subprocess
import sys
from pathlib import Path

import shardrules as sr
from tests.quick import QUICK_FLAGS

BENCHMARKS = Path(__file__).parents[1]


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script on CPUs, with the shardrules that the tests import, installed or not."""
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "XLA_FLAGS": QUICK_FLAGS,
        "PYTHONPATH": str(Path(sr.__file__).parents[1]),
    }
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **settings, **variables},
    )
