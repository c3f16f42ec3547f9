"""Aligns two sequences: the pairs, in the order of both, that are worth most together."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

_MOST_CELLS = 2**23
"""The cells of a table of rows by columns, of 8 bytes each, before it is split in two. With half as many long
programs take a little longer, with four times as many a table takes a quarter of a gigabyte."""

Worth: TypeAlias = Callable[[int, int, int], Any]
"""What a row is worth with the columns from one to another; 0 where they are no pair."""


def align(worth: Worth, rows: tuple[int, int], columns: tuple[int, int]) -> list[tuple[int, int]]:
    """The pairs of rows and columns, both in order, that are worth most together."""
    (top, bottom), (left, right) = rows, columns
    if top == bottom or left == right:
        return []
    if (bottom - top) * (right - left) > _MOST_CELLS and bottom - top > 1:
        middle = (top + bottom) // 2
        before = _best(worth, range(top, middle), columns)[-1]
        after = _best(worth, range(bottom - 1, middle - 1, -1), columns, reverse=True)[-1][::-1]
        split = left + int(np.argmax(before + after))
        return [*align(worth, (top, middle), (left, split)), *align(worth, (middle, bottom), (split, right))]
    table = _best(worth, range(top, bottom), columns, keep=True)
    pairs = []
    row, column = bottom - top, right - left
    while row and column:
        if table[row][column] == table[row - 1][column]:
            row -= 1
        elif table[row][column] == table[row][column - 1]:
            column -= 1
        else:
            row, column = row - 1, column - 1
            pairs.append((top + row, left + column))
    return pairs[::-1]


def _best(
    worth: Worth, rows: Iterable[int], columns: tuple[int, int], *, reverse: bool = False, keep: bool = False
) -> list[Any]:
    """What the first rows are worth at most with the first columns, for each number of columns.

    The last item is for all rows; with `keep` those before are for fewer.
    """
    left, right = columns
    table = [np.zeros(right - left + 1)]
    for row in rows:
        last, values = table[-1], worth(row, left, right)
        values = values[::-1] if reverse else values
        # A pair that is worth nothing is none.
        best = np.maximum(last[1:], np.where(values, last[:-1] + values, 0))
        entry = np.concatenate(([0.0], np.maximum.accumulate(best)))
        table = table if keep else []
        table.append(entry)
    return table
