"""Processes as forks of a server that has imported JAX and all of shardrules, which takes longer than most tests.

The server starts no backend of JAX, so that each fork starts its own, with the environment that it is given. Only what
Python itself reads at its start, such as `PYTHONHASHSEED`, is the server's: tests of that start real processes.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, final

import attrs

from tests.house.source import REPOSITORY

_MESSAGE_BYTES = 2**17
"""The longest message to the server: the code and the environment. Sockets take no more than 200 kB."""


@final
@attrs.frozen
class Ended:
    """How a process ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


@final
@attrs.frozen(eq=False)
class Fork:
    """A process that runs."""

    pid: int
    _status: Any

    def kill(self) -> None:
        """Ends it at once, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = 120) -> int:
        """Returns its exit code, which is negative if it did not end in time."""
        if not select.select([self._status], [], [], timeout)[0]:
            self.kill()
        with self._status:
            return int(self._status.readline())


def start_fork(
    code: str,
    *arguments: str,
    out: int,
    err: int,
    env: Mapping[str, str],
    cwd: Path = REPOSITORY,
    strict: bool = False,
) -> Fork:
    """Runs Python code, which prints to two open files. If `strict`, warnings are errors."""
    reader, writer = os.pipe()
    request = json.dumps([code, ["-c", *arguments], dict(env), str(cwd), strict]).encode()
    assert len(request) < _MESSAGE_BYTES
    socket.send_fds(_server(), [request], [out, err, writer])
    os.close(writer)
    status = os.fdopen(reader)
    return Fork(int(status.readline()), status)


def run_forks(
    code: str, argument_lists: Sequence[Sequence[str]], *, timeout: float = 120, **options: Any
) -> list[Ended]:
    """Runs code in several processes at once; if one does not end in time, all are killed."""
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)] for _ in argument_lists]
        forks = [
            start_fork(code, *arguments, out=out.fileno(), err=err.fileno(), **options)
            for arguments, (out, err) in zip(argument_lists, files, strict=True)
        ]
        codes: list[int] = []
        for fork in forks:
            codes.append(fork.wait(timeout))
            if codes[-1] == -signal.SIGKILL:
                for other in forks[len(codes) :]:
                    other.kill()
        return [Ended(code, *map(_text, pair)) for code, pair in zip(codes, files, strict=True)]


def _text(file: Any) -> str:
    file.seek(0)
    return file.read().decode()


@functools.cache
def _server() -> socket.socket:
    """Starts the server of this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own_to_tests = ("XLA_FLAGS", "JAX_PLATFORMS", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM")
    environment = {name: value for name, value in os.environ.items() if name not in own_to_tests}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forks", str(theirs.fileno())],
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        server.wait(timeout=30)

    atexit.register(end)
    return ours


# The server.


def _import_everything() -> None:
    import jax.numpy
    import optax

    import shardrules

    del jax, optax  # imported for its forks
    for module in pkgutil.walk_packages(shardrules.__path__, "shardrules."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    gc.freeze()  # so that forks share its memory


def _serve(wire: socket.socket) -> str:
    """Forks for each request; returns, in the fork, the code that it has to run."""
    before = dict(os.environ)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that wait for forks
    while True:
        message, descriptors, _, _ = socket.recv_fds(wire, _MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        if _fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    out, err, status = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    wire.close()
    child = _fork()
    if child:
        os.close(out)
        os.close(err)
        os.write(status, f"{child}\n".encode())
        _, code = os.waitpid(child, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(status, f"{os.waitstatus_to_exitcode(code)}\n".encode())
        os._exit(0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for descriptor in descriptors:
        os.close(descriptor)
    text, sys.argv, environment, folder, strict = json.loads(message)
    _enter(environment, before, folder, strict)
    return text


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks: no thread of its own runs here yet
        return os.fork()


def _enter(environment: Mapping[str, str], before: Mapping[str, str], folder: str, strict: bool) -> None:
    import jax

    # What importing JAX has added stays.
    for name in before:
        os.environ.pop(name, None)
    os.environ.update(environment)
    if "JAX_PLATFORMS" in environment:  # JAX has read it
        jax.config.update("jax_platforms", environment["JAX_PLATFORMS"])
    os.chdir(folder)
    sys.path[0] = folder
    # Bytecode is told apart by seconds: a test may change a module sooner than that.
    sys.dont_write_bytecode = True
    if strict:
        warnings.simplefilter("error")
        sys.warnoptions.append("error")


if __name__ == "__main__":
    _import_everything()
    _code = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.modules["server"], sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    exec(compile(_code, "<string>", "exec"), vars(sys.modules["__main__"]))
