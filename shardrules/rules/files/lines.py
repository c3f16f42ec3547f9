"""On which line of a TOML file each value is, which `tomllib` does not say.

`tomllib` has read the text before, so it is valid: all that is left is to walk along its tokens and count lines.
"""

import re
from typing import TypeAlias, final

import attrs

KeyPath: TypeAlias = tuple[str | int, ...]
"""The keys and indices that lead to a value: `("rules", 0, "spec")`, which messages write `rules[0].spec`."""

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'  # a string of many lines may end in two quotes of its own
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[\[\]{},=.\n]"
    r"|[^\s\[\]{},=.\#\"']+",
    re.DOTALL,
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Returns the line of each key, each heading and each item of an array in valid TOML; the first line is 1."""
    tokens: list[tuple[str, int]] = []
    line, end = 1, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", end, match.start())
        end = match.start()
        if not match[0].startswith("#"):
            tokens.append((match[0], line))
    walk = _Walk(tokens[::-1])
    walk.file()
    return walk.lines


@final
@attrs.define
class _Walk:
    """A walk along the tokens, the next of which is last, and the lines that it has met."""

    tokens: list[tuple[str, int]]
    lines: dict[KeyPath, int] = attrs.field(factory=dict)
    table_counts: dict[KeyPath, int] = attrs.field(factory=dict)

    @property
    def next_token(self) -> str:
        return self.tokens[-1][0] if self.tokens else ""

    def skip(self, *tokens: str) -> None:
        while self.next_token in tokens:
            self.tokens.pop()

    def file(self) -> None:
        table: KeyPath = ()
        self.skip("\n")
        while self.tokens:
            if self.next_token == "[":
                table = self.heading()
            else:
                self.assignment(table)
            self.skip("\n")

    def heading(self) -> KeyPath:
        """`[a.b]`, or `[[a.b]]`, which adds a table to an array."""
        _, line = self.tokens.pop()
        is_array = self.next_token == "["
        self.skip("[")
        names = self.names("]")
        table: KeyPath = ()
        for length, name in enumerate(names, 1):
            table = (*table, name)
            self.lines.setdefault(table, line)
            if is_array and length == len(names):
                self.table_counts[table] = self.table_counts.get(table, -1) + 1
            if table in self.table_counts:
                table = (*table, self.table_counts[table])
                self.lines.setdefault(table, line)
        self.skip("]")
        return table

    def names(self, end: str) -> list[str]:
        """The parts of a key, up to the token that ends it."""
        names: list[str] = []
        while self.next_token != end:
            token, _ = self.tokens.pop()
            if token != ".":
                names.append(token.strip("\"'"))
        return names

    def assignment(self, table: KeyPath) -> None:
        _, line = self.tokens[-1]
        path = table
        for name in self.names("="):
            path = (*path, name)
            self.lines.setdefault(path, line)
        self.tokens.pop()
        self.value(path)

    def value(self, path: KeyPath) -> None:
        start, _ = self.tokens.pop()
        if start == "[":
            self.skip(",", "\n")
            index = 0
            while self.next_token != "]":
                self.lines[*path, index] = self.tokens[-1][1]
                self.value((*path, index))
                self.skip(",", "\n")
                index += 1
            self.tokens.pop()
        elif start == "{":
            self.skip(",", "\n")
            while self.next_token != "}":
                self.assignment(path)
                self.skip(",", "\n")
            self.tokens.pop()
        else:  # dates and fractions are several tokens
            while self.tokens and self.next_token not in (",", "]", "}", "\n"):
                self.tokens.pop()
