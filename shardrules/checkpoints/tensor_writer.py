"""Parts of arrays to where they belong in a file, from all processes at once.

Where each tensor begins follows from the shapes alone. So every process writes what its own devices hold, shard by
shard, and no process ever has a whole array, nor sends anything to another.

A shard lies in the file as runs of equal length at equal distances. Where runs are long, shards are written one by one.
Where they are short, the shards of this process that lie beside each other are written together, a block at a time. The
checksum of a block is taken while it is in the cache.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

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
from shardrules.checkpoints.checksums import UNKNOWN, block_count, block_sums
from shardrules.checkpoints.leaves import SavedLeaf
from shardrules.placement.source import ArraySource

TensorPart: TypeAlias = tuple[Box, Callable[[], np.ndarray]]
"""A box of an array, and the function that reads it when it is written."""

_SOURCE_BYTES = 64 * 2**20
"""The bytes of an `ArraySource` that are read at once. Chosen by hand."""


def local_parts(leaf: SavedLeaf, is_writer: bool) -> list[TensorPart]:
    """Returns the parts of a leaf that this process writes: over all processes, each part once.

    Of what every process has whole, only the writer writes.
    """
    value, whole = leaf.value, tuple((0, size) for size in leaf.shape)
    if leaf.is_local and not is_writer:
        return []
    if isinstance(value, jax.Array):
        return [
            (box_of(shard.index, leaf.shape), lambda data=shard.data: _on_host(data))
            for shard in value.addressable_shards
            if shard.replica_id == 0
        ]
    if isinstance(value, ArraySource) and whole:
        rows = max(1, _SOURCE_BYTES * value.shape[0] // max(value.nbytes, 1))
        return [(box, lambda box=box: _part_of(value, box)) for box in row_blocks(whole, 0, rows)]
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
            for run in row_blocks(box, outer, shape[outer]):
                start, stop = byte_range(run, steps, itemsize)
                _write_run(file, offset, start, flat[: stop - start], block, sums, leaf.nbytes)
                flat = flat[stop - start :]
    return sums


def _on_host(data: jax.Array) -> np.ndarray:
    # An array keeps its copy on the host once it has made one: through another array on the same memory, the copy goes
    # away after it is written. Otherwise the host would hold all of the tree in the end.
    return np.asarray(jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data]))


def _part_of(source: ArraySource, box: Box) -> np.ndarray:
    return source.part(tuple(slice(start, stop) for start, stop in box))


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
