"""Separates the stderr of a process from what JAX writes there at startup.

JAX's plugins write to stderr, CUDA's even where only CPU devices are requested. The text differs by plugin and
version, so it is not listed here: a process that only starts JAX shows it.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

Environment: TypeAlias = Mapping[str, str]

STAMP = re.compile(r"^([IWEF])\d{4} [\d:.]+ +\d+ ")
"""Severity, date, time and thread of a line logged in C++. Only the severity is the same in each run."""


def beyond_startup(stderr: str, start: str, environment: Environment) -> str:
    """Returns `stderr` without the lines that a process writes that only runs `start`.

    Each line is removed as often as that process writes it, and no more: another one was caused by something else.
    """
    if not stderr:
        return ""
    command = [sys.executable, "-W", "error", "-c", start]
    alone = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert alone.returncode == 0, alone.stderr[-4000:]  # the output of a failing startup is not expected output
    expected = Counter(STAMP.sub(r"\1 ", line) for line in alone.stderr.splitlines())
    left = []
    for line in stderr.splitlines(keepends=True):
        key = STAMP.sub(r"\1 ", line.rstrip("\n"))
        if expected[key] > 0:  # in any order: JAX iterates over a set of plugins
            expected[key] -= 1
        else:
            left.append(line)
    return "".join(left)
