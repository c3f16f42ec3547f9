"""Boxes of an array, and how they lie in a file that holds the array: as runs of equal length at equal distances.

Where runs are short, boxes that lie beside each other are read and written together, a block of rows at a time.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from shardrules.placement.source import Index

Box: TypeAlias = tuple[tuple[int, int], ...]
"""The start and the stop of a box in each dimension."""

_LONG_BYTES = 256 * 2**10
"""Runs of this length are read and written one by one: a call costs little beside their bytes. Chosen by hand."""

_TOGETHER_BYTES = 2**30
"""The most that is read or written together, since the host keeps it meanwhile. Chosen by hand."""

BLOCK_BYTES = 2 * 2**20
"""The bytes that are put together, cut and checked at once, so that they stay in caches. Chosen by hand."""

_PAGE_BYTES = 4096


def box_of(index: Index, shape: tuple[int, ...]) -> Box:
    """Returns the box that slices without steps cut from an array of this shape."""
    pairs = (cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))
    return tuple((start, max(start, stop)) for start, stop in pairs)


def box_sizes(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def byte_steps(shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Returns how far apart neighbours in each dimension are in the file."""
    return [itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def byte_range(box: Box, steps: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Returns the first byte of a box, from the beginning of the array, and the first after it."""
    start = sum(first * step for (first, _), step in zip(box, steps, strict=True))
    return start, start + sum(
        (stop - first - 1) * step for (first, stop), step in zip(box, steps, strict=True)
    ) + itemsize


def run_of(sizes: tuple[int, ...], steps: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Returns from which dimension on a box is contiguous in the file, and the bytes of such a run."""
    run_bytes = itemsize
    for dim in reversed(range(len(sizes))):
        if sizes[dim] > 1 and steps[dim] != run_bytes:
            return dim + 1, run_bytes
        run_bytes *= sizes[dim]
    return 0, run_bytes


def box_groups(boxes: Sequence[Box], shape: tuple[int, ...], itemsize: int) -> list[tuple[list[int], Box]]:
    """Returns the indices of boxes in groups, each with the box that it fills.

    Boxes that lie beside each other are one group where their runs are short. The last dimension is joined first: it
    makes runs longer.
    """
    groups = [([index], box) for index, box in enumerate(boxes)]
    steps = byte_steps(shape, itemsize)
    for dim in reversed(range(len(shape))):
        # The first group stands for all: shards of an array have nearly equal sizes.
        if not groups or run_of(box_sizes(groups[0][1]), steps, itemsize)[1] >= _LONG_BYTES:
            break
        if any(box[dim] != (0, shape[dim]) for _, box in groups):
            groups = _joined(groups, dim, itemsize)
    return groups


def _joined(groups: list[tuple[list[int], Box]], dim: int, itemsize: int) -> list[tuple[list[int], Box]]:
    """Joins groups that differ only in dimension `dim`, and there lie beside each other."""
    # Sorted by all other dims first, neighbours along this one follow each other.
    keyed = sorted(groups, key=lambda group: (group[1][:dim] + group[1][dim + 1 :], group[1][dim]))
    result = keyed[:1]
    for indices, box in keyed[1:]:
        others, last = result[-1]
        whole = (*box[:dim], (last[dim][0], box[dim][1]), *box[dim + 1 :])
        is_beside = whole == (*last[:dim], whole[dim], *last[dim + 1 :]) and last[dim][1] == box[dim][0]
        if is_beside and math.prod(box_sizes(whole)) * itemsize <= _TOGETHER_BYTES:
            result[-1] = ([*others, *indices], whole)
        else:
            result.append((indices, box))
    return result


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
    common = [(max(a, b), min(c, d)) for (a, c), (b, d) in zip(block, box, strict=True)]
    if any(low >= high for low, high in common):
        return None
    of_block, of_box = (
        tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(common, whole, strict=True))
        for whole in (block, box)
    )
    return of_block, of_box
