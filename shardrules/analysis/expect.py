"""What the tests of a project hold its plans and audits to: golden plans, known collectives, and room in memory.

What is expected stands in the test, or in a file beside it. A file is written only where `update=True` says so.
"""

import functools
import json
import numbers
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import attrs

from shardrules.analysis.audits.report import AuditReport
from shardrules.analysis.audits.surprises import SMALLER
from shardrules.analysis.audits.text import array_text
from shardrules.analysis.compiling.source import short_line, users_line
from shardrules.analysis.program.collectives import KINDS, Collective
from shardrules.core.check import bytes_text
from shardrules.core.errors import ExpectationError, PlanError, ReportError, SpecError, suggest
from shardrules.core.fields import read_bytes
from shardrules.core.finding import common_path, shape_text, template
from shardrules.core.rule import ShardingPlan
from shardrules.core.spec import spec_repr
from shardrules.core.storage.files import write_text
from shardrules.mesh.shape import mesh_shape

_LIMITS = ("runs", "wire_bytes", "max_runs", "max_wire_bytes")
_SHOWN = 3
"""How many of what costs most an error lists."""


def assert_plan_matches(plan: ShardingPlan, file: Path | str, *, update: bool = False, strict: bool = False) -> None:
    """Holds a plan to the golden one in a file.

    **Arguments:**

    - `plan`: the plan as it is now.
    - `file`: JSON that `update=True` or `plan.to_json()` wrote.
    - `update`: writes the plan instead of comparing, if the file says anything else. Folders are made.
    - `strict`: whether rules and reasons must be the same too, and not just mesh, arrays and placements.

    **Raises:**

    `ExpectationError` with all that differs and what it means in bytes, or when there is no such file; `PlanError` when
    the file holds no plan, or one that was changed by hand.

    ```python
    plan = sr.DimShardingRule("data", 0).plan({"w": np.ones((8, 4))}, sr.mesh_shape("data:4"))
    sr.assert_plan_matches(plan, "golden/plan.json", update=True)
    sr.assert_plan_matches(plan, "golden/plan.json")
    ```
    """
    __tracebackhide__ = True  # a failed test shows its own line, not these
    if update:
        write_text(file, f"{plan.to_json()}\n")
        return
    accept = f"assert_plan_matches(plan, {str(file)!r}, update=True)"
    text = _read(file, accept)
    try:
        golden = ShardingPlan.from_json(text)
    except PlanError as error:
        raise PlanError(f"{file}: {error}\n    -> Write it anew: {accept}", error.findings) from error
    diff = golden.diff(plan)
    lines = str(diff).splitlines() if diff else []
    lines += _reworded(golden, plan, [one.path for one in diff.changes]) if strict else []
    if lines:
        old, new = golden.memory().device_bytes, plan.memory().device_bytes
        change = f" ({new / old - 1:+.1%})" if old not in (0, new) else ""
        lines.append(f"in all {bytes_text(old)} -> {bytes_text(new)} per device{change}")
        lines.append(f"  -> If that is meant, write it: {accept}")
        raise ExpectationError("\n  ".join([f"the plan is not the one in {file}:", *lines]))


def _reworded(golden: ShardingPlan, plan: ShardingPlan, seen: Sequence[str]) -> Iterator[str]:
    """Leaves that are placed alike, by other rules or for other reasons. Equal layers are one line."""
    told = dict.fromkeys(seen)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for path in plan.paths:
        if path in told:
            continue
        old, new = (
            f"{spec_repr(one.spec)} by {one.rule_name}: {one.reason}"
            for one in (golden.decision(path), plan.decision(path))
        )
        if old != new:
            groups.setdefault((template(path), old, new), []).append(path)
    for (_, old, new), paths in groups.items():
        many = f"  x{len(paths)}" if len(paths) > 1 else ""
        yield f"{functools.reduce(common_path, paths)}{many}  {old} -> {new}"


