"""Processes that wait for each other and exchange notes, over the key-value store that `jax.distributed` starts.

JAX has barriers of its own. With these, the timeout of the first process applies to all, and a process that gives up
breaks the barrier for those that arrive later. So processes meet by notes in the store instead, and each keeps its own
timeout.

The meetings of a job are numbered, and every process goes from one to the next, whatever name it uses for them:
processes that wait at different barriers meet nevertheless, and each gets an error. A process that arrives writes a
note. The last one reads the notes of all others and writes the outcome, which holds all notes. A process whose time is
up writes that it gave up instead, and another attempt begins, in which processes with time left wait for it to return.
The store keeps only the first outcome of an attempt, so that all continue from the same one.
"""

import json
import math
import sys
import time
from typing import Any, final

import attrs
import jax

from shardrules.core.errors import BarrierError, BarrierTimeoutError, ConfigError
from shardrules.core.jax_state import coordination_client, process_count, process_id

_NOTES = "shardrules/notes/"
_OUTCOMES = "shardrules/outcomes/"
_READ_SECONDS = 20.0
"""The time to wait for a value that the store has already: a busy store takes milliseconds, a lost one never answers.
Chosen by hand."""

_PAUSE_SECONDS = 0.2
"""The pause before another attempt, in which processes that arrived together give up together. It delays a process that
tries again by as much; without it, each of them could start an attempt of its own."""

_LONGEST_WAIT = 2**31 - 1
"""The milliseconds that the store can wait (int32), 24 days; after that another attempt begins."""


@final
@attrs.frozen
class _Note:
    """The position of a process, its message to the others, and the meeting and attempt that it goes to next."""

    state: str  # "waiting at", "gave up at" or "past"
    name: str
    location: str
    message: str | None
    meeting: int
    attempt: int
    waited: float | None = None

    def __str__(self) -> str:
        after = "" if self.waited is None else f" after {self.waited:g} s"
        return f"{self.state} {self.name!r} ({self.location}){after}"


def is_primary() -> bool:
    """Returns whether this is process 0, the one that logs and writes for all."""
    return (process_id() if coordination_client() is not None else jax.process_index()) == 0


def barrier_sync(timeout: float = 200, *, name: str = "") -> None:
    """Waits until all processes have arrived here. With one process it returns at once.

    Each process keeps its own timeout. A process whose time is up raises; the others wait for it to return as long as
    they have time, so that a process that tries again meets those that still wait or arrive late. A process waits at
    one barrier at a time: two of its threads cannot wait at two.

    **Arguments:**

    - `timeout`: the seconds for which this process waits for the last one to arrive.
    - `name`: the name of the barrier in errors; by default the file and the line of the caller. All processes must use
        the same name, so calls on different lines need an explicit one.

    **Raises:**

    `BarrierTimeoutError` when a process does not arrive in time; `BarrierError` when one arrives at another barrier
    instead, or when there are several processes and `jax.distributed` is not initialised. Both list where each process
    is. `ConfigError` when the timeout is not a number of seconds.

    ```python
    sr.barrier_sync(timeout=10, name="checkpoint written")
    ```
    """
    frame = sys._getframe(1)
    location = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
    exchange(None, name or location, location, timeout)


def exchange(message: str | None, name: str, location: str, timeout: float) -> list[str | None]:
    """Waits for all processes at barrier `name`, and returns their messages by process.

    `location` is the file and line of the caller, or the name of a function, for errors.
    """
    if not isinstance(timeout, int | float) or not 0 <= timeout < math.inf:
        raise ConfigError(f"barrier {name!r}: the timeout must be a number of seconds, 0 or more; got {timeout!r}")
    count = process_count()
    if count == 1:
        return [message]
    client = coordination_client()
    if client is None:
        raise BarrierError(
            f"barrier {name!r}: there are {count} processes, but jax.distributed is not initialised. Call "
            "jax.distributed.initialize() before anything else"
        )
    process = process_id()
    try:
        note, notes = _meet(client, process, count, _Note("waiting at", name, location, message, 0, 0), timeout)
    except jax.errors.JaxRuntimeError as error:
        raise BarrierError(
            f"barrier {name!r} is not available any more: the process that started jax.distributed has ended, or this "
            f"one has lost the connection to it\n    JAX says: {str(error).splitlines()[0]}"
        ) from error
    # Another thread of this process may have met the others in its place.
    if notes[process] != note:
        raise BarrierError(
            f"barrier {name!r}: the others met this process {notes[process]}, in another thread or before it was "
            "interrupted. A process waits at one barrier at a time"
        )
    if any(other.name != name for other in notes.values()):
        raise BarrierError(
            f"processes wait at different barriers:\n{_listing(notes, count)}\n    -> All must take the same path "
            "through the program: look for a condition that depends on the process"
        )
    return [notes[index].message for index in range(count)]


