"""The cache of compiled functions: bounded, with keys that are equal only for what compiles to the same."""

import itertools
import threading
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar, final

import attrs
import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding

_V = TypeVar("_V")

CACHE_SIZE = 4096
"""The most signatures of one function that are kept: JAX keeps as many calls, of all functions that are jitted with
options as ours are (8,192 entries, two per call)."""


@final
@attrs.define(eq=False)
class _Entry(Generic[_V]):
    value: _V
    last_use: int


@final
@attrs.define(eq=False)
class Cache(Generic[_V]):
    """A dictionary that drops what was not used for longest once it is full. Threads may share it."""

    size: int = CACHE_SIZE
    _entries: dict[Hashable, _Entry[_V]] = attrs.field(factory=dict, init=False)
    _clock: Iterator[int] = attrs.field(factory=itertools.count, init=False)
    # Comparing keys runs code of users, which may call a compiled function in turn.
    _lock: threading.RLock = attrs.field(factory=threading.RLock, init=False)

    def get(self, key: Hashable) -> _V | None:
        """Returns the value under `key`, or `None`."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            # Not moved to the end: a key holds a whole tree structure, and hashing it takes longest in a call.
            entry.last_use = next(self._clock)
            return entry.value

    def add(self, key: Hashable, value: _V) -> None:
        """Keeps `value` under `key`, unless another thread was first."""
        with self._lock:
            self._entries.setdefault(key, _Entry(value, next(self._clock)))
            if len(self._entries) > self.size:
                del self._entries[min(self._entries.items(), key=lambda item: item[1].last_use)[0]]


def static_key(value: Any) -> Hashable:
    """Returns the key of a leaf that is not an array; it has a hash where the leaf has one."""
    # Python has 1 == 1.0 == True and 0.0 == -0.0, which do not compile to the same.
    return type(value), repr(value) if isinstance(value, float | complex) else value


def array_key(value: Any) -> Hashable:
    """Returns the key of an array or of its shape: its type, mesh and memory, and its sharding on Explicit axes."""
    if isinstance(value, Tracer):
        sharding = jax.typeof(value).sharding
    else:
        sharding = getattr(value, "sharding", None)  # numpy arrays have none
    placement: Hashable = None
    if isinstance(sharding, NamedSharding):
        # On Explicit axes the sharding is part of the array's type. Elsewhere jit itself compiles for each sharding.
        is_explicit = AxisType.Explicit in sharding.mesh.axis_types
        placement = sharding if is_explicit else (sharding.mesh, sharding.memory_kind)
    return value.shape, value.dtype, getattr(value, "weak_type", False), placement
