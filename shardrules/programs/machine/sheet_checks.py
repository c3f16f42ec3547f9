"""The problems of the figures of a sheet of hardware: their types first, then their ranges."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import attrs

from shardrules.core.errors import suggest
from shardrules.programs.machine.measured import KINDS, Access, CollectiveTimes, Fractions, MatmulRates, is_number

_POSITIVE = (
    *("memory_bytes", "memory_bytes_per_second", "link_bytes_per_second", "link_latency_seconds"),
    *("network_bytes_per_second", "network_latency_seconds", "network_fraction", "host_link_bytes_per_second"),
    "overlap_fraction",
)
_LEAST = {
    "torus_dims": 0,
    "devices_per_chip": 1,
    "matmul_tile": 1,
    "launch_seconds": 0,
    "collective_launch_seconds": 0,
    "clock_hertz": 0,
    "rate_spread": 0,
    "vector_memory_bytes": 0,
}
_MOST = {"network_fraction": 1, "overlap_fraction": 1, "rate_spread": 1}
_WHOLE = ("torus_dims", "devices_per_chip", "matmul_tile", "vector_memory_bytes")


def hardware_problems(figures: Mapping[str, Any], rates: Sequence[str]) -> list[str]:
    """Returns everything that is wrong with the figures of a sheet. `rates` are the kinds of multiplication."""
    problems = [problem for figure in (*_POSITIVE, *_LEAST) for problem in _number_problems(figure, figures[figure])]
    count = figures["devices_per_host"]
    if count is not None and (not _is_whole(count) or count < 1):
        problems.append(f"devices_per_host must be at least 1, or None for all devices; got {count!r}")
    problems += _pairs_problems("peak_flops", figures["peak_flops"], rates, math.inf)
    for figure, names in (
        ("matmul_fractions", rates),
        ("memory_fractions", get_args(Access)),
        ("link_fractions", KINDS),
    ):
        problems += _pairs_problems(figure, figures[figure], (*names, "all"), 1)
    if not figures["peak_flops"]:
        problems.append("peak_flops is empty")
    problems += _tables_problems("matmul_rates", figures["matmul_rates"], MatmulRates, rates)
    return problems + _tables_problems("collective_times", figures["collective_times"], CollectiveTimes, KINDS)


def _number_problems(figure: str, value: Any) -> list[str]:
    if figure in _WHOLE and not _is_whole(value):
        return [f"{figure} must be a whole number, got {value!r:.60}"]
    if not is_number(value):
        return [f"{figure} must be a number, got {value!r:.60}"]
    if figure in _POSITIVE and not 0 < value < math.inf:
        return [f"{figure} must be positive and finite, got {value!r}"]
    if figure in _LEAST and not _LEAST[figure] <= value < math.inf:
        return [f"{figure} must be at least {_LEAST[figure]}, got {value!r}"]
    most = _MOST.get(figure, math.inf)
    return [f"{figure} must be at most {most}, got {value!r}"] if value > most else []


def _pairs_problems(figure: str, pairs: Any, names: Sequence[str], most: float) -> list[str]:
    if not isinstance(pairs, tuple):
        number = "a number or " if most == 1 else ""
        return [f"{figure} must be {number}a mapping of names to numbers, got {pairs!r:.60}"]
    limits = "positive and finite" if most == math.inf else f"above 0 and at most {most}"
    bad = [
        f"{figure}[{name!r}] must be {limits if is_number(value) else 'a number'}, got {value!r:.60}"
        for name, value in pairs
        if not is_number(value) or not 0 < value <= most or value == math.inf
    ]
    return [*_named_problems(figure, pairs, names), *bad]


def _named_problems(figure: str, pairs: Fractions, names: Sequence[str]) -> list[str]:
    problems = [
        f"{figure}: unknown kind {name!r}{suggest(str(name), names)}; the kinds are {', '.join(names)}"
        for name, _ in pairs
        if name not in names
    ]
    return problems + [f"{figure} has the same kind twice"] * (len(dict(pairs)) < len(pairs))


def _tables_problems(figure: str, tables: Any, kind: type[Any], names: Sequence[str]) -> list[str]:
    if not isinstance(tables, tuple):
        return [f"{figure} must be a list of tables, got {tables!r:.60}"]
    read = [table for table in tables if isinstance(table, kind)]
    problems = [
        problem
        for index, table in enumerate(tables)
        if not isinstance(table, kind)
        for problem in _unread_problems(f"{figure}[{index}]", table, kind)
    ]
    problems += _named_problems(figure, tuple(dict.fromkeys((table.kind, 0.0) for table in read)), names)
    keys = [(table.kind, getattr(table, "group_size", 0)) for table in read]
    if len(dict.fromkeys(keys)) < len(keys):
        problems.append(f"{figure} has the same kind{' and group size' if kind is CollectiveTimes else ''} twice")
    return problems + [problem for table in read for problem in table.problems()]


def _unread_problems(name: str, table: Any, kind: type[Any]) -> list[str]:
    """The reasons why a table is none of its class: its fields, or their values."""
    fields = [field.name for field in attrs.fields(kind)]
    if not isinstance(table, Mapping):
        return [f"{name} must be a table of {', '.join(fields)}; got {table!r:.60}"]
    missing = [field for field in fields if field not in table]
    problems = [f"{name} has no {', '.join(missing)}"] * bool(missing)
    problems += [f"{name}: unknown field {key!r}{suggest(str(key), fields)}" for key in table if key not in fields]
    # The class is tried last: with wrong fields it would only say so again.
    if not problems:
        try:
            kind(**table)
        except (TypeError, ValueError) as error:
            problems.append(f"{name}: {error}")
    return problems


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
