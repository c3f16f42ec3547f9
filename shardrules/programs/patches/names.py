"""The names that annotations use in a file: those of its imports and constants, and what has to be added for them."""

import ast
import json
import keyword
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.programs.patches.source import Edit, SourceFile


@final
@attrs.define(eq=False)
class FileNames:
    """The global names of a file, and the lines that its annotations add to it."""

    file: SourceFile
    axes: Sequence[str] = ()
    """The axes of the mesh, in order."""
    imports: list[str] = attrs.field(factory=list)
    constants: dict[str, str] = attrs.field(factory=dict)
    """The names of new constants, by axis."""
    _local: dict[int, set[str]] = attrs.field(factory=dict)
    _bound: dict[str, int] = attrs.field(init=False)
    """How often each name is bound anywhere in the file."""
    _globals: dict[str, str] = attrs.field(init=False)
    """The dotted names of what the file imports at its top, by their names there."""

    def __attrs_post_init__(self) -> None:
        self._bound = {}
        for name in _bindings(self.file.tree):
            self._bound[name] = self._bound.get(name, 0) + 1
        self._globals = dotted_names(self.file.tree.body)

    def imported(self, dotted: str, statement: str, name: str) -> str:
        """Returns an expression for something that can be imported, and adds the import if it is missing."""
        parts = dotted.split(".")
        # The longest part that has a name: `lax.reshape` rather than `jax.lax.reshape`. Specs get a short name.
        for count in range(len(parts), 1 if name == "P" else 0, -1):
            prefix = ".".join(parts[:count])
            for alias, target in self._globals.items():
                if target == prefix and self._bound[alias] == 1:
                    return ".".join([alias, *parts[count:]])
        if name in self._bound:  # the file calls something else so
            module, _, last = dotted.rpartition(".")
            name = self.free(f"jax_{last.lower()}")
            statement = f"from {module} import {last} as {name}" if module else f"import {last} as {name}"
            alias_target = dotted
        else:
            alias_target = parts[0] if statement.startswith("import ") and " as " not in statement else dotted
        self.imports.append(statement)
        self._bound[name] = 1
        self._globals[name] = alias_target
        return self.imported(dotted, statement, name)

    def free(self, name: str) -> str:
        """Returns a name like this one that the file does not use."""
        name = re.sub(r"\W", "_", name)
        name = f"_{name}" if not name or name[0].isdigit() else name
        names = {each.id for each in ast.walk(self.file.tree) if isinstance(each, ast.Name)}
        free = _free(name, names | self._bound.keys())
        self._bound[free] = 1
        return free

    def local(self, name: str, function: ast.AST) -> str:
        """Returns a name like this one that a function does not use."""
        space = self._local.get(id(function))
        if space is None:
            nodes = list(ast.walk(function))
            space = {each.id for each in nodes if isinstance(each, ast.Name)}
            space |= {each.arg for each in nodes if isinstance(each, ast.arg)}
            self._local[id(function)] = space
        free = _free(name, space)
        space.add(free)
        return free

    def axis(self, axis: str) -> str:
        """Returns the constant that is the name of a mesh axis: the file's own, else a new one."""
        if axis not in self.constants:
            constants = [
                name for name, value in _constants(self.file.tree.body) if value == axis and self._bound[name] == 1
            ]
            if constants:
                return constants[0]
            self.constants[axis] = self.free(re.sub(r"\W", "_", axis).upper())
        return self.constants[axis]

    def spec(self, spec: PartitionSpec) -> str:
        """Returns the text of a spec."""
        call = self.imported("jax.sharding.PartitionSpec", "from jax.sharding import PartitionSpec as P", "P")
        entries: list[str] = []
        for entry in spec:
            names = [self.axis(axis) for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis is not None]
            entries.append(
                "None" if entry is None else names[0] if not isinstance(entry, tuple) else f"({', '.join(names)})"
            )
        return f"{call}({', '.join(entries)})"

    def function(self, dotted: str) -> str:
        """Returns the text of a function of JAX."""
        if dotted.startswith("jax.numpy."):
            return self.imported(dotted, "import jax.numpy as jnp", "jnp")
        return self.imported(dotted, "import jax", "jax")

    @property
    def header(self) -> str:
        """The new lines at the top of the file."""
        imports = "".join(f"{each}\n" for each in dict.fromkeys(self.imports))
        order = sorted(self.constants, key=lambda axis: self.axes.index(axis) if axis in self.axes else len(self.axes))
        constants = [f"{self.constants[axis]} = {json.dumps(axis, ensure_ascii=False)}\n" for axis in order]
        return "".join([imports, *(["\n"] if constants else []), *constants])

    def header_edits(self) -> list[Edit]:
        """Returns the edits that add these lines behind the imports of the file."""
        text, line = self.header, _import_line(self.file.tree.body)
        if not text:
            return []
        if line >= len(self.file.line_starts):  # the last line has no end
            return [Edit(len(self.file.data), len(self.file.data), f"\n{text}")]
        start = self.file.line_starts[line]
        following = self.file.line_of(line + 1).strip()
        return [Edit(start, start, text + "\n" * bool(following and (self.constants or not line)))]


def _free(name: str, names: Collection[str]) -> str:
    """A name like this one that is none of some names, and no word of Python."""
    free, count = name, 1
    while free in names or keyword.iskeyword(free):
        count += 1
        free = f"{name}_{count}"
    return free


def dotted_names(body: Sequence[ast.stmt]) -> dict[str, str]:
    """Returns the dotted names of what a file imports at its top, by their names there."""
    return dict(_imported(body))


def _import_line(body: Sequence[ast.stmt]) -> int:
    """The number of the line after which new imports go; 0 for the top of the file."""
    line = 0
    for index, statement in enumerate(body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            break
        is_docstring = index == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement, ast.Import | ast.ImportFrom) or is_docstring:
            line = statement.end_lineno or line
    if line:
        return line
    first = body[0]
    decorators = [each.lineno for each in getattr(first, "decorator_list", [])]
    return min([first.lineno, *decorators]) - 1


def _imported(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for statement in body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                root = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (root, root)
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            for alias in statement.names:
                yield alias.asname or alias.name, f"{statement.module}.{alias.name}"


def _constants(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """The names and values of the strings that a file gives names to at its top."""
    for statement in body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        pairs: list[tuple[Any, Any]] = [(target, getattr(statement, "value", None))]
        if isinstance(target, ast.Tuple) and isinstance(pairs[0][1], ast.Tuple):
            pairs = list(zip(target.elts, pairs[0][1].elts, strict=False))
        for name, value in pairs:
            if isinstance(name, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield name.id, value.value


def _bindings(tree: ast.Module) -> Iterator[str]:
    """Yields each name as often as it is bound; what the top imports twice under one name is bound once."""
    seen: set[tuple[str, str]] = set()
    for name, target in _imported(tree.body):
        if (name, target) not in seen:
            seen.add((name, target))
            yield name
    top = {id(statement) for statement in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top:
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            yield node.name or ""
