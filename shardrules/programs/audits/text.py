"""The tables of an audit's report, each with its largest costs first."""

import functools
from collections.abc import Sequence
from typing import final

import attrs

from shardrules.core.finding import Finding, common_path, template
from shardrules.core.source import short_line, user_line
from shardrules.core.text import bytes_text
from shardrules.core.views.table import aligned
from shardrules.programs.audits.modules import ModuleCost
from shardrules.programs.compiled.collectives import Collective, array_text, totals, totals_by_axes
from shardrules.programs.costs.schedule import LineTime
from shardrules.programs.costs.step_time import seconds_text

_MAX_COLLECTIVES = 10
_MAX_MODULES = 12
_MAX_LINES = 10
"""The rows of the tables of collectives, modules and lines, chosen by hand: the whole report fits a screen."""

_SHADOWED = 0.01
"""The part of the step from which on the critical path is listed. Chosen by hand."""


def count_text(count: float) -> str:
    """Returns a large number with a unit."""
    for unit in ("", "k", "M", "G", "T"):
        # Three digits: 99.9 M, then 100 M. What rounds to 1000 takes the next unit.
        digits = 1 if unit and abs(count) < 99.95 else 0
        if abs(round(count, digits)) < 1000 or unit == "T":
            return f"{count:,.{digits}f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def axes_table(collectives: Sequence[Collective]) -> list[str]:
    """Returns the lines of a table of what goes over each mesh axis; none where nothing is sent."""
    kinds: dict[str, dict[str, None]] = {}
    moving = [collective for collective in collectives if collective.wire_bytes]
    for collective in moving:
        kinds.setdefault(collective.axes_text, {})[collective.kind] = None
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
    """Sorts modules by their shares of all FLOPs and of all wire bytes together, largest first."""
    flops, wire_bytes = _module_totals(modules)
    return tuple(sorted(modules, key=lambda module: -(module.flops / flops + module.wire_bytes / wire_bytes)))


def _module_totals(modules: Sequence[ModuleCost]) -> tuple[int, int]:
    """All FLOPs and all wire bytes, at least 1 each to divide by."""
    return max(1, sum(module.flops for module in modules)), max(1, sum(module.wire_bytes for module in modules))


def modules_table(modules: Sequence[ModuleCost]) -> list[str]:
    """Returns the lines of a table of the modules that cost most; none where there are no modules."""
    flops, wire_bytes = _module_totals(modules)

    def row(name: str, group: Sequence[ModuleCost]) -> tuple[str, ...]:
        group_flops, group_wire = sum(module.flops for module in group), sum(module.wire_bytes for module in group)
        return (
            name,
            count_text(group_flops),
            f"{group_flops / flops:.0%}",
            bytes_text(group_wire),
            f"{group_wire / wire_bytes:.0%}",
        )

    order = by_cost(modules)
    rows = [row(module.path, [module]) for module in order[:_MAX_MODULES]]
    rest = order[_MAX_MODULES:]
    if rest:
        rows.append(row(f"{len(rest)} more", rest))
    return aligned([("module", "FLOPs", "", "wire", ""), *rows], (1, 2, 3, 4)) if rows else []


@final
@attrs.frozen
class CollectiveGroup:
    """The collectives of one kind, axes, array and user line: how often they run, and what one device sends."""

    kind: str
    axes: str
    array: str
    line: str
    run_count: int
    wire_bytes: int


def group_collectives(collectives: Sequence[Collective]) -> tuple[CollectiveGroup, ...]:
    """Groups the collectives that send something, most bytes first. Their `arguments` have to be paths."""

    def key(collective: Collective) -> tuple[str, ...]:
        return collective.kind, collective.axes_text, array_text(collective), user_line(collective.stack)

    moving = (collective for collective in collectives if collective.wire_bytes)
    return tuple(
        CollectiveGroup(kind, axes, array, short_line(line), total.run_count, total.wire_bytes)
        for (kind, axes, array, line), total in totals(moving, key).items()
    )


def collectives_table(collectives: Sequence[Collective]) -> list[str]:
    """Returns the lines of a table of the groups of collectives that send most; none where nothing is sent."""
    rows = [
        (bytes_text(group.wire_bytes), f"{group.run_count:,}", group.kind, group.axes, group.array, group.line)
        for group in group_collectives(collectives)[:_MAX_COLLECTIVES]
    ]
    return aligned([("wire", "runs", "collective", "over", "array", "line"), *rows], (0, 1)) if rows else []


def lines_table(lines: Sequence[LineTime]) -> list[str]:
    """Returns the lines of a table of the lines of code that take most of the step; none where nothing takes time."""
    total = sum(line.seconds for line in lines)

    # If all that runs beside a collective is shorter, the lines that take time are those on the critical path.
    is_shadowed = any(abs(line.critical_seconds - line.seconds) > _SHADOWED * total for line in lines)

    def row(name: str, group: Sequence[LineTime]) -> tuple[str, ...]:
        seconds, compute, sent, exposed, copies, critical = (
            sum(getattr(line, f"{field}seconds") for line in group)
            for field in ("", "compute_", "communication_", "exposed_", "copy_", "critical_")
        )
        hidden_by = short_line(group[0].hidden_by) if len(group) == 1 and sent > exposed else ""
        shown = [seconds_text(value) if value else "" for value in (compute, sent, exposed, copies)]
        path = f"{critical / total:.0%}" if is_shadowed else ""
        return (seconds_text(seconds), f"{seconds / total:.0%}", path, *shown, name, hidden_by)

    if not total:
        return []
    rows = [row(short_line(line.line) or "(unknown)", [line]) for line in lines[:_MAX_LINES]]
    rest = lines[_MAX_LINES:]
    rows += [row(f"{len(rest)} more", rest)] if rest else []
    head = ("time", "", "critical", "compute", "sends", "exposed", "copies", "line", "hidden by")
    # Most programs wait for no copies and hide nothing: columns without content are left out.
    columns = [index for index, title in enumerate(head) if not title or any(row[index] for row in rows)]
    table = [tuple(row[index] for index in columns) for row in (head, *rows)]
    return aligned(table, tuple(range(len(columns) - 1 - (columns[-1] == 8))))


def layers_text(paths: Sequence[str]) -> str:
    """Returns the path that equal layers have in common, with their count."""
    return functools.reduce(common_path, paths) + (f"  x{len(paths)}" if len(paths) > 1 else "")


def arrays_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the lines of a table of arrays from their paths and other columns; equal layers are one row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for path, *rest in rows:
        groups.setdefault((template(path), *rest), []).append(path)
    grid = [(layers_text(paths), *rest) for (_, *rest), paths in groups.items()]
    return aligned([("array", "shape", "dtype", "role", "requested", "compiled", "donated"), *grid])


def findings_list(findings: Sequence[Finding]) -> list[str]:
    """Returns findings as lines: errors and warnings in full, notes as a count."""
    if not findings:
        return ["no findings"]
    severities = [finding.severity for finding in findings]
    counts = [
        f"{severities.count(severity)} {severity}{'s' * (severities.count(severity) > 1)}"
        for severity in dict.fromkeys(severities)
    ]
    problems = [
        attrs.evolve(finding, source=short_line(finding.source)) for finding in findings if finding.severity != "note"
    ]
    return [f"findings: {', '.join(counts)}", *(f"  {line}" for each in problems for line in str(each).splitlines())]
