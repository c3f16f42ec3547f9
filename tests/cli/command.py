"""The command line as a user has it: a process of its own, in a folder of its own."""

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
"""With this, whoever starts a backend of JAX fails."""


NOISE = ("WARNING: All log messages before absl", "cudart_stub.cc")
"""What plugins of JAX print when they are loaded."""


def environment(*forgotten: str, **more: str) -> dict[str, str]:
    """The environment of a command: that of the tests, without what they set for themselves and what is `forgotten`."""
    own = ("XLA_FLAGS", "JAX_PLATFORMS", "NO_COLOR", "FORCE_COLOR", "COLUMNS", *forgotten)
    known = {name: value for name, value in os.environ.items() if name not in own}
    return {**known, "PYTHONPATH": str(REPOSITORY), **more}


def shardrules(
    *words: str, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Runs `shardrules`, and returns what it printed and how it ended."""
    done = subprocess.run(
        [sys.executable, "-m", "shardrules", *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=cwd or REPOSITORY,
        env=environment("TERM", **(env or {})),
    )
    lines = [line for line in done.stderr.splitlines() if not any(one in line for one in NOISE)]
    done.stderr = "".join(f"{line}\n" for line in lines)
    return done


_SERVER = """
import json, os, sys, tempfile, warnings
from shardrules.cli.main import main

wire = os.fdopen(os.dup(1), "w")
warnings.simplefilter("ignore")  # JAX warns of forks: no thread of its own runs here yet
for line in sys.stdin:
    asked = json.loads(line)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.chdir(asked["cwd"])
            code = 70
            try:
                code = main(asked["words"])
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
    """Commands as processes forked from one that has imported everything: where there are many, that saves minutes.

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
        """Runs a command, and returns what it printed and how it ended."""
        server = self._server
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({"words": words, "cwd": str(cwd)}) + "\n")
        server.stdin.flush()
        code, out, err = json.loads(server.stdout.readline())
        return subprocess.CompletedProcess(words, code, out, err)

    def close(self) -> None:
        """Ends the process that others are forked from."""
        self._server.communicate(timeout=30)
