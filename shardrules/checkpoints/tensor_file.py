"""Tensors in files, uncompressed: parts of them are read as they are requested, and written as devices have them.

Bytes are read with plain calls, straight into the array that is returned. A mapped file would be simpler, but mapped
pages count as memory of the process, and machines with a limit kill it for that. And they are written from all
processes at once: where each tensor begins follows from the shapes alone, so every process writes what its own devices
hold, shard by shard; no process ever has a whole array, nor sends anything to another.

A part of a tensor lies in the file as runs of equal length at equal distances. Long runs are read and written one by
one. Short ones are read together with what lies between them, and cut out; parts that lie beside each other are read
and written together, a block at a time. Checksums are taken and compared while the block is in the cache.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

import attrs
import jax
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
from shardrules.checkpoints.checksums import UNKNOWN, TensorSums, block_count, block_sums
from shardrules.checkpoints.leaves import SavedLeaf
from shardrules.core.errors import CheckpointError
from shardrules.core.storage.files import open_regular
from shardrules.placement.source import ArraySource, Index, aligned_empty

TensorPart: TypeAlias = tuple[Box, Callable[[], np.ndarray]]
"""A box of an array, and the function that reads it when it is written."""

_SOURCE_BYTES = 64 * 2**20
"""The bytes of an `ArraySource` that are read at once. Chosen by hand."""

_SHORT_BYTES = 4 * 2**10
"""Below this, one call per run costs more than reading what lies between runs. Chosen by hand."""

_WIDE_BYTES = 64 * 2**10
"""Runs further apart than this are not read together: too little of what is read would be used. Chosen by hand."""


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
                arrays = [aligned_empty(chosen.shape + box_sizes(boxes[index]), np.dtype(dtype)) for index in group]
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


def _read(tensor: FileTensor, whole: Box, targets: Sequence[tuple[Box, np.ndarray]]) -> None:
    """Fills an array for each of the boxes that together fill the box `whole` of a tensor in the file."""
    if not all(target.size for _, target in targets):
        return
    dtype, shape = tensor.dtype, tensor.file_shape
    if not shape:
        shape, whole = (1,), ((0, 1),)
        targets = [(whole, target.reshape(1)) for _, target in targets]
    steps = byte_steps(shape, dtype.itemsize)
    inner, run_bytes = run_of(box_sizes(whole), steps, dtype.itemsize)
    outer = _outer(box_sizes(whole), steps, inner, run_bytes)
    first = targets[0][1]
    # A part that is one run of the file, in its own dtype, is read straight into the result.
    is_direct = len(targets) == 1 and outer == inner and first.dtype == dtype and first.flags.c_contiguous
    scratch = first.reshape(-1).view(np.uint8) if is_direct else np.empty(0, np.uint8)
    # Blocks are rows of the outermost dim whose rows are small enough.
    while outer + 1 < len(steps) and steps[outer] > BLOCK_BYTES:
        outer += 1
    with open_regular(tensor.path) as file:
        edge = np.empty(_piece_bytes(tensor), np.uint8)
        for block in row_blocks(whole, outer, block_rows(steps[outer])):
            start, stop = byte_range(block, steps, dtype.itemsize)
            if len(scratch) < stop - start:
                scratch = np.empty(stop - start, np.uint8)
            _read_range(file.fileno(), tensor, start, scratch[: stop - start], edge)
            if is_direct:
                scratch = scratch[stop - start :]
                continue
            # A view with the file's own strides leaves the gaps out.
            cut = np.ndarray(box_sizes(block), dtype, scratch, strides=steps)
            for box, target in targets:
                if slices := overlap(block, box):
                    _assign(target[slices[1]], cut[slices[0]])


def _piece_bytes(tensor: FileTensor) -> int:
    """Returns the bytes that are read and checked at once: whole blocks with checksums."""
    unit = tensor.sums.block if tensor.sums else 1
    return max(1, BLOCK_BYTES // unit) * unit


def _read_range(file: int, tensor: FileTensor, start: int, into: np.ndarray, edge: np.ndarray) -> None:
    """Reads bytes of a tensor, and checks all blocks that they lie in; `edge` has room for a piece of them."""
    begin, stop, unit = start, start + len(into), tensor.sums.block if tensor.sums else 1
    while begin < stop:
        end = min((begin // len(edge) + 1) * len(edge), stop)
        low, high = begin // unit * unit, min(-(-end // unit) * unit, tensor.nbytes)
        part = into[begin - start : end - start]
        # Where blocks reach beyond the part, they are read beside it.
        data = part if high - low == len(part) else edge[: high - low]
        read_into(file, tensor.offset + low, data.data, tensor.path)
        if tensor.sums and (damage := tensor.sums.damage(low, data)):
            first = tensor.offset + damage[0] * unit
            raise CheckpointError(
                f"{tensor.path} is damaged: {tensor.name} differs from its checksums in bytes {first} to "
                f"{min(first + unit, tensor.offset + tensor.nbytes)} of the file. Copy the file again, or load another "
                "checkpoint; verify=False loads it as it is"
            )
        if data is not part:
            part[:] = data[begin - low : end - low]
        begin = end


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
        # The dtype may be too narrow in general: only the numbers that are there count.
        for extreme in (int(part.min()), int(part.max())):
            if not np.iinfo(dtype).min <= extreme <= np.iinfo(dtype).max:
                raise CheckpointError(f"{dtype} cannot hold {extreme}: give `like` a wider dtype")
    target[...] = part


def local_parts(leaf: SavedLeaf, is_writer: bool) -> list[TensorPart]:
    """Returns the parts of a leaf that this process writes: over all processes, each part once.

    Of what every process has whole, only the writer writes.
    """
    value, whole = leaf.value, tuple((0, size) for size in leaf.shape)
    if leaf.is_local and not is_writer:
        return []
    if isinstance(value, jax.Array):
        return [
            # The default binds this shard: a free name would be the last shard by the time of the call.
            (box_of(shard.index, leaf.shape), lambda data=shard.data: _on_host(data))
            for shard in value.addressable_shards
            # Replicas are equal, and the first of them is written.
            if shard.replica_id == 0
        ]
    if isinstance(value, ArraySource) and whole:
        rows = max(1, _SOURCE_BYTES * value.shape[0] // max(value.nbytes, 1))
        return [
            (box, lambda box=box: value.part(tuple(slice(start, stop) for start, stop in box)))
            for box in row_blocks(whole, 0, rows)
        ]
    return [(whole, lambda: value.part(()) if isinstance(value, ArraySource) else np.asarray(value))]


def write_tensor(file: int, offset: int, leaf: SavedLeaf, parts: Sequence[TensorPart], block: int) -> np.ndarray:
    """Writes parts of a tensor that begins at `offset` of an open file.

    Returns the checksums of its blocks of so many bytes: `UNKNOWN`, where no run of these parts fills one.
    """
    sums = np.full(block_count(leaf.nbytes, block), UNKNOWN, np.uint32)
    shape, itemsize = leaf.shape or (1,), leaf.dtype.itemsize
    steps = byte_steps(shape, itemsize)
    if not leaf.nbytes:
        return sums
    boxes = [box or ((0, 1),) for box, _ in parts]
    for group, whole in box_groups(boxes, shape, itemsize):
        members = [(boxes[index], parts[index][1]()) for index in group]
        for box, array in _blocks(whole, members, steps, leaf.dtype):
            outer, _ = run_of(box_sizes(box), steps, itemsize)
            flat = array.reshape(-1).view(np.uint8)
            # Runs lie apart in the file, and one after the other in `flat`.
            for run in row_blocks(box, outer, shape[outer]):
                start, stop = byte_range(run, steps, itemsize)
                _write_run(file, offset, start, flat[: stop - start], block, sums, leaf.nbytes)
                flat = flat[stop - start :]
    return sums


def _on_host(data: jax.Array) -> np.ndarray:
    # An array keeps its copy on the host once it has made one: through another array on the same memory, the copy goes
    # away after it is written. Otherwise the host would hold all of the tree in the end.
    return np.asarray(jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data]))


def _blocks(
    whole: Box, members: Sequence[tuple[Box, np.ndarray]], steps: Sequence[int], dtype: np.dtype
) -> Iterator[tuple[Box, np.ndarray]]:
    """Yields the box that arrays fill as contiguous blocks."""
    if len(members) == 1:
        yield members[0][0], np.require(members[0][1], dtype, "C")
        return
    outer = next(dim for dim, step in enumerate(steps) if step <= BLOCK_BYTES or dim == len(steps) - 1)
    scratch = np.empty(0, dtype)
    for block in row_blocks(whole, outer, block_rows(steps[outer])):
        sizes = box_sizes(block)
        size = math.prod(sizes)
        scratch = scratch if len(scratch) >= size else np.empty(size, dtype)
        data = scratch[:size].reshape(sizes)
        for box, array in members:
            if slices := overlap(block, box):
                data[slices[0]] = array[slices[1]]
        yield block, data


def _write_run(file: int, offset: int, start: int, data: np.ndarray, block: int, sums: np.ndarray, nbytes: int) -> None:
    """Writes bytes of a tensor from its byte `start` on, and notes the checksums of the blocks that they fill."""
    stop, first, begin = start + len(data), block_count(start, block), start
    while begin < stop:
        # Whole pages of the file: a page that two calls write costs more.
        end = min(((offset + begin) // BLOCK_BYTES + 1) * BLOCK_BYTES - offset, stop)
        last = block_count(end, block) if end == nbytes else end // block
        if first < last:
            sums[first:last] = block_sums(data[first * block - start : min(last * block, end) - start], block)
            first = last
        write_at(file, offset + begin, data[begin - start : end - start].data)
        begin = end


def write_at(file: int, offset: int, data: memoryview | bytes) -> None:
    """Writes all of `data` at an offset of an open file."""
    view = memoryview(data)
    while view:  # one call writes at most 2 GiB
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count
