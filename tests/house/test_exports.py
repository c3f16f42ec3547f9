"""Every public name is documented, every signature annotated, every export stands in the API pages."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, is_typeddict

import pytest

import shardrules
from tests.house.source import (
    REPOSITORY,
    Definition,
    Function,
    Module,
    plant,
    public_constants,
    public_definitions,
    shardrules_source,
)

API_PAGES = REPOSITORY / "docs" / "api"

TYPING = ("TYPE_CHECKING", "Any")
"""What the package's root holds for its own annotations."""


def api_text(folder: Path) -> str:
    """Returns the text of every API page in `folder`."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.md")))


def exports(package: ModuleType) -> list[str]:
    """Returns what the package's root offers."""
    return list(vars(package)["__all__"])


def broken_exports(package: ModuleType) -> list[str]:
    """Names in `__all__` that are not there, or stand there twice."""
    names = exports(package)
    missing = [f"{name} is not there" for name in names if not hasattr(package, name)]
    return missing + [f"{name} is listed twice" for name in dict.fromkeys(names) if names.count(name) > 1]


def unlisted_exports(package: ModuleType) -> list[str]:
    """Public names that the package's root holds without listing them."""
    listed = exports(package)
    return [
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name not in (*listed, *TYPING)
    ]


def missing_from_pages(names: Iterable[str], pages: str) -> list[str]:
    """Names that no API page mentions."""
    return [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", pages)]


def undocumented(modules: tuple[Module, ...]) -> list[str]:
    """Public classes, functions, methods and constants without a docstring, exported or not.

    A constant is documented by a string that follows it, a method also by the method of a base class that it fills in.
    """
    bad = []
    for module in modules:
        for name, node in public_definitions(module.tree):
            if not ast.get_docstring(node) and not inherits_docstring(module.name, name):
                bad.append(f"{module.name}.{name}")
        bad += [f"{module.name}.{name}" for name, text, _ in public_constants(module.tree) if not text]
    return bad


def inherits_docstring(module: str, name: str) -> bool:
    owner, _, method = name.partition(".")
    if not method:
        return False
    bases: tuple[type, ...] = getattr(importlib.import_module(module), owner).__mro__[1:]
    return any(getattr(vars(base).get(method), "__doc__", None) for base in bases)


def unnamed_parameters(modules: tuple[Module, ...]) -> list[str]:
    """What callers pass, to a function or to build a class, that the docstring does not name in backticks."""
    bad = []
    for module in modules:
        for name, node in public_definitions(module.tree):
            text = ast.get_docstring(node)
            if text:
                missing = [each for each in passed(module.name, node) if not is_named(each, text)]
                bad += [f"{module.name}.{name}: {each}" for each in missing]
    return bad


def is_named(name: str, text: str) -> bool:
    """Whether `text` names it in backticks, stars and all, or stands for it with a prefix such as `generation_*`."""
    prefixes = re.findall(r"`(\w+_)\*`", text)
    return bool(re.search(rf"`\**{name}\b", text)) or any(name.startswith(prefix) for prefix in prefixes)


def passed(module: str, node: Definition) -> list[str]:
    """Returns what a caller names: parameters, the fields that attrs takes, the keys of a typed dictionary."""
    if isinstance(node, Function):
        names = [arg.arg for arg in arguments(node) if arg.arg not in ("self", "cls")]
    else:
        cls: type = getattr(importlib.import_module(module), node.name)
        own = "__init__" in vars(cls)
        names = (
            list(inspect.signature(cls).parameters) if own else list(cls.__annotations__) if is_typeddict(cls) else []
        )
    return [name for name in names if not name.startswith("_")]


def arguments(node: Function) -> list[ast.arg]:
    given = node.args
    starred = [arg for arg in (given.vararg, given.kwarg) if arg]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *starred]


