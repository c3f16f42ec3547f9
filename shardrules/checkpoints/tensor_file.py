"""`FileTensor`: a tensor at an offset of a file; only the bytes of the requested slices are read.

Bytes are read with plain calls, straight into the array that is returned. A mapped file would be simpler, but mapped
pages count as memory of the process, and machines with a limit kill it for that.

A slice of a tensor lies in the file as runs of equal length at equal distances. Long runs are read one by one. Short
ones are read together with what lies between them, a block at a time, and cut out; slices that lie beside each other
are cut from the same block. What is read is checked while it is in the cache, if the file has checksums.
"""

import math
import os
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
    box_groups,
    box_of,
    box_sizes,
    byte_range,
    byte_steps,
    overlap,
    row_blocks,
    run_of,
)
from shardrules.checkpoints.checksums import TensorSums
from shardrules.core.errors import CheckpointError
from shardrules.core.storage.files import open_regular
from shardrules.placement.source import ArraySource, Index

_SHORT_BYTES = 4 * 2**10
"""Below this, one call per run costs more than reading what lies between runs. Chosen by hand."""

_WIDE_BYTES = 64 * 2**10
"""Runs further apart than this are not read together: too little of what is read would be used. Chosen by hand."""

_ALIGNMENT = 64
"""JAX on CPUs takes an array at a multiple of this as it is, and copies any other."""


