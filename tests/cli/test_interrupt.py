"""Ctrl-C: the exit code is 130 within a second and without a traceback, whatever the command is doing."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardrules.cli import interrupt
from tests.cli.command import EXAMPLES, GPT, GPT_RULES, NOISE, environment

PLAN = ("plan", GPT, "--rules", GPT_RULES, "--mesh", "data:4,model:2")

SUBJECTS = """\
import re
import subprocess
import sys
import jax.numpy as jnp

def compiles():
    def step(w, x):
        for index in range(400):
            x = jnp.sort(jnp.tanh(x @ w + index), axis=-1) @ w.T
            x = x / jnp.cumsum(jnp.exp(x), axis=0)
        return w, x
    return step, jnp.ones((64, 64)), jnp.ones((64, 64))

def waits():
    print("waiting")
    subprocess.run(["sleep", "100"])
    return jnp.ones(8)

def backtracks():
    print("waiting")
    re.match(r"(a+)+$", "a" * 40 + "b")
    return jnp.ones(8)

class Deletes:
    def __del__(self):
        while True:
            pass

def deletes():
    print("waiting")
    Deletes()
    return jnp.ones(8)

def catches():
    print("waiting")
    while True:
        try:
            re.match(r"(a+)+$", "a" * 15 + "b")
        except BaseException:
            pass
"""
"""Where `KeyboardInterrupt` would come late, or be swallowed."""


def started(*words: str, cwd: Path | None = None, stderr: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """A command that has been started, in its own folder."""
    command = [sys.executable, "-m", "shardrules", *words]
    env = environment(TERM="xterm", JAX_PLATFORMS="cpu")
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, cwd=cwd, env=env)


def await_thread(process: subprocess.Popen[bytes]) -> None:
    """Waits for the thread that waits for the signal: before it, Python itself is still starting."""
    while process.poll() is None and len(os.listdir(f"/proc/{process.pid}/task")) < 2:
        time.sleep(0.001)


def interrupted(process: subprocess.Popen[bytes]) -> None:
    """Sends SIGINT, and checks that it ends the process."""
    assert ended(process) == (130, [])


def ended(process: subprocess.Popen[bytes]) -> tuple[int, list[str]]:
    """Sends SIGINT, and returns how the process ends: what it prints is an error, unless the process is through."""
    process.send_signal(signal.SIGINT)
    try:
        _, error = process.communicate(timeout=10)  # a second, with room for a machine that is busy
    finally:
        process.kill()
    lines = [line for line in error.decode().splitlines() if not any(noise in line for noise in NOISE)]
    assert (process.returncode, lines) in ((0, []), (130, []))
    return process.returncode, lines


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_imports_end_at_once(seconds: float) -> None:
    process = started(*PLAN)
    await_thread(process)
    time.sleep(seconds)
    interrupted(process)


@pytest.mark.slow
def test_every_moment_of_a_command_ends_at_once() -> None:
    start = time.monotonic()
    started(*PLAN).communicate(timeout=240)
    whole = time.monotonic() - start
    late = 0
    for index in range(15):
        process = started(*PLAN)
        await_thread(process)
        time.sleep(whole * index / 15)
        # A run may take less time than the first, and be over when the signal comes.
        late += ended(process)[0] == 0
    assert late <= 7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["waits", "backtracks", "deletes", "catches"])
def test_user_code_ends_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(SUBJECTS)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as messages:
        process = started(
            "plan", f"model.py:{name}", "--rules", "auto", "--mesh", "data:4", cwd=tmp_path, stderr=writer
        )
        os.close(writer)
        while b"waiting" not in messages.readline():
            pass
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
        assert b"Traceback" not in messages.read()  # it would wait for a child that still has the pipe


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", "cuda:h100:4", "tpu:v5e:2x2"])
def test_compilers_end_at_once(target: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(SUBJECTS)
    words = ("audit", "model.py:compiles", "--mesh", "data:4", "--rules", "shard_dim('data', 0)", "--target", target)
    for seconds in (4, 7):
        process = started(*words, "--batch", "data", cwd=tmp_path)
        time.sleep(seconds)
        assert process.poll() is None, "it compiles too fast to be interrupted"
        interrupted(process)


@pytest.mark.slow
def test_the_cursor_is_shown_again() -> None:
    ours, theirs = pty.openpty()
    words = ("autoplan", f"{EXAMPLES}/train_gpt.py:training", "--mesh", "8", "--frontier", "6")
    process = started(*words, stderr=theirs)
    os.close(theirs)
    text = b""
    while b"\x1b[?25l" not in text:
        text += os.read(ours, 4096)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    with contextlib.suppress(OSError):  # Linux raises it when the other side is closed
        while part := os.read(ours, 4096):
            text += part
    assert text.endswith(b"\r\x1b[K\x1b[?25h")


WRITES = """\
import sys, time
from pathlib import Path
from shardrules.cli.interrupt import end_on_interrupt
end_on_interrupt()
from shardrules.cli import files
def slow(file, text):
    Path("begun").write_text("")
    time.sleep(float(sys.argv[1]))
    file.write_text(text)
files.files.write_text = slow
files.write(Path("plan.json"), "whole")
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "text"), [("0.2", "whole"), ("100", None)])
def test_files_are_written_whole_or_not_at_all(seconds: str, text: str | None, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES, seconds]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path, env=environment())
    while not (tmp_path / "begun").exists() and process.poll() is None:
        time.sleep(0.01)
    interrupted(process)
    file = tmp_path / "plan.json"
    assert (file.read_text() if file.exists() else None) == text


def test_ignored_interrupts_stay_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `nohup`, and in the background jobs of scripts."""
    threads = threading.active_count()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupt.end_on_interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)
    assert threading.active_count() == threads
