"""A file of source code as bytes of UTF-8, in which `ast` counts its columns, and changes to it."""

import ast
import io
import os
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, final

import attrs

from shardrules.core.errors import PatchError

_LINE_END = re.compile(rb"\r\n|\r|\n")


@final
class Edit(NamedTuple):
    """Text in the place of the bytes from `start` to `stop`."""

    start: int
    stop: int
    text: str


@final
@attrs.frozen(eq=False)
class SourceFile:
    """A file as it was read."""

    path: Path
    raw: bytes
    """The bytes of the file."""
    encoding: str
    data: bytes
    """The text in UTF-8, with the line ends of the file."""
    tree: ast.Module
    line_starts: tuple[int, ...]

    @classmethod
    def read(cls, path: str | Path) -> "SourceFile":
        """Returns a file of Python. `PatchError` says why it is none."""
        path = Path(path)
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise PatchError(f"{path}: the source cannot be read: {error.strerror}") from error
        return cls.parse(path, raw)

    @classmethod
    def parse(cls, path: Path, raw: bytes) -> "SourceFile":
        """Returns a file with these bytes."""
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            data = raw.decode(encoding).encode()
            tree = ast.parse(data.decode(), str(path))
        except (SyntaxError, UnicodeDecodeError, ValueError) as error:
            raise PatchError(f"{path}: the source is not Python: {error}") from error
        starts = (0, *(match.end() for match in _LINE_END.finditer(data)))
        return cls(path, raw, encoding, data, tree, starts)

    @property
    def line_end(self) -> str:
        """The end of its lines: that of the first."""
        match = _LINE_END.search(self.data)
        return "\n" if match is None else match.group().decode()

    def offset(self, line: int, column: int) -> int:
        """The offset of a position as `ast` counts it, lines from 1."""
        return self.line_starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """The offsets at which a node begins and ends."""
        end_line, end_column = node.end_lineno, node.end_col_offset
        assert end_line is not None, "parsed nodes have an end"
        return self.offset(node.lineno, node.col_offset), self.offset(end_line, end_column or 0)

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, stop = self.span(node)
        return self.data[start:stop].decode()

    def line_of(self, line: int) -> str:
        """The text of a line, without its end."""
        stop = self.line_starts[line] if line < len(self.line_starts) else len(self.data)
        return self.data[self.line_starts[line - 1] : stop].rstrip(b"\r\n").decode()

    def edited(self, edits: Iterable[Edit]) -> bytes:
        """Returns the bytes of the file with edits, of which none overlap. What goes to one place keeps its order."""
        data = self.data
        for edit in sorted(edits, key=lambda edit: edit[:2])[::-1]:
            data = data[: edit.start] + edit.text.replace("\n", self.line_end).encode() + data[edit.stop :]
        return data.decode().encode(self.encoding)


def is_file(name: str) -> bool:
    """Returns whether code of this file name comes from a file: not from a prompt, nor from a string."""
    return not name.startswith("<") and os.path.isfile(name)
