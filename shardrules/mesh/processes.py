"""Processes that wait for each other and compare notes, over the store of texts that `jax.distributed` starts.

JAX has barriers of its own. There the timeout of whoever comes first holds for all, and one that gives up spoils the
barrier for those who come later. So processes meet by notes in the store instead, and each keeps its own timeout.

The meetings of a job are numbered, and every process goes from one to the next, whatever names it has for them: those
which disagree about where they are meet nevertheless, and are told. Whoever comes writes a note. The last one finds the
notes of all others and writes the outcome, all notes in it. One whose time is up writes that it gave up instead, and
there is another attempt, in which those who have time left wait for it to come back. The store keeps the first outcome
of an attempt only, so that all go on from the same one.
"""

import json
import math
import sys
import time
from typing import Any, final

import attrs
import jax

from shardrules.core.errors import BarrierError, BarrierTimeoutError
from shardrules.core.jax_state import coordination_client, process_count, process_id

_NOTES = "shardrules/notes/"
_OUTCOMES = "shardrules/outcomes/"
_TO_READ = 20.0  # seconds in which the store hands out what is there already
_PAUSE = 0.2  # seconds before another attempt: those who came together give up together
_LONGEST = 2**31 - 1  # milliseconds that the store can be asked to wait; then there is another attempt


@final
@attrs.frozen
class _Note:
    """Where a process is, and what it has to say there. The numbers are those of the meeting it goes to next."""

    state: str  # "waiting at", "gave up at" or "past"
    name: str
    place: str
    said: str | None
    meeting: int
    attempt: int
    waited: float | None = None

    def __str__(self) -> str:
        after = "" if self.waited is None else f" after {self.waited:g} s"
        return f"{self.state} {self.name!r} ({self.place}){after}"


def is_primary() -> bool:
    """Whether this process is the one that logs and writes for all: process 0.

    **Returns:**

    `True` where there is one process.

    ```python
    assert sr.meshes.is_primary()
    ```
    """
    return (process_id() if coordination_client() is not None else jax.process_index()) == 0


def barrier_sync(timeout: float = 200, *, name: str = "") -> None:
    """Waits until all processes have come here. With one process there is nothing to wait for.

    Each process keeps its own timeout. One whose time is up gives up and raises; the others wait for it to come back as
    long as they have time, so that a process that tries again meets those who still wait or come late. A process waits
    at one barrier at a time: two threads of it cannot wait at two.

    **Arguments:**

    - `timeout`: the seconds for which this process waits for the last one to come.
    - `name`: what the barrier is called in errors; by default the file and the line of the caller. All processes must
        use one name, so calls on different lines need one that is given.

    **Raises:**

    `BarrierTimeoutError` when a process does not come in time, `BarrierError` when one comes to another barrier
    instead, when the timeout is no number of seconds, or when there are several processes and `jax.distributed` was not
    initialised. Both say who is where, and who gave up.

    ```python
    barrier_sync(timeout=10, name="checkpoint written")
    ```
    """
    caller = sys._getframe(1)
    place = f"{caller.f_code.co_filename.rpartition('/')[2]}:{caller.f_lineno}"
    exchange(None, name or place, place, timeout)


def exchange(note: str | None, name: str, place: str, timeout: float) -> list[str | None]:
    """Waits for all processes at a barrier, and returns what each of them had to say.

    **Arguments:**

    - `note`: what this one has to say.
    - `name`: the barrier.
    - `place`: the file and line of the caller.
    - `timeout`: the seconds to wait.

    **Returns:**

    The notes by process.

    **Raises:**

    As `barrier_sync`.
    """
    if not isinstance(timeout, int | float) or not 0 <= timeout < math.inf:
        raise BarrierError(f"barrier {name!r}: a timeout is a number of seconds, 0 or more; got {timeout!r}")
    count = process_count()
    if count == 1:
        return [note]
    client = coordination_client()
    if client is None:
        raise BarrierError(
            f"barrier {name!r}: there are {count} processes and nothing for them to meet at. Call "
            "jax.distributed.initialize() before anything else"
        )
    me = process_id()
    try:
        mine, notes = _meet(client, me, count, _Note("waiting at", name, place, note, 0, 0), timeout)
    except jax.errors.JaxRuntimeError as error:
        raise BarrierError(
            f"barrier {name!r} cannot be waited at any more: the process that started jax.distributed is gone, or this "
            f"one was cut off\n    JAX says: {str(error).splitlines()[0]}"
        ) from error
    if notes[me] != mine:
        raise BarrierError(
            f"barrier {name!r}: the others met this process {notes[me]}, in another thread or before it was "
            "interrupted. A process waits at one barrier at a time"
        )
    if any(one.name != name for one in notes.values()):
        raise BarrierError(
            f"processes wait at different barriers:\n{_listing(notes, count)}\n    -> All must take the same way "
            "through the program: look for a condition that depends on the process"
        )
    return [notes[process].said for process in range(count)]


def _meet(client: Any, me: int, count: int, mine: _Note, timeout: float) -> tuple[_Note, dict[int, _Note]]:
    """Goes to the next meeting, and returns the note that this process wrote there and those of all."""
    end = time.monotonic() + timeout
    last = _notes(client).get(me)
    if last is not None:
        mine = attrs.evolve(mine, meeting=last.meeting, attempt=last.attempt)
    while True:
        _write(client, me, mine)
        outcome = _outcome(client, mine, count, end)
        if outcome:
            _write(client, me, attrs.evolve(mine, state="past", said=None, meeting=mine.meeting + 1, attempt=0))
            return mine, outcome
        mine = attrs.evolve(mine, attempt=mine.attempt + 1)
        time.sleep(max(min(_PAUSE, end - time.monotonic()), 0))
        if time.monotonic() >= end:
            _write(client, me, attrs.evolve(mine, state="gave up at", said=None, waited=timeout))
            listing = _listing(_notes(client), count)
            raise BarrierTimeoutError(f"barrier {mine.name!r}: not all processes came within {timeout:g} s:\n{listing}")


def _outcome(client: Any, mine: _Note, count: int, end: float) -> dict[int, _Note]:
    """The notes of all processes, or none where one of them gave up: whatever came first."""
    key = f"{_OUTCOMES}{mine.meeting}/{mine.attempt}"
    notes = _notes(client)
    turns = [(note.meeting, note.attempt) for note in notes.values() if note.state == "waiting at"]
    if turns.count((mine.meeting, mine.attempt)) == count and _decide(client, key, notes):
        client.key_value_delete(f"{_OUTCOMES}{mine.meeting - 1}")  # all are here, so nobody reads there any more
    try:
        wait = min(max(int(1000 * (end - time.monotonic())), 1), _LONGEST)
        text = client.blocking_key_value_get(key, wait)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        _decide(client, key, {})
        text = client.blocking_key_value_get(key, int(1000 * _TO_READ))
    return {int(process): _Note(**fields) for process, fields in json.loads(text).items()}


def _decide(client: Any, key: str, notes: dict[int, _Note]) -> bool:
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
    found = client.key_value_dir_get(_NOTES)
    return {int(key.rpartition("/")[2]): _Note(**json.loads(text)) for key, text in sorted(found)}


def _listing(notes: dict[int, _Note], count: int) -> str:
    return "\n".join(
        f"  process {process}: {notes.get(process, 'has come to no barrier yet')}" for process in range(count)
    )
