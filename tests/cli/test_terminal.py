"""What a person sees in a real terminal of any width, with and without colours."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

import pytest

from tests.cli.command import EXAMPLES, GPT, GPT_RULES, NO_BACKEND, NOISE, environment
from tests.house.source import REPOSITORY

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def typed(*words: str, width: int = 200, env: dict[str, str] | None = None) -> tuple[str, int]:
    """Runs `shardrules` in a terminal, and returns its output and its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "shardrules", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=REPOSITORY,
        env=environment("CI", **{"TERM": "xterm-256color", **(env or {})}),
    )
    os.close(theirs)
    parts: list[bytes] = []
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux raises it when the other side is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    text = b"".join(parts).decode().replace("\r\n", "\n")
    lines = [line for line in text.split("\n") if not any(noise in line for noise in NOISE)]
    return "\n".join(lines), process.wait()


PLAN = ("plan", GPT, "--rules", GPT_RULES, "--mesh", "data:4,model:2")


def test_wide_terminals_show_the_table() -> None:
    text, code = typed(*PLAN, env=NO_BACKEND)
    assert code == 0
    assert "\x1b[" in text
    plain = _ESCAPE.sub("", text)
    assert ["path", "shape", "dtype", "spec", "bytes/device", "rule", "reason"] in [
        line.split() for line in plain.splitlines()
    ]
    assert "41 arrays, 2.4 MiB in all" in plain


@pytest.mark.sample(1)
@pytest.mark.parametrize("width", [40, 100])
def test_narrow_terminals_stack_the_rows(width: int) -> None:
    text, _ = typed(*PLAN, width=width, env=NO_BACKEND)
    plain = _ESCAPE.sub("", text)
    assert "blocks/*/up/weight  x3\n  (512, 128) float32  P('model', 'data')  96.0 KiB/device\n" in plain
    assert "----" not in plain


@pytest.mark.sample(1)
@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_can_be_turned_off(env: dict[str, str]) -> None:
    text, _ = typed(*PLAN, env={**NO_BACKEND, **env})
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", text)
    check, code = typed("check", *PLAN[1:], "--budget", "1KiB", env={**NO_BACKEND, **env})
    assert code == 1
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", check)


def test_findings_are_coloured_by_severity() -> None:
    text, code = typed("check", *PLAN[1:], "--budget", "1KiB", env=NO_BACKEND)
    assert code == 1
    assert re.search(r"\x1b\[1;31merror over-budget", text)


@pytest.mark.slow
def test_long_work_shows_progress() -> None:
    words = (
        "audit",
        f"{EXAMPLES}/train_gpt.py:training",
        "--mesh",
        "data:2",
        "--rules",
        "replicate",
        "--batch",
        "data",
    )
    text, code = typed(*words)
    assert code == 1  # whole parameters and a split batch: the gradients are added on every device
    plain = _ESCAPE.sub("", text)
    assert re.search(r"compiling \S+train_gpt.py:training for cpu on data:2 +0:00:0[0-9]", plain)
    assert "step on cpu" in plain
