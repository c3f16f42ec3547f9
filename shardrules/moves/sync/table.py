"""`NameTable`: the correspondences between the arrays of two trees, one line for each, also as TOML."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import attrs

from shardrules.core.errors import ConfigError, ShardRulesError, shown, suggest
from shardrules.core.storage.files import as_path, read_text, write_text
from shardrules.core.storage.records import read_toml, toml_string
from shardrules.moves.sync.operation_text import read_operations
from shardrules.moves.sync.operations import NameOperation, Tied
from shardrules.moves.sync.pattern import PathPattern


def _patterns(value: Any) -> tuple[PathPattern, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not values or not all(isinstance(text, str) for text in values):
        raise ConfigError(f"expected a pattern of paths or a list of them, got {shown(value)}")
    return tuple(map(PathPattern, values))


@final
@attrs.frozen
class NameLine:
    """One correspondence: the arrays of the target that are made of arrays of the source, and how.

    `source` and `target` are patterns of paths, or lists of them, which `concat` joins and `split` makes. `{name}` in a
    pattern stands for one name between slashes or dots, `{*name}` for any text, `{layer:3-60}` for a number in a range
    and `{layer:0-60:6}` for each sixth. A name on both sides has the same value in both; `stack` uses up one that only
    the source has, and `unstack` makes one that only the target has. `operations` are what is done to the arrays, in
    order: `"transpose(1, 0) | cast('bfloat16')"`. A `ConfigError` says what is wrong with a line.

    ```python
    from shardrules.reports import NameLine

    line = NameLine("layers/attention/wq", "model.layers.{layer}.self_attn.q_proj.weight", "unstack('layer')")
    assert line.target == ("model.layers.{layer}.self_attn.q_proj.weight",)
    ```
    """

    source_patterns: tuple[PathPattern, ...] = attrs.field(alias="source", converter=_patterns)
    target_patterns: tuple[PathPattern, ...] = attrs.field(alias="target", converter=_patterns)
    operations: str = ""
    steps: tuple[tuple[str, NameOperation], ...] = attrs.field(
        init=False,
        repr=False,
        eq=False,
        default=attrs.Factory(lambda self: read_operations(self.operations), takes_self=True),
    )
    """The operations, each with its text."""

    @property
    def source(self) -> tuple[str, ...]:
        """The patterns of the source as text."""
        return tuple(pattern.text for pattern in self.source_patterns)

    @property
    def target(self) -> tuple[str, ...]:
        """The patterns of the target as text."""
        return tuple(pattern.text for pattern in self.target_patterns)

    @property
    def is_tied(self) -> bool:
        """True where other lines may use the same arrays of the source."""
        return any(isinstance(operation, Tied) for _, operation in self.steps)

    def __str__(self) -> str:
        sides = [texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]" for texts in (self.source, self.target)]
        return " -> ".join(sides) + (f": {self.operations}" if self.operations else "")


_KEYS = ("source", "target", "operations")

IDENTITY = "{*path}"
"""The pattern of any path."""


def _as_lines(values: Any) -> tuple[NameLine, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"the lines of a name table must be a list, got {shown(values)}")
    lines: list[NameLine] = []
    problems: list[str] = []
    for number, value in enumerate(values, 1):
        try:
            lines.append(_as_line(value))
        except ShardRulesError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        raise ConfigError("name table:\n" + "\n".join(f"  {problem}" for problem in problems))
    return tuple(lines)


def _as_line(value: Any) -> NameLine:
    if isinstance(value, NameLine):
        return value
    if isinstance(value, Mapping):
        unknown = [key for key in value if key not in _KEYS]
        if unknown:
            near = suggest(str(unknown[0]), _KEYS)
            raise ConfigError(f"unknown key {unknown[0]!r:.60}{near}; the keys are {', '.join(_KEYS)}")
        missing = [key for key in _KEYS[:2] if key not in value]
        if missing:
            raise ConfigError(f"it has no {' and no '.join(map(repr, missing))}")
        return NameLine(value["source"], value["target"], value.get("operations", ""))
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) in (2, 3):
        return NameLine(*value)
    raise ConfigError(f"expected (source, target) or (source, target, operations), got {shown(value)}")


def _as_unused(values: Any) -> tuple[PathPattern, ...]:
    return _patterns(values) if isinstance(values, str) or values else ()


@final
@attrs.frozen
class NameTable:
    """A table of correspondences. Each array of the source belongs to the first line that matches its path.

    A line with `tied()` also matches arrays that belong to other lines. `lines` are `NameLine`s, or tuples `(source,
    target, operations)`, where the last may be left out. `unused` has patterns of the paths in the source that the
    target does not need, which may be anything. A `ConfigError` lists all lines that cannot be read.

    ```python
    from shardrules.reports import NameTable

    table = NameTable([("params/{*path}/kernel", "{*path}.weight", "transpose(1, 0)")], unused="opt_state/{*rest}")
    assert NameTable.from_toml(table.to_toml()) == table
    ```
    """

    lines: tuple[NameLine, ...] = attrs.field(converter=_as_lines)
    unused_patterns: tuple[PathPattern, ...] = attrs.field(default=(), alias="unused", converter=_as_unused)

    @property
    def unused(self) -> tuple[str, ...]:
        """The patterns of paths that the target does not need, as text."""
        return tuple(pattern.text for pattern in self.unused_patterns)

    @staticmethod
    def of(value: Any) -> "NameTable":
        """Returns the table that `value` is or names: a table, its lines, a file, or `None`, where paths are equal."""
        if isinstance(value, NameTable):
            return value
        if value is None:
            return NameTable([(IDENTITY, IDENTITY)])
        if isinstance(value, str | Path):
            return NameTable.load(value)
        return NameTable(value)

    @staticmethod
    def from_toml(text: str) -> "NameTable":
        """Returns the table in a `text` of TOML, which has `unused` and for each line a table `[[line]]`.

        Its keys are `source`, `target` and `operations`. A `ConfigError` lists all that is wrong.
        """
        try:
            data = read_toml(text)
        except ValueError as error:
            raise ConfigError(f"name table: it is not TOML: {error}") from None
        unknown = [key for key in data if key not in ("line", "unused")]
        if unknown:
            near = suggest(unknown[0], ("line", "unused"))
            raise ConfigError(f"name table: unknown key {unknown[0]!r:.60}{near}; the keys are line, unused")
        return NameTable(data.get("line", []), data.get("unused", ()))

    @staticmethod
    def load(file: str | Path) -> "NameTable":
        """Returns the table in a `file` of TOML; a `ConfigError` says why it cannot be read."""
        return NameTable.from_toml(read_text(as_path(file, "NameTable.load")))

    def to_toml(self) -> str:
        """Returns the table as TOML, which `from_toml` reads."""
        blocks = [f"unused = {_list(self.unused)}\n"] if self.unused else []
        for line in self.lines:
            rows = [f"source = {_toml(line.source)}", f"target = {_toml(line.target)}"]
            rows += [f"operations = {toml_string(line.operations)}"] if line.operations else []
            blocks.append("\n".join(["[[line]]", *rows, ""]))
        return "\n".join(blocks)

    def save(self, file: str | Path) -> None:
        """Writes the table as TOML to a `file`, whose folder is made."""
        write_text(as_path(file, "NameTable.save"), self.to_toml())

    def __add__(self, other: "NameTable") -> "NameTable":
        """Returns the lines of both, in order."""
        return NameTable((*self.lines, *other.lines), (*self.unused, *other.unused))


def _toml(texts: Sequence[str]) -> str:
    return toml_string(texts[0]) if len(texts) == 1 else _list(texts)


def _list(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(toml_string, texts))}]"
