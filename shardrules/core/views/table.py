"""The table of a plan, in which equal layers are one row, as text and as HTML."""

import collections
import html
from collections.abc import Collection, Sequence
from typing import Any, final

import attrs

from shardrules.core.axes import AnyMesh, mesh_sizes, shown_mesh
from shardrules.core.errors import printable, shortened
from shardrules.core.finding import Finding, common_path, listing, shape_text, template
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.spec import spec_repr
from shardrules.core.text import bytes_text

COLUMNS = ("path", "shape", "dtype", "spec", "bytes/device", "rule", "reason")
"""The columns of the table of a plan."""

BYTES_COLUMN = 4
"""The column with numbers, which is aligned to the right."""

MOST_ROWS = 400
"""The rows that tables print unless they are asked for more, chosen by hand."""


@final
@attrs.frozen
class Row:
    """One row: leaves that differ in nothing but the indices in their paths.

    `leaf` and `decision` are of the first of them, `device_bytes` is for all, and `kinds` are indices in the plan.
    """

    path: str
    count: int
    leaf: Leaf
    decision: Decision
    device_bytes: int
    kinds: tuple[int, ...]

    def cells(self) -> tuple[str, ...]:
        """Returns the texts of the row, one for each column."""
        count = f"  x{self.count}" if self.count > 1 else ""
        cells = (
            f"{self.path or '(the tree)'}{count}",
            shape_text(self.leaf.shape),
            str(self.leaf.dtype),
            spec_repr(self.decision.spec),
            bytes_text(self.device_bytes),
            self.decision.rule_name,
            self.decision.reason,
        )
        return tuple(map(printable, cells))


def rows(
    paths: Sequence[str],
    leaves: Sequence[Leaf],
    decisions: Sequence[Decision],
    counts: Sequence[int],
    mesh: AnyMesh | None,
) -> tuple[Row, ...]:
    """Returns the rows of the table in the order of the tree, given path, leaf, decision and count of each kind."""
    sizes = mesh_sizes(mesh)
    groups: dict[Any, Row] = {}
    for kind, (path, leaf, decision, count) in enumerate(zip(paths, leaves, decisions, counts, strict=True)):
        spec = spec_repr(decision.spec)
        key = (template(path), leaf.shape, str(leaf.dtype), spec, decision.rule_name, decision.reason)
        amount = count * decision.device_bytes(leaf, sizes)
        old = groups.get(key)
        if old is None:
            groups[key] = Row(path, count, leaf, decision, amount, (kind,))
        else:
            groups[key] = Row(
                common_path(old.path, path),
                old.count + count,
                old.leaf,
                old.decision,
                old.device_bytes + amount,
                (*old.kinds, kind),
            )
    return tuple(groups.values())


@final
@attrs.frozen
class Totals:
    """The arrays of a plan, and the bytes that they take: each counted once, and on one device."""

    leaf_count: int
    total_bytes: int
    device_bytes: int
    mesh: AnyMesh | None

    def __str__(self) -> str:
        arrays = "1 array" if self.leaf_count == 1 else f"{self.leaf_count:,} arrays"
        share = "" if not self.total_bytes else f" ({self.device_bytes / self.total_bytes:.1%} of the whole)"
        where = "without a mesh" if self.mesh is None else f"mesh {printable(shown_mesh(self.mesh))}"
        whole, part = bytes_text(self.total_bytes), bytes_text(self.device_bytes)
        return f"{arrays}, {whole} in all, {part} per device{share}, {where}"


def totals(kinds: Sequence[Leaf], decisions: Sequence[Decision], counts: Sequence[int], mesh: AnyMesh | None) -> Totals:
    """Returns what leaves take in all and on one device; `counts` says how many leaves are of each kind."""
    sizes = mesh_sizes(mesh)
    triples = list(zip(kinds, decisions, counts, strict=True))
    return Totals(
        sum(counts),
        sum(leaf.nbytes * count for leaf, _, count in triples),
        sum(decision.device_bytes(leaf, sizes) * count for leaf, decision, count in triples),
        mesh,
    )


def table_lines(table: Sequence[Row], most: int | None = None) -> list[str]:
    """Returns the table as aligned lines: of the first rows, and how many more there are; by default all."""
    lines = aligned([COLUMNS, *(row.cells() for row in table[:most])], (BYTES_COLUMN,))
    return lines if most is None or len(table) <= most else [*lines, _more(len(table) - most)]


def _more(count: int) -> str:
    return f"and {count:,} more row{'s' * (count > 1)}: plan.table() has all"


def table_text(table: Sequence[Row], totals: Totals, findings: Sequence[Finding], most: int | None = None) -> str:
    """Returns the table as aligned text, at most so many rows of it, followed by the totals and the findings."""
    lines = [*table_lines(table, most), str(totals)]
    if findings:
        counter = collections.Counter(finding.severity for finding in findings)
        counts = [f"{count} {severity}{'s' * (count > 1)}" for severity, count in counter.items()]
        lines += ["", f"findings: {', '.join(counts)}"]
        # Notes are not printed: the table itself shows which leaves have no opinion.
        printed = [finding for finding in findings if finding.severity != "note"]
        lines += [listing(printed)] if printed else []
    return "\n".join(lines)


def aligned(grid: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Returns a table as aligned lines, with a rule under its heading. The columns in `right` are aligned to the right.

    ```python
    from shardrules.core.views.table import aligned

    assert aligned([("a", "n"), ("bc", "10")], (1,)) == ["a    n", "--  --", "bc  10"]
    ```
    """
    grid = [[*map(printable, cells)] for cells in grid]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in grid
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def table_html(table: Sequence[Row], totals: Totals, findings: Sequence[Finding]) -> str:
    """Returns the table as HTML without scripts, for notebooks; every text in it is escaped."""
    head = "".join(f"<th style='text-align:left'>{name}</th>" for name in COLUMNS)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td style='text-align:{'right' if column == BYTES_COLUMN else 'left'}'>{html.escape(cell)}</td>"
            for column, cell in enumerate(cells)
        )
        + "</tr>"
        for cells in (row.cells() for row in table[:MOST_ROWS])
    )
    if len(table) > MOST_ROWS:
        body += f"<tr><td colspan='{len(COLUMNS)}'>{_more(len(table) - MOST_ROWS)}</td></tr>"
    notes = "".join(f"<li><pre>{html.escape(str(finding))}</pre></li>" for finding in shortened(findings))
    return (
        f"<table><caption style='text-align:left'>{html.escape(str(totals))}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" + (f"<ul>{notes}</ul>" if notes else "")
    )
