"""On which line of a TOML file each key is, which `tomllib` does not say."""

import re
from typing import TypeAlias

KeyPath: TypeAlias = tuple[str | int, ...]
"""The keys and indices that lead to a value: `("rules", 0, "spec")`, which messages write `rules[0].spec`."""

_TOKEN = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\])*"|\'[^\']*\'|#[^\n]*', re.DOTALL)
"""A string or a comment."""

_NAME = r"(?:[\w-]+|\"(?:\\.|[^\"\\])*\"|'[^']*')"
_DOTTED = rf"\s*{_NAME}\s*(?:\.\s*{_NAME}\s*)*"
_HEADING = re.compile(rf"\s*(?P<many>\[?)\[(?P<names>{_DOTTED})\]\]?\s*")
_KEY = re.compile(rf"(?P<names>{_DOTTED})=")


def key_lines(text: str) -> dict[KeyPath, int]:
    """Returns the lines of the headings and keys of valid TOML that begin a line; the first line is 1.

    Values inside of others have no line of their own: messages name the line of the key around them, and the whole key
    path.
    """
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    depth = 0  # of brackets: inside a value that spans lines nothing is a heading or a key
    for line_number, line in enumerate(_TOKEN.sub(_without_lines, text).split("\n"), 1):
        heading = None if depth else _HEADING.fullmatch(line)
        if heading:
            table = ()
            names = _names(heading["names"])
            for length, name in enumerate(names, 1):
                table = (*table, name)
                if heading["many"] and length == len(names):
                    counts[table] = counts.get(table, -1) + 1
                    lines.setdefault(table, line_number)
                if table in counts:
                    table = (*table, counts[table])
                lines.setdefault(table, line_number)
            continue
        key = None if depth else _KEY.match(line)
        if key:
            names = _names(key["names"])
            for length in range(1, len(names) + 1):
                lines.setdefault((*table, *names[:length]), line_number)
        brackets = _TOKEN.sub("", line)
        depth += sum(map(brackets.count, "[{")) - sum(map(brackets.count, "]}"))
    return lines


def _without_lines(token: re.Match[str]) -> str:
    """A string of one line as it is, one of many lines as line breaks, and nothing for a comment."""
    if token[0].startswith("#"):
        return ""
    return '""' + "\n" * token[0].count("\n") if token[0].startswith(('"""', "'''")) else token[0]


def _names(dotted: str) -> list[str]:
    return [name.strip("\"'") for name in re.findall(_NAME, dotted)]
