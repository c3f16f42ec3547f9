"""The text of annotations: where the expression stands, or in a line of its own where that reads better."""

import ast
import re
import string
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.programs.patches.names import FileNames
from shardrules.programs.patches.places import Place
from shardrules.programs.patches.source import Edit, SourceFile

Form: TypeAlias = Literal["constraint", "reshard", "out_sharding", "auto"]
"""The way to say a layout: on Auto axes by `with_sharding_constraint`, on Explicit ones by the others."""

_WIDTH = 100
"""The longest line that an annotation is written into: chosen by hand, between Black's 88 and Google's 100."""

_FUNCTIONS = {"constraint": "jax.lax.with_sharding_constraint", "reshard": "jax.sharding.reshard"}
_AT = re.compile(rb"\s*@\s*")
_OPERATOR = re.compile(rb"[\w\])'\"]")


@final
@attrs.frozen
class Annotation:
    """A layout that a place gets."""

    place: Place
    spec: PartitionSpec
    form: Form
    operands: tuple[ast.expr, ...] = ()
    """The arrays in the expression, for one that runs on Auto axes."""


def parameter_names(node: ast.expr, count: int) -> list[str]:
    """Returns names for parameters that an expression does not use."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return [name for name in (*string.ascii_lowercase, *(f"x{index}" for index in range(count))) if name not in names][
        :count
    ]


@final
class AnnotatedFile(NamedTuple):
    """A file with annotations."""

    file: SourceFile
    new: bytes
    header: str
    """The lines that were added at its top."""


def annotated(file: SourceFile, annotations: Sequence[Annotation], axes: Sequence[str]) -> AnnotatedFile:
    """Returns a file with annotations; `axes` are those of the mesh."""
    names = FileNames(file, axes)
    texts = _Texts(file, names, [each for each in annotations if each.place.file is file])
    edits = texts.edits()
    new = file.edited([*names.header_edits(), *edits])
    SourceFile.parse(file.path, new)  # never write what is no Python
    return AnnotatedFile(file, new, names.header)


@final
class _Insertion(NamedTuple):
    """Text in the place of some bytes. Of what goes to one offset, `order` says what comes first."""

    start: int
    stop: int
    order: int
    text: str


@final
class _Texts:
    """The edits of one file, from the innermost expressions outwards."""

    def __init__(self, file: SourceFile, names: FileNames, annotations: Sequence[Annotation]) -> None:
        self.file = file
        self.names = names
        self.annotations = sorted(annotations, key=self.length)
        self.insertions: list[_Insertion] = []
        self.lines: list[_Insertion] = []

    def length(self, annotation: Annotation) -> int:
        start, stop = self.file.span(annotation.place.node)
        return stop - start

    def edits(self) -> list[Edit]:
        for annotation in self.annotations:
            if annotation.form == "out_sharding":
                self.add_out_sharding(annotation.place, self.names.spec(annotation.spec))
                self.shorten(annotation.place)
            elif annotation.form == "auto":
                self.add_auto(annotation)
                self.shorten(annotation.place)
            else:
                self.add(annotation)
        ordered = sorted([*self.lines, *self.insertions], key=lambda each: each[:3])
        return [Edit(each.start, each.stop, each.text) for each in ordered]

    def insert(self, start: int, stop: int, order: int, text: str) -> None:
        self.insertions.append(_Insertion(start, stop, order, text))

    def open(self, offset: int, text: str) -> None:
        """Adds the beginning of a call: before the beginnings inside of it."""
        self.insert(offset, offset, -len(self.insertions), text)

    def close(self, offset: int, text: str) -> None:
        """Adds the end of a call: behind the ends inside of it, and before what begins there."""
        self.insert(offset, offset, len(self.insertions) - (1 << 30), text)

    def add(self, annotation: Annotation) -> None:
        place, spec = annotation.place, self.names.spec(annotation.spec)
        call = self.names.function(_FUNCTIONS[annotation.form])
        statement, indent, target = place.statement, self.indent(place.statement), _target(place)
        fits = self.fits(place.node, len(call) + len(spec) + 4)
        if target is not None and indent is not None and self.ends_line(statement) and (place.is_after or not fits):
            self.insert_line(statement.end_lineno or 0, f"{indent}{target} = {call}({target}, {spec})")
        elif fits or place.is_inline or indent is None:
            self.wrap(place, call, spec, fits)
        else:
            self.name(place, call, spec, indent)

    def fits(self, node: ast.expr, length: int) -> bool:
        """Returns whether the line of an expression has room for more text."""
        if node.lineno != node.end_lineno:
            return False
        start = self.file.line_starts[node.lineno - 1]
        line = self.file.line_of(node.lineno)
        inside = [each for each in self.insertions if start <= each.start <= start + len(line.encode())]
        added = sum(len(each.text) - (each.stop - each.start) for each in inside)
        return len(line) + added + length <= _WIDTH

    def name(self, place: Place, call: str, spec: str, indent: str) -> None:
        """Gives the value a name in a line before the statement."""
        start, stop = self.file.span(place.node)
        value = self.taken(start, stop)
        name = self.names.local(_name_for(place.node), place.function)
        text, after = f"{indent}{name} = {call}({value}, {spec})\n", name
        if len(text) > _WIDTH + 1 or "\n" in value or "\r" in value:
            value = f"({value})" if "\n" in value or "\r" in value else value
            text, after = f"{indent}{name} = {value}\n", f"{call}({name}, {spec})"
            line = self.file.line_of(place.line)
            if place.node.lineno != place.node.end_lineno or len(line) + len(after) - (stop - start) > _WIDTH:
                text, after = f"{text}{indent}{name} = {after}\n", name
        self.hoist(place, text, after)

    def hoist(self, place: Place, lines: str, after: str) -> None:
        """Adds lines before the statement of an expression, and puts other text into its place."""
        before = self.file.offset(place.statement.lineno, 0)
        self.lines.append(_Insertion(before, before, len(self.lines), lines.replace("\r\n", "\n")))
        self.insert(*self.file.span(place.node), 0, after)

    def shorten(self, place: Place) -> None:
        """Gives an annotated value a name in a line before, if the line is too long with it."""
        indent = self.indent(place.statement)
        is_whole = getattr(place.statement, "value", None) is place.node
        if indent is None or place.is_inline or is_whole or self.fits(place.node, 0):
            return
        name = self.names.local(_name_for(place.node), place.function)
        self.hoist(place, f"{indent}{name} = {self.taken(*self.file.span(place.node))}\n", name)

    def taken(self, start: int, stop: int) -> str:
        """Takes the annotated text of an expression out, to write it elsewhere."""
        inside = [each for each in self.insertions if start <= each.start and each.stop <= stop]
        self.insertions = [each for each in self.insertions if each not in inside]
        data = self.file.data[start:stop]
        for each in sorted(inside, key=lambda each: each[:3], reverse=True):
            data = data[: each.start - start] + each.text.encode() + data[each.stop - start :]
        return data.decode()

    def add_auto(self, annotation: Annotation) -> None:
        """Makes the expression a function of the arrays in it, which runs on Auto axes."""
        node, spec = annotation.place.node, self.names.spec(annotation.spec)
        names = parameter_names(node, len(annotation.operands))
        operands: list[str] = []
        for name, operand in zip(names, annotation.operands, strict=True):
            first, last = self.file.span(operand)
            operands.append(self.taken(first, last))
            self.insert(first, last, 0, name)
        start, stop = self.file.span(node)
        body, call = self.taken(start, stop), self.names.function("jax.sharding.auto_axes")
        arguments, ending = f"lambda {', '.join(names)}: {body}, out_sharding={spec}", f")({', '.join(operands)})"
        margin = self.margin(annotation.place)
        is_long = len(margin) + len(call) + len(arguments) + len(ending) > _WIDTH
        text = f"{call}(\n{margin}    {arguments}\n{margin}{ending}" if is_long else f"{call}({arguments}{ending}"
        self.insert(start, stop, 0, text)

    def add_out_sharding(self, place: Place, spec: str) -> None:
        node, (start, stop) = place.node, self.file.span(place.node)
        if isinstance(node, ast.BinOp):
            _, left = self.file.span(node.left)
            right, _ = self.file.span(node.right)
            match = _AT.search(self.file.data, left, right)
            assert match is not None, "there is an operator between the operands"
            self.insert(match.start(), match.end(), 0, ", ")
            self.open(start, f"{self.names.function('jax.numpy.matmul')}(")
            self.close(stop, f", out_sharding={spec})")
        elif isinstance(node, ast.Subscript):
            _, base = self.file.span(node.value)
            self.open(self.file.data.index(b"[", base), ".at")
            self.close(stop, f".get(out_sharding={spec})")
        else:
            before = self.file.data[start : stop - 1].rstrip()
            comma = "" if before.endswith((b",", b"(")) else ", "
            self.close(start + len(before), f"{comma}out_sharding={spec}")

    def wrap(self, place: Place, call: str, spec: str, fits: bool) -> None:
        """Writes the call around the expression, in the parentheses that it has already."""
        start, stop = self.file.span(place.node)
        data = self.file.data
        outer, end = start, stop
        while data[outer - 1 : outer] in (b" ", b"\t"):
            outer -= 1
        while data[end : end + 1] in (b" ", b"\t"):
            end += 1
        is_grouped = data[outer - 1 : outer] == b"(" and data[end : end + 1] == b")"
        is_grouped = is_grouped and not _OPERATOR.match(data[outer - 2 : outer - 1])
        # Between parentheses, a long line may be broken anywhere.
        margin = self.margin(place) + " " * 4
        lines = ("", "") if fits else (f"\n{margin}    ", f"\n{margin}")
        if is_grouped and fits:
            self.open(outer - 1, call)
            self.close(end, f", {spec}")
        else:
            self.open(start, f"{call}({lines[0]}")
            self.close(stop, f", {spec}{lines[1]})")

    def insert_line(self, line: int, text: str) -> None:
        """Adds a line behind another."""
        if line < len(self.file.line_starts):
            offset = self.file.line_starts[line]
            self.lines.append(_Insertion(offset, offset, -(1 << 31), f"{text}\n"))
        else:
            end = len(self.file.data)
            self.lines.append(_Insertion(end, end, 0, f"\n{text}"))

    def margin(self, place: Place) -> str:
        """The blanks with which the line of a statement begins, whatever stands there."""
        line = self.file.line_of(place.statement.lineno)
        return line[: len(line) - len(line.lstrip())]

    def indent(self, statement: ast.stmt) -> str | None:
        """The blanks before a statement; `None` if something else stands in its line before it."""
        start = self.file.line_starts[statement.lineno - 1]
        blanks = self.file.data[start : start + statement.col_offset].decode()
        return None if blanks.strip() else blanks

    def ends_line(self, statement: ast.stmt) -> bool:
        """Returns whether nothing but a comment stands behind a statement in its line."""
        _, stop = self.file.span(statement)
        line = statement.end_lineno or 0
        end = self.file.line_starts[line] if line < len(self.file.line_starts) else len(self.file.data)
        rest = self.file.data[stop:end].strip()
        return not rest or rest.startswith(b"#")


def _target(place: Place) -> str | None:
    """The name that the statement gives to the value of a place, if it does."""
    statement = place.statement
    if place.is_after and isinstance(place.node, ast.Name):
        return place.node.id
    targets: Iterable[ast.expr] = ()
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    targets = list(targets)
    is_value = getattr(statement, "value", None) is place.node
    return targets[0].id if is_value and len(targets) == 1 and isinstance(targets[0], ast.Name) else None


def _name_for(node: ast.expr) -> str:
    """A name for the value of an expression, by what it is made from."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value
    if isinstance(node, ast.Attribute):
        return f"{node.attr}_value" if node.attr in ("T", "mT") else node.attr
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return "product"
    if isinstance(node, ast.Call):
        func = node.func
        name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else "value"
        return f"{name}_result"
    return "value"
