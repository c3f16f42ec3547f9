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
from typing import final

import attrs
import jax
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
from shardrules.checkpoints.checksums import UNKNOWN, block_count, block_sums
from shardrules.checkpoints.saved import SavedLeaf
from shardrules.core.errors import CheckpointError
from shardrules.placement.source import ArraySource

_SOURCE_BYTES = 64 * 2**20
"""How much of an `ArraySource` is read at once. Half of it makes more calls, double takes more memory."""


@final
@attrs.frozen(eq=False)
class TensorPart:
    """A box of an array, which is read when it is written."""

    box: Box
    read: Callable[[], np.ndarray]


def local_parts(leaf: SavedLeaf, is_writer: bool) -> list[TensorPart]:
    """Returns the parts of a leaf that this process writes: over all processes, each part once.

    Of what every process has whole, only the writer writes.

    ```python
    from shardrules.checkpoints.saved import saved_leaves
    from shardrules.checkpoints.tensor_writer import local_parts

    placed = sr.filter_shard({"w": np.ones((8, 4))}, P("data"), sr.create_mesh("data:4,model:2"))
    leaves, _ = saved_leaves(placed, "save", lambda dtype: "")
    assert [part.box[0] for part in local_parts(leaves[0], True)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    ```
    """
    value = leaf.value
    if leaf.is_local and not is_writer:
        return []
    if isinstance(value, jax.Array):
        return [
            TensorPart(box_of(shard.index, leaf.shape), lambda data=shard.data: _on_host(data))
            for shard in value.addressable_shards
            if shard.replica_id == 0
        ]
    if isinstance(value, ArraySource):
        return [TensorPart(box, lambda box=box: _part_of(value, box)) for box in _source_boxes(value)]
    whole = tuple((0, size) for size in leaf.shape)
    return [TensorPart(whole, lambda: np.asarray(value))]


def write_tensor(file: int, offset: int, leaf: SavedLeaf, parts: Sequence[TensorPart], block: int) -> np.ndarray:
    """Writes parts of a tensor that begins at `offset` of an open file.

    Returns the checksums of its blocks of so many bytes: `UNKNOWN`, where no run of these parts fills one.
    """
    sums = np.full(block_count(leaf.nbytes, block), UNKNOWN, np.uint32)
    shape, itemsize = leaf.shape or (1,), leaf.dtype.itemsize
    steps = byte_steps(shape, itemsize)
    if not leaf.nbytes:
        return sums
    boxes = [part.box or ((0, 1),) for part in parts]
    for group in box_groups(boxes, shape, itemsize):
        members = [(boxes[index], parts[index].read()) for index in group]
        for box, array in _blocks(members, steps, leaf.dtype):
            outer, run_bytes = run_of(box_sizes(box), steps, itemsize)
            flat = array.reshape(-1).view(np.uint8)
            for index, run in enumerate(row_blocks(box, outer, shape[outer])):
                start = distance([start for start, _ in run], steps)
                data = flat[index * run_bytes : (index + 1) * run_bytes]
                _write_run(file, offset, start, data, block, sums, leaf.nbytes)
    return sums


def _on_host(data: jax.Array) -> np.ndarray:
    # An array keeps its copy on the host once it has made one: through another array on the same memory, the copy goes
    # away after it is written. Otherwise the host would hold all of the tree in the end.
    return np.asarray(jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data]))


def _part_of(source: ArraySource, box: Box) -> np.ndarray:
    return source.part(tuple(slice(start, stop) for start, stop in box))


def _source_boxes(source: ArraySource) -> Iterator[Box]:
    if not source.shape:
        yield ()
        return
    step = max(1, _SOURCE_BYTES * source.shape[0] // max(source.nbytes, 1))
    yield from row_blocks(tuple((0, size) for size in source.shape), 0, step)


def _blocks(
    members: Sequence[tuple[Box, np.ndarray]], steps: Sequence[int], dtype: np.dtype
) -> Iterator[tuple[Box, np.ndarray]]:
    """Yields the box that arrays fill as contiguous blocks."""
    if len(members) == 1:
        yield members[0][0], np.require(members[0][1], dtype, "C")
        return
    outer = next(dim for dim, step in enumerate(steps) if step <= BLOCK_BYTES or dim == len(steps) - 1)
    scratch = np.empty(0, dtype)
    for block in row_blocks(bounding_box([box for box, _ in members]), outer, block_rows(steps[outer])):
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


def read_at(file: int, offset: int, count: int) -> bytes:
    """Reads bytes at an offset of an open file, which has so many."""
    parts: list[bytes] = []
    while count:
        parts.append(os.pread(file, count, offset))
        if not parts[-1]:
            raise CheckpointError(
                f"the file ended at byte {offset} while it was written: another program has changed it"
            )
        offset, count = offset + len(parts[-1]), count - len(parts[-1])
    return b"".join(parts)
