"""`FileTensor`: a tensor at an offset of a file; only the bytes of the requested slices are read.

Bytes are read with plain calls, straight into the array that is returned. A mapped file would be simpler, but mapped
pages count as memory of the process, and machines with a limit kill it for that.

A slice of a tensor lies in the file as runs of equal length at equal distances. Long runs are read one by one. Short
ones are read together with what lies between them, a block at a time, and cut out.
"""

import math
import os
import re
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, final

import attrs
import numpy as np

from shardrules.core.errors import CheckpointError, printable
from shardrules.core.storage.files import as_path
from shardrules.placement.source import ArraySource, Index

_SHORT_BYTES = 4 * 2**10
"""Below this, one call per run costs more than reading what lies between runs. Half of it makes more calls, double
reads more bytes for nothing."""

_WIDE_BYTES = 64 * 2**10
"""Runs further apart than this are not read together: too little of what is read would be used. With half of it more
runs are read by calls of their own, with double more bytes are read for nothing."""

_BLOCK_BYTES = 2**20
"""How much is read at once of what has to be cut. Half of it makes more calls, double takes more memory."""


_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+:/")
"""How the address of a cloud store begins; of two slashes a `Path` keeps one."""


def local_path(path: Any, caller: str) -> Path:
    """Returns a path, after checking that it is not the address of a cloud store."""
    file = as_path(path, caller)
    text = os.fspath(path)
    if _ADDRESS.match(text):
        raise CheckpointError(
            f"{caller}: {printable(text)} is an address, and these files are read and written only in file systems. "
            "save_orbax and load_orbax take addresses; or mount the bucket, and pass a path in it"
        )
    return file


@final
@attrs.frozen(eq=False)
class FileTensor:
    """A tensor that lies in a file, uncompressed; `fortran` says that its first dimension is the contiguous one.

    ```python
    from pathlib import Path

    from shardrules.placement.checkpoints.tensor_file import FileTensor

    np.arange(12, dtype=np.int32).tofile("numbers")
    tensor = FileTensor(Path("numbers"), 0, (3, 4), np.dtype(np.int32))
    assert tensor.read((slice(1, 3), slice(0, 2))).tolist() == [[4, 5], [8, 9]]
    ```
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def source(self, dtype: Any) -> ArraySource:
        """Returns it as an array that is read in parts, each converted to `dtype` on the host."""
        return ArraySource(self.shape, dtype, lambda index: _converted(self.read(index), np.dtype(dtype)))

    def read(self, index: Index) -> np.ndarray:
        """Reads the part at slices without steps."""
        order = -1 if self.fortran else 1  # in Fortran order the file holds the transposed tensor
        shape = self.shape[::order]
        bounds = [cut.indices(size)[:2] for cut, size in zip(index[::order], shape, strict=True)]
        starts = tuple(start for start, _ in bounds)
        sizes = tuple(max(stop - start, 0) for start, stop in bounds)
        part = np.empty(sizes, self.dtype)
        if part.size:
            with self.path.open("rb", buffering=0) as file:
                _read_box(file, self.offset, shape, starts, part)
        return part.transpose() if self.fortran else part


def stacked_source(layers: Sequence[ArraySource]) -> ArraySource:
    """Returns arrays of equal shapes as one, with a dimension for them in front; only the requested ones are read.

    ```python
    from shardrules.placement.checkpoints.tensor_file import stacked_source

    layers = [sr.ArraySource((4,), np.int8, np.arange(i, i + 4, dtype=np.int8).__getitem__) for i in range(3)]
    assert stacked_source(layers).part((slice(1, 3), slice(0, 2))).tolist() == [[1, 2], [2, 3]]
    ```
    """
    first = layers[0]

    def read(index: Index) -> np.ndarray:
        chosen = range(len(layers))[index[0]]
        sizes = [len(range(*cut.indices(size))) for cut, size in zip(index[1:], first.shape, strict=True)]
        part = np.empty((len(chosen), *sizes), first.dtype)
        for position, layer in enumerate(chosen):
            part[position] = layers[layer].part(index[1:])
        return part

    return ArraySource((len(layers), *first.shape), first.dtype, read)


def _read_box(file: FileIO, offset: int, shape: tuple[int, ...], starts: tuple[int, ...], part: np.ndarray) -> None:
    """Fills `part`, which is contiguous, with the box of its size at `starts` of a tensor of this shape."""
    sizes, itemsize = part.shape, part.dtype.itemsize
    steps = [itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset += sum(start * step for start, step in zip(starts, steps, strict=True))
    inner, run_bytes = _contiguous(sizes, steps, itemsize)
    flat = part.reshape(-1).view(np.uint8)
    # From dimension `outer` on, runs are read together, with the gaps between them: `span` bytes in all.
    outer, span = inner, run_bytes
    while outer and span < _SHORT_BYTES and steps[outer - 1] <= _WIDE_BYTES:
        outer -= 1
        span += (sizes[outer] - 1) * steps[outer]
    filled = 0
    if outer == inner:
        for position in np.ndindex(*sizes[:outer]):
            _read_exactly(file, offset + _distance(position, steps), flat[filled : filled + run_bytes])
            filled += run_bytes
        return
    rows = max(1, _BLOCK_BYTES // steps[outer])
    row_bytes = span - (sizes[outer] - 1) * steps[outer]
    scratch = np.empty((min(rows, sizes[outer]) - 1) * steps[outer] + row_bytes, np.uint8)
    for position in np.ndindex(*sizes[:outer]):
        start = offset + _distance(position, steps)
        for row in range(0, sizes[outer], rows):
            count = min(rows, sizes[outer] - row)
            block = scratch[: (count - 1) * steps[outer] + row_bytes]
            _read_exactly(file, start + row * steps[outer], block)
            # A view with the file's own strides leaves the gaps out.
            cut = np.ndarray((count, *sizes[outer + 1 :]), part.dtype, block, strides=steps[outer:])
            part[(*position, slice(row, row + count))] = cut


def _contiguous(sizes: tuple[int, ...], steps: list[int], itemsize: int) -> tuple[int, int]:
    """Returns from which dimension on the box is contiguous in the file, and the bytes of such a run."""
    run_bytes = itemsize
    for dim in reversed(range(len(sizes))):
        if sizes[dim] > 1 and steps[dim] != run_bytes:
            return dim + 1, run_bytes
        run_bytes *= sizes[dim]
    return 0, run_bytes


def _distance(position: tuple[int, ...], steps: list[int]) -> int:
    return sum(index * step for index, step in zip(position, steps, strict=False))


def _read_exactly(file: FileIO, offset: int, into: np.ndarray) -> None:
    file.seek(offset)
    done = 0
    while done < len(into):  # one call reads at most 2 GiB
        count = file.readinto(into[done:].data)
        if not count:
            raise CheckpointError(
                f"{file.name} ended at byte {offset + done} while it was read, so it changed after its header was "
                "checked. Do not write a checkpoint while it is loaded"
            )
        done += count


def _converted(part: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the same numbers in another dtype; refuses integers that would overflow."""
    result = part.astype(dtype, copy=False)
    if part.size and part.dtype.kind in "iu" and dtype.kind in "iu" and not np.can_cast(part.dtype, dtype):
        for extreme in (int(part.min()), int(part.max())):
            if not np.iinfo(dtype).min <= extreme <= np.iinfo(dtype).max:
                raise CheckpointError(f"{dtype} cannot hold {extreme}: give `like` a wider dtype")
    return result
