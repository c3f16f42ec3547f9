"""How the report of an audit looks: its tables, in the order of what costs most."""

import functools
from collections.abc import Sequence
from typing import final

import attrs

from shardrules.analysis.audits.modules import ModuleCost
from shardrules.analysis.compiling.source import short_line, users_line
from shardrules.analysis.program.collectives import Collective, totals_by_axes
from shardrules.core.check import bytes_text
from shardrules.core.finding import Finding, common_path, template
from shardrules.core.views.table import aligned

_DEAREST = 10
_MODULES = 12


def count_text(count: float) -> str:
    """Returns a large number as a person reads it.

    **Arguments:**

    - `count`: for instance FLOPs.

    **Returns:**

    For instance `"1.5 T"`.

    ```python
    assert count_text(1.5e12) == "1.5 T" and count_text(640) == "640 "
    ```
    """
    for unit in ("", "k", "M", "G", "T"):
        digits = 1 if unit and abs(count) < 99.95 else 0
        if abs(round(count, digits)) < 1000 or unit == "T":
            return f"{count:,.{digits}f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def axes_table(collectives: Sequence[Collective]) -> list[str]:
    """Returns what goes along each mesh axis, as lines.

    **Arguments:**

    - `collectives`: those of a program.

    **Returns:**

    The lines; none where nothing is sent.
    """
    kinds: dict[str, dict[str, None]] = {}
    moving = [one for one in collectives if one.wire_bytes]
    for one in moving:
        kinds.setdefault(one.axes_text, {})[one.kind] = None
    rows = [
        (
            axes,
            f"{total.run_count:,}",
            bytes_text(total.payload_bytes),
            bytes_text(total.wire_bytes),
            ", ".join(kinds[axes]),
        )
        for axes, total in totals_by_axes(moving).items()
    ]
    return aligned([("mesh axis", "runs", "payload", "wire", "kinds"), *rows], (1, 2, 3)) if rows else []


def by_cost(modules: Sequence[ModuleCost]) -> tuple[ModuleCost, ...]:
    """Returns modules in the order of what they cost: their parts of all FLOPs and of all bytes on the wire.

    **Arguments:**

    - `modules`: those of a program.

    **Returns:**

    The same, the dearest first.
    """
    flops, wire = _sums(modules)
    return tuple(sorted(modules, key=lambda one: -(one.flops / flops + one.wire_bytes / wire)))


def _sums(modules: Sequence[ModuleCost]) -> tuple[int, int]:
    """All FLOPs and all bytes on the wire, to divide by."""
    return max(1, sum(one.flops for one in modules)), max(1, sum(one.wire_bytes for one in modules))


def modules_table(modules: Sequence[ModuleCost]) -> list[str]:
    """Returns what the modules cost that cost most, as lines.

    **Arguments:**

    - `modules`: those of a program.

    **Returns:**

    The lines; none where there are no modules.
    """
    flops, wire = _sums(modules)
    order = by_cost(modules)
    rows = [
        (
            one.path,
            f"{count_text(one.flops)}",
            f"{one.flops / flops:.0%}",
            bytes_text(one.wire_bytes),
            f"{one.wire_bytes / wire:.0%}",
        )
        for one in order[:_MODULES]
    ]
    more = order[_MODULES:]
    if more:
        rest = sum(one.flops for one in more), sum(one.wire_bytes for one in more)
        rows.append(
            (
                f"{len(more)} more",
                count_text(rest[0]),
                f"{rest[0] / flops:.0%}",
                bytes_text(rest[1]),
                f"{rest[1] / wire:.0%}",
            )
        )
    return aligned([("module", "FLOPs", "", "wire", ""), *rows], (1, 2, 3, 4)) if rows else []


@final
@attrs.frozen
class Moved:
    """What collectives of one line of code and one kind of array add up to.

    **Arguments:**

    - `kind`, `axes`: the kind, and the mesh axes as text.
    - `array`: what they move, as text.
    - `line`: the line of the user's own code; empty where none is known.
    - `run_count`, `wire_bytes`: how often they run in one call, and what a device sends in all of them.
    """

    kind: str
    axes: str
    array: str
    line: str
    run_count: int
    wire_bytes: int


def dearest(collectives: Sequence[Collective]) -> tuple[Moved, ...]:
    """Adds collectives up by line of code and array.

    **Arguments:**

    - `collectives`: those of a program; `arguments` are paths that people know.

    **Returns:**

    What they add up to, the dearest first; nothing for those that move nothing.
    """
    groups: dict[tuple[str, str, str, str], list[Collective]] = {}
    for one in collectives:
        if one.wire_bytes:
            groups.setdefault((one.kind, one.axes_text, array_text(one), users_line(one.stack)), []).append(one)
    found = [
        Moved(
            kind,
            axes,
            what,
            short_line(line),
            sum(one.times.count for one in same),
            sum(one.total_wire_bytes for one in same),
        )
        for (kind, axes, what, line), same in groups.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.wire_bytes))


def dearest_table(collectives: Sequence[Collective]) -> list[str]:
    """Returns the collectives that cost most, as lines: those of one line of code and one kind of array are one row.

    **Arguments:**

    - `collectives`: those of a program; `arguments` are paths that people know.

    **Returns:**

    The lines; none where nothing is sent.
    """
    rows = [
        (bytes_text(one.wire_bytes), f"{one.run_count:,}", one.kind, one.axes, one.array, one.line)
        for one in dearest(collectives)[:_DEAREST]
    ]
    return aligned([("wire", "runs", "collective", "over", "array", "line"), *rows], (0, 1)) if rows else []


def array_text(one: Collective) -> str:
    """Returns what a collective moves: the argument or arguments, if these can be told, else the largest array.

    **Arguments:**

    - `one`: the collective; `arguments` are paths that people know.

    **Returns:**

    For instance `"params/up and 3 more"`, `"f32[8,16]"`.
    """
    named = [path for path in dict.fromkeys(one.arguments) if path]
    largest = max(one.arrays, key=lambda each: each.nbytes, default="")
    count = len(named or one.arrays)
    return f"{named[0] if named else largest}{f' and {count - 1} more' if count > 1 else ''}"


def arrays_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns arrays as asked and as compiled, as lines; equal layers are one row.

    **Arguments:**

    - `rows`: for each array path, shape, dtype, role, what was asked, what was compiled, and whether it is donated.

    **Returns:**

    The lines.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for path, *rest in rows:
        groups.setdefault((template(path), *rest), []).append(path)
    grid = [
        (f"{functools.reduce(common_path, paths)}{f'  x{len(paths)}' if len(paths) > 1 else ''}", *rest)
        for (_, *rest), paths in groups.items()
    ]
    return aligned([("array", "shape", "dtype", "role", "asked", "compiled", "donated"), *grid])


def findings_list(findings: Sequence[Finding]) -> list[str]:
    """Returns findings as lines: errors and warnings in full, notes by their number.

    **Arguments:**

    - `findings`: the findings.

    **Returns:**

    The lines.
    """
    if not findings:
        return ["no findings"]
    kinds = [found.severity for found in findings]
    counted = [f"{kinds.count(kind)} {kind}{'s' * (kinds.count(kind) > 1)}" for kind in dict.fromkeys(kinds)]
    loud = [attrs.evolve(one, source=short_line(one.source)) for one in findings if one.severity != "note"]
    return [f"findings: {', '.join(counted)}", *(f"  {line}" for found in loud for line in str(found).splitlines())]
