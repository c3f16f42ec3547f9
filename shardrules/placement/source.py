"""`ArraySource`: an array that is not in memory; each process reads only what its own devices hold."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, final

import attrs
import numpy as np

from shardrules.core.errors import ConfigError

WHOLE_BYTES = 8 * 2**20
"""Up to this size all shards of an array are read before any is placed, in one transfer. Beyond it, a transfer per
shard costs little beside reading it. Chosen by hand."""

_ALIGNMENT_BYTES = 64
"""The alignment that XLA's CPU client asks of memory that it adopts: it copies any other."""

Index: TypeAlias = tuple[slice, ...]
"""One slice for each dimension, as `numpy` takes them."""


def _as_shape(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(operator.index, shape))


@final
@attrs.frozen(eq=False)
class ArraySource:
    """An array whose values are in a file or are computed, and which is read in parts.

    `filter_shard` reads one part per distinct shard, on each process only for the shards of its own devices.

    **Arguments:**

    - `shape`, `dtype`: of the whole array.
    - `read`: a function from a tuple of slices, one for each dimension, to that part as a numpy array of this dtype. It
        must not fill that array again: on CPUs the placed array may have the same memory.
    - `read_together`: a function from several such tuples to groups of parts, each with the position of its slices, for
        a source that reads parts together in less time. Each group is placed before the next is read.

    ```python
    rows = np.arange(16.0, dtype=np.float32).reshape(8, 2)
    source = sr.ArraySource((8, 2), np.float32, lambda index: rows[index])
    placed = sr.filter_shard({"w": source}, sr.DimShardingRule("data", 0), sr.create_mesh("data:8"))
    assert placed["w"].sharding.spec == P("data", None)
    ```
    """

    shape: tuple[int, ...] = attrs.field(converter=_as_shape)
    dtype: Any = attrs.field(converter=np.dtype)
    read: Callable[[Index], np.ndarray]
    read_together: Callable[[Sequence[Index]], Iterable[Sequence[tuple[int, np.ndarray]]]] | None = None

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, index: Index) -> np.ndarray:
        """Returns the part at `index`, a slice for each dimension; a `ConfigError` if it has another shape or dtype."""
        return self._checked(self.read(index), index)

    def groups(self, indices: Sequence[Index]) -> Iterator[list[tuple[int, np.ndarray]]]:
        """Yields the parts at `indices` in the groups that are read together, each part with its position there."""
        alone = ([(position, self.read(index))] for position, index in enumerate(indices))
        for group in alone if self.read_together is None else self.read_together(indices):
            yield [(position, self._checked(values, indices[position])) for position, values in group]

    def _checked(self, part: Any, index: Index) -> np.ndarray:
        values = np.asarray(part)
        shape = tuple(len(range(*cut.indices(size))) for cut, size in zip(index, self.shape, strict=True))
        if values.shape != shape or values.dtype != self.dtype:
            raise ConfigError(
                f"read({index}) of {self!r} returned {values.dtype}{list(values.shape)}, expected "
                f"{self.dtype}{list(shape)}"
            )
        return values


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an uninitialised array in memory that the CPU backend adopts without copying it."""
    count = math.prod(shape) * dtype.itemsize
    memory = np.empty(count + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + count].view(dtype).reshape(shape)
