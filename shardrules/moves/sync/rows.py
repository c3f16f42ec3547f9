"""The rows of the table of a sync: target arrays that differ in nothing but the indices in their paths are one."""

import functools
from collections.abc import Sequence
from typing import Any, final

import attrs
import numpy as np

from shardrules.core.errors import printable
from shardrules.core.finding import common_path, shape_text, template
from shardrules.core.text import bytes_text
from shardrules.core.views.table import aligned
from shardrules.moves.sync.schedule import SyncSchedule
from shardrules.moves.sync.strided import SOURCE, TARGET
from shardrules.moves.sync.table import IDENTITY, NameTable

COLUMNS = ("target", "source", "operations", "shape", "dtype", "from", "to", "moves", "stays")
"""The columns of the table."""

_LINE_COLUMNS = (1, 2)
"""The columns that stand below a row in text, where they would make it too wide."""

_SHARDINGS = (5, 6)
"""The columns with shardings."""

_BYTES_COLUMNS = (5, 6)
"""The columns of text with numbers, which are aligned to the right."""


@final
@attrs.frozen
class SyncRow:
    """Target arrays with one line and one layout. `source_sharding` is that of one of their sources, as text."""

    path: str
    count: int
    sources: tuple[str, ...]
    operations: str
    shape: tuple[int, ...]
    dtype: str
    source_sharding: str
    target_sharding: str
    moved_bytes: int
    kept_bytes: int

    def cells(self) -> tuple[str, ...]:
        """Returns the texts of the row, one for each column."""
        return (
            f"{self.path}{f'  x{self.count}' if self.count > 1 else ''}",
            ", ".join(self.sources),
            self.operations,
            shape_text(self.shape),
            self.dtype,
            self.source_sharding,
            self.target_sharding,
            bytes_text(self.moved_bytes),
            bytes_text(self.kept_bytes),
        )


def row_lines(rows: Sequence[SyncRow]) -> tuple[list[str], str]:
    """Returns the table as aligned lines, below each row the line that makes it; and the meshes, if all rows agree."""
    grid = [COLUMNS, *(row.cells() for row in rows)]
    meshes = list(dict.fromkeys(tuple(row[column].partition(" on ")[2] for column in _SHARDINGS) for row in grid[1:]))
    way = f", from {meshes[0][0]} to {meshes[0][1]}" if len(meshes) == 1 and all(meshes[0]) else ""
    if way:
        grid = [tuple(cell.partition(" on ")[0] for cell in cells) for cells in grid]
    narrow = [[cell for column, cell in enumerate(cells) if column not in _LINE_COLUMNS] for cells in grid]
    heading, rule, *texts = aligned(narrow, _BYTES_COLUMNS)
    lines = [heading, rule]
    for row, text in zip(rows, texts, strict=True):
        lines.append(text)
        if row.operations or row.sources != (IDENTITY,):
            lines.append(printable(f"  {', '.join(row.sources)}{f': {row.operations}' if row.operations else ''}"))
    return lines, way


def sync_rows(schedule: SyncSchedule, table: NameTable, line_of: np.ndarray) -> list[SyncRow]:
    """Returns the rows in the order of the target; `line_of` has the line of each of its arrays."""
    target = schedule.target
    moved, kept = _array_bytes(schedule)
    examples = _examples(schedule)
    groups: dict[Any, list[int]] = {}
    for index, path in enumerate(target.paths):
        kind = target.shapes[index], str(target.dtypes[index]), int(target.layout_of[index])
        groups.setdefault((template(path), kind, int(line_of[index])), []).append(index)
    rows: list[SyncRow] = []
    for (_, (shape, dtype, layout), line), members in groups.items():
        example = int(examples[members[0]])
        source = schedule.source.layouts[int(schedule.source.layout_of[example])].text if example >= 0 else "constants"
        rows.append(
            SyncRow(
                functools.reduce(common_path, (target.paths[index] for index in members)),
                len(members),
                table.lines[line].source,
                table.lines[line].operations,
                shape,
                dtype,
                source,
                target.layouts[layout].text,
                _total(moved, members),
                _total(kept, members),
            )
        )
    return rows


def _total(amounts: np.ndarray, members: Sequence[int]) -> int:
    return int(amounts[list(members)].sum())


def _examples(schedule: SyncSchedule) -> np.ndarray:
    """A source array of each target array; -1 where all of it is constant, or empty."""
    examples = np.full(len(schedule.target), -1)
    for flow in schedule.flows:
        if flow.source is not None:
            examples[flow.parts.arrays[TARGET]] = flow.parts.arrays[SOURCE]
    return examples


def _array_bytes(schedule: SyncSchedule) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of each target array that move, and that stay."""
    moved, kept = np.zeros(len(schedule.target), np.int64), np.zeros(len(schedule.target), np.int64)
    for flow, route in zip(schedule.flows, schedule.routes, strict=True):
        if flow.source is None:
            continue
        same = route.senders == route.receivers
        for total, chosen in ((moved, ~same), (kept, same)):
            np.add.at(total, flow.parts.arrays[TARGET], chosen.sum(axis=(1, 2)) * flow.content_bytes)
    return moved, kept
