"""`FileTensor`: a tensor at an offset of a file; only the bytes of the requested slices are read.

Bytes are read with plain calls, straight into the array that is returned. A mapped file would be simpler, but mapped
pages count as memory of the process, and machines with a limit kill it for that.

A slice of a tensor lies in the file as runs of equal length at equal distances. Long runs are read one by one. Short
ones are read together with what lies between them, a block at a time, and cut out; slices that lie beside each other
are cut from the same block. What is read is checked while it is in the cache, if the file has checksums.
"""

import math
import os
import re
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, final

import attrs
import numpy as np

from shardrules.checkpoints.boxes import (
    BLOCK_BYTES,
    Box,
    block_rows,
    bounding_box,
    box_groups,
    box_of,
    box_sizes,
    byte_steps,
    distance,
    overlap,
    row_blocks,
    run_of,
)
from shardrules.checkpoints.checksums import TensorSums
from shardrules.core.errors import CheckpointError, printable, shown
from shardrules.core.storage.files import as_path, open_regular
from shardrules.placement.source import ArraySource, Index

_SHORT_BYTES = 4 * 2**10
"""Below this, one call per run costs more than reading what lies between runs. Half of it makes more calls, double
reads more bytes for nothing."""

_WIDE_BYTES = 64 * 2**10
"""Runs further apart than this are not read together: too little of what is read would be used. With half of it more
runs are read by calls of their own, with double more bytes are read for nothing."""

_ALIGNMENT = 64
"""JAX on CPUs takes an array at a multiple of this as it is, and copies any other."""

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


def title_of(caller: str, path: Any) -> str:
    """Returns the caller and the file, for messages; the path may be anything that a user passes."""
    return f"{caller}: {printable(str(path)) if isinstance(path, str | os.PathLike) else shown(path)}"


