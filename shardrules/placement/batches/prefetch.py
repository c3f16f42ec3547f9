"""`place_batches`: the batches of an iterator, placed by a thread while the program computes."""

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import attrs
import jax
import numpy as np
from jax.sharding import Mesh

from shardrules.core.axes import AnyMesh, check_mesh
from shardrules.core.context import current_mesh
from shardrules.core.fields import integer
from shardrules.core.spec import device_dtype
from shardrules.placement.batches.batch import LocalBatch, Placer, agree
from shardrules.rules.how import How

_JOIN_SECONDS = 10
"""The seconds for which closing waits for the thread. Only that of an iterator that blocks takes longer: it ends with
the process. Chosen by hand."""

_stops: "weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]]" = weakref.WeakKeyDictionary()
"""The function that stops each thread. They are daemons, else the process could not end while one waits for a slot."""


def place_batches(
    batches: Iterable[Any], how: How, mesh: AnyMesh | None = None, *, prefetch: int = 2, timeout: float = 200
) -> "PlacedBatches":
    """Returns an iterator over batches, each placed as `place_batch` does, some of them ahead.

    A thread takes the batches from `batches` and starts to place them, while the program computes with earlier ones.
    Numpy arrays are copied before the next batch is taken: a reader may fill the same memory with it.

    **Arguments:**

    - `batches`: this process's part of each batch. A generator is closed by the thread that runs it.
    - `how`, `mesh`: where the arrays go, as for `place_batch`. A mesh in force counts where this function is called.
    - `prefetch`: how many batches are placed ahead: as many more are on the devices. With 0 there is no thread.
    - `timeout`: the seconds that a process waits for the others' part of a batch.

    **Returns:**

    An iterator. What `batches` raises, it raises, after the batches before. `close()` stops the thread, as leaving a
    `with` block does, and so does dropping the iterator.

    **Raises:**

    `ConfigError` for a negative `prefetch`. While iterating, what `place_batch` raises, and on every process
    `DisagreementError` when some have no more batches or failed.

    ```python
    mesh = sr.create_mesh("data:8")
    rows = ({"x": np.full((8, 2), step)} for step in range(3))
    with sr.place_batches(rows, P("data"), mesh) as batches:
        assert [float(batch["x"].mean()) for batch in batches] == [0, 1, 2]
    ```
    """
    ahead = integer("prefetch", 0)(prefetch)
    check_mesh(mesh)
    placer = Placer(how, mesh)
    local_batches = iter(batches)
    if ahead == 0:
        return PlacedBatches(lambda: _next_item(local_batches, placer), timeout)
    items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    slots = threading.Semaphore(ahead)
    stopped = threading.Event()
    arguments = (local_batches, placer, items, slots, stopped, current_mesh(), device_dtype(np.int64) == np.int64)
    thread = threading.Thread(target=_produce, args=arguments, name="shardrules.place_batches", daemon=True)

    def take() -> _Item:
        item = items.get()
        slots.release()
        return item

    def stop() -> None:
        stopped.set()
        slots.release()  # the thread may be waiting for one

    placed = PlacedBatches(take, timeout, stop, thread)
    weakref.finalize(placed, stop)
    _stops[thread] = stop
    thread.start()
    return placed


@atexit.register
def _end_threads() -> None:
    """Python unwinds a daemon's stack as it ends; in JAX's C++ code that aborts the process."""
    for stop in list(_stops.values()):
        stop()
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in list(_stops):
        thread.join(max(0, deadline - time.monotonic()))


@final
@attrs.frozen(eq=False)
class _Item:
    """A batch with its arrays placed, an error, or with neither the end."""

    batch: LocalBatch | None = None
    placed: Any = None
    error: BaseException | None = None


@final
@attrs.define(eq=False, repr=False)
class PlacedBatches(Iterator[Any]):
    """The batches that `place_batches` places: an iterator and a context manager."""

    _take: Callable[[], _Item]
    _timeout: float
    _stop: Callable[[], None] = lambda: None
    _thread: threading.Thread | None = None
    _is_closed: bool = attrs.field(default=False, init=False)

    def __next__(self) -> Any:
        if self._is_closed:
            raise StopIteration
        item = self._take()
        try:
            # Here and not in the thread: processes compare one thing at a time, in the order of the program.
            has_batch = agree(item.batch, self._timeout, item.error)
        except BaseException:
            self.close()
            raise
        if has_batch:
            return item.placed
        self.close()
        raise StopIteration

    def __enter__(self) -> "PlacedBatches":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the thread; iterating ends. Batches that were placed ahead are dropped."""
        self._is_closed = True
        self._stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)


def _produce(
    batches: Iterator[Any],
    placer: Placer,
    items: "queue.SimpleQueue[_Item]",
    slots: threading.Semaphore,
    stopped: threading.Event,
    mesh: AnyMesh | None,
    is_x64: bool,
) -> None:
    """Runs in the thread. It must not refer to the iterator, which could never be dropped then."""
    # What is set for the thread that asked is not set for this one.
    with jax.enable_x64(is_x64), jax.set_mesh(mesh) if isinstance(mesh, Mesh) else contextlib.nullcontext():
        item = _Item()
        while True:
            slots.acquire()
            if stopped.is_set():
                break
            item = _next_item(batches, placer)
            items.put(item)
            if item.batch is None or item.error is not None:
                break
        close = getattr(batches, "close", None)
        if callable(close):
            close()


def _next_item(batches: Iterator[Any], placer: Placer) -> _Item:
    try:
        local = next(batches)
    except StopIteration:
        return _Item()
    except BaseException as error:  # noqa: BLE001  raised where the batch is asked for
        return _Item(error=error)
    try:
        batch = LocalBatch.of(local)
    except Exception as error:  # noqa: BLE001  as above
        return _Item(error=error)
    # This error keeps the batch: processes compare their parts before any of them raises.
    try:
        return _Item(batch, placer.place(batch))
    except Exception as error:  # noqa: BLE001  as above
        return _Item(batch, error=error)
