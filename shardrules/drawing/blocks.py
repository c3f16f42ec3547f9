"""Which device holds which block of an array: of any number of dimensions, over any mesh.

The last two dimensions are a sheet; blocks along others are sheets beside each other. Where there are many blocks along
a dimension the first ones and the last are drawn, and what lies between is hinted at.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias, final

import attrs

from shardrules.drawing.picture import Box, Mark, Picture, Words, label_width

Split: TypeAlias = tuple[int, tuple[str, ...]]
"""A dimension: its size, and the mesh axes that split it, the coarsest first."""

_SHOWN = 8
_CELL_HEIGHT, _SHEET_WIDTH, _SHEET_HEIGHT = 26, 232, 104
_TOP, _GAP, _ROW = 40, 28, 4


@final
@attrs.frozen
class Block:
    """A block of an array."""

    index: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]


@final
@attrs.frozen
class Blocks:
    """How an array is cut into blocks, and who holds them. Notebooks draw it.

    ```python
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
        """Into how many blocks each dimension is cut."""
        sizes = self.sizes
        return tuple(math.prod(sizes[axis] for axis in axes) for _, axes in self.dims)

    def all(self) -> Iterator[Block]:
        """Yields every block."""
        yield from map(self.block, itertools.product(*map(range, self.counts)))

    def block(self, index: Sequence[int]) -> Block:
        """Returns one block."""
        at: dict[str, int] = {}
        sizes = self.sizes
        bounds = []
        for (size, axes), count, place in zip(self.dims, self.counts, index, strict=True):
            step = -(-size // count) if count else size
            bounds.append((min(size, place * step), min(size, (place + 1) * step)))
            for axis in reversed(axes):
                place, at[axis] = divmod(place, sizes[axis])
        ways = [(at[axis],) if axis in at else range(size) for axis, size in self.mesh]
        return Block(tuple(index), tuple(bounds), tuple(map(self._number, itertools.product(*ways))))

    def _number(self, place: Sequence[int]) -> int:
        """The place of a device in the mesh, the last axis changing first."""
        number = 0
        for one, (_, size) in zip(place, self.mesh, strict=True):
            number = number * size + one
        return number

    def sentences(self) -> Iterator[str]:
        """Yields what is true of each dimension, in words."""
        for dim, ((size, axes), count) in enumerate(zip(self.dims, self.counts, strict=True)):
            if count == 1:
                yield f"dim {dim}: {size:,}, whole"
            else:
                step = -(-size // count)
                yield f"dim {dim}: {size:,} in {count:,} blocks of {step:,} over {', '.join(axes)}"
        copies = math.prod(size for _, size in self.mesh) // max(1, math.prod(self.counts))
        yield f"each block is on {copies:,} device{'s' * (copies > 1)}"

    def picture(self) -> Picture:
        """Draws it."""
        sheet = self._sheet()
        places = _some(math.prod(self.counts[:-2]))
        marks: list[Mark] = []
        for number, place in enumerate(places):
            x = sheet.left + (number % _ROW) * (sheet.width + _GAP)
            y = _TOP + number // _ROW * (sheet.height + _GAP + 14)
            if place is None:
                marks.append(Words(x + sheet.width / 2, y + sheet.height / 2, "…", "middle"))
            else:
                marks += self._drawn(sheet, self._outer(place), x, y, numbered=number % _ROW == 0)
        captions = [(len(self.dims) - 1, (sheet.left + sheet.width / 2, 12)), (len(self.dims) - 2, (12, 0.0))]
        for dim, (x, y) in captions:
            if dim >= 0:
                axes = ", ".join(self.dims[dim][1])
                text = f"dim {dim} over {axes}" if axes else f"dim {dim}"
                marks.append(Words(x, y or _TOP + sheet.height / 2, text, "middle", upright=not y))
        width = sheet.left + min(len(places), _ROW) * (sheet.width + _GAP)
        height = _TOP + -(-len(places) // _ROW) * (sheet.height + _GAP + 14) - 14 * (len(places) == 1)
        return Picture(width, height, tuple(marks), f"which device holds which block: {'; '.join(self.sentences())}")

    def _repr_html_(self) -> str:
        return self.picture().to_svg()

    def _sheet(self) -> "_Sheet":
        rows = _some(self.counts[-2]) if len(self.dims) > 1 else [0]
        columns = _some(self.counts[-1]) if self.dims else [0]
        beside = [_range(self._bounds(-2, row)) for row in rows if row is not None] if len(rows) > 1 else []
        above = [_range(self._bounds(-1, one)) for one in columns if one is not None] if len(columns) > 1 else []
        wide = max([58.0, _SHEET_WIDTH / len(columns), *(label_width(text) for text in above)])
        left = 24 + max([0.0, *(label_width(text) for text in beside)])
        return _Sheet(tuple(rows), tuple(columns), wide, max(_CELL_HEIGHT, _SHEET_HEIGHT / len(rows)), left)

    def _outer(self, place: int) -> tuple[int, ...]:
        """The place along the dimensions before the last two of the sheet with this number."""
        found: list[int] = []
        for count in reversed(self.counts[:-2]):
            place, at = divmod(place, count)
            found.insert(0, at)
        return tuple(found)

    def _drawn(self, sheet: "_Sheet", first: tuple[int, ...], x: float, y: float, *, numbered: bool) -> Iterator[Mark]:
        """The blocks of the last two dimensions, for one place along the others."""
        cut = [dim for dim, count in enumerate(self.counts[:-2]) if count > 1]
        if cut:
            said = ", ".join(f"dim {dim} [{_range(self._bounds(dim, first[dim]))}]" for dim in cut)
            yield Words(x + sheet.width / 2, y + sheet.height + 12, said, "middle")
        for (down, row), (across, column) in itertools.product(enumerate(sheet.rows), enumerate(sheet.columns)):
            where = x + across * sheet.cell_width, y + down * sheet.cell_height
            if row is None or column is None:
                yield Words(where[0] + sheet.cell_width / 2, where[1] + sheet.cell_height / 2 + 4, "…", "middle")
                continue
            index = (*first, row, column)[-len(self.dims) :] if self.dims else ()
            yield self._box(self.block(index), where, sheet)
        for across, column in enumerate(sheet.columns if len(sheet.columns) > 1 else ()):
            if column is not None:
                middle = x + (across + 0.5) * sheet.cell_width
                yield Words(middle, y - 5, _range(self._bounds(-1, column)), "middle")
        for down, row in enumerate(sheet.rows if len(sheet.rows) > 1 and numbered else ()):
            if row is not None:
                middle = y + (down + 0.5) * sheet.cell_height + 4
                yield Words(x - 5, middle, _range(self._bounds(-2, row)), "end")

    def _bounds(self, dim: int, place: int) -> tuple[int, int]:
        index = [0] * len(self.dims)
        index[dim] = place
        return self.block(index).bounds[dim]

    def _box(self, block: Block, where: tuple[float, float], sheet: "_Sheet") -> Box:
        whole = math.prod(self.counts) == 1
        where_text = ", ".join(f"[{_range(one)}]" for one in block.bounds) or "the number"
        devices = ranges(block.devices)
        many = len(block.devices) > 1
        title = f"{where_text}: on device{'s' * many} {devices}"
        label = f"all {len(block.devices)} devices" if whole and many else devices
        if label_width(label) > sheet.cell_width:
            label = f"{block.devices[0]} +{len(block.devices) - 1}"
        return Box(*where, sheet.cell_width, sheet.cell_height, None if whole else sum(block.index), label, title)


@final
@attrs.frozen
class _Sheet:
    """How the blocks of the last two dimensions are drawn: which of them, and how large."""

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


def _some(count: int) -> list[int | None]:
    """The places that are drawn of so many; `None` for those between, where there are too many."""
    if count <= _SHOWN:
        return [*range(count)]
    return [*range(_SHOWN - 2), None, count - 1]


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]:,}–{bounds[1] - 1:,}" if bounds[1] - bounds[0] > 1 else f"{bounds[0]:,}"


def ranges(numbers: Sequence[int]) -> str:
    """Returns numbers as a person writes them, `0-3,6` for 0, 1, 2, 3, 6.

    ```python
    assert ranges([0, 1, 2, 3, 6]) == "0-3,6"
    ```
    """
    runs: list[list[int]] = []
    for one in numbers:
        if runs and one == runs[-1][-1] + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
