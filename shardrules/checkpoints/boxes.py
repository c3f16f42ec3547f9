"""Boxes of an array, and how they lie in a file that holds the array: as runs of equal length at equal distances.

Where runs are short, boxes that lie beside each other are read and written together, a block of rows at a time.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from shardrules.placement.source import Index

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Where a box starts and stops in each dimension."""

_LONG_BYTES = 256 * 2**10
"""Runs of this length are read and written one by one: a call for each costs little beside its bytes. With half of it
more calls are made, with double more shards are kept on the host together."""

_TOGETHER_BYTES = 2**30
"""How much is read or written together at most, since the host keeps it meanwhile. Half of it reads rows of large
tables more often, double takes more memory."""

BLOCK_BYTES = 2 * 2**20
"""How much is put together, cut and checked at once. With half of it saving over columns takes an eighth more time of
the processor, with double the same, and caches of cores may be too small."""


_PAGE_BYTES = 4096


def box_of(index: Index, shape: tuple[int, ...]) -> Box:
    """Returns the box that slices without steps cut from an array of this shape."""
    pairs = (cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))
    return tuple((start, max(start, stop)) for start, stop in pairs)


def box_sizes(box: Box) -> tuple[int, ...]:
    """Returns the shape of a box."""
    return tuple(stop - start for start, stop in box)


def byte_steps(shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Returns how far apart neighbours in each dimension are in the file."""
    return [itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def distance(position: Sequence[int], steps: Sequence[int]) -> int:
    """Returns how far from the beginning of the array a position is."""
    return sum(index * step for index, step in zip(position, steps, strict=False))


def run_of(sizes: tuple[int, ...], steps: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Returns from which dimension on a box is contiguous in the file, and the bytes of such a run."""
    run_bytes = itemsize
    for dim in reversed(range(len(sizes))):
        if sizes[dim] > 1 and steps[dim] != run_bytes:
            return dim + 1, run_bytes
        run_bytes *= sizes[dim]
    return 0, run_bytes


def box_groups(boxes: Sequence[Box], shape: tuple[int, ...], itemsize: int) -> list[list[int]]:
    """Returns the indices of the boxes, those that lie beside each other as one group where their runs are short.

    Each group fills a box. The last dimension is joined first: it makes runs longer.

    ```python
    from shardrules.checkpoints.boxes import box_groups

    columns = [((0, 64), (0, 8)), ((0, 64), (8, 16))]
    assert box_groups(columns, (64, 16), 4) == [[0, 1]]
    ```
    """
    groups = [([index], box) for index, box in enumerate(boxes)]
    steps = byte_steps(shape, itemsize)
    for dim in reversed(range(len(shape))):
        if not groups or run_of(box_sizes(groups[0][1]), steps, itemsize)[1] >= _LONG_BYTES:
            break
        if any(box[dim] != (0, shape[dim]) for _, box in groups):
            groups = _joined(groups, dim, itemsize)
    return [indices for indices, _ in groups]


def _joined(groups: list[tuple[list[int], Box]], dim: int, itemsize: int) -> list[tuple[list[int], Box]]:
    """Joins groups that differ only in dimension `dim`, and there lie beside each other."""
    keyed = sorted(groups, key=lambda group: (group[1][:dim] + group[1][dim + 1 :], group[1][dim]))
    result: list[tuple[list[int], Box]] = []
    for indices, box in keyed:
        last = result[-1][1] if result else None
        if last is not None and last[:dim] + last[dim + 1 :] == box[:dim] + box[dim + 1 :]:
            whole = (*box[:dim], (last[dim][0], box[dim][1]), *box[dim + 1 :])
            if last[dim][1] == box[dim][0] and math.prod(box_sizes(whole)) * itemsize <= _TOGETHER_BYTES:
                result[-1] = ([*result[-1][0], *indices], whole)
                continue
        result.append((indices, box))
    return result


def bounding_box(boxes: Sequence[Box]) -> Box:
    """Returns the box that a group of boxes fills."""
    return tuple(
        (min(start for start, _ in pairs), max(stop for _, stop in pairs)) for pairs in zip(*boxes, strict=True)
    )


def row_blocks(box: Box, outer: int, rows: int) -> Iterator[Box]:
    """Yields a box in blocks: single positions of the dimensions before `outer`, at most `rows` rows of that one."""
    before = [range(start, stop) for start, stop in box[:outer]]
    start, stop = box[outer]
    for position in itertools.product(*before):
        for row in range(start, stop, rows):
            yield (*((index, index + 1) for index in position), (row, min(row + rows, stop)), *box[outer + 1 :])


def block_rows(step: int) -> int:
    """Returns how many rows at this distance are read or written together: whole pages, where that is possible."""
    rows, unit = max(1, BLOCK_BYTES // step), _PAGE_BYTES // math.gcd(step, _PAGE_BYTES)
    return rows - rows % unit if rows > unit else rows


def overlap(block: Box, box: Box) -> tuple[Index, Index] | None:
    """Returns the slices of a block and of a box that both have, if they have any."""
    of_block: list[slice] = []
    of_box: list[slice] = []
    for (block_start, block_stop), (start, stop) in zip(block, box, strict=True):
        low, high = max(block_start, start), min(block_stop, stop)
        if low >= high:
            return None
        of_block.append(slice(low - block_start, high - block_start))
        of_box.append(slice(low - start, high - start))
    return tuple(of_block), tuple(of_box)