@final
@attrs.frozen(eq=False)
class FileTensor:
    """A tensor that lies in a file, uncompressed; `fortran` says that its first dimension is the contiguous one."""

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

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Its shape as rows of the file, which in Fortran order holds the transposed tensor."""
        return self.shape[::-1] if self.fortran else self.shape


def file_source(tensors: Sequence[FileTensor], dims: tuple[int, ...], dtype: Any) -> ArraySource:
    """Returns tensors of equal shapes, stacked in new dimensions `dims` in front, as one array that is read in parts.

    Each part is converted to `dtype` on the host; only the tensors that it needs are read.
    """
    first, count = tensors[0], len(dims)
    shape, order = first.file_shape, -1 if first.fortran else 1
    positions = np.arange(len(tensors)).reshape(dims)

    def read_together(indices: Sequence[Index]) -> Iterator[list[tuple[int, np.ndarray]]]:
        layers: dict[str, list[int]] = {}
        for number, index in enumerate(indices):
            layers.setdefault(repr(index[:count]), []).append(number)  # slices have no hash before Python 3.12
        for numbers in layers.values():
            chosen = np.asarray(positions[indices[numbers[0]][:count]])
            boxes = [box_of(indices[number][count:], first.shape)[::order] for number in numbers]
            for group, whole in box_groups(boxes, shape, first.dtype.itemsize):
                arrays = [_empty(chosen.shape + box_sizes(boxes[index]), np.dtype(dtype)) for index in group]
                for place in np.ndindex(*chosen.shape):
                    targets = [(boxes[index], array[(*place, ...)]) for index, array in zip(group, arrays, strict=True)]
                    _read(tensors[int(chosen[place])], whole, targets)
                # Only a file with one tensor for the array has another order.
                parts = [array.T if first.fortran else array for array in arrays]
                yield [(numbers[index], part) for index, part in zip(group, parts, strict=True)]

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


def _read(tensor: FileTensor, whole: Box, targets: Sequence[tuple[Box, np.ndarray]]) -> None:
    """Fills an array for each of the boxes that together fill the box `whole` of a tensor in the file."""
    if not all(target.size for _, target in targets):
        return
    shape = tensor.file_shape
    if not shape:
        shape, whole = (1,), ((0, 1),)
        targets = [(whole, target.reshape(1)) for _, target in targets]
    with open_regular(tensor.path) as file:
        reader = _Reader(file, tensor)
        reader.read(shape, whole, targets)
        if reader.damage:
            raise _damage_error(tensor, sorted(reader.damage))


@final
class _Reader:
    """Reads parts of one tensor from an open file, and notes which blocks differ from their checksums."""

    def __init__(self, file: FileIO, tensor: FileTensor) -> None:
        self._file, self._tensor = file, tensor
        self._block_bytes = 1 if tensor.sums is None else tensor.sums.block
        self._piece_bytes = max(1, BLOCK_BYTES // self._block_bytes) * self._block_bytes
        self._scratch, self._edge = np.empty(0, np.uint8), np.empty(self._piece_bytes, np.uint8)
        self.damage: dict[int, None] = {}

    def read(self, shape: tuple[int, ...], whole: Box, targets: Sequence[tuple[Box, np.ndarray]]) -> None:
        """Fills the targets, block by block, with what they have of an array of this shape."""
        dtype, steps = self._tensor.dtype, byte_steps(shape, self._tensor.dtype.itemsize)
        inner, run_bytes = run_of(box_sizes(whole), steps, dtype.itemsize)
        outer = _outer(box_sizes(whole), steps, inner, run_bytes)
        first = targets[0][1]
        is_direct = len(targets) == 1 and outer == inner and first.dtype == dtype and first.flags.c_contiguous
        filled = first.reshape(-1).view(np.uint8) if is_direct else np.empty(0, np.uint8)
        while outer + 1 < len(steps) and steps[outer] > BLOCK_BYTES:
            outer += 1
        for block in row_blocks(whole, outer, block_rows(steps[outer])):
            start, stop = byte_range(block, steps, dtype.itemsize)
            if is_direct:
                self._read_range(start, filled[: stop - start])
                filled = filled[stop - start :]
                continue
            self._scratch = self._scratch if len(self._scratch) >= stop - start else np.empty(stop - start, np.uint8)
            self._read_range(start, self._scratch[: stop - start])
            # A view with the file's own strides leaves the gaps out.
            cut = np.ndarray(box_sizes(block), dtype, self._scratch, strides=steps)
            for box, target in targets:
                if slices := overlap(block, box):
                    _assign(target[slices[1]], cut[slices[0]])

    def _read_range(self, start: int, into: np.ndarray) -> None:
        """Reads bytes of the tensor, and checks all blocks that they lie in."""
        begin, stop, unit = start, start + len(into), self._block_bytes
        while begin < stop:
            end = min((begin // self._piece_bytes + 1) * self._piece_bytes, stop)
            low, high = begin // unit * unit, min(-(-end // unit) * unit, self._tensor.nbytes)
            part = into[begin - start : end - start]
            # Where blocks reach beyond the part, they are read beside it.
            data = part if high - low == len(part) else self._edge[: high - low]
            self._read_exactly(low, data)
            if self._tensor.sums is not None:
                self.damage.update(dict.fromkeys(self._tensor.sums.damage(low, data)))
            if data is not part:
                part[:] = data[begin - low : end - low]
            begin = end

    def _read_exactly(self, start: int, into: np.ndarray) -> None:
        read_into(self._file.fileno(), self._tensor.offset + start, into.data, self._tensor.path)


def read_into(file: int, offset: int, view: memoryview, path: Path) -> None:
    """Fills memory from an open file."""
    while view:  # one call reads at most 2 GiB
        count = os.preadv(file, [view], offset)
        if not count:
            raise CheckpointError(
                f"{path} ended at byte {offset} while it was read, so another program has changed it. Do not write a "
                "checkpoint while it is loaded or saved"
            )
        view, offset = view[count:], offset + count


def _damage_error(tensor: FileTensor, blocks: Sequence[int]) -> CheckpointError:
    assert tensor.sums is not None
    begin = blocks[0] * tensor.sums.block
    end = min(begin + tensor.sums.block, tensor.nbytes)
    more = f" and {len(blocks) - 1} more blocks" if len(blocks) > 1 else ""
    return CheckpointError(
        f"{tensor.path} is damaged: {tensor.name} differs from its checksums in bytes {tensor.offset + begin} to "
        f"{tensor.offset + end} of the file{more}. Copy the file again, or load another checkpoint; verify=False "
        "loads it as it is"
    )


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