def unannotated(modules: tuple[Module, ...]) -> list[str]:
    """Parameters and results without a type, of every function and method, private and inner ones too."""
    bad = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, Function):
                where = f"{module.name}:{node.lineno} {node.name}"
                open_ended = [
                    arg.arg for arg in arguments(node) if not arg.annotation and arg.arg not in ("self", "cls")
                ]
                bad += [f"{where}: {name}" for name in open_ended]
                if not node.returns:
                    bad.append(f"{where}: its result")
    return bad


def test_exports_are_there() -> None:
    assert broken_exports(shardrules) == []
    assert unlisted_exports(shardrules) == []


def test_exports_are_in_the_api_pages() -> None:
    assert missing_from_pages(exports(shardrules), api_text(API_PAGES)) == []


def test_public_names_are_documented() -> None:
    assert undocumented(shardrules_source()) == []


def test_docstrings_name_every_parameter() -> None:
    assert unnamed_parameters(shardrules_source()) == []


def test_signatures_are_annotated() -> None:
    assert unannotated(shardrules_source()) == []


# Planted violations.


@pytest.fixture
def planted() -> Any:
    package = ModuleType("planted")
    package.__dict__.update({"__all__": ["here", "gone", "here"], "here": 1, "loose": 2, "ast": ast, "_own": 3})
    return package


def test_a_broken_export_is_seen(planted: ModuleType) -> None:
    assert broken_exports(planted) == ["gone is not there", "here is listed twice"]


def test_an_unlisted_export_is_seen(planted: ModuleType) -> None:
    assert unlisted_exports(planted) == ["loose"]


def test_a_name_missing_from_the_pages_is_seen(tmp_path: Path) -> None:
    (tmp_path / "rules.md").write_text("::: shardrules.AutoShardingRule\n\n`mesh_shape`")
    names = ["AutoShardingRule", "mesh_shape", "ShardingRule", "mesh"]
    assert missing_from_pages(names, api_text(tmp_path)) == ["ShardingRule", "mesh"]


def test_an_undocumented_name_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '''
import abc
X = 1
Y: int = 2
"""The second."""
_Z = 3
def f(): ...
def _g(): ...
class A(abc.ABC):
    """A."""
    def decide(self):
        """Decides."""
    def other(self): ...
class B(A):
    def decide(self): ...
    @property
    def size(self): ...
    def _own(self): ...
'''
    modules = plant(tmp_path, {"core/a.py": text}, name="planted_docs")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["A.other", "B", "B.size", "f", "X"]
    assert sorted(undocumented(modules)) == sorted(f"planted_docs.core.a.{name}" for name in names)


def test_an_unnamed_parameter_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '''
import abc, attrs, typing
def f(left, right, *rest, _own=1):
    """Adds `left` to `*rest`, never to `rights`."""
def g(decode_left, decoder):
    """Takes `decode_*`."""
@attrs.frozen
class A:
    """Has a `size`."""
    size: int
    weight: int
    derived: int = attrs.field(init=False, default=0)
    def g(self, x):
        """Does."""
class B(abc.ABC):
    """Declares what others have."""
    mesh: int
class C:
    """Has its own init, which takes `x`."""
    def __init__(self, x, y): ...
class D(typing.TypedDict):
    """Keys."""
    total: int
'''
    modules = plant(tmp_path, {"a.py": text}, name="planted_parameters")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [line.rpartition("planted_parameters.a.")[2] for line in unnamed_parameters(modules)]
    assert found == ["f: right", "g: decoder", "A: weight", "A.g: x", "C: y", "D: total"]


def test_an_open_signature_is_seen(tmp_path: Path) -> None:
    text = """
class A:
    def f(self, x: int, y, *args, **kw: int) -> None: ...
    def _g(self): ...
def h(a: int) -> int:
    def inner(b) -> None: ...
"""
    found = unannotated(plant(tmp_path, {"a.py": text}))
    assert [line.partition(" ")[2] for line in found] == ["f: y", "f: args", "_g: its result", "inner: b"]
