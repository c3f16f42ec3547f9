"""Live functions with other code for a while, so that changed source runs without being imported again.

Closures, decorated functions and methods of objects that exist already run the changed code, too.
"""

import contextlib
import difflib
import gc
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

import jax
import numpy as np

from shardrules.core.errors import PatchError
from shardrules.programs.patches.source import SourceFile

Changes: TypeAlias = Mapping[CodeType, CodeType]
"""Code of functions, and what stands in its place."""

_ATOMS = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic, jax.Array, CodeType)


def compiled(file: SourceFile) -> CodeType:
    """Returns the code of a module as it is imported."""
    return compile(file.data.decode(), str(file.path), "exec", dont_inherit=True)


def code_changes(old: CodeType, new: CodeType, file: SourceFile) -> dict[CodeType, CodeType]:
    """Returns for each function of a module its code in a changed module, which has these functions, too."""
    changes: dict[CodeType, CodeType] = {}
    olds, news = ([each for each in code.co_consts if isinstance(each, CodeType)] for code in (old, new))
    # Changed code may have more lambdas.
    keys, new_keys = ([(each.co_name, each.co_argcount) for each in codes] for codes in (olds, news))
    blocks = difflib.SequenceMatcher(None, keys, new_keys, autojunk=False).get_matching_blocks()
    pairs = [(olds[first + index], news[second + index]) for first, second, size in blocks for index in range(size)]
    if len(pairs) < len(olds):
        raise PatchError(f"{file.path}: functions in line {old.co_firstlineno} cannot be told apart. Name them")
    for before, after in pairs:
        changes[before] = after
        changes |= code_changes(before, after, file)
    return changes


def live_functions(roots: Iterable[Any], files: frozenset[str]) -> list[FunctionType]:
    """Returns the functions of files that can be reached from some objects, and from the modules of these files."""
    modules = [each for each in list(sys.modules.values()) if _file_of(each) in files]
    stack: list[Any] = [*modules, *roots]
    seen: dict[int, Any] = {}  # with the objects, so that no other gets the same id
    functions: list[FunctionType] = []
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, _ATOMS):
            continue
        seen[id(item)] = item
        if isinstance(item, FunctionType):
            is_in_files = item.__code__.co_filename in files
            functions += [item] if is_in_files else []
            stack += [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__]
            stack += item.__globals__.values() if is_in_files else ()
        elif isinstance(item, ModuleType):
            stack += vars(item).values() if _file_of(item) in files else ()
        elif isinstance(item, type):
            is_in_files = _file_of(sys.modules.get(item.__module__)) in files or "<locals>" in item.__qualname__
            stack += [*vars(item).values(), *item.__mro__] if is_in_files else ()
        else:
            stack += gc.get_referents(item)
            stack.append(getattr(item, "__wrapped__", None) if callable(item) else None)
    return functions


def _file_of(module: Any) -> str:
    return getattr(module, "__file__", None) or "" if isinstance(module, ModuleType) else ""


def imported_size(name: str) -> int | None:
    """Returns the size that a file had when it was imported, if Python kept its code: the code has no comments."""
    for module in list(sys.modules.values()):
        cached = getattr(getattr(module, "__spec__", None), "cached", None)
        if cached and _file_of(module) == name and os.path.isfile(cached):
            with open(cached, "rb") as stream:
                header = stream.read(16)
            # Magic number, flags, time and size, as `importlib` writes them; with flags, a hash of the source.
            is_timed = header[:4] == importlib.util.MAGIC_NUMBER and header[4:8] == bytes(4)
            return int.from_bytes(header[12:], "little") if is_timed else None
    return None


@contextlib.contextmanager
def swapped(
    changes: Changes, names: Mapping[str, Mapping[str, Any]], functions: Sequence[FunctionType]
) -> Iterator[None]:
    """Makes functions run changed code, whose files have more global names. Traces that JAX keeps are forgotten."""
    old_code = [(function, function.__code__) for function in functions if function.__code__ in changes]
    spaces = {id(function.__globals__): function for function, _ in old_code}
    old_names: list[tuple[dict[str, Any], dict[str, Any], Mapping[str, Any]]] = []
    jax.clear_caches()
    try:
        for function in spaces.values():
            space, new = function.__globals__, names.get(function.__code__.co_filename, {})
            old_names.append((space, {name: space[name] for name in new if name in space}, new))
            space.update(new)
        for function, code in old_code:
            function.__code__ = changes[code]
        yield
    finally:
        for function, code in old_code:
            function.__code__ = code
        for space, before, new in old_names:
            for name in new:
                space.pop(name, None)
            space.update(before)
        jax.clear_caches()