def _meet(client: Any, process: int, count: int, note: _Note, timeout: float) -> tuple[_Note, dict[int, _Note]]:
    """Goes to the next meeting, and returns the note that this process wrote there and the notes of all."""
    end = time.monotonic() + timeout
    # The note that this process left last says which meeting comes next, even after it gave up or was interrupted.
    last = _notes(client).get(process)
    if last is not None:
        note = attrs.evolve(note, meeting=last.meeting, attempt=last.attempt)
    while True:
        _write(client, process, note)
        outcome = _outcome(client, note, count, end)
        if outcome:
            _write(client, process, attrs.evolve(note, state="past", message=None, meeting=note.meeting + 1, attempt=0))
            return note, outcome
        note = attrs.evolve(note, attempt=note.attempt + 1)
        # Another process gave up. It may try again, so this one waits for it as long as it has time.
        time.sleep(max(min(_PAUSE_SECONDS, end - time.monotonic()), 0))
        if time.monotonic() >= end:
            _write(client, process, attrs.evolve(note, state="gave up at", message=None, waited=timeout))
            listing = _listing(_notes(client), count)
            raise BarrierTimeoutError(
                f"barrier {note.name!r}: not all processes arrived within {timeout:g} s:\n{listing}"
            )


def _outcome(client: Any, note: _Note, count: int, end: float) -> dict[int, _Note]:
    """The notes of all processes, or none where one of them gave up: whichever was written first."""
    key = f"{_OUTCOMES}{note.meeting}/{note.attempt}"
    notes = _notes(client)
    turns = [(other.meeting, other.attempt) for other in notes.values() if other.state == "waiting at"]
    if turns.count((note.meeting, note.attempt)) == count and _write_outcome(client, key, notes):
        # All have arrived here, so no process reads the outcome of the meeting before any more.
        client.key_value_delete(f"{_OUTCOMES}{note.meeting - 1}")
    try:
        wait = min(max(int(1000 * (end - time.monotonic())), 1), _LONGEST_WAIT)
        text = client.blocking_key_value_get(key, wait)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        # This process gives up, unless another outcome was written just before: the first one counts.
        _write_outcome(client, key, {})
        text = client.blocking_key_value_get(key, int(1000 * _READ_SECONDS))
    return {int(index): _Note(**fields) for index, fields in json.loads(text).items()}


def _write_outcome(client: Any, key: str, notes: dict[int, _Note]) -> bool:
    """Writes an outcome, and returns whether it was the first."""
    text = json.dumps({process: attrs.asdict(note) for process, note in notes.items()})
    try:
        client.key_value_set(key, text)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return False
    return True


def _write(client: Any, process: int, note: _Note) -> None:
    client.key_value_set(f"{_NOTES}{process}", json.dumps(attrs.asdict(note)), allow_overwrite=True)


def _notes(client: Any) -> dict[int, _Note]:
    entries = client.key_value_dir_get(_NOTES)
    return {int(key.rpartition("/")[2]): _Note(**json.loads(text)) for key, text in sorted(entries)}


def _listing(notes: dict[int, _Note], count: int) -> str:
    return "\n".join(
        f"  process {process}: {notes.get(process, 'has not reached a barrier yet')}" for process in range(count)
    )
