"""Processes that wait for each other and compare notes, over the coordination service that `jax.distributed` starts.

Every barrier of shardrules is one and the same to the service, so that processes which disagree about where they are
meet nevertheless, and are told. Before a process waits, it writes down where it is; when all have come, each reads what
the others wrote, and they wait once more, so that nobody moves on before everybody has read.
"""

import json
import sys
from typing import Any

import jax

from shardrules.core.errors import BarrierError, BarrierTimeoutError
from shardrules.mesh.jax_state import coordination_client, process_count, process_id

_BARRIER = "shardrules/barrier"
_NOTES = "shardrules/notes/"
_TO_READ = 20.0  # seconds in which everybody who came has read what the others wrote


def is_primary() -> bool:
    """Whether this process is the one that logs and writes for all: process 0.

    **Returns:**

    `True` where there is one process.

    ```python
    assert sr.is_primary()
    ```
    """
    return (process_id() if coordination_client() is not None else jax.process_index()) == 0


def barrier_sync(timeout: float = 200, *, name: str = "") -> None:
    """Waits until all processes have come here. With one process there is nothing to wait for.

    **Arguments:**

    - `timeout`: the seconds to wait, for the last process to come.
    - `name`: what the barrier is called in errors; by default the file and the line of the caller.

    **Raises:**

    `BarrierTimeoutError` when a process does not come in time, `BarrierError` when one comes to another barrier
    instead, or when there are several processes and `jax.distributed` was not initialised. Both say who is where.

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
    _write(client, me, name, place, "waiting at", note)
    _wait(client, name, timeout)
    notes = _read(client)
    _wait(client, name, _TO_READ)
    _write(client, me, name, place, "past", None)
    if any(notes[process]["name"] != name for process in notes):
        raise BarrierError(
            f"processes wait at different barriers:\n{_listing(notes, count)}\n    -> All must take the same way "
            "through the program: look for a condition that depends on the process"
        )
    return [notes[process]["note"] for process in range(count)]


def _write(client: Any, process: int, name: str, place: str, state: str, note: str | None) -> None:
    text = json.dumps({"name": name, "place": place, "state": state, "note": note})
    client.key_value_set(f"{_NOTES}{process}", text, allow_overwrite=True)


def _read(client: Any) -> dict[int, dict[str, Any]]:
    found = client.key_value_dir_get(_NOTES)
    return {int(key.rpartition("/")[2]): json.loads(text) for key, text in sorted(found)}


def _wait(client: Any, name: str, timeout: float) -> None:
    try:
        client.wait_at_barrier(_BARRIER, max(int(1000 * timeout), 1))
    except jax.errors.JaxRuntimeError as error:
        notes = _listing(_read(client), process_count())
        if "DEADLINE_EXCEEDED" in str(error):
            message = f"barrier {name!r}: not all processes came within {timeout:g} s:\n{notes}"
            raise BarrierTimeoutError(message) from error
        raise BarrierError(
            f"barrier {name!r} cannot be waited at any more: another process has given up or is gone.\n{notes}\n"
            f"    JAX says: {str(error).splitlines()[0]}"
        ) from error


def _listing(notes: dict[int, dict[str, Any]], count: int) -> str:
    return "\n".join(
        f"  process {process}: {notes[process]['state']} {notes[process]['name']!r} ({notes[process]['place']})"
        if process in notes
        else f"  process {process}: has come to no barrier yet"
        for process in range(count)
    )
