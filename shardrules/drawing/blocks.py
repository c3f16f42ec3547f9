"""Which device holds which block of an array: of any number of dimensions, over any mesh.

The last two dimensions are a sheet; blocks along other dimensions are sheets beside each other. Of many blocks along a
dimension only the first ones and the last are drawn, with an ellipsis between them.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias, final

import attrs

from shardrules.drawing.picture import PALETTE, Box, Mark, Picture, Words, label_width

Split: TypeAlias = tuple[int, tuple[str, ...]]
"""A dimension: its size, and the mesh axes that split it, the most major first."""

_MOST_CELLS = 8
"""How many blocks are drawn along a dimension. Twice as many have no room for labels in a notebook."""

_CELL_HEIGHT, _SHEET_WIDTH, _SHEET_HEIGHT = 26, 232, 104
"""Pixels: a line of text with some air, and four sheets side by side on a page of 1,040 pixels."""

_LINE, _GAP, _SHEETS_PER_ROW = 15, 28, 4
"""Pixels of a line of words, between sheets, and how many sheets fill a row of a page."""


@final
@attrs.frozen
class Block:
    """A block of an array: its index along each dimension, its bounds, and the devices that hold it."""

    index: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]


@final
@attrs.frozen
class Blocks:
    """How an array is split into blocks, and which devices hold them. Notebooks draw it.

    ```python
    from shardrules.drawing.blocks import Blocks

    blocks = Blocks(((8, ("data",)), (6, ())), {"data": 2, "model": 2})
    assert blocks.counts == (2, 1)
    assert blocks.block((1, 0)).devices == (2, 3)
    assert blocks.block((1, 0)).bounds == ((4, 8), (0, 6))
    ```
    """

    dims: tuple[Split, ...]
    mesh: tuple[tuple[str, int], ...] = attrs.field(converter=lambda sizes: tuple(dict(sizes).items()))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis of the mesh."""
        return dict(self.mesh)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of blocks along each dimension."""
        sizes = self.sizes
        return tuple(math.prod(sizes[axis] for axis in axes) for _, axes in self.dims)

    def all(self) -> Iterator[Block]:
        """Yields every block."""
        yield from map(self.block, itertools.product(*map(range, self.counts)))

    def block(self, index: Sequence[int]) -> Block:
        """Returns the block at `index`, its position along each dimension."""
        axis_indices: dict[str, int] = {}
        sizes = self.sizes
        bounds = []
        for (size, axes), count, position in zip(self.dims, self.counts, index, strict=True):
            step = -(-size // count) if count else size  # the last blocks may be smaller, or empty
            bounds.append((min(size, position * step), min(size, (position + 1) * step)))
            for axis in reversed(axes):  # the last axis of an entry changes fastest
                position, axis_indices[axis] = divmod(position, sizes[axis])
        # Along axes that split nothing every device has a copy.
        choices = [(axis_indices[axis],) if axis in axis_indices else range(size) for axis, size in self.mesh]
        return Block(tuple(index), tuple(bounds), tuple(map(self._device_index, itertools.product(*choices))))

    def _device_index(self, coordinates: Sequence[int]) -> int:
        """The position of a device in the flattened mesh."""
        device_index = 0
        for coordinate, (_, size) in zip(coordinates, self.mesh, strict=True):
            device_index = device_index * size + coordinate
        return device_index

    def sentences(self) -> Iterator[str]:
        """Yields how each dimension is split, in words."""
        for dim, ((size, axes), count) in enumerate(zip(self.dims, self.counts, strict=True)):
            if count == 1:
                yield f"dim {dim}: {size:,}, whole"
            else:
                step = -(-size // count)
                yield f"dim {dim}: {size:,} in {count:,} blocks of {step:,} over {', '.join(axes)}"
        # Devices beyond the number of blocks hold copies.
        copies = math.prod(size for _, size in self.mesh) // max(1, math.prod(self.counts))
        yield f"each block is on {copies:,} device{'s' * (copies > 1)}"

    def picture(self) -> Picture:
        """Returns a picture of the blocks."""
        sheet_indices = _drawn_indices(math.prod(self.counts[:-2]))
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
            f"which device holds which block: {'; '.join(self.sentences())}",
        )

    def _repr_html_(self) -> str:
        return self.picture().to_svg()

    def _headings(self) -> list[str]:
        """What the rows and the columns of a sheet are, in words."""
        names = [("columns", len(self.dims) - 1), ("rows", len(self.dims) - 2)]
        headings = []
        for name, dim in names:
            if dim >= 0:
                axes = ", ".join(self.dims[dim][1])
                headings.append(f"{name}: dim {dim} over {axes}" if axes else f"{name}: dim {dim}")
        return headings[::-1]

    def _caption(self, sheet_index: int) -> str:
        """Which part of the dimensions before the last two a sheet is; empty if they are whole."""
        outer_index = self._outer_index(sheet_index)
        split_dims = [dim for dim, count in enumerate(self.counts[:-2]) if count > 1]
        return ", ".join(f"dim {dim} [{_range(self._bounds(dim, outer_index[dim]))}]" for dim in split_dims)

    def _layout(self, caption_width: float) -> "_Sheet":
        rows = _drawn_indices(self.counts[-2]) if len(self.dims) > 1 else [0]
        columns = _drawn_indices(self.counts[-1]) if self.dims else [0]
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
        index: list[int] = []
        for count in reversed(self.counts[:-2]):
            sheet_index, position = divmod(sheet_index, count)
            index.insert(0, position)
        return tuple(index)

    def _sheet_marks(
        self, sheet: "_Sheet", outer_index: tuple[int, ...], x: float, y: float, *, with_row_labels: bool
    ) -> Iterator[Mark]:
        """The blocks of the last two dimensions, at `outer_index` along the others."""
        for (i, row), (j, column) in itertools.product(enumerate(sheet.rows), enumerate(sheet.columns)):
            corner = x + j * sheet.cell_width, y + i * sheet.cell_height
            if row is None or column is None:
                yield Words(corner[0] + sheet.cell_width / 2, corner[1] + sheet.cell_height / 2 + 4, "…", "middle")
                continue
            index = (*outer_index, row, column)[-len(self.dims) :] if self.dims else ()
            yield self._box(self.block(index), corner, sheet)
        for j, column in enumerate(sheet.columns if len(sheet.columns) > 1 else ()):
            if column is not None:
                middle = x + (j + 0.5) * sheet.cell_width
                yield Words(middle, y - 5, _range(self._bounds(-1, column)), "middle")
        for i, row in enumerate(sheet.rows if len(sheet.rows) > 1 and with_row_labels else ()):
            if row is not None:
                middle = y + (i + 0.5) * sheet.cell_height + 4
                yield Words(x - 5, middle, _range(self._bounds(-2, row)), "end")

    def _bounds(self, dim: int, position: int) -> tuple[int, int]:
        index = [0] * len(self.dims)
        index[dim] = position
        return self.block(index).bounds[dim]

    def _box(self, block: Block, corner: tuple[float, float], sheet: "_Sheet") -> Box:
        whole = math.prod(self.counts) == 1
        bounds = ", ".join(f"[{_range(dim_bounds)}]" for dim_bounds in block.bounds) or "the number"
        devices = ranges(block.devices)
        replicated = len(block.devices) > 1
        title = f"{bounds}: on device{'s' * replicated} {devices}"
        label = f"all {len(block.devices)} devices" if whole and replicated else devices
        if label_width(label) > sheet.cell_width:
            label = f"{block.devices[0]} +{len(block.devices) - 1}"
        return Box(*corner, sheet.cell_width, sheet.cell_height, self._colour(block), label, title)

    def _colour(self, block: Block) -> int | None:
        """Up to 8 devices have a colour each, and so have up to 8 blocks; of more blocks, neighbours differ."""
        block_count = math.prod(self.counts)
        if block_count == 1:
            # In one block, whatever the number of devices.
            return None
        if math.prod(size for _, size in self.mesh) <= len(PALETTE):
            return block.devices[0]
        if block_count <= len(PALETTE):
            return functools.reduce(
                lambda row, pair: row * pair[1] + pair[0], zip(block.index, self.counts, strict=True), 0
            )
        # Steps that are odd: of the 8 colours, no two neighbours along any dimension get the same.
        return sum(position * (2 * back + 1) for back, position in enumerate(reversed(block.index)))


@final
@attrs.frozen
class _Sheet:
    """Which blocks of the last two dimensions are drawn, and how large."""

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


def ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers with runs as ranges: `0-3,6` for 0, 1, 2, 3, 6.

    ```python
    from shardrules.drawing.blocks import ranges

    assert ranges([0, 1, 2, 3, 6]) == "0-3,6"
    ```
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
