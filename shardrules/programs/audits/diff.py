"""The changes between two audit reports."""

import functools
from collections.abc import Iterable, Mapping
from typing import final

import attrs

from shardrules.core.errors import printable
from shardrules.core.finding import Finding, common_path, listing, template
from shardrules.core.text import bytes_text
from shardrules.programs.audits.text import count_text
from shardrules.programs.compiled.collectives import Collective, Total, totals
from shardrules.programs.costs.step_time import seconds_text


@final
@attrs.frozen
class FigureChange:
    """A total that has changed."""

    name: str
    old: int
    new: int

    def __str__(self) -> str:
        change = f" ({self.new / self.old - 1:+.1%})" if self.old else ""
        if self.name == "nanoseconds":
            return f"time: {seconds_text(self.old / 1e9)} -> {seconds_text(self.new / 1e9)}{change}"
        figure_text = count_text if self.name == "FLOPs" else bytes_text
        return f"{self.name}: {figure_text(self.old)} -> {figure_text(self.new)}{change}"


@final
@attrs.frozen
class CollectivesChange:
    """The collectives of one kind over the same axes: their runs, and the bytes that one device sends."""

    kind: str
    axes: str
    old_runs: int
    new_runs: int
    old_bytes: int
    new_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.kind} over {self.axes}: {self.old_runs:,} runs, {bytes_text(self.old_bytes)} -> "
            f"{self.new_runs:,} runs, {bytes_text(self.new_bytes)}"
        )


@final
@attrs.frozen
class ArrayChange:
    """An argument or result that is compiled differently: its shape, dtype and spec, empty if it is absent."""

    path: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}: {self.old or 'absent'} -> {self.new or 'absent'}"


@final
@attrs.frozen(repr=False)
class AuditDiff:
    """The changes between two audit reports. It is false without any, and prints as a list.

    `old` and `new` are the function, target and mesh of each report. `appeared` are the findings that only the new
    report has, `vanished` those that only the old one has.

    ```python
    assert not sr.reports.AuditDiff("f on cpu", "f on cpu", (), (), (), (), ())
    ```
    """

    old: str
    new: str
    figures: tuple[FigureChange, ...]
    collectives: tuple[CollectivesChange, ...]
    arrays: tuple[ArrayChange, ...]
    appeared: tuple[Finding, ...]
    vanished: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return self.old != self.new or any((self.figures, self.collectives, self.arrays, self.appeared, self.vanished))

    def __str__(self) -> str:
        if not self:
            return "no difference"
        lines = [] if self.old == self.new else [f"{self.old} -> {self.new}"]
        lines += map(str, (*self.figures, *self.collectives))
        # Equal layers, whose paths differ only in an index, are one line with a count.
        layers: dict[ArrayChange, list[str]] = {}
        for change in self.arrays:
            layers.setdefault(attrs.evolve(change, path=template(change.path)), []).append(change.path)
        for change, paths in layers.items():
            count_suffix = f" x{len(paths)}" if len(paths) > 1 else ""
            lines.append(str(attrs.evolve(change, path=f"{functools.reduce(common_path, paths)}{count_suffix}")))
        lines = [*map(printable, lines)]
        for title, findings in (("new findings:", self.appeared), ("findings that are gone:", self.vanished)):
            lines += [title, listing(findings)] if findings else []
        return "\n".join(lines)

    __repr__ = __str__


def changed_collectives(old: Iterable[Collective], new: Iterable[Collective]) -> tuple[CollectivesChange, ...]:
    """Returns the kinds and axes whose runs or bytes differ, most bytes first."""
    old_totals, new_totals = (
        totals(each, lambda collective: (collective.kind, collective.axes_text)) for each in (old, new)
    )
    none = Total(0, 0, 0, 0)
    pairs = {key: (old_totals.get(key, none), new_totals.get(key, none)) for key in (*old_totals, *new_totals)}
    changes = (
        CollectivesChange(kind, axes, before.run_count, after.run_count, before.wire_bytes, after.wire_bytes)
        for (kind, axes), (before, after) in pairs.items()
        if (before.run_count, before.wire_bytes) != (after.run_count, after.wire_bytes)
    )
    return tuple(sorted(changes, key=lambda change: -max(change.old_bytes, change.new_bytes)))


def changed_arrays(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[ArrayChange, ...]:
    """Returns the paths whose descriptions differ."""
    return tuple(
        ArrayChange(path, old.get(path, ""), new.get(path, ""))
        for path in dict.fromkeys((*old, *new))
        if old.get(path) != new.get(path)
    )