def assert_collectives(
    report: AuditReport, expected: Mapping[str, int | Mapping[str, int]] | Path | str, *, update: bool = False
) -> None:
    """Holds the collectives of an audit to those that are expected. One that nobody expects is an error too.

    A key is a kind and axes (`"all-gather over data"`, `"all-reduce over data+model"`, `"all-to-all over part of
    data"`), a kind (`"all-gather"`), or `"*"` for all the rest. What a collective is held to is the most specific key
    that fits it. Collectives that move nothing, since their groups are one device each, are left out.

    A value is the number of runs in one call, or a mapping with any of `"runs"` and `"wire_bytes"`, which must be met
    exactly, `"max_runs"` and `"max_wire_bytes"`; `{}` allows all. Loops count as often as they go round, and once
    where nobody can tell, as in the report.

    **Arguments:**

    - `report`: the audit.
    - `expected`: from key to value, or a JSON file with that.
    - `update`: writes what the report has to the file instead of comparing, if the file says anything else. Folders are
        made.

    **Raises:**

    `ExpectationError`, which lists all that differs with the dearest arrays and lines behind what is too much, or when
    there is no such file; `ReportError`, which lists all keys and values that cannot be meant.

    ```python
    mesh, x = sr.mesh_shape("data:8"), jax.ShapeDtypeStruct((64, 16), jnp.float32)
    report = sr.ShardingAnalyzer(mesh).audit(lambda x: x.sum(), x, in_shardings=P("data"))
    sr.assert_collectives(report, {"all-reduce over data": 1})
    sr.assert_collectives(report, {"all-gather": 0, "*": {"max_wire_bytes": 100}})
    ```
    """
    __tracebackhide__ = True
    in_file = isinstance(expected, str | os.PathLike)
    if update and not in_file:
        raise ReportError("update=True writes a file: give its path for what is expected, not a mapping")
    moving = [one for one in report.collectives if one.wire_bytes]
    if in_file and update:
        write_text(expected, f"{json.dumps(_present(moving), indent=1, sort_keys=True)}\n")
        return
    if in_file:
        accept = f"assert_collectives(report, {str(expected)!r}, update=True)"
        source, wanted = f" in {expected}", _loaded(_read(expected, accept), f"{expected}", accept)
        then = f"If that is meant, write it: {accept}"
    else:
        source, wanted = "", expected
        runs = {key: found["runs"] for key, found in sorted(_present(moving).items())}
        then = f"If that is meant, expect it: {runs}"
    lines = _misses(_limits(wanted, mesh_shape(report.mesh).axis_names, source), moving)
    if lines:
        where = f"{report.name} on {report.target}, mesh {report.mesh}"
        head = f"{where}: the collectives are not those expected{source}:"
        raise ExpectationError("\n  ".join([head, *lines, f"  -> {then}"]))


def _present(moving: Iterable[Collective]) -> dict[str, dict[str, int]]:
    """What there is, in the form in which it can be expected."""
    found: dict[str, dict[str, int]] = {}
    for one in moving:
        total = found.setdefault(f"{one.kind} over {one.axes_text}", {"runs": 0, "wire_bytes": 0})
        total["runs"] += one.times.count
        total["wire_bytes"] += one.total_wire_bytes
    return found


@final
@attrs.frozen
class _Limit:
    """What may be there of the collectives that a key is for: numbers by their names, which are those of `_LIMITS`."""

    key: str
    numbers: tuple[tuple[str, int], ...]

    def misses(self, runs: int, wire_bytes: int) -> Iterator[tuple[bool, str]]:
        """Whether there is too much of something, and what was expected and found."""
        for name, number in self.numbers:
            is_runs, most = name.endswith("runs"), name.startswith("max_")
            found, unit = (runs, "run") if is_runs else (wire_bytes, "wire byte")
            if found > number or (found < number and not most):
                yield found > number, f"{'at most ' * most}{_count(number, unit)} expected, {found:,} found"


