"""Patterns of paths with captures: `layers/{layer}/attention/{name}`."""

import functools
import re
from collections.abc import Mapping
from typing import final

import attrs

from shardrules.core.errors import ConfigError

_FIELD = re.compile(r"\{(\*?)([A-Za-z_]\w*)(?::(\d{1,9})-(\d{1,9})(?::(\d{1,9}))?)?\}")


@final
@attrs.frozen
class Capture:
    """A name in braces: `{name}` is one name between slashes or dots, `{*name}` any text.

    `{name:3-60}` is an integer from 3 to 60, `{name:0-60:6}` each sixth of them.
    """

    name: str
    is_any: bool = False
    numbers: range | None = None

    @property
    def regex(self) -> str:
        """The pattern of what it matches; that a number is in range is checked afterwards."""
        text = ".*" if self.is_any else r"[^/.]+" if self.numbers is None else r"\d+"
        return f"(?P<{self.name}>{text})"


@final
@attrs.frozen
class PathPattern:
    """A path with captures, which matches paths as a whole."""

    text: str
    pieces: tuple[str | Capture, ...] = attrs.field(
        init=False, repr=False, eq=False, default=attrs.Factory(lambda self: _read(self.text), takes_self=True)
    )

    @property
    def captures(self) -> dict[str, Capture]:
        """The captures by name, in order."""
        return {piece.name: piece for piece in self.pieces if isinstance(piece, Capture)}

    @property
    def ends(self) -> tuple[str, str]:
        """The text before the first capture, and that behind the last."""
        first, last = (self.pieces[0], self.pieces[-1]) if self.pieces else ("", "")
        return first if isinstance(first, str) else "", last if isinstance(last, str) else ""

    def match(self, path: str) -> dict[str, str] | None:
        """Returns what a path has for each capture; `None` where it does not match."""
        match = _regex(self).fullmatch(path)
        if match is None:
            return None
        values = match.groupdict()
        for name, numbers in _ranges(self):
            if int(values[name]) not in numbers:
                return None
        return values

    def fill(self, values: Mapping[str, str]) -> str:
        """Returns the path with these captures."""
        return "".join([piece if isinstance(piece, str) else values[piece.name] for piece in self.pieces])


def _read(text: str) -> tuple[str | Capture, ...]:
    pieces: list[str | Capture] = []
    position = 0
    for match in _FIELD.finditer(text):
        pieces.append(text[position : match.start()])
        star, name, first, last, every = match.groups()
        numbers = None if first is None else range(int(first), int(last) + 1, int(every or 1) or 1)
        if numbers is not None and (not numbers or every == "0" or star):
            raise ConfigError(f"{match[0]} in {text!r}: expected {{name:first-last}} with first <= last")
        pieces.append(Capture(name, bool(star), numbers))
        position = match.end()
    pieces.append(text[position:])
    rest = "".join(piece for piece in pieces if isinstance(piece, str))
    if "{" in rest or "}" in rest:
        forms = "{name}, {*name}, {name:first-last} and {name:first-last:step}"
        raise ConfigError(f"{text!r} has a brace that is not part of a capture; captures are {forms}")
    names = [piece.name for piece in pieces if isinstance(piece, Capture)]
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if repeated:
        raise ConfigError(f"{text!r} has the capture {repeated[0]!r} twice")
    return tuple(piece for piece in pieces if piece != "")


@functools.lru_cache(1024)
def _regex(pattern: PathPattern) -> re.Pattern[str]:
    return re.compile(
        "".join(re.escape(piece) if isinstance(piece, str) else piece.regex for piece in pattern.pieces), re.DOTALL
    )


@functools.lru_cache(1024)
def _ranges(pattern: PathPattern) -> tuple[tuple[str, range], ...]:
    return tuple((name, each.numbers) for name, each in pattern.captures.items() if each.numbers is not None)
