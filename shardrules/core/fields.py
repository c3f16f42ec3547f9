"""Converters for the fields of rules, which refuse in words what cannot be meant."""

import math
import numbers
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from shardrules.core.errors import SpecError


def integer(name: str, least: int | None = None) -> Callable[[Any], int]:
    """Returns a converter to an integer.

    **Arguments:**

    - `name`: the field, for the message.
    - `least`: the least value that makes sense.

    **Returns:**

    A function that returns an `int`, and raises `SpecError` for anything else.

    ```python
    assert integer("dims", 1)(np.int64(2)) == 2
    ```
    """

    def convert(value: Any) -> int:
        try:
            found = operator.index(value)
        except TypeError:
            raise SpecError(f"{name} is an integer, got {value!r}") from None
        if least is not None and found < least:
            raise SpecError(f"{name} is {least} or more, got {found}")
        return found

    return convert


def byte_count(name: str) -> Callable[[Any], int]:
    """Returns a converter to a number of bytes, for which `16e9` will do.

    **Arguments:**

    - `name`: the field, for the message.

    **Returns:**

    A function that returns an `int`, and raises `SpecError` for what is no number of bytes.

    ```python
    assert byte_count("limit")(16e9) == 16_000_000_000
    ```
    """

    def convert(value: Any) -> int:
        found = _number(value)
        if found is None or not 0 <= found < math.inf:
            raise SpecError(f"{name} is a number of bytes, 0 or more; got {value!r}")
        return int(found)

    return convert


_DECIMAL = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {**_DECIMAL, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def read_bytes(name: str, value: float | str) -> int:
    """Returns a number of bytes that may be written with a unit.

    **Arguments:**

    - `name`: what it is, for the message.
    - `value`: a number, or a text such as `"80GB"` or `"40 GiB"`.

    **Returns:**

    A whole number.

    **Raises:**

    `SpecError` for anything else.

    ```python
    assert read_bytes("budget", "1.5 KiB") == read_bytes("budget", 1536) == 1536
    ```
    """
    if not isinstance(value, str):
        return byte_count(name)(value)
    found = _BYTES.fullmatch(value)
    if found is None or found[2] not in _UNITS:
        raise SpecError(f"{name} is bytes, or a text like '80GB' with one of {', '.join(_UNITS)}; got {value!r}")
    return int(Decimal(found[1]) * _UNITS[found[2]])


def _number(value: Any) -> int | float | None:
    """A number of any kind, such as NumPy's, as one of Python's; `None` for what is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def size_in_mb(name: str) -> Callable[[Any], float]:
    """Returns a converter to a number of MiB, which may be a fraction.

    **Arguments:**

    - `name`: the field, for the message.

    **Returns:**

    A function that returns an `int` or a `float`, and raises `SpecError` for what is none.

    ```python
    assert size_in_mb("min_size_mb")(0.5) == 0.5
    ```
    """

    def convert(value: Any) -> float:
        found = _number(value)
        if found is None or not found >= 0:
            raise SpecError(f"{name} is a number of MiB, 0 or more; got {value!r}")
        return found

    return convert


def one_of(name: str, *choices: str) -> Callable[[Any], Any]:
    """Returns a converter that lets a few words pass.

    **Arguments:**

    - `name`: the field, for the message.
    - `choices`: the words.

    **Returns:**

    A function that returns its argument, and raises `SpecError` for any other.

    ```python
    assert one_of("scope", "array", "tree")("tree") == "tree"
    ```
    """

    def convert(value: Any) -> Any:
        if value not in choices:
            raise SpecError(f"{name} is one of {', '.join(map(repr, choices))}; got {value!r}")
        return value

    return convert
