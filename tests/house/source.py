"""Reads a package as source, for the house tests: the real one, or a planted one."""

import ast
import functools
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias, final

import attrs

REPOSITORY = Path(__file__).parents[2]

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Definition: TypeAlias = Function | ast.ClassDef


@final
@attrs.frozen
class Module:
    """One module: its dotted name, its file and its syntax tree."""

    name: str
    path: Path
    tree: ast.Module


def read_package(folder: Path) -> tuple[Module, ...]:
    """Returns every module of the package in `folder`, in the order of their names."""
    modules = []
    for path in sorted(folder.rglob("*.py")):
        parts = (folder.name, *path.relative_to(folder).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(Module(name, path, ast.parse(path.read_text(), str(path))))
    return tuple(modules)


@functools.cache
def shardrules_source() -> tuple[Module, ...]:
    """Returns the modules of shardrules."""
    return read_package(REPOSITORY / "shardrules")


def plant(folder: Path, files: dict[str, str], name: str = "planted") -> tuple[Module, ...]:
    """Writes a package called `name` with these `files` into `folder`, and returns its modules."""
    root = folder / name
    for path, text in {"__init__.py": "", **files}.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for inner in [path for path in root.rglob("*") if path.is_dir()]:
        (inner / "__init__.py").touch()
    return read_package(root)


def _is_overload(node: Definition) -> bool:
    """Whether a definition is an overload: the function itself follows it."""
    return any(isinstance(decorator, ast.Name) and decorator.id == "overload" for decorator in node.decorator_list)


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Yields the qualified name and the node of every public class, function and method."""
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_") and not _is_overload(node):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, Function) and not inner.name.startswith("_"):
                        yield f"{node.name}.{inner.name}", inner


def public_constants(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Yields every public name that a module binds by assignment, with the string after it, or "", and its line."""
    for node, after in itertools.zip_longest(tree.body, tree.body[1:]):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        text, line = string_of(after)
        for target in targets:
            for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(name, ast.Name) and not name.id.startswith("_"):
                    yield name.id, text, line


def string_of(node: ast.stmt | None) -> tuple[str, int]:
    """Returns the text and the line of a statement that is a string, else nothing."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value), node.lineno
    return "", 0
