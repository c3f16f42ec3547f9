"""Converters for arguments and for the fields of rules, which raise `ConfigError` for invalid values."""

import math
import numbers
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from shardrules.core.errors import ConfigError

LARGEST_INTEGER = 2**63 - 1
"""The largest integer of 64 bits. No size is larger, and Python refuses to print integers of 4,300 digits."""


def whole_number(text: str) -> int | None:
    """Returns the number that decimal digits write; `None` for any other text, and for more than 18 digits.

    ```python
    from shardrules.core.fields import whole_number

    assert whole_number("64") == 64 and whole_number("-1") is whole_number("9" * 5000) is None
    ```
    """
    return int(text) if text.isdecimal() and len(text.lstrip("0")) <= 18 else None


def integer(name: str, least: int | None = None) -> Callable[[Any], int]:
    """Returns a converter to an integer, not below `least`, for the field `name`."""

    def convert(value: Any) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            raise ConfigError(f"{name} must be an integer, got {value!r}") from None
        if abs(number) > LARGEST_INTEGER:
            raise ConfigError(f"{name} must be an integer of 64 bits, got one of {number.bit_length()} bits")
        if least is not None and number < least:
            raise ConfigError(f"{name} must be {least} or more, got {number}")
        return number

    return convert


def byte_count(name: str) -> Callable[[Any], int]:
    """Returns a converter to a number of bytes, for the field `name`; floats such as `16e9` are also accepted."""

    def convert(value: Any) -> int:
        number = _real_number(value)
        if number is None or not 0 <= number <= LARGEST_INTEGER:
            raise ConfigError(f"{name} must be a number of bytes, 0 or more; got {_number_text(value, number)}")
        return int(number)

    return convert


_DECIMAL = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {**_DECIMAL, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def read_bytes(name: str, value: float | str) -> int:
    """Returns the number of bytes in the argument `name`: a number, or a string such as `"80GB"` or `"40 GiB"`.

    ```python
    from shardrules.core.fields import read_bytes

    assert read_bytes("budget", "1.5 KiB") == read_bytes("budget", 1536) == 1536
    ```
    """
    if not isinstance(value, str):
        return byte_count(name)(value)
    match = _BYTES.fullmatch(value)
    # The pattern has no sign: a negative number would be reported as a wrong unit.
    if value.strip().startswith("-"):
        raise ConfigError(f"{name} must be a number of bytes, 0 or more; got {value!r}")
    if match is None or match[2] not in _UNITS:
        same = [f"{match[1]}{unit}" for unit in _UNITS if match is not None and unit.lower() == match[2].lower()]
        near = f" (did you mean {same[-1]!r}?)" if same else ""
        raise ConfigError(
            f"{name} must be a number of bytes, or a string like '80GB' with one of {', '.join(_UNITS)}; got "
            f"{value!r}{near}"
        )
    # A Decimal keeps the digits that a float would round.
    count = Decimal(match[1]) * _UNITS[match[2]]
    return byte_count(name)(int(count) if count < 2**64 else math.inf)


def _real_number(value: Any) -> int | float | None:
    """A real number of any type, such as NumPy's, as one of Python's, infinite beyond 64 bits; else `None`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    if not isinstance(value, numbers.Integral):
        return float(value)
    number = int(value)
    return number if abs(number) <= LARGEST_INTEGER else math.copysign(math.inf, number)


def _number_text(value: Any, number: float | None) -> str:
    """A value as errors show it, if it can be printed."""
    return "a number beyond 64 bits" if number is not None and abs(number) > LARGEST_INTEGER else repr(value)


def size_in_mb(name: str) -> Callable[[Any], float]:
    """Returns a converter to a number of MiB, which may be a fraction, for the field `name`."""

    def convert(value: Any) -> float:
        number = _real_number(value)
        if number is None or not number >= 0:
            raise ConfigError(f"{name} must be a number of MiB, 0 or more; got {_number_text(value, number)}")
        return number

    return convert


def one_of(name: str, *choices: str) -> Callable[[Any], Any]:
    """Returns a converter that accepts only `choices`, for the field `name`."""

    def convert(value: Any) -> Any:
        if value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
        return value

    return convert
