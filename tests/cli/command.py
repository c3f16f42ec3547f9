"""The command line as users have it: a process in its own folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import final

from tests.house.source import REPOSITORY

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
    return {**kept, "PYTHONPATH": str(REPOSITORY), **more}


def shardrules(
    *words: str, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Runs `shardrules`, and returns its output and exit code."""
    process = subprocess.run(
        [sys.executable, "-m", "shardrules", *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=cwd or REPOSITORY,
        env=environment("TERM", **(env or {})),
    )
    lines = [line for line in process.stderr.splitlines() if not any(noise in line for noise in NOISE)]
    process.stderr = "".join(f"{line}\n" for line in lines)
    return process


_SERVER = """
import json, os, sys, tempfile, warnings
from shardrules.cli.main import main

wire = os.fdopen(os.dup(1), "w")
warnings.simplefilter("ignore")  # JAX warns of forks: no thread of its own runs here yet
for line in sys.stdin:
    request = json.loads(line)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.chdir(request["cwd"])
            code = 70
            try:
                code = main(request["words"])
            except SystemExit as ended:
                code = ended.code or 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    print(json.dumps([os.waitstatus_to_exitcode(status), *texts]), file=wire, flush=True)
"""


@final
class Forks:
    """Commands as forks of a process that has imported everything: with many commands that saves minutes.

    No backend of JAX can be started in them.
    """

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment("TERM", **NO_BACKEND),
        )

    def run(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Runs a command, and returns its output and exit code."""
        server = self._server
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({"words": words, "cwd": str(cwd)}) + "\n")
        server.stdin.flush()
        code, out, err = json.loads(server.stdout.readline())
        return subprocess.CompletedProcess(words, code, out, err)

    def close(self) -> None:
        """Ends the server process."""
        self._server.communicate(timeout=30)
