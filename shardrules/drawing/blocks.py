"""Which device holds which block of an array: of any number of dimensions, over any mesh.

The last two dimensions are a sheet; blocks along other dimensions are sheets beside each other. Of many blocks along a
dimension only the first ones and the last are drawn, with an ellipsis between them.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias, final

import attrs

from shardrules.drawing.picture import Box, Mark, Picture, Words, label_width

Split: TypeAlias = tuple[int, tuple[str, ...]]
"""A dimension: its size, and the mesh axes that split it, the most major first."""

_MOST_CELLS = 8
"""How many blocks are drawn along a dimension. Twice as many have no room for labels in a notebook."""

_CELL_HEIGHT, _SHEET_WIDTH, _SHEET_HEIGHT = 26, 232, 104
"""Pixels: a line of text with some air, and four sheets side by side on a page of 1,040 pixels."""

_TOP, _GAP, _SHEETS_PER_ROW = 40, 28, 4
"""Pixels above the first row for its captions, between sheets, and how many sheets fill a row of a page."""

_CAPTION_HEIGHT = 14
"""Pixels below a row of sheets for the line that says which sheet each of them is."""


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
        sheet = self._layout()
        sheet_indices = _drawn_indices(math.prod(self.counts[:-2]))
        marks: list[Mark] = []
        for position, sheet_index in enumerate(sheet_indices):
            x = sheet.left + (position % _SHEETS_PER_ROW) * (sheet.width + _GAP)
            y = _TOP + position // _SHEETS_PER_ROW * (sheet.height + _GAP + _CAPTION_HEIGHT)
            if sheet_index is None:
                marks.append(Words(x + sheet.width / 2, y + sheet.height / 2, "…", "middle"))
            else:
                is_first = position % _SHEETS_PER_ROW == 0
                marks += self._sheet_marks(sheet, self._outer_index(sheet_index), x, y, with_row_labels=is_first)
        # The last dimension is named above the sheets, the one before it upright at their left.
        captions = [
            (len(self.dims) - 1, sheet.left + sheet.width / 2, 12.0, False),
            (len(self.dims) - 2, 12.0, _TOP + sheet.height / 2, True),
        ]
        for dim, x, y, upright in captions:
            if dim >= 0:
                axes = ", ".join(self.dims[dim][1])
                text = f"dim {dim} over {axes}" if axes else f"dim {dim}"
                marks.append(Words(x, y, text, "middle", upright=upright))
        width = sheet.left + min(len(sheet_indices), _SHEETS_PER_ROW) * (sheet.width + _GAP)
        height = (
            _TOP
            + -(-len(sheet_indices) // _SHEETS_PER_ROW) * (sheet.height + _GAP + _CAPTION_HEIGHT)
            - _CAPTION_HEIGHT * (len(sheet_indices) == 1)  # a single sheet has no caption
        )
        return Picture(width, height, tuple(marks), f"which device holds which block: {'; '.join(self.sentences())}")

    def _repr_html_(self) -> str:
        return self.picture().to_svg()

    def _layout(self) -> "_Sheet":
        rows = _drawn_indices(self.counts[-2]) if len(self.dims) > 1 else [0]
        columns = _drawn_indices(self.counts[-1]) if self.dims else [0]
        row_labels = [_range(self._bounds(-2, row)) for row in rows if row is not None] if len(rows) > 1 else []
        column_labels = (
            [_range(self._bounds(-1, column)) for column in columns if column is not None] if len(columns) > 1 else []
        )
        # Cells get wider for the labels of columns; 58 pixels have room for 7 characters.
        cell_width = max([58.0, _SHEET_WIDTH / len(columns), *(label_width(text) for text in column_labels)])
        left = 24 + max([0.0, *(label_width(text) for text in row_labels)])
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
        split_dims = [dim for dim, count in enumerate(self.counts[:-2]) if count > 1]
        if split_dims:
            caption = ", ".join(f"dim {dim} [{_range(self._bounds(dim, outer_index[dim]))}]" for dim in split_dims)
            yield Words(x + sheet.width / 2, y + sheet.height + 12, caption, "middle")
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
        # An array in one block has the plain colour, whatever the number of devices.
        whole = math.prod(self.counts) == 1
        bounds = ", ".join(f"[{_range(dim_bounds)}]" for dim_bounds in block.bounds) or "the number"
        devices = ranges(block.devices)
        replicated = len(block.devices) > 1
        title = f"{bounds}: on device{'s' * replicated} {devices}"
        label = f"all {len(block.devices)} devices" if whole and replicated else devices
        if label_width(label) > sheet.cell_width:
            label = f"{block.devices[0]} +{len(block.devices) - 1}"
        return Box(*corner, sheet.cell_width, sheet.cell_height, None if whole else sum(block.index), label, title)


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
