"""Values read from JSON and TOML that people may have edited, each field checked against its annotation."""

import contextlib
import json
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, final

import attrs

from shardrules.core.errors import ReportError, ShardRulesError
from shardrules.core.fields import LARGEST_INTEGER

SAVE_AGAIN = "If an earlier version of shardrules wrote it, save it again with this version"
"""The remedy of errors for fields that do not fit."""


def read_json(text: str | bytes, **options: Any) -> Any:
    """Returns what a text of JSON says; `options` are as for `json.loads`. What it cannot read is a `ValueError`."""
    with _shallow():
        return json.loads(text, **{"parse_int": _integer, "parse_constant": _constant, **options})


def read_toml(text: str) -> dict[str, Any]:
    """Returns what a text of TOML says. What it cannot read is a `ValueError`."""
    with _shallow():
        data = tomllib.loads(text)
        _check_integers(data)
        return data


def toml_string(text: str) -> str:
    """Returns a string of TOML: literal if it can be, since backslashes are common in patterns."""
    if "'" not in text and text.isprintable() and "\\" in text:
        return f"'{text}'"
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted) + '"'


@final
@attrs.frozen
class Format:
    """A kind of JSON document, which has its version under a key of its own."""

    key: str
    version: int
    """A change that older readers would misread raises it."""
    noun: str = ""
    """The document, as messages call it: `"a plan"`."""
    error_type: type[ShardRulesError] = ReportError

    def write(self, data: Mapping[str, Any]) -> str:
        """Returns the text of a document."""
        return json.dumps({self.key: self.version, **data}, indent=1)

    @contextlib.contextmanager
    def read(self, text: str) -> Iterator[dict[str, Any]]:
        """A context with the data of a document. Errors that invalid data raises inside it become `error_type`."""
        try:
            data = object_of(read_json(text), "its JSON")
            version = data.pop(self.key)
            if version != self.version:
                name = self.noun.partition(" ")[2]  # without its article
                message = f"this {name} has format {version!r}, and this version reads {self.version}"
                raise self.error_type(message)
            yield data
        except self.error_type:
            raise
        except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError) as error:
            raise self.error_type(f"this text is not {self.noun}: {problem(error)}") from error


@contextlib.contextmanager
def _shallow() -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def _integer(text: str) -> int:
    # A sign and the 19 digits of LARGEST_INTEGER. Longer text is not read: Python refuses 4,300 digits.
    if len(text) > 20 or abs(int(text)) > LARGEST_INTEGER:
        raise ValueError(f"{text:.30} does not fit in 64 bits")
    return int(text)


def _check_integers(value: Any) -> None:
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise ValueError(f"an integer of {value.bit_length()} bits does not fit in 64")
    items = list(value.values()) if isinstance(value, dict) else value
    for item in items if isinstance(items, list) else ():
        _check_integers(item)


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is not a number of JSON")
    return float(name)


def is_cut_off(error: json.JSONDecodeError) -> bool:
    """Returns whether a text is wrong only because it ends too early."""
    text = error.doc.strip()
    return text[:1] in ("{", "[") and (
        error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
    )


def problem(error: Exception) -> str:
    """Returns what is wrong with JSON that somebody may have edited, from the error of reading it."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, json.JSONDecodeError) and is_cut_off(error):
        return f"{text}; it ends too early, as a file that is cut off"
    return f"{text} is missing" if isinstance(error, KeyError) else text


def record(kind: Any, value: Any, name: str) -> Any:
    """Returns a piece of JSON as a value of the annotation `kind`; a `TypeError` or `LookupError` says where not.

    Objects become attrs classes, and lists become tuples; `int`, `float`, `str`, `bool`, `Literal` and `None` are
    checked. A union may only add `None`. Fields with a default may be missing. `name` is what messages call the value.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in parts:
            return None
        # A union that only adds `None` has one other part.
        (other,) = [part for part in parts if part is not type(None)]
        return record(other, value, name)
    if origin is tuple:
        return _tuple_record(parts, value, name)
    if origin is typing.Literal:
        return _checked(value, value in parts, name, " or ".join(map(repr, parts)))
    if attrs.has(kind):
        return _class_record(kind, value, name)
    # JSON may write 1 for 1.0. A bool is an int in Python, but not here.
    accepted = int | float if kind is float else kind
    valid = isinstance(value, accepted) and (kind not in (int, float) or not isinstance(value, bool))
    return _checked(value, valid, name, kind.__name__)


def _checked(value: Any, valid: bool, name: str, expected: str) -> Any:
    if not valid:
        raise TypeError(f"{name} must be {expected}, got {value!r:.60}")
    return value


def _tuple_record(parts: tuple[Any, ...], value: Any, name: str) -> tuple[Any, ...]:
    _checked(value, isinstance(value, list), name, "a list")
    if parts[-1] is Ellipsis:
        parts = (parts[0],) * len(value)
    _checked(value, len(parts) == len(value), name, f"a list of {len(parts)}")
    pairs = zip(parts, value, strict=True)
    return tuple(record(part, item, f"{name}[{index}]") for index, (part, item) in enumerate(pairs))


def object_of(value: Any, name: str) -> dict[str, Any]:
    """Returns a piece of JSON that must be an object."""
    return _checked(value, isinstance(value, dict), name, "an object")


def _class_record(kind: Any, value: Any, name: str) -> Any:
    object_of(value, name)
    fields = {field.name: field.default is not attrs.NOTHING for field in attrs.fields(kind)}
    missing = [field for field, has_default in fields.items() if field not in value and not has_default]
    unknown = [field for field in value if field not in fields]
    if missing or unknown:
        differences = [
            f"{', '.join(names)} {state}" for names, state in ((missing, "missing"), (unknown, "unknown")) if names
        ]
        raise LookupError(f"{name} has other fields: {'; '.join(differences)}. {SAVE_AGAIN}")
    hints = typing.get_type_hints(kind)
    return kind(**{field: record(hints[field], item, f"{name}.{field}") for field, item in value.items()})