def _misses(limits: Mapping[tuple[str, str], _Limit], moving: Iterable[Collective]) -> list[str]:
    groups: dict[tuple[str, str], list[Collective]] = {key: [] for key in limits}
    beyond: dict[str, list[Collective]] = {}
    for one in moving:
        keys = ((one.kind, one.axes_text), (one.kind, ""), ("*", ""))
        key = next((key for key in keys if key in limits), None)
        same = beyond.setdefault(f"{one.kind} over {one.axes_text}", []) if key is None else groups[key]
        same.append(one)
    lines: list[str] = []
    for key, same in groups.items():
        found = list(limits[key].misses(*_total(same)))
        if found:
            lines.append(f"{limits[key].key}: {'; '.join(text for _, text in found)}")
            lines += _dearest(same) if any(too_much for too_much, _ in found) else []
    for name, same in beyond.items():
        runs, wire_bytes = _total(same)
        lines.append(f"{name}: not expected, {_count(runs, 'run')} and {_count(wire_bytes, 'wire byte')} found")
        lines += _dearest(same)
    return lines


def _total(collectives: Iterable[Collective]) -> tuple[int, int]:
    pairs = [(one.times.count, one.total_wire_bytes) for one in collectives]
    return sum(runs for runs, _ in pairs), sum(wire_bytes for _, wire_bytes in pairs)


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}{'s' * (number != 1)}"


def _dearest(collectives: Iterable[Collective]) -> Iterator[str]:
    """The collectives that cost most: those of one line and operation that move the same in each layer are one."""
    groups: dict[tuple[str, str, str], list[Collective]] = {}
    for one in collectives:
        groups.setdefault((template(array_text(one)), users_line(one.stack), one.op_name), []).append(one)
    order = sorted(groups.items(), key=lambda item: -_total(item[1])[1])
    for (_, line, op), same in order[:_SHOWN]:
        runs, wire_bytes = _total(same)
        at, by = f" at {short_line(line)}" if line else "", f" ({op})" if op else ""
        array = functools.reduce(common_path, map(array_text, same))
        yield f"  {bytes_text(wire_bytes)} in {_count(runs, 'run')}: {array}{at}{by}"
    if order[_SHOWN:]:
        yield f"  {len(order) - _SHOWN} more"


def _limits(expected: Any, axes: Sequence[str], source: str) -> dict[tuple[str, str], _Limit]:
    """What is expected, by kind and axes; all that cannot be meant is one error."""
    if not isinstance(expected, Mapping):
        raise ReportError(f"the expected collectives{source} are a mapping from text to numbers, got {expected!r:.80}")
    problems: list[str] = []
    limits: dict[tuple[str, str], _Limit] = {}
    for key, value in expected.items():
        wrong: list[str] = []
        kind, over = _kind_and_axes(key, axes, wrong)
        if (kind, over) in limits and not wrong:
            wrong.append(f"the same as {limits[kind, over].key!r}")
        limits.setdefault((kind, over), _Limit(str(key), tuple(_numbers(value, wrong))))
        problems += [f"  {key!r}: {text}" for text in wrong]
    if problems:
        raise ReportError("\n".join([f"the expected collectives{source} cannot be meant:", *problems]))
    return limits


