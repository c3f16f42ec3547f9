"""Values read from JSON that people may have edited, each field checked against its annotation."""

import types
import typing
from typing import Any

import attrs


def record(kind: Any, value: Any, at: str) -> Any:
    """Returns what a piece of JSON stands for.

    **Arguments:**

    - `kind`: an annotation: a class of attrs, `int`, `float`, `str`, `bool`, a `Literal`, a tuple of these, or one of
        them or `None`.
    - `value`: what JSON has there: an object for a class, a list for a tuple.
    - `at`: where that is, for messages.

    **Returns:**

    A value of that kind.

    **Raises:**

    `TypeError` where `value` is something else, `LookupError` for a field that is missing or surplus; both say where.

    ```python
    @attrs.frozen
    class Size:
        name: str
        dims: tuple[int, ...]

    assert record(Size, {"name": "x", "dims": [1, 2]}, "size") == Size("x", (1, 2))
    ```
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in parts:
            return None
        (rest,) = [part for part in parts if part is not type(None)]
        return record(rest, value, at)
    if origin is tuple:
        return _tuple(parts, value, at)
    if origin is typing.Literal:
        return _checked(value, value in parts, at, " or ".join(map(repr, parts)))
    if attrs.has(kind):
        return _fields(kind, value, at)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fine = number and (kind is float or isinstance(value, int)) if kind in (int, float) else isinstance(value, kind)
    return _checked(value, fine, at, kind.__name__)


def _checked(value: Any, fine: bool, at: str, wanted: str) -> Any:
    if not fine:
        raise TypeError(f"{at} is {value!r:.60} where {wanted} is wanted")
    return value


def _tuple(parts: tuple[Any, ...], value: Any, at: str) -> tuple[Any, ...]:
    _checked(value, isinstance(value, list), at, "a list")
    if parts[-1] is Ellipsis:
        parts = (parts[0],) * len(value)
    _checked(value, len(parts) == len(value), at, f"a list of {len(parts)}")
    return tuple(record(part, one, f"{at}[{n}]") for n, (part, one) in enumerate(zip(parts, value, strict=True)))


def _fields(kind: Any, value: Any, at: str) -> Any:
    _checked(value, isinstance(value, dict), at, "an object")
    names = [field.name for field in attrs.fields(kind)]
    wrong = [name for name in names if name not in value] + [name for name in value if name not in names]
    if wrong:
        raise LookupError(f"{at} has fields {', '.join(value)} where {', '.join(names)} are wanted")
    hints = typing.get_type_hints(kind)
    return kind(**{name: record(hints[name], value[name], f"{at}.{name}") for name in names})
