"""Tables of what a chip was measured at: matmuls by size, collectives by kind, group and bytes."""

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, Literal, TypeAlias, TypeVar, final

import attrs

Fractions = tuple[tuple[str, float], ...]
"""Fractions of a peak by kind; `"all"` is for the kinds that are not named."""

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
"""The kinds of collectives, as XLA writes them."""

Access: TypeAlias = Literal["copy", "read", "gather"]
"""The use of memory: read and written in order, read in order, or in rows at any positions."""

ROW_BYTES = 512
"""The pieces that are gathered: 128 numbers of 4 bytes, as a TPU holds them together. Larger ones are gathered as fast
as a whole array is read; smaller ones take a part of what a memory reads at once."""

_Table = TypeVar("_Table")


def is_number(value: object) -> bool:
    """Returns whether it is a number, which bools are not here."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


# Converters leave what they cannot convert as it is: `sheet_checks` lists everything that is wrong in one error.
def as_pairs(value: Mapping[str, float] | Iterable[tuple[str, float]]) -> Fractions:
    """Converts a mapping, or its pairs."""
    try:
        pairs = [(name, number) for name, number in (value.items() if isinstance(value, Mapping) else value)]
    except (TypeError, ValueError):
        # A value of another type stays as it is, for the check that lists everything wrong with a sheet.
        return value  # pyright: ignore[reportReturnType]
    return tuple((str(name), float(number) if is_number(number) else number) for name, number in pairs)


def as_fractions(value: float | Mapping[str, float] | Iterable[tuple[str, float]]) -> Fractions:
    """Converts a mapping, its pairs, or a single fraction for everything."""
    return (("all", float(value)),) if is_number(value) else as_pairs(value)  # pyright: ignore[reportArgumentType]


def as_tables(kind: Callable[..., _Table]) -> Callable[[Iterable[Any]], tuple[_Table, ...]]:
    """Returns a converter of tables, each of which may be a mapping of the fields of its class."""

    def convert_table(table: Any) -> Any:
        try:
            return kind(**table) if isinstance(table, Mapping) else table
        except (TypeError, ValueError):
            return table

    def convert(value: Iterable[Any]) -> tuple[_Table, ...]:
        is_list = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
        return tuple(map(convert_table, value)) if is_list else value  # pyright: ignore[reportReturnType]

    return convert


def _as_sizes(value: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(size) for size in value)


def _as_floats(value: Iterable[Any]) -> tuple[float, ...]:
    return tuple(float(number) for number in value)


@final
@attrs.frozen(cache_hash=True)
class MatmulRates:
    """The rates of matmuls of one kind, for each combination of sizes, each in ascending order."""

    kind: str = attrs.field(validator=attrs.validators.instance_of(str))
    """One of the kinds of `peak_flops`."""
    m: tuple[int, ...] = attrs.field(converter=_as_sizes)
    n: tuple[int, ...] = attrs.field(converter=_as_sizes)
    k: tuple[int, ...] = attrs.field(converter=_as_sizes)
    flops_per_second: tuple[float, ...] = attrs.field(converter=_as_floats, repr=False)
    """For each `m`, for each `n`, for each `k`, one after the other."""
    peak: float = attrs.field(converter=float)
    """The peak of the chip that was measured: on hardware with another peak all rates are that much higher or lower."""

    def problems(self) -> list[str]:
        """Everything that is wrong with it."""
        sizes = (self.m, self.n, self.k)
        bad = [
            f"{name} must be ascending positive sizes, got {dims}"
            for name, dims in zip("mnk", sizes, strict=True)
            if _bad(dims)
        ]
        count = math.prod(map(len, sizes))
        if len(self.flops_per_second) != count:
            bad.append(
                f"flops_per_second needs {count} rates, one for each m, n and k; got {len(self.flops_per_second)}"
            )
        if not all(0 < rate < math.inf for rate in (*self.flops_per_second, self.peak)):
            bad.append("rates and peak must be positive and finite")
        return [f"matmul_rates of {self.kind!r}: {problem}" for problem in bad]


@final
@attrs.frozen(cache_hash=True)
class CollectiveTimes:
    """The times of a collective of one kind in groups of one size inside a host, by its bytes in ascending order."""

    kind: str = attrs.field(validator=attrs.validators.instance_of(str))
    group_size: int = attrs.field(validator=attrs.validators.instance_of(int))
    payload_bytes: tuple[int, ...] = attrs.field(converter=_as_sizes, repr=False)
    """The bytes of the whole array: gathered, reduced, or exchanged or sent by one device."""
    seconds: tuple[float, ...] = attrs.field(converter=_as_floats, repr=False)
    link_bytes_per_second: float = attrs.field(converter=float)
    """The rate of the measured links: on hardware with other links, sending takes more or less time."""

    def problems(self) -> list[str]:
        """Everything that is wrong with it."""
        bad = []
        if self.group_size < 2:
            bad.append("a group has at least 2 devices")
        if _bad(self.payload_bytes) or len(self.payload_bytes) != len(self.seconds):
            bad.append("payload_bytes must be ascending and positive, with one of seconds for each")
        if any(earlier > later for earlier, later in pairwise(self.seconds)):
            bad.append("seconds must not fall with more bytes")
        if not all(0 < number < math.inf for number in (*self.seconds, self.link_bytes_per_second)):
            bad.append("seconds and link_bytes_per_second must be positive and finite")
        return [f"collective_times of {self.kind!r} in groups of {self.group_size}: {problem}" for problem in bad]


def _bad(sizes: tuple[int, ...]) -> bool:
    return not sizes or sizes[0] < 1 or any(low >= high for low, high in pairwise(sizes))