@final
@attrs.frozen(eq=False)
class FileTensor:
    """A tensor that lies in a file, uncompressed; `fortran` says that its first dimension is the contiguous one.

    ```python
    from pathlib import Path

    from shardrules.checkpoints.tensor_file import FileTensor, file_source

    np.arange(12, dtype=np.int32).tofile("numbers")
    tensor = FileTensor(Path("numbers"), 0, (3, 4), np.dtype(np.int32))
    source = file_source([tensor], (), np.int32)
    assert source.part((slice(1, 3), slice(0, 2))).tolist() == [[4, 5], [8, 9]]
    ```
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool = False
    name: str = ""
    sums: TensorSums | None = None
    """Its checksums, by which all that is read is checked."""

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, boxes: Sequence[Box], targets: Sequence[np.ndarray]) -> None:
        """Reads boxes, each into an array of its shape, whose dtype may be another. Together they fill a box."""
        if not all(target.size for target in targets):
            return
        if not self.shape:
            boxes, targets = [((0, 1),)], [target.reshape(1) for target in targets]
        order = -1 if self.fortran else 1  # in Fortran order the file holds the transposed tensor
        shape = (self.shape or (1,))[::order]
        with _Reader(open_regular(self.path), self) as reader:
            reader.read(
                shape, [box[::order] for box in boxes], [target.T if self.fortran else target for target in targets]
            )


def file_source(tensors: Sequence[FileTensor], dims: tuple[int, ...], dtype: Any) -> ArraySource:
    """Returns tensors of equal shapes, stacked in new dimensions `dims` in front, as one array that is read in parts.

    Each part is converted to `dtype` on the host; only the tensors that it needs are read.

    ```python
    from pathlib import Path

    from shardrules.checkpoints.tensor_file import FileTensor, file_source

    np.arange(12, dtype=np.int8).tofile("numbers")
    layers = [FileTensor(Path("numbers"), 4 * i, (4,), np.dtype(np.int8)) for i in range(3)]
    source = file_source(layers, (3,), np.int8)
    assert source.part((slice(1, 3), slice(0, 2))).tolist() == [[4, 5], [8, 9]]
    ```
    """
    first, count = tensors[0], len(dims)
    positions = np.arange(len(tensors)).reshape(dims)

    def read_together(indices: Sequence[Index]) -> Iterator[list[tuple[int, np.ndarray]]]:
        layers: dict[str, list[int]] = {}
        for number, index in enumerate(indices):
            layers.setdefault(repr(index[:count]), []).append(number)  # slices have no hash before Python 3.12
        for numbers in layers.values():
            chosen = np.asarray(positions[indices[numbers[0]][:count]])
            boxes = [box_of(indices[number][count:], first.shape) for number in numbers]
            order = -1 if first.fortran else 1
            for group in box_groups([box[::order] for box in boxes], first.shape[::order], first.dtype.itemsize):
                group_boxes = [boxes[index] for index in group]
                arrays = [_empty(chosen.shape + box_sizes(box), np.dtype(dtype)) for box in group_boxes]
                for place in np.ndindex(*chosen.shape):
                    tensors[int(chosen[place])].read(group_boxes, [array[(*place, ...)] for array in arrays])
                yield [(numbers[index], array) for index, array in zip(group, arrays, strict=True)]

    def read(index: Index) -> np.ndarray:
        ((_, array),) = next(read_together([index]))
        return array

    return ArraySource(dims + first.shape, dtype, read, read_together)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array that JAX on CPUs need not copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


@final
class _Reader:
    """Reads parts of one tensor from an open file, and checks them."""

    def __init__(self, file: FileIO, tensor: FileTensor) -> None:
        self._file, self._tensor = file, tensor
        self._scratch, self._edge = np.empty(0, np.uint8), np.empty(0, np.uint8)
        self._damage: dict[int, None] = {}

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def read(self, shape: tuple[int, ...], boxes: Sequence[Box], targets: Sequence[np.ndarray]) -> None:
        """Fills the targets with the boxes of an array of this shape."""
        dtype = self._tensor.dtype
        whole = bounding_box(boxes)
        sizes, steps = box_sizes(whole), byte_steps(shape, dtype.itemsize)
        inner, run_bytes = run_of(sizes, steps, dtype.itemsize)
        outer = _outer(sizes, steps, inner, run_bytes)
        if len(targets) == 1 and outer == inner and targets[0].dtype == dtype and targets[0].flags.c_contiguous:
            flat, filled = targets[0].reshape(-1).view(np.uint8), 0
            for run in row_blocks(whole, inner, sizes[inner]):
                self._read_range(_start(run, steps), flat[filled : filled + run_bytes])
                filled += run_bytes
        else:
            self._read_blocks(whole, steps, outer, boxes, targets)
        if self._damage:
            self._refuse()

    def _read_blocks(
        self, whole: Box, steps: list[int], outer: int, boxes: Sequence[Box], targets: Sequence[np.ndarray]
    ) -> None:
        """Reads the box that all boxes fill block by block, and cuts each."""
        dtype, sizes = self._tensor.dtype, box_sizes(whole)
        while outer + 1 < len(steps) and steps[outer] > BLOCK_BYTES:
            outer += 1
        for block in row_blocks(whole, outer, block_rows(steps[outer])):
            sizes = box_sizes(block)
            nbytes = distance([size - 1 for size in sizes], steps) + dtype.itemsize
            self._scratch = self._scratch if len(self._scratch) >= nbytes else np.empty(nbytes, np.uint8)
            self._read_range(_start(block, steps), self._scratch[:nbytes])
            # A view with the file's own strides leaves the gaps out.
            cut = np.ndarray(sizes, dtype, self._scratch, strides=steps)
            for box, target in zip(boxes, targets, strict=True):
                if slices := overlap(block, box):
                    _assign(target[slices[1]], cut[slices[0]])

    def _read_range(self, start: int, into: np.ndarray) -> None:
        """Reads bytes of the tensor, and checks all blocks that they lie in."""
        sums, stop = self._tensor.sums, start + len(into)
        if sums is None:
            self._read_exactly(start, into)
            return
        low, high = start // sums.block * sums.block, min(-(-stop // sums.block) * sums.block, self._tensor.nbytes)
        first, last = -(-start // sums.block) * sums.block, high if high == stop else stop // sums.block * sums.block
        if first >= last or (len(into) < _WIDE_BYTES and (low, high) != (start, stop)):
            self._read_around(sums, low, high, start, into)
            return
        if low < start:
            self._read_around(sums, low, first, start, into[: first - start])
        for begin in range(first, last, max(sums.block, BLOCK_BYTES)):
            data = into[begin - start : min(begin + max(sums.block, BLOCK_BYTES), last) - start]
            self._read_exactly(begin, data)
            self._damage.update(dict.fromkeys(sums.damage(begin, data)))
        if last < stop:
            self._read_around(sums, last, high, last, into[last - start :])

    def _read_around(self, sums: TensorSums, low: int, high: int, start: int, into: np.ndarray) -> None:
        """Reads and checks whole blocks, and takes the bytes from `start` on."""
        self._edge = self._edge if len(self._edge) >= high - low else np.empty(high - low, np.uint8)
        data = self._edge[: high - low]
        self._read_exactly(low, data)
        self._damage.update(dict.fromkeys(sums.damage(low, data)))
        into[:] = data[start - low : start - low + len(into)]

    def _read_exactly(self, start: int, into: np.ndarray) -> None:
        view, offset = into.data, self._tensor.offset + start
        while view:  # one call reads at most 2 GiB
            count = os.preadv(self._file.fileno(), [view], offset)
            if not count:
                raise CheckpointError(
                    f"{self._tensor.path} ended at byte {offset} while it was read, so it changed after its header was "
                    "checked. Do not write a checkpoint while it is loaded"
                )
            view, offset = view[count:], offset + count

    def _refuse(self) -> None:
        tensor, blocks = self._tensor, sorted(self._damage)
        assert tensor.sums is not None
        begin = blocks[0] * tensor.sums.block
        end = min(begin + tensor.sums.block, tensor.nbytes)
        more = f" and {len(blocks) - 1} more blocks" if len(blocks) > 1 else ""
        raise CheckpointError(
            f"{tensor.path} is damaged: {tensor.name} differs from its checksums in bytes {tensor.offset + begin} to "
            f"{tensor.offset + end} of the file{more}. Copy the file again, or load another checkpoint; verify=False "
            "loads it as it is"
        )


def _start(box: Box, steps: Sequence[int]) -> int:
    return distance([start for start, _ in box], steps)


def _outer(sizes: tuple[int, ...], steps: list[int], inner: int, run_bytes: int) -> int:
    """Returns from which dimension on runs are read together, with the gaps between them; `inner`, if none are."""
    outer, span = inner, run_bytes
    while outer and span < _SHORT_BYTES and steps[outer - 1] <= _WIDE_BYTES:
        outer -= 1
        span += (sizes[outer] - 1) * steps[outer]
    return outer


def _assign(target: np.ndarray, part: np.ndarray) -> None:
    """Copies numbers, perhaps into another dtype; refuses integers that would overflow."""
    dtype = target.dtype
    if part.dtype.kind in "iu" and dtype.kind in "iu" and not np.can_cast(part.dtype, dtype):
        for extreme in (int(part.min()), int(part.max())):
            if not np.iinfo(dtype).min <= extreme <= np.iinfo(dtype).max:
                raise CheckpointError(f"{dtype} cannot hold {extreme}: give `like` a wider dtype")
    target[...] = part
