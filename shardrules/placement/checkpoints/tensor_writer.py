"""Parts of arrays to where they belong in a file, from all processes at once.

Where each tensor begins follows from the shapes alone. So every process writes what its own devices hold, shard by
shard, and no process ever has a whole array, nor sends anything to another.

A shard lies in the file as runs of equal length at equal distances. Where runs are long, shards are written one by one.
Where they are short, the shards of this process that lie beside each other are written together, a block at a time.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import attrs
import jax
import numpy as np

from shardrules.placement.checkpoints.saved import SavedLeaf
from shardrules.placement.source import ArraySource

_LONG_BYTES = 256 * 2**10
"""Runs of this length are written one by one: a call for each costs little beside writing it. With half of it more
calls are made, with double more shards are kept on the host to be written together."""

_BLOCK_BYTES = 16 * 2**20
"""How much is put together at once. Half of it makes more calls, double takes more memory."""

_SOURCE_BYTES = 64 * 2**20
"""How much of an `ArraySource` is read at once. Half of it makes more calls, double takes more memory."""


@final
@attrs.frozen(eq=False)
class TensorPart:
    """A box of an array, which is read when it is written."""

    bounds: tuple[tuple[int, int], ...]
    """Where it starts and stops in each dimension."""
    read: Callable[[], np.ndarray]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(stop - start for start, stop in self.bounds)


def local_parts(leaf: SavedLeaf, is_writer: bool) -> list[TensorPart]:
    """Returns the parts of a leaf that this process writes: over all processes, each part once.

    Of what every process has whole, only the writer writes.

    ```python
    from shardrules.placement.checkpoints.saved import saved_leaves
    from shardrules.placement.checkpoints.tensor_writer import local_parts

    placed = sr.filter_shard({"w": np.ones((8, 4))}, P("data"), sr.create_mesh("data:4,model:2"))
    leaves, _ = saved_leaves(placed, "save", lambda dtype: "")
    assert [part.bounds[0] for part in local_parts(leaves[0], True)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    ```
    """
    value = leaf.value
    if leaf.is_local and not is_writer:
        return []
    if isinstance(value, jax.Array):
        return [
            TensorPart(_bounds(shard.index, leaf.shape), lambda data=shard.data: _on_host(data))
            for shard in value.addressable_shards
            if shard.replica_id == 0
        ]
    if isinstance(value, ArraySource):
        return [TensorPart(bounds, lambda bounds=bounds: _part_of(value, bounds)) for bounds in _row_blocks(value)]
    whole = tuple((0, size) for size in leaf.shape)
    return [TensorPart(whole, lambda: np.asarray(value))]


def write_tensor(file: int, offset: int, leaf: SavedLeaf, parts: Sequence[TensorPart]) -> None:
    """Writes parts of a tensor that begins at `offset` of an open file."""
    for group in _groups(parts, leaf.shape, leaf.dtype.itemsize):
        starts = tuple(min(part.bounds[dim][0] for part in group) for dim in range(len(leaf.shape)))
        for row, block in _blocks(group, starts, leaf.dtype):
            if block.size:
                corner = (starts[0] + row, *starts[1:]) if starts else starts
                _write_box(file, offset, leaf.shape, corner, block)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))


def _on_host(data: jax.Array) -> np.ndarray:
    # An array keeps its copy on the host once it has made one: through another array on the same memory, the copy goes
    # away after it is written. Otherwise the host would hold all of the tree in the end.
    return np.asarray(jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data]))


def _part_of(source: ArraySource, bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
    return source.part(tuple(slice(start, stop) for start, stop in bounds))


def _row_blocks(source: ArraySource) -> Iterator[tuple[tuple[int, int], ...]]:
    if not source.shape:
        yield ()
        return
    rows, *rest = source.shape
    step = max(1, _SOURCE_BYTES * rows // max(source.nbytes, 1))
    for start in range(0, rows, step):
        yield ((start, min(start + step, rows)), *((0, size) for size in rest))


def _groups(parts: Sequence[TensorPart], shape: tuple[int, ...], itemsize: int) -> list[list[TensorPart]]:
    """Returns the parts, those that lie beside each other as one group where their runs are short.

    Each group fills a box. The last dimension is joined first: it makes runs longer.
    """
    groups = [[part] for part in parts]
    for dim in reversed(range(len(shape))):
        if not groups or _run(groups[0][0].sizes, shape, itemsize)[1] >= _LONG_BYTES:
            break
        if all(group[0].bounds[dim] == (0, shape[dim]) for group in groups):
            continue
        groups = _joined(groups, dim)
    return groups


def _joined(groups: list[list[TensorPart]], dim: int) -> list[list[TensorPart]]:
    """Joins groups that differ only in dimension `dim`, and there lie beside each other."""

    def key(group: list[TensorPart]) -> tuple[Any, tuple[int, int]]:
        bounds = [(min(part.bounds[n][0] for part in group), max(part.bounds[n][1] for part in group)) for n in dims]
        return (tuple(bounds[:dim] + bounds[dim + 1 :]), bounds[dim])

    dims = range(len(groups[0][0].bounds))
    keyed = sorted(((key(group), group) for group in groups), key=lambda pair: pair[0])
    result: list[list[TensorPart]] = []
    for _, same in itertools.groupby(keyed, key=lambda pair: pair[0][0]):
        stop = None
        for (_, (start, end)), group in same:
            if start == stop:
                result[-1] = [*result[-1], *group]
            else:
                result.append(list(group))
            stop = end
    return result


def _blocks(group: list[TensorPart], starts: tuple[int, ...], dtype: np.dtype) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the box that a group fills as contiguous blocks, each with the index of its first row in the box."""
    if len(group) == 1:
        yield 0, np.require(group[0].read(), dtype, "C")
        return
    stops = tuple(max(part.bounds[dim][1] for part in group) for dim in range(len(starts)))
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    arrays = [(part, part.read()) for part in group]
    rows = max(1, _BLOCK_BYTES // max(1, math.prod(sizes[1:]) * dtype.itemsize))
    scratch = np.empty((min(rows, sizes[0]), *sizes[1:]), dtype)
    for row in range(0, sizes[0], rows):
        block = scratch[: min(rows, sizes[0] - row)]
        for part, array in arrays:
            first = part.bounds[0][0] - starts[0]
            begin, end = max(first, row), min(first + len(array), row + len(block))
            if begin < end:
                columns = [
                    slice(low - start, high - start)
                    for (low, high), start in zip(part.bounds[1:], starts[1:], strict=True)
                ]
                block[(slice(begin - row, end - row), *columns)] = array[begin - first : end - first]
        yield row, block


def _run(sizes: tuple[int, ...], shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Returns how many dimensions are outside of a contiguous run of the file, and the bytes of such a run."""
    run_bytes = itemsize
    for dim in reversed(range(len(sizes))):
        run_bytes *= sizes[dim]
        if sizes[dim] != shape[dim]:
            return dim, run_bytes
    return 0, run_bytes


def _write_box(file: int, offset: int, shape: tuple[int, ...], starts: tuple[int, ...], block: np.ndarray) -> None:
    """Writes a contiguous block at `starts` of a tensor of this shape that begins at `offset`."""
    steps = [block.dtype.itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset += sum(start * step for start, step in zip(starts, steps, strict=True))
    outer, run_bytes = _run(block.shape, shape, block.dtype.itemsize)
    flat = block.reshape(-1).view(np.uint8).data
    for run_index, position in enumerate(np.ndindex(*block.shape[:outer])):
        distance = sum(index * step for index, step in zip(position, steps, strict=False))
        write_at(file, offset + distance, flat[run_index * run_bytes : (run_index + 1) * run_bytes])


def write_at(file: int, offset: int, data: memoryview | bytes) -> None:
    """Writes all of `data` at an offset of an open file."""
    view = memoryview(data)
    while view:  # one call writes at most 2 GiB
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count
