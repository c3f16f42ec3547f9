"""Where in a TOML file each value stands: Python's own reader tells what a file says, but not on which line.

The text has been read by `tomllib` before, so it is known to be sound: all that is left is to go along and count lines.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias, final

import attrs

Place: TypeAlias = tuple[str | int, ...]
"""The keys and indices that lead to a value: `("rules", 0, "spec")`."""

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""+'
    r"|'''.*?'''+"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[\[\]{},=.\n]"
    r"|[^\s\[\]{},=.\#\"']+",
    re.DOTALL,
)


def toml_lines(text: str) -> Mapping[Place, int]:
    """Returns the line of each key and of each item of an array.

    **Arguments:**

    - `text`: TOML that `tomllib` can read.

    **Returns:**

    From place to line, the first being 1.

    ```python
    lines = toml_lines('mesh = "data:4"\\n\\n[[rules]]\\npath = "norm"\\nspec = []\\n')
    assert lines["mesh",] == 1 and lines["rules", 0] == 3 and lines["rules", 0, "spec"] == 5
    ```
    """
    reader = _Reader([(one[0], text.count("\n", 0, one.start()) + 1) for one in _TOKEN.finditer(text)])
    reader.read()
    return MappingProxyType(reader.lines)


@final
@attrs.define
class _Reader:
    """Goes along the tokens, and remembers the line of each place."""

    tokens: list[tuple[str, int]]
    at: int = 0
    lines: dict[Place, int] = attrs.Factory(dict)
    counts: dict[Place, int] = attrs.Factory(dict)

    def read(self) -> None:
        table: Place = ()
        while self.at < len(self.tokens):
            token, line = self.tokens[self.at]
            if token == "\n" or token.startswith("#"):
                self.at += 1
            elif token == "[":
                table = self._heading(line)
            else:
                self._assignment(table)

    def _peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def _heading(self, line: int) -> Place:
        """`[a.b]`, or `[[a.b]]`, which adds an item to an array of tables."""
        self.at += 1
        many = self._peek() == "["
        self.at += many
        place: Place = ()
        keys = self._key("]")
        for number, key in enumerate(keys):
            place = (*place, key)
            if many and number == len(keys) - 1:
                self.counts[place] = self.counts.get(place, -1) + 1
            if place in self.counts:
                place = (*place, self.counts[place])
            self.lines.setdefault(place, line)
        self.at += 1 + many
        return place

    def _key(self, end: str) -> list[str]:
        """The parts of a key, up to what ends it."""
        parts: list[str] = []
        while self._peek() != end:
            token = self._peek()
            if token not in (".", "\n"):
                # An unquoted number with a point is two parts, as in TOML.
                parts.append(token[1:-1] if token[0] in "\"'" else token)
            self.at += 1
        return parts

    def _assignment(self, table: Place) -> None:
        line = self.tokens[self.at][1]
        place = table
        for key in self._key("="):
            place = (*place, key)
            self.lines.setdefault(place, line)
        self.at += 1
        self._value(place)

    def _value(self, place: Place) -> None:
        token = self._peek()
        if token == "[":
            self._array(place)
        elif token == "{":
            self._inline_table(place)
        else:  # dates and fractions are several tokens
            while self.at < len(self.tokens) and self._peek() not in (",", "]", "}", "\n"):
                self.at += 1

    def _skip(self) -> str:
        """Goes on to what is neither a comma, a line's end nor a comment."""
        while self._peek() in (",", "\n") or self._peek().startswith("#"):
            self.at += 1
        return self._peek()

    def _array(self, place: Place) -> None:
        self.at += 1
        number = 0
        while self._skip() != "]":
            self.lines[*place, number] = self.tokens[self.at][1]
            self._value((*place, number))
            number += 1
        self.at += 1

    def _inline_table(self, place: Place) -> None:
        self.at += 1
        while self._skip() != "}":
            self._assignment(place)
        self.at += 1
