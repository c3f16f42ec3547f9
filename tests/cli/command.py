"""The command line as users have it: a process in its own folder."""

import os
import subprocess
from pathlib import Path

from tests.forks import run_forks
from tests.house.source import REPOSITORY
from tests.quick import QUICK_FLAGS

EXAMPLES = REPOSITORY / "docs" / "examples"
GPT = f"{EXAMPLES}/train_gpt.py:GPT"
GPT_RULES = f"{EXAMPLES}/train_gpt.py:RULES"

NO_BACKEND = {"JAX_PLATFORMS": "none_such"}
"""With this, starting a backend of JAX fails."""


NOISE = ("WARNING: All log messages before absl", "cudart_stub.cc")
"""What plugins of JAX print while they load."""


def environment(*without: str, **more: str) -> dict[str, str]:
    """The environment of a command: the tests' own, without variables that tests set and without `without`."""
    removed = ("XLA_FLAGS", "JAX_PLATFORMS", "NO_COLOR", "FORCE_COLOR", "COLUMNS", *without)
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    return {**kept, "XLA_FLAGS": QUICK_FLAGS, "PYTHONPATH": str(REPOSITORY), **more}


def shardrules(
    *words: str, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Runs `shardrules`, and returns its output and exit code."""
    (ended,) = run_forks(
        "from shardrules.cli.start import start; start()",
        [words],
        env=environment("TERM", **(env or {})),
        cwd=cwd or REPOSITORY,
        timeout=timeout,
    )
    lines = [line for line in ended.err.splitlines() if not any(noise in line for noise in NOISE)]
    return subprocess.CompletedProcess(words, ended.code, ended.out, "".join(f"{line}\n" for line in lines))
