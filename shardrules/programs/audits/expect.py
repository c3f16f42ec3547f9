"""Expectations of the tests of a project for its plans and audits: golden plans, collectives, and room in memory.

Expectations are in the test, or in a file beside it. A file is written only with `update=True`.
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

from shardrules.core.errors import (
    ConfigError,
    ConfigTypeError,
    ExpectationError,
    PlanError,
    ReportError,
    printable,
    shortened,
    suggest,
)
from shardrules.core.fields import read_bytes
from shardrules.core.finding import common_path, shape_text, template
from shardrules.core.rule import ShardingPlan
from shardrules.core.source import short_line, user_line
from shardrules.core.spec import spec_repr
from shardrules.core.storage.files import write_text
from shardrules.core.text import bytes_text
from shardrules.mesh.shape import mesh_shape
from shardrules.programs.audits.memory import usable_bytes
from shardrules.programs.audits.report import AuditReport
from shardrules.programs.audits.text import layers_text
from shardrules.programs.compiled.collectives import Collective, array_text, totals
from shardrules.programs.machine.measured import KINDS

_LIMITS = ("runs", "wire_bytes", "max_runs", "max_wire_bytes")
"""The counts that the value of a key may limit, exactly or with `max_` at most."""

_MAX_CAUSES = 3
"""The collectives or arguments that an error lists, by cost; chosen by hand. The report has all of them."""


def assert_plan_matches(plan: ShardingPlan, file: Path | str, *, update: bool = False, strict: bool = False) -> None:
    """Asserts that a plan is the golden plan in a file.

    **Arguments:**

    - `plan`: the current plan.
    - `file`: JSON that `update=True` or `plan.to_json()` wrote.
    - `update`: writes the plan instead of comparing, if the file differs. Folders are made.
    - `strict`: whether rules and reasons must be equal too, and not just mesh, arrays and placements.

    **Raises:**

    `ExpectationError` with all differences and what they mean in bytes, or if the file does not exist; `PlanError` if
    the file has no plan, or one that was edited by hand.

    ```python
    plan = sr.DimShardingRule("data", 0).plan({"w": np.ones((8, 4))}, sr.mesh_shape("data:4"))
    sr.assert_plan_matches(plan, "golden/plan.json", update=True)
    sr.assert_plan_matches(plan, "golden/plan.json")
    ```
    """
    __tracebackhide__ = True  # pytest then shows the failed line of the test, and not these
    if update:
        write_text(file, f"{plan.to_json()}\n")
        return
    accept = f"assert_plan_matches(plan, {str(file)!r}, update=True)"
    text = _read_golden(file, accept)
    try:
        golden = ShardingPlan.from_json(text)
    except PlanError as error:
        raise PlanError(f"{file}: {error}\n    -> Write it again: {accept}", error.findings) from error
    # A diff has only placements. Rules and reasons that changed without moving an array come after it.
    diff = golden.diff(plan)
    lines = str(diff).splitlines() if diff else []
    lines += shortened([*_reworded_leaves(golden, plan, [change.path for change in diff.changes])]) if strict else []
    if lines:
        old, new = golden.memory().device_bytes, plan.memory().device_bytes
        change = f" ({new / old - 1:+.1%})" if old not in (0, new) else ""
        lines.append(f"in total {bytes_text(old)} -> {bytes_text(new)} per device{change}")
        lines.append(f"  -> If this is intended, write it: {accept}")
        raise ExpectationError("\n  ".join([f"the plan differs from {file}:", *lines]))


def _reworded_leaves(golden: ShardingPlan, plan: ShardingPlan, changed_paths: Sequence[str]) -> Iterator[str]:
    """Leaves with the same placement, but by other rules or for other reasons. Equal layers are one line."""
    reported = dict.fromkeys(changed_paths)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for path in plan.paths:
        if path in reported:
            continue
        old, new = (
            f"{spec_repr(decision.spec)} by {decision.rule_name}: {decision.reason}"
            for decision in (golden.decision(path), plan.decision(path))
        )
        if old != new:
            groups.setdefault((template(path), old, new), []).append(path)
    for (_, old, new), paths in groups.items():
        yield printable(f"{layers_text(paths)}  {old} -> {new}")


def assert_collectives(
    report: AuditReport, expected: Mapping[str, int | Mapping[str, int]] | Path | str, *, update: bool = False
) -> None:
    """Asserts that an audit has the expected collectives, and no others.

    A key is a kind and axes (`"all-gather over data"`, `"all-reduce over data+model"`, `"all-to-all over part of
    data"`), a kind (`"all-gather"`), or `"*"` for all others. The most specific key that fits a collective applies.
    Collectives that move nothing, because their groups are single devices, are left out.

    A value is the number of runs in one call, or a mapping with any of `"runs"` and `"wire_bytes"`, which must be met
    exactly, `"max_runs"` and `"max_wire_bytes"`; `{}` allows anything. Loops count as often as they run, and once if
    that is unknown, as in the report.

    **Arguments:**

    - `report`: the audit.
    - `expected`: a mapping from key to value, or a JSON file with one.
    - `update`: writes the report's collectives to the file instead of comparing, if the file differs. Folders are made.

    **Raises:**

    `ExpectationError`, which lists all differences and the arrays and lines behind every excess, or if the file does
    not exist; `ConfigError`, which lists all invalid keys and values, or `ConfigTypeError` for anything but a mapping;
    `ReportError` if the file is not JSON.

    ```python
    mesh, x = sr.mesh_shape("data:8"), jax.ShapeDtypeStruct((64, 16), jnp.float32)
    report = sr.audit(lambda x: x.sum(), x, mesh=mesh, in_shardings=P("data"))
    sr.assert_collectives(report, {"all-reduce over data": 1})
    sr.assert_collectives(report, {"all-gather": 0, "*": {"max_wire_bytes": 100}})
    ```
    """
    __tracebackhide__ = True
    is_file = isinstance(expected, str | os.PathLike)
    if update and not is_file:
        raise ConfigError("update=True writes a file: pass its path as expected, not a mapping")
    # Groups of a single device move nothing, and which of them a compiler leaves in a program is up to it.
    moving_collectives = [collective for collective in report.collectives if collective.wire_bytes]
    if is_file and update:
        write_text(expected, f"{json.dumps(_as_expected(moving_collectives), indent=1, sort_keys=True)}\n")
        return
    if is_file:
        accept = f"assert_collectives(report, {str(expected)!r}, update=True)"
        source, expectations = f" in {expected}", _parse_json(_read_golden(expected, accept), f"{expected}", accept)
        remedy = f"If this is intended, write it: {accept}"
    else:
        source, expectations = "", expected
        runs = {key: counts["runs"] for key, counts in sorted(_as_expected(moving_collectives).items())}
        remedy = f"If this is intended, expect it: {runs}"
    lines = _differences(_read_limits(expectations, mesh_shape(report.mesh).axis_names, source), moving_collectives)
    if lines:
        where = f"{report.name} on {report.target}, mesh {report.mesh}"
        head = f"{where}: the collectives differ from those expected{source}:"
        raise ExpectationError("\n  ".join([head, *lines, f"  -> {remedy}"]))


def _as_expected(collectives: Iterable[Collective]) -> dict[str, dict[str, int]]:
    by_key = totals(collectives, lambda collective: f"{collective.kind} over {collective.axes_text}")
    return {key: {"runs": total.run_count, "wire_bytes": total.wire_bytes} for key, total in by_key.items()}


@final
@attrs.frozen
class _Limit:
    """The expectation for the collectives of a key: counts by their names, which are in `_LIMITS`."""

    key: str
    counts: tuple[tuple[str, int], ...]

    def differences(self, runs: int, wire_bytes: int) -> Iterator[tuple[bool, str]]:
        """Yields for each count that differs whether it is too high, and what was expected and found."""
        for name, count in self.counts:
            is_runs, is_maximum = name.endswith("runs"), name.startswith("max_")
            actual, unit = (runs, "run") if is_runs else (wire_bytes, "wire byte")
            # A maximum may stay unmet; any other number has to be met exactly.
            if actual > count or (actual < count and not is_maximum):
                yield actual > count, f"{'at most ' * is_maximum}{_count(count, unit)} expected, {actual:,} found"


def _differences(limits: Mapping[tuple[str, str], _Limit], collectives: Iterable[Collective]) -> list[str]:
    groups: dict[tuple[str, str], list[Collective]] = {key: [] for key in limits}
    unexpected: dict[str, list[Collective]] = {}
    for collective in collectives:
        # Only the most specific key counts a collective: of "all-gather over data" and "*" the first, for a gather over
        # data.
        keys = ((collective.kind, collective.axes_text), (collective.kind, ""), ("*", ""))
        key = next((key for key in keys if key in limits), None)
        if key is None:
            unexpected.setdefault(f"{collective.kind} over {collective.axes_text}", []).append(collective)
        else:
            groups[key].append(collective)
    lines: list[str] = []
    for key, group in groups.items():
        differences = list(limits[key].differences(*_total(group)))
        if differences:
            lines.append(f"{limits[key].key}: {'; '.join(text for _, text in differences)}")
            lines += _causes(group) if any(too_much for too_much, _ in differences) else []
    for name, group in unexpected.items():
        runs, wire_bytes = _total(group)
        lines.append(f"{name}: not expected, {_count(runs, 'run')} and {_count(wire_bytes, 'wire byte')} found")
        lines += _causes(group)
    return lines


def _total(collectives: Iterable[Collective]) -> tuple[int, int]:
    pairs = [(collective.times.count, collective.total_wire_bytes) for collective in collectives]
    return sum(runs for runs, _ in pairs), sum(wire_bytes for _, wire_bytes in pairs)


def _count(count: int, unit: str) -> str:
    return f"{count:,} {unit}{'s' * (count != 1)}"


def _causes(collectives: Iterable[Collective]) -> Iterator[str]:
    """Lists the collectives that send most. Those of one line and operation that move equal layers share a line."""
    groups: dict[tuple[str, str, str], list[Collective]] = {}
    for collective in collectives:
        key = template(array_text(collective)), user_line(collective.stack), collective.op_name
        groups.setdefault(key, []).append(collective)
    order = sorted(groups.items(), key=lambda item: -_total(item[1])[1])
    for (_, line, op_name), group in order[:_MAX_CAUSES]:
        runs, wire_bytes = _total(group)
        where, op = f" at {short_line(line)}" if line else "", f" ({op_name})" if op_name else ""
        array = functools.reduce(common_path, map(array_text, group))
        yield f"  {bytes_text(wire_bytes)} in {_count(runs, 'run')}: {printable(f'{array}{where}{op}')}"
    if order[_MAX_CAUSES:]:
        yield f"  {len(order) - _MAX_CAUSES} more"


def _read_limits(expected: Any, axes: Sequence[str], source: str) -> dict[tuple[str, str], _Limit]:
    """The limits by kind and axes. One error lists all invalid keys and values."""
    if not isinstance(expected, Mapping):
        raise ConfigTypeError(
            f"the expected collectives{source} must be a mapping from strings to numbers, got {expected!r:.80}"
        )
    lines: list[str] = []
    limits: dict[tuple[str, str], _Limit] = {}
    for key, value in expected.items():
        problems: list[str] = []
        kind, axes_text = _parse_key(key, axes, problems)
        if (kind, axes_text) in limits and not problems:
            problems.append(f"the same as {limits[kind, axes_text].key!r}")
        # The first of equal keys stays, even if it is invalid: the error is raised when all keys are read.
        limits.setdefault((kind, axes_text), _Limit(str(key), tuple(_parse_counts(value, problems))))
        lines += [f"  {key!r}: {problem}" for problem in problems]
    if lines:
        raise ConfigError("\n".join([f"invalid expected collectives{source}:", *lines]))
    return limits


def _parse_key(key: object, axes: Sequence[str], problems: list[str]) -> tuple[str, str]:
    """The kind that a key names, and its axes in the order of the mesh; empty for any axes."""
    if not isinstance(key, str):
        problems.append("keys are strings, such as 'all-gather over data'")
        return "", ""
    kind, separator, axes_text = key.partition(" over ")
    if separator and kind == "*":
        problems.append("'*' is for all others, over any axes")
    elif key != "*" and kind not in KINDS:
        problems.append(f"unknown kind {kind!r}{suggest(kind, KINDS)}; the kinds are {', '.join(KINDS)}")
    if not separator or re.fullmatch(r"groups of \d+", axes_text):
        return kind, axes_text
    # Users may name axes in any order; collectives have them in the order of the mesh.
    prefix = "part of " if axes_text.startswith("part of ") else ""
    names = axes_text.removeprefix(prefix).split("+")
    problems += [
        f"unknown axis {name!r}{suggest(name, axes)}; the mesh has ({', '.join(axes)})"
        for name in dict.fromkeys(names)
        if name not in axes
    ]
    problems += [f"axis {name!r} is named twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    return kind, prefix + "+".join(name for name in axes if name in names)


def _parse_counts(value: object, problems: list[str]) -> Iterator[tuple[str, int]]:
    for name, count in value.items() if isinstance(value, Mapping) else [("runs", value)]:
        if name not in _LIMITS:
            problems.append(f"unknown limit {name!r}{suggest(str(name), _LIMITS)}; the limits are {', '.join(_LIMITS)}")
        # A bool is an integer in Python, and a mistake here.
        elif isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 0:
            problems.append(f"{name} must be an integer, 0 or more; got {count!r}")
        else:
            yield name, int(count)


def assert_fits(report: AuditReport, budget: float | str | None = None, *, reserve: float | str = 0) -> None:
    """Asserts that what a device needs is within a budget.

    **Arguments:**

    - `report`: the audit.
    - `budget`: what a device may use: bytes, or a string such as `"80GB"` or `"40 GiB"`. `None`: the memory on the
        sheet of the hardware. The CPU's describes no real machine: pass a budget there.
    - `reserve`: how much of that to keep free, for what else is on the device; bytes or a string.

    **Raises:**

    `ExpectationError`, which says by how much it is too much, what takes it, and what to do; `ConfigError` for a bad
    number of bytes.

    ```python
    report = sr.audit(lambda x: x @ x.T, jnp.ones((64, 64)), mesh=sr.mesh_shape("data:8"))
    sr.assert_fits(report, "1 MiB", reserve="16 KiB")
    ```
    """
    __tracebackhide__ = True
    reserved, capacity = read_bytes("reserve", reserve), report.hardware.memory_bytes
    available = capacity if budget is None else read_bytes("budget", budget)
    peak, usable = report.peak_bytes, usable_bytes(available, reserved)
    if peak <= usable:
        return
    available_text = f"{bytes_text(available)} of {'the budget' if budget is not None else report.hardware.name}"
    room = f"the {bytes_text(usable)} left of {available_text}" if reserved else f"the {available_text}"
    where, excess = f"{report.name} on {report.target}, mesh {report.mesh}", peak - usable
    need = f"a device needs {bytes_text(peak)}, {bytes_text(excess)} ({_count(excess, 'byte')}) more than {room}"
    lines = [
        f"{where}, does not fit: {need}",
        report.memory.shares_text(),
        *_largest_arguments(report),
        f"  -> {report.memory.remedy}",
    ]
    raise ExpectationError("\n  ".join(lines))


def _largest_arguments(report: AuditReport) -> Iterator[str]:
    """The arguments that take most of a device. Equal layers are one line."""
    groups: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for array in report.arrays:
        if array.role != "result":
            key = (template(array.path), f"{shape_text(array.shape)} {array.dtype} {array.compiled}")
            groups.setdefault(key, []).append((array.path, array.device_bytes))
    order = sorted(groups.items(), key=lambda item: -sum(size for _, size in item[1]))
    yield from ["largest arguments:"] if order else []
    for (_, text), group in order[:_MAX_CAUSES]:
        layers = printable(layers_text([path for path, _ in group]))
        yield f"  {bytes_text(sum(size for _, size in group))}: {layers}  {text}"


def _read_golden(file: Path | str, accept: str) -> str:
    """The text of a golden file. Bytes that are not UTF-8 are replaced: the parser refuses them with a better error."""
    __tracebackhide__ = True
    if not Path(file).exists():
        where = "" if Path(file).is_absolute() else f" in {Path.cwd()}"
        raise ExpectationError(
            f"the file {file} does not exist{where}\n    -> Write it, and keep it in your repository: {accept}"
        )
    return Path(file).read_text(encoding="utf-8", errors="replace")


def _parse_json(text: str, file: str, accept: str) -> Any:
    __tracebackhide__ = True
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise ReportError(f"{file} cannot be read as JSON: {error}\n    -> Write it again: {accept}") from error


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    duplicates = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if duplicates:
        raise ValueError(f"duplicate keys {', '.join(map(repr, duplicates))}")
    return dict(pairs)
