"""What has changed between two reports of an audit."""

import functools
from collections.abc import Iterable, Mapping
from typing import final

import attrs

from shardrules.analysis.audits.text import count_text
from shardrules.analysis.program.collectives import Collective
from shardrules.core.check import bytes_text
from shardrules.core.finding import Finding, common_path, listing, template


@final
@attrs.frozen
class FigureChange:
    """A figure that has changed.

    **Arguments:**

    - `name`: what it is of.
    - `old`, `new`: the figure.
    """

    name: str
    old: int
    new: int

    def __str__(self) -> str:
        text = count_text if self.name == "FLOPs" else bytes_text
        change = f" ({self.new / self.old - 1:+.1%})" if self.old else ""
        return f"{self.name}: {text(self.old)} -> {text(self.new)}{change}"


@final
@attrs.frozen
class CollectivesChange:
    """What has changed about the collectives of one kind over the same axes.

    **Arguments:**

    - `kind`, `axes`: which they are.
    - `old_runs`, `new_runs`: how often they run.
    - `old_bytes`, `new_bytes`: what one device sends.
    """

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
    """An array that goes in or comes out, and is compiled in another way.

    **Arguments:**

    - `path`: the array.
    - `old`, `new`: its shape, dtype and spec; empty where there is no such array.
    """

    path: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}: {self.old or 'absent'} -> {self.new or 'absent'}"


@final
@attrs.frozen(repr=False)
class AuditDiff:
    """What has changed between two reports. It is false when nothing has, and prints as a list.

    **Arguments:**

    - `old`, `new`: function, target and mesh of each.
    - `figures`: totals that differ.
    - `collectives`: kinds and axes whose number or bytes differ.
    - `arrays`: arguments and results that are compiled otherwise.
    - `appeared`, `vanished`: findings that only the new one has, and only the old one.

    ```python
    assert not AuditDiff("f on cpu", "f on cpu", (), (), (), (), ())
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
        layers: dict[ArrayChange, list[str]] = {}
        for one in self.arrays:
            layers.setdefault(attrs.evolve(one, path=template(one.path)), []).append(one.path)
        for one, paths in layers.items():
            many = f" x{len(paths)}" if len(paths) > 1 else ""
            lines.append(str(attrs.evolve(one, path=f"{functools.reduce(common_path, paths)}{many}")))
        for title, found in (("new findings:", self.appeared), ("findings that are gone:", self.vanished)):
            lines += [title, listing(found)] if found else []
        return "\n".join(lines)

    __repr__ = __str__


def changed_collectives(old: Iterable[Collective], new: Iterable[Collective]) -> tuple[CollectivesChange, ...]:
    """Finds the kinds and axes whose collectives have changed.

    **Arguments:**

    - `old`, `new`: the collectives of two programs.

    **Returns:**

    One change for each kind and axes, those that cost most first.
    """
    before, after = _totals(old), _totals(new)
    none = (0, 0)
    found = [
        CollectivesChange(*key, before.get(key, none)[0], after.get(key, none)[0], before.get(key, none)[1], bytes_)
        for key in dict.fromkeys((*before, *after))
        for bytes_ in [after.get(key, none)[1]]
        if before.get(key, none) != after.get(key, none)
    ]
    return tuple(sorted(found, key=lambda one: -max(one.old_bytes, one.new_bytes)))


def _totals(collectives: Iterable[Collective]) -> dict[tuple[str, str], tuple[int, int]]:
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for one in collectives:
        runs, wire = totals.get((one.kind, one.axes_text), (0, 0))
        totals[one.kind, one.axes_text] = runs + one.times.count, wire + one.total_wire_bytes
    return totals


def changed_arrays(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[ArrayChange, ...]:
    """Finds the arrays that are compiled otherwise.

    **Arguments:**

    - `old`, `new`: for each path what is known of the array, as text.

    **Returns:**

    One change for each.
    """
    return tuple(
        ArrayChange(path, old.get(path, ""), new.get(path, ""))
        for path in dict.fromkeys((*old, *new))
        if old.get(path) != new.get(path)
    )
