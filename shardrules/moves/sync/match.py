"""The arrays of two trees that correspond by the lines of a table, and all that is wrong with it."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np

from shardrules.core.errors import suggest
from shardrules.core.finding import Finding, common_path, template
from shardrules.moves.sync.arrays import Arrays, side_name
from shardrules.moves.sync.items import Items, OperationError
from shardrules.moves.sync.operations import LineTarget, Lists
from shardrules.moves.sync.pattern import PathPattern
from shardrules.moves.sync.strided import SOURCE, TARGET, Parts, Side, covered
from shardrules.moves.sync.table import NameLine, NameTable

_SUGGESTIONS = 20
"""The findings of a kind that get a nearest name, which takes time among many paths. Chosen by hand."""


@final
@attrs.frozen(eq=False)
class Matches:
    """The parts of source arrays that make up the target, and the line that each target array comes from."""

    parts: tuple[Parts, ...]
    """The targets are indices of arrays."""
    unused: tuple[Parts, ...]
    """What lines cut off."""
    line_of: np.ndarray
    """The line of each target array; -1 where no line makes it."""
    sources_of: tuple[tuple[int, int], ...]
    """For each line with arrays the index of one of its sources, as an example, and how many it has."""
    findings: tuple[Finding, ...]


@final
@attrs.define(eq=False)
class _Line:
    """What a line matches: for each of its source patterns, indices of arrays and the values of captures."""

    number: int
    line: NameLine
    indices: list[list[int]]
    values: list[list[dict[str, str]]]
    codes: dict[str, int] = attrs.field(factory=dict)
    """A number for each value of a capture: itself, or a negative one for other texts."""

    @staticmethod
    def of(number: int, line: NameLine) -> "_Line":
        lists = range(len(line.source))
        return _Line(number, line, [[] for _ in lists], [[] for _ in lists])

    def __str__(self) -> str:
        return f"line {self.number + 1} ({self.line})"

    def code(self, text: str) -> int:
        code = self.codes.get(text)
        if code is None:
            is_number = text.isdecimal() and len(text) < 18 and str(int(text)) == text
            code = self.codes[text] = int(text) if is_number else -1 - len(self.codes)
        return code

    def texts(self) -> dict[int, str]:
        """The texts of the negative codes."""
        return {code: text for text, code in self.codes.items() if code < 0}

    def items(self, source: Arrays) -> Lists:
        """The arrays of each pattern, those of one shape and dtype together."""
        lists: list[tuple[Items, ...]] = []
        for pattern, indices, values in zip(self.line.source_patterns, self.indices, self.values, strict=True):
            names = tuple(pattern.captures)
            groups: dict[Any, list[int]] = {}
            for row, index in enumerate(indices):
                groups.setdefault((source.shapes[index], source.dtypes[index]), []).append(row)
            group_items: list[Items] = []
            for (shape, dtype), rows in groups.items():
                keys = [[self.code(values[row][name]) for name in names] for row in rows]
                table = np.array(keys, np.int64).reshape(len(rows), len(names))
                arrays = np.array([indices[row] for row in rows], np.int64)
                group_items.append(Items(shape, dtype, names, table, (Parts.whole(shape, arrays),)))
            lists.append(tuple(group_items))
        return tuple(lists)


def match_arrays(source: Arrays, target: Arrays, table: NameTable) -> Matches:
    """Returns which parts of the source make up the target."""
    lines = [_Line.of(number, line) for number, line in enumerate(table.lines)]
    line_of_source = _assign(source, lines, table)
    taken_by = dict(zip(source.paths, line_of_source.tolist(), strict=True))
    result = _Result(source, target, {path: index for index, path in enumerate(target.paths)})
    sources_of: list[tuple[int, int]] = []
    for line in lines:
        for pattern, indices in zip(line.line.source_patterns, line.indices, strict=True):
            if not indices:
                whole = "" if len(line.indices) == 1 else f"{pattern.text!r} of "
                result.add("no-match", f"{whole}{line} matches no array", "", pattern.text, *_near(pattern, taken_by))
        if not any(line.indices):
            result.failed.append(line.line)
            sources_of.append((-1, 0))
            continue
        sources_of.append((next(index for indices in line.indices for index in indices), sum(map(len, line.indices))))
        result.take(line)
    findings = [*source.findings, *_misplaced(source, line_of_source >= 0)]
    findings += [*target.findings, *_misplaced(target, np.full(len(target), True))]
    findings += [*result.findings, *_idle(table, source, line_of_source)]
    findings += _unused(source, line_of_source, target)
    findings += _unwritten(source, target, result)
    findings += [] if findings else _unproved(source, target, result, lines)
    return Matches(tuple(result.parts), tuple(result.unused), result.line_of, tuple(sources_of), tuple(findings))


def _near(pattern: PathPattern, taken_by: Mapping[str, int]) -> tuple[Iterable[str], str]:
    """The paths that a pattern without arrays may mean, and a remedy where others have taken them."""
    takers = [line for path, line in taken_by.items() if pattern.match(path) is not None]
    if not takers:
        return taken_by, ""
    taker = "unused" if takers[0] < 0 else f"used by line {takers[0] + 1}; tied() uses it again"
    return (), f"An array that it could match is {taker}"


def _assign(source: Arrays, lines: Sequence[_Line], table: NameTable) -> np.ndarray:
    """Gives each array to its lines. Returns the number of the first line of each; -1 for none, -2 for unused ones."""
    line_of_source = np.full(len(source), -1)
    patterns = [
        (line, line.line.is_tied, position, pattern, pattern.ends)
        for line in lines
        for position, pattern in enumerate(line.line.source_patterns)
    ]
    for index, path in enumerate(source.paths):
        is_taken = any(pattern.match(path) is not None for pattern in table.unused_patterns)
        if is_taken:
            line_of_source[index] = -2
        for line, is_tied, position, pattern, (prefix, suffix) in patterns:
            # Most patterns differ from most paths in how they begin or end.
            if (is_taken and not is_tied) or not path.startswith(prefix) or not path.endswith(suffix):
                continue
            values = pattern.match(path)
            if values is None:
                continue
            line.indices[position].append(index)
            line.values[position].append(values)
            is_taken = is_taken or not is_tied
            line_of_source[index] = line.number if line_of_source[index] == -1 else line_of_source[index]
    return line_of_source


@final
@attrs.define(eq=False)
class _Result:
    source: Arrays
    target: Arrays
    index_of: dict[str, int]
    parts: list[Parts] = attrs.field(factory=list)
    unused: list[Parts] = attrs.field(factory=list)
    findings: list[Finding] = attrs.field(factory=list)
    failed: list[NameLine] = attrs.field(factory=list)
    line_of: np.ndarray = attrs.field(
        default=attrs.Factory(lambda self: np.full(len(self.target), -1), takes_self=True)
    )

    def add(self, code: str, why: str, path: str, name: str = "", near: Iterable[str] = (), remedy: str = "") -> None:
        hint = suggest(name, near) if len(self.findings) < _SUGGESTIONS else ""
        self.findings.append(Finding("error", code, f"{why}{hint}", path, remedy))

    def take(self, line: _Line) -> None:
        """Applies the operations of a line, and notes what it makes of which arrays, or what is wrong with it."""
        example = self.source.paths[next(index for indices in line.indices for index in indices)]
        lists = line.items(self.source)
        numbers = {
            name: capture.numbers
            for pattern in (*line.line.source_patterns, *line.line.target_patterns)
            for name, capture in pattern.captures.items()
            if capture.numbers is not None
        }
        goal = LineTarget(numbers, len(line.line.target))
        trace = [_shapes(lists)]
        for text, operation in line.line.steps:
            try:
                lists = operation.apply(lists, goal)
            except OperationError as error:
                why = f"{line}: {text} after {' -> '.join(trace)}: {error}"
                self.add("operation", why, example)
                self.failed.append(line.line)
                return
            trace.append(f"{text} {_shapes(lists)}")
        if len(lists) != len(line.line.target):
            why = f"{line}: {len(lists)} patterns of the source for {len(line.line.target)} of the target"
            self.add("lists", why, example, remedy="Join a list with concat, make one with split")
            self.failed.append(line.line)
            return
        for pattern, group in zip(line.line.target_patterns, lists, strict=True):
            for items in group:
                self._write(line, pattern, items, trace, example)

    def _write(self, line: _Line, pattern: PathPattern, items: Items, trace: Sequence[str], example: str) -> None:
        names = list(pattern.captures)
        problems = [
            f"the source has {{{name}}}, which the target lacks: stack it" for name in items.names if name not in names
        ]
        problems += [
            f"the target has {{{name}}}, which the source lacks{suggest(name, items.names)}: unstack makes it"
            for name in names
            if name not in items.names
        ]
        if problems:
            self.add("captures", f"{line}: {'; '.join(problems)}", example)
            self.failed.append(line.line)
            return
        indices = np.full(len(items), -1)
        texts = line.texts()
        for row, key in enumerate(items.keys.tolist()):
            values = [str(code) if code >= 0 else texts[code] for code in key]
            path = pattern.fill(dict(zip(items.names, values, strict=True)))
            index = self.index_of.get(path)
            if index is None:
                self.add("no-target", f"{line} makes it, and the target lacks it", path, path, self.target.paths)
                continue
            if self.line_of[index] >= 0:
                other = f"line {self.line_of[index] + 1}" if self.line_of[index] != line.number else "the same line"
                self.add("twice", f"{line} makes it, and {other} does, too", path)
                continue
            self.line_of[index] = line.number
            expected, dtype = self.target.shapes[index], self.target.dtypes[index]
            if items.shape != expected or items.dtype != dtype:
                actual, planned = f"{items.dtype}{list(items.shape)}", f"{dtype}{list(expected)}"
                remedy = f"Add cast({str(dtype)!r})" if items.shape == expected else ""
                self.add(
                    "shape",
                    f"{line} makes {actual} ({' -> '.join(trace)}), the target has {planned}",
                    path,
                    remedy=remedy,
                )
                continue
            indices[row] = index
        for each in items.renumbered(indices):
            chosen = each.arrays[TARGET] >= 0
            self.parts.append(each if chosen.all() else each.rows(chosen))
        self.unused += items.unused


def _shapes(lists: Lists) -> str:
    shapes = dict.fromkeys(f"{items.dtype}{list(items.shape)}" for group in lists for items in group)
    names = list(shapes)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _idle(table: NameTable, source: Arrays, line_of_source: np.ndarray) -> Iterator[Finding]:
    """Patterns of `unused` that match nothing."""
    rest = [path for path, line in zip(source.paths, line_of_source.tolist(), strict=True) if line == -2]
    for pattern in table.unused_patterns:
        if not any(pattern.match(path) is not None for path in rest):
            why = f"{pattern.text!r} of unused matches no array of the source{suggest(pattern.text, source.paths)}"
            yield Finding("error", "no-match", why)


def _by_template(indices: Iterable[int], arrays: Arrays) -> Iterator[tuple[list[int], str]]:
    groups: dict[Any, list[int]] = {}
    for index in indices:
        key = template(arrays.paths[index]), arrays.shapes[index], min(int(arrays.layout_of[index]), 0)
        groups.setdefault(key, []).append(index)
    for group in groups.values():
        yield group, functools.reduce(common_path, (arrays.paths[index] for index in group))


def _misplaced(arrays: Arrays, used: np.ndarray) -> Iterator[Finding]:
    """Arrays that are used, and of which no device holds a part that is known."""
    for group, path in _by_template(np.flatnonzero(used & (arrays.layout_of < 0)).tolist(), arrays):
        problem = arrays.problems[-1 - int(arrays.layout_of[group[0]])]
        yield attrs.evolve(problem, path=path, count=len(group))


def _unused(source: Arrays, line_of_source: np.ndarray, target: Arrays) -> Iterator[Finding]:
    """Arrays of the source without a line."""
    for number, (group, path) in enumerate(_by_template(np.flatnonzero(line_of_source == -1).tolist(), source)):
        first = source.paths[group[0]]
        near = suggest(first, target.paths) if number < _SUGGESTIONS else ""
        why = f"no line of the table uses this array of the source{near}"
        remedy = f"Add a line for it, or name it as unused: {first!r}"
        yield Finding("error", "unused", why, path, remedy, source.shapes[group[0]], count=len(group))


def _unwritten(source: Arrays, target: Arrays, result: _Result) -> Iterator[Finding]:
    """Arrays of the target that no line makes; what a line that failed should have made is not listed again."""
    patterns = [pattern for line in result.failed for pattern in line.target_patterns]
    missing = [
        index
        for index in np.flatnonzero(result.line_of < 0).tolist()
        if not any(pattern.match(target.paths[index]) is not None for pattern in patterns)
    ]
    for number, (group, path) in enumerate(_by_template(missing, target)):
        near = suggest(target.paths[group[0]], source.paths) if number < _SUGGESTIONS else ""
        why = f"no line of the table makes this array of the target{near}"
        yield Finding("error", "missing", why, path, "Add a line for it", target.shapes[group[0]], count=len(group))


def _unproved(source: Arrays, target: Arrays, result: _Result, lines: Sequence[_Line]) -> Iterator[Finding]:
    """Arrays of which parts do not cover each element as often as they should: an error of this package."""
    uses = np.zeros(len(source), np.int64)
    for line in lines:
        for indices in line.indices:
            np.add.at(uses, indices, 1)
    used = [each for each in (*result.parts, *result.unused) if not each.is_fill]
    sides: tuple[tuple[Side, Arrays, Sequence[Parts], np.ndarray], ...] = (
        (SOURCE, source, used, uses),
        (TARGET, target, result.parts, np.ones(len(target), np.int64)),
    )
    for side, arrays, pieces, times in sides:
        for index in np.flatnonzero(~covered(pieces, side, arrays.shapes, times)).tolist():
            why = f"an element of this array of the {side_name(side)} is not used {times[index]} times"
            yield Finding("error", "proof", why, arrays.paths[index], "Report it", arrays.shapes[index])