def _kind_and_axes(key: object, axes: Sequence[str], wrong: list[str]) -> tuple[str, str]:
    """The kind that a key names, and its axes in the order of the mesh; empty for any."""
    if not isinstance(key, str):
        wrong.append("a key is a text, such as 'all-gather over data'")
        return "", ""
    kind, written, over = key.partition(" over ")
    if written and kind == "*":
        wrong.append("'*' is for all the rest, over whatever axes")
    elif key != "*" and kind not in KINDS:
        wrong.append(f"there is no kind {kind!r}{suggest(kind, KINDS)}: the kinds are {', '.join(KINDS)}")
    if not written or re.fullmatch(r"groups of \d+", over):
        return kind, over
    part = "part of " if over.startswith("part of ") else ""
    names = over.removeprefix(part).split("+")
    mesh = ", ".join(axes)
    wrong += [
        f"axis {name!r} is not in the mesh ({mesh}){suggest(name, axes)}"
        for name in dict.fromkeys(names)
        if name not in axes
    ]
    wrong += [f"axis {name!r} comes twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    return kind, part + "+".join(name for name in axes if name in names)


def _numbers(value: object, wrong: list[str]) -> Iterator[tuple[str, int]]:
    for name, number in value.items() if isinstance(value, Mapping) else [("runs", value)]:
        if name not in _LIMITS:
            wrong.append(
                f"there is no limit {name!r}{suggest(str(name), _LIMITS)}: the limits are {', '.join(_LIMITS)}"
            )
        elif isinstance(number, bool) or not isinstance(number, numbers.Integral) or number < 0:
            wrong.append(f"{name} is a whole number, 0 or more; got {number!r}")
        else:
            yield name, int(number)


def assert_fits(report: AuditReport, budget: float | str | None = None, *, reserve: float | str = 0) -> None:
    """Holds what a device needs to what it has.

    **Arguments:**

    - `report`: the audit.
    - `budget`: what a device may use: bytes, or a text such as `"80GB"` or `"40 GiB"`. `None`: what the sheet of the
        hardware says it has. That of the CPU is no real machine's: name a budget.
    - `reserve`: how much of that to keep free, for what else is on the device; as `budget`.

    **Raises:**

    `ExpectationError`, which says by how much it is too much, what takes it, and what to do; `SpecError` for what is no
    number of bytes.

    ```python
    report = sr.ShardingAnalyzer(sr.mesh_shape("data:8")).audit(lambda x: x @ x.T, jnp.ones((64, 64)))
    sr.assert_fits(report, "1 MiB", reserve="16 KiB")
    ```
    """
    __tracebackhide__ = True
    kept, has = read_bytes("reserve", reserve), report.hardware.memory_bytes
    most = has if budget is None else read_bytes("budget", budget)
    if kept > most:
        raise SpecError(f"reserve is {bytes_text(kept)}, more than the {bytes_text(most)} that there are")
    peak, left = report.peak_bytes, most - kept
    if peak <= left:
        return
    whole = f"{bytes_text(most)} of {'the budget' if budget is not None else report.hardware.name}"
    room = f"the {bytes_text(left)} that are left of {whole}" if kept else f"the {whole}"
    shares = sorted(report.memory.shares().items(), key=lambda item: -item[1])
    where, beyond = f"{report.name} on {report.target}, mesh {report.mesh}", peak - left
    need = f"a device needs {bytes_text(peak)}, {bytes_text(beyond)} ({_count(beyond, 'byte')}) more than {room}"
    lines = [
        f"{where}, does not fit: {need}",
        ", ".join(f"{name} {bytes_text(size)} ({size / peak:.0%})" for name, size in shares if size),
        *_largest(report),
        f"  -> {SMALLER[shares[0][0]]}",
    ]
    raise ExpectationError("\n  ".join(lines))


def _largest(report: AuditReport) -> Iterator[str]:
    """The arguments that take most of a device. Equal layers are one line."""
    groups: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for one in report.arrays:
        if one.role != "result":
            kind = (template(one.path), f"{shape_text(one.shape)} {one.dtype} {one.compiled}")
            groups.setdefault(kind, []).append((one.path, one.device_bytes))
    order = sorted(groups.items(), key=lambda item: -sum(size for _, size in item[1]))
    yield from ["largest arguments:"] if order else []
    for (_, text), same in order[:_SHOWN]:
        many = f"  x{len(same)}" if len(same) > 1 else ""
        path = functools.reduce(common_path, (path for path, _ in same))
        yield f"  {bytes_text(sum(size for _, size in same))}: {path}{many}  {text}"


def _read(file: Path | str, accept: str) -> str:
    """The text of a golden file. Bytes that are no text are for whoever reads it to refuse."""
    __tracebackhide__ = True
    if not Path(file).exists():
        where = "" if Path(file).is_absolute() else f" in {Path.cwd()}"
        raise ExpectationError(
            f"there is no file {file}{where}\n    -> Write it, and keep it in your repository: {accept}"
        )
    return Path(file).read_text(encoding="utf-8", errors="replace")


def _loaded(text: str, file: str, accept: str) -> Any:
    __tracebackhide__ = True
    try:
        return json.loads(text, object_pairs_hook=_once_each)
    except ValueError as error:
        raise ReportError(f"{file} cannot be read as JSON: {error}\n    -> Write it anew: {accept}") from error


def _once_each(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ValueError(f"there are two of {', '.join(map(repr, twice))}")
    return dict(pairs)
