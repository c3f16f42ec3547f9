"""Ctrl-C ends a command at once, whatever it is doing.

`KeyboardInterrupt` cannot promise that. Python raises it only between two lines of Python, so a compiler would finish
first; callbacks of JAX's that it is raised in swallow it; and in the middle of an import it leaves half of a module,
which compiled libraries may abort for. So nothing is raised: a thread waits for the signal, and ends the process.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

INTERRUPTED = 130
"""The exit code, which shells give to what Ctrl-C ends."""

_IDLE = threading.Event()
_IDLE.set()

_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"
"""Removes the line of the progress, and shows the cursor that it hid."""


def end_on_interrupt() -> None:
    """Makes SIGINT end the process with `INTERRUPTED`. Where SIGINT is ignored, as with `nohup`, it stays ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Written to by the signal itself, even while a compiler runs. Only signals with a handler in Python are.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def stop(*_: object) -> None:
        # A library may have taken the file of wake-ups for itself.
        os.write(writer, bytes([signal.SIGINT]))
        # Asleep, since code in C may keep the lock of the interpreter, which the thread below needs.
        while _IDLE.is_set():
            time.sleep(1)

    signal.signal(signal.SIGINT, stop)
    # While a program is compiled, descriptor 2 is a file for the compiler's messages.
    terminal = os.dup(2) if sys.stderr is not None and sys.stderr.isatty() else None
    threading.Thread(target=_wait, args=(reader, terminal), name="interrupt", daemon=True).start()


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Inside, a file is finished before SIGINT ends the process, so that no part of one is left."""
    _IDLE.clear()
    try:
        yield
    finally:
        _IDLE.set()


def end(code: int) -> NoReturn:
    """Ends the process after the exit functions of libraries.

    Python would then take every module apart, for half a second in which SIGINT kills a process that is done.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # its reader has closed the pipe
                stream.flush()
    os._exit(code)


def _wait(reader: int, terminal: int | None) -> None:
    while signal.SIGINT not in os.read(reader, 64):
        pass
    _IDLE.wait(0.5)  # for a file to be complete; chosen by hand: a pipe that nobody reads never is
    for child in _children():
        with contextlib.suppress(OSError):  # it has just ended
            os.kill(child, signal.SIGTERM)
    if terminal is not None and os.environ.get("TERM", "dumb") != "dumb":
        os.write(terminal, _SHOW_CURSOR)
    os._exit(INTERRUPTED)


def _children() -> list[int]:
    """The processes that this one waits for, where the system lists them. From a terminal they get the signal, too."""
    try:
        threads = os.listdir("/proc/self/task")
        texts = [open(f"/proc/self/task/{thread}/children").read() for thread in threads]  # noqa: SIM115
    except OSError:
        return []
    return [int(child) for text in texts for child in text.split()]
