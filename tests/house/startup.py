"""Tells what a process says from what JAX says in it when it starts.

JAX's plugins write to stderr, CUDA's even where only CPU devices are asked for. What they write differs by plugin and
version, so it is not listed here: a process that does nothing but start JAX shows it.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

Environment: TypeAlias = Mapping[str, str]

STAMP = re.compile(r"^([IWEF])\d{4} [\d:.]+ +\d+ ")
"""The severity, date, time and thread before a line that is logged in C++. All but the first differ in each run."""


def beyond_startup(stderr: str, start: str, environment: Environment) -> str:
    """Returns what of `stderr` is left without the lines that a process writes in which nothing but `start` runs.

    Each line goes as often as that process writes it, and no more: one that comes again was caused by something else.
    """
    if not stderr:
        return ""
    command = [sys.executable, "-W", "error", "-c", start]
    alone = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert alone.returncode == 0, alone.stderr[-4000:]  # what it says as it breaks is nothing to take for granted
    expected = Counter(STAMP.sub(r"\1 ", line) for line in alone.stderr.splitlines())
    left = []
    for line in stderr.splitlines(keepends=True):
        key = STAMP.sub(r"\1 ", line.rstrip("\n"))
        if expected[key] > 0:  # in any order: JAX goes through its plugins in that of a set
            expected[key] -= 1
        else:
            left.append(line)
    return "".join(left)
