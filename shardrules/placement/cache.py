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
class Cache(Generic[_V]):
    """A dictionary that drops what was not used for longest once it is full. Threads may share it."""

    size: int = CACHE_SIZE
    _values: dict[Hashable, _V] = attrs.field(factory=dict, init=False)
    _last_uses: dict[int, int] = attrs.field(factory=dict, init=False)
    _clock: Iterator[int] = attrs.field(factory=itertools.count, init=False)
    # Comparing keys runs code of users, which may call a compiled function in turn.
    _lock: threading.RLock = attrs.field(factory=threading.RLock, init=False)

    def get(self, key: Hashable) -> _V | None:
        """Returns the value under `key`, or `None`."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                # Keys hold a whole tree structure, and hashing one takes longest in a call: uses are counted by
                # identity.
                self._last_uses[id(value)] = next(self._clock)
            return value

    def add(self, key: Hashable, value: _V) -> None:
        """Keeps `value` under `key`, unless another thread was first."""
        with self._lock:
            if key in self._values:
                return
            self._values[key] = value
            self._last_uses[id(value)] = next(self._clock)
            if len(self._values) > self.size:
                self._drop()

    def _drop(self) -> None:
        """Drops the value that was not used for longest, under all its keys."""
        values = list(self._values.items())
        oldest = min((value for _, value in values), key=lambda value: self._last_uses[id(value)])
        for key, value in values:
            if value is oldest:
                self._values.pop(key, None)
        self._last_uses.pop(id(oldest), None)


def static_key(value: Any) -> Hashable:
    """Returns the key of a leaf that is not an array; it has a hash where the leaf has one.

    Python has 1 == 1.0 == True and 0.0 == -0.0, which do not compile to the same.

    ```python
    from shardrules.placement.cache import static_key

    assert static_key(1) != static_key(True) != static_key(1.0)
    assert static_key(0.0) != static_key(-0.0)
    ```
    """
    return type(value), repr(value) if isinstance(value, float | complex) else value


def array_key(value: Any) -> Hashable:
    """Returns the key of an array, or of its shape: its type, its mesh and memory, and its sharding on Explicit axes.

    ```python
    from shardrules.placement.cache import array_key

    assert array_key(np.ones(3)) == array_key(np.zeros(3)) != array_key(np.ones(4))
    ```
    """
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
