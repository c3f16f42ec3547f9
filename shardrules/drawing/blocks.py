"""Drawings of blocks: which device holds which part of an array.

The last two dimensions are a sheet; blocks along other dimensions are sheets beside each other. Of many blocks along a
dimension only the first ones and the last are drawn, with an ellipsis between them.
"""

import itertools
import math
from collections.abc import Iterator
from typing import final

import attrs
import numpy as np

from shardrules.core.views.blocks import Block, Blocks, ranges
from shardrules.drawing.picture import PALETTE, Box, Mark, Picture, Words, label_width

_MOST_CELLS = 8
"""The blocks that are drawn along a dimension: more have no room for labels in a notebook."""

_CELL_HEIGHT, _SHEET_WIDTH, _SHEET_HEIGHT = 26, 232, 104
"""Pixels: a line of text with some air, and four sheets side by side on a page of 1,040 pixels."""

_LINE, _GAP, _SHEETS_PER_ROW = 15, 28, 4
"""Pixels of a line of words, between sheets, and how many sheets fill a row of a page."""


def blocks_picture(blocks: Blocks) -> Picture:
    """Returns a drawing of the blocks, with the devices that hold each."""
    return _Drawing(blocks).picture()


@final
@attrs.frozen
class _Drawing:
    blocks: Blocks

    def picture(self) -> Picture:
        sheet_indices = _drawn_indices(math.prod(self.blocks.counts[:-2]))
        headings = self._headings()
        captions = [None if index is None else self._caption(index) for index in sheet_indices]
        sheet = self._layout(max(label_width(caption or "") for caption in captions))
        # Above each row of sheets are the bounds of the columns, and below it the captions.
        top = _LINE * (len(headings) + 1)
        pitch = sheet.height + _GAP + _LINE
        marks: list[Mark] = [Words(0, _LINE * (line + 1) - 4, heading) for line, heading in enumerate(headings)]
        for position, (sheet_index, caption) in enumerate(zip(sheet_indices, captions, strict=True)):
            x = sheet.left + (position % _SHEETS_PER_ROW) * (sheet.width + _GAP)
            y = top + position // _SHEETS_PER_ROW * pitch
            if sheet_index is None:
                marks.append(Words(x + sheet.width / 2, y + sheet.height / 2, "…", "middle"))
                continue
            is_first = position % _SHEETS_PER_ROW == 0
            marks += self._sheet_marks(sheet, self._outer_index(sheet_index), x, y, with_row_labels=is_first)
            if caption:
                marks.append(Words(x + sheet.width / 2, y + sheet.height + 12, caption, "middle"))
        width = sheet.left + min(len(sheet_indices), _SHEETS_PER_ROW) * (sheet.width + _GAP) - _GAP
        height = top + -(-len(sheet_indices) // _SHEETS_PER_ROW) * pitch - _GAP - _LINE * (not any(captions))
        return Picture(
            max(width, *map(label_width, ("", *headings))),
            height,
            tuple(marks),
            f"which device holds which block: {'; '.join(self.blocks.sentences())}",
        )

    def _headings(self) -> list[str]:
        """The rows and the columns of a sheet, in words."""
        headings = []
        for name, back in (("rows", 2), ("columns", 1)):
            dim = len(self.blocks.dims) - back
            if dim >= 0:
                axes = ", ".join(self.blocks.dims[dim][1])
                headings.append(f"{name}: dim {dim} over {axes}" if axes else f"{name}: dim {dim}")
        return headings

    def _caption(self, sheet_index: int) -> str:
        """The part of the dimensions before the last two that a sheet is; empty if they are whole."""
        outer_index = self._outer_index(sheet_index)
        split_dims = [dim for dim, count in enumerate(self.blocks.counts[:-2]) if count > 1]
        return ", ".join(f"dim {dim} [{_range(self._bounds(dim, outer_index[dim]))}]" for dim in split_dims)

    def _layout(self, caption_width: float) -> "_Sheet":
        rows = _drawn_indices(self.blocks.counts[-2]) if len(self.blocks.dims) > 1 else [0]
        columns = _drawn_indices(self.blocks.counts[-1]) if self.blocks.dims else [0]
        row_labels = [_range(self._bounds(-2, row)) for row in rows if row is not None] if len(rows) > 1 else []
        column_labels = (
            [_range(self._bounds(-1, column)) for column in columns if column is not None] if len(columns) > 1 else []
        )
        # Cells get wider for the labels of columns, and for captions; 58 pixels have room for 7 characters.
        cell_width = max(
            58.0,
            _SHEET_WIDTH / len(columns),
            caption_width / len(columns),
            *(label_width(text) for text in column_labels),
        )
        left = max([0.0, *(label_width(text) for text in row_labels)])
        return _Sheet(tuple(rows), tuple(columns), cell_width, max(_CELL_HEIGHT, _SHEET_HEIGHT / len(rows)), left)

    def _outer_index(self, sheet_index: int) -> tuple[int, ...]:
        """The index of a sheet along each of the dimensions before the last two."""
        return tuple(map(int, np.unravel_index(sheet_index, self.blocks.counts[:-2])))

    def _sheet_marks(
        self, sheet: "_Sheet", outer_index: tuple[int, ...], x: float, y: float, *, with_row_labels: bool
    ) -> Iterator[Mark]:
        """The blocks of the last two dimensions, at `outer_index` along the others."""
        for (i, row), (j, column) in itertools.product(enumerate(sheet.rows), enumerate(sheet.columns)):
            corner = x + j * sheet.cell_width, y + i * sheet.cell_height
            if row is None or column is None:
                yield Words(corner[0] + sheet.cell_width / 2, corner[1] + sheet.cell_height / 2 + 4, "…", "middle")
                continue
            # An array of one dim has no rows, and a number has neither: the index is cut to its dims.
            index = (*outer_index, row, column)[-len(self.blocks.dims) :] if self.blocks.dims else ()
            yield self._box(self.blocks.block(index), corner, sheet)
        for j, column in enumerate(sheet.columns if len(sheet.columns) > 1 else ()):
            if column is not None:
                middle = x + (j + 0.5) * sheet.cell_width
                yield Words(middle, y - 5, _range(self._bounds(-1, column)), "middle")
        for i, row in enumerate(sheet.rows if len(sheet.rows) > 1 and with_row_labels else ()):
            if row is not None:
                middle = y + (i + 0.5) * sheet.cell_height + 4
                yield Words(x - 5, middle, _range(self._bounds(-2, row)), "end")

    def _bounds(self, dim: int, position: int) -> tuple[int, int]:
        index = [0] * len(self.blocks.dims)
        index[dim] = position
        return self.blocks.block(index).bounds[dim]

    def _box(self, block: Block, corner: tuple[float, float], sheet: "_Sheet") -> Box:
        whole = math.prod(self.blocks.counts) == 1
        bounds = ", ".join(f"[{_range(dim_bounds)}]" for dim_bounds in block.bounds) or "the number"
        devices = ranges(block.devices)
        replicated = len(block.devices) > 1
        title = f"{bounds}: on device{'s' * replicated} {devices}"
        label = f"all {len(block.devices)} devices" if whole and replicated else devices
        # A label that does not fit names one device, and the title has all.
        if label_width(label) > sheet.cell_width:
            label = f"{block.devices[0]} +{len(block.devices) - 1}"
        return Box(*corner, sheet.cell_width, sheet.cell_height, self._colour(block), label, title)

    def _colour(self, block: Block) -> int | None:
        """Up to 8 devices have a colour each, and so have up to 8 blocks; of more blocks, neighbours differ."""
        block_count = math.prod(self.blocks.counts)
        if block_count == 1:
            # In one block, whatever the number of devices.
            return None
        if math.prod(size for _, size in self.blocks.mesh) <= len(PALETTE):
            return block.devices[0]
        if block_count <= len(PALETTE):
            return int(np.ravel_multi_index(block.index, self.blocks.counts))
        # Steps that are odd: of the 8 colours, no two neighbours along any dimension get the same.
        return sum(position * (2 * back + 1) for back, position in enumerate(reversed(block.index)))


@final
@attrs.frozen
class _Sheet:
    """The blocks of the last two dimensions that are drawn, and their size."""

    rows: tuple[int | None, ...]
    columns: tuple[int | None, ...]
    cell_width: float
    cell_height: float
    left: float

    @property
    def width(self) -> float:
        return self.cell_width * len(self.columns)

    @property
    def height(self) -> float:
        return self.cell_height * len(self.rows)


def _drawn_indices(count: int) -> list[int | None]:
    """The indices that are drawn, with `None` for an ellipsis."""
    if count <= _MOST_CELLS:
        return [*range(count)]
    return [*range(_MOST_CELLS - 2), None, count - 1]


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]:,}–{bounds[1] - 1:,}" if bounds[1] - bounds[0] > 1 else f"{bounds[0]:,}"
