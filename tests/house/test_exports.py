"""Every export exists once, is documented and on an API page; every signature is annotated."""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import is_typeddict

import pytest

import shardrules
from shardrules.presets import big_vision, eformer, haliax, huggingface, levanter, maxtext, pathways
from tests.house.source import (
    REPOSITORY,
    Definition,
    Function,
    Module,
    plant,
    public_definitions,
    shardrules_source,
)

API_PAGES = REPOSITORY / "docs" / "api"

TYPING = ("Any",)
"""What the package's root imports for its own annotations."""

ROOMS: dict[str, ModuleType] = {
    module.__name__: module
    for module in (
        *(shardrules, shardrules.errors, shardrules.meshes, shardrules.reports, shardrules.specs),
        *(shardrules.presets, eformer, big_vision, haliax, huggingface, levanter, maxtext, pathways),
    )
}
"""Where users import from, by name."""


def api_text(folder: Path) -> str:
    """Returns the text of every API page in `folder`."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.md")))


def broken_exports(package: ModuleType) -> list[str]:
    """Names in `__all__` that do not exist, or appear twice."""
    names: list[str] = vars(package)["__all__"]
    missing = [f"{name} does not exist" for name in names if not hasattr(package, name)]
    return missing + [f"{name} is listed twice" for name in dict.fromkeys(names) if names.count(name) > 1]


def unlisted_exports(package: ModuleType) -> list[str]:
    """Public names that a package or a room binds without listing them."""
    return [
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
        if name not in (*vars(package)["__all__"], *TYPING)
    ]


def exported_twice(rooms: dict[str, ModuleType]) -> list[str]:
    """Names that several rooms export: each has one home."""
    homes: dict[str, list[str]] = defaultdict(list)
    for room, module in rooms.items():
        for name in vars(module)["__all__"]:
            homes[name].append(room)
    return [f"{name}: {', '.join(modules)}" for name, modules in homes.items() if len(modules) > 1]


def missing_from_pages(names: Iterable[str], pages: str) -> list[str]:
    """Dotted names that no API page documents or mentions in backticks."""
    return [name for name in names if not re.search(rf"(?:::: |`){re.escape(name)}(?!\w)", pages)]


def undocumented(package: ModuleType, modules: tuple[Module, ...]) -> list[str]:
    """Exported classes and functions, and their public methods, without a docstring.

    A method is documented also by the method of a base class that it implements.
    """
    return [
        f"{module}.{name}"
        for module, name, node in exported_definitions(package, modules)
        if not ast.get_docstring(node) and not inherits_docstring(module, name)
    ]


def exported_definitions(package: ModuleType, modules: tuple[Module, ...]) -> Iterator[tuple[str, str, Definition]]:
    """Yields module, qualified name and node of what `package` exports, and of its public methods."""
    exports = [getattr(package, name) for name in vars(package)["__all__"]]
    homes = {(export.__module__, export.__name__) for export in exports if isinstance(export, type | FunctionType)}
    for module in modules:
        for name, node in public_definitions(module.tree):
            if (module.name, name.partition(".")[0]) in homes:
                yield module.name, name, node


def inherits_docstring(module: str, name: str) -> bool:
    owner, _, method = name.partition(".")
    if not method:
        return False
    bases: tuple[type, ...] = getattr(importlib.import_module(module), owner).__mro__[1:]
    return any(inspect.getdoc(vars(base)[method]) for base in bases if method in vars(base))


def unnamed_parameters(package: ModuleType, modules: tuple[Module, ...]) -> list[str]:
    """Parameters of exported functions, methods and classes that the docstring does not name in backticks."""
    bad = []
    for module, name, node in exported_definitions(package, modules):
        text = ast.get_docstring(node)
        missing = [each for each in parameters(module, node) if text and not is_named(each, text)]
        bad += [f"{module}.{name}: {each}" for each in missing]
    return bad


def is_named(name: str, text: str) -> bool:
    """Whether `text` names it in backticks, stars and all, or by a prefix such as `generation_*`."""
    prefixes = re.findall(r"`(\w+_)\*`", text)
    return bool(re.search(rf"`\**{name}\b", text)) or any(name.startswith(prefix) for prefix in prefixes)


def parameters(module: str, node: Definition) -> list[str]:
    """Returns what a caller names: parameters, the fields that attrs takes, the keys of a typed dictionary."""
    if isinstance(node, Function):
        names = [arg.arg for arg in arguments(node) if arg.arg not in ("self", "cls")]
    else:
        cls: type = getattr(importlib.import_module(module), node.name)
        has_init = "__init__" in vars(cls)
        names = list(inspect.signature(cls).parameters) if has_init else []
        names += list(cls.__annotations__) if is_typeddict(cls) else []
    return [name for name in names if not name.startswith("_")]


def arguments(node: Function) -> list[ast.arg]:
    starred = [arg for arg in (node.args.vararg, node.args.kwarg) if arg]
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *starred]


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


def test_rooms_import_nothing_else() -> None:
    rooms = (shardrules, shardrules.errors, shardrules.meshes, shardrules.reports, shardrules.specs, pathways)
    assert [name for room in rooms for name in unlisted_exports(room)] == []


@pytest.mark.parametrize("name", ["PlanError", "fold_axes", "canonical"])
def test_a_name_in_a_room_is_suggested(name: str) -> None:
    (home,) = [room for room, module in ROOMS.items() if name in vars(module)["__all__"]]
    with pytest.raises(AttributeError, match=rf"^module 'shardrules' has no attribute '{name}'; use {home}.{name}$"):
        getattr(shardrules, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'shardrules' has no attribute 'plan_errors'$"):
        getattr(shardrules, "plan_errors")  # noqa: B009


def test_each_name_has_one_home() -> None:
    assert exported_twice(ROOMS) == []


def stubs(text: str) -> dict[str, str]:
    """The module of each name that the text of a stub exports again, `from module import name as name`."""
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname == alias.name}


def test_type_checkers_know_every_export() -> None:
    modules: dict[str, str] = vars(shardrules)["_MODULES"]
    stub = (REPOSITORY / "shardrules" / "__init__.pyi").read_text()
    assert stubs(stub) == {name: "shardrules" + (module and f".{module}") for name, module in modules.items()}


def test_a_name_that_a_stub_does_not_export_is_reported() -> None:
    assert stubs("from a import b as b\nfrom a import c\nfrom a import d as e") == {"b": "a"}


def test_the_root_exports_at_most_80_names() -> None:
    assert len(shardrules.__all__) <= 80


@pytest.mark.parametrize("room", ROOMS)
def test_exports_exist_and_are_in_the_api_pages(room: str) -> None:
    assert broken_exports(ROOMS[room]) == []
    assert missing_from_pages([f"{room}.{name}" for name in vars(ROOMS[room])["__all__"]], api_text(API_PAGES)) == []


def test_exports_are_documented_and_signatures_are_annotated() -> None:
    modules = shardrules_source()
    assert [line for room in ROOMS.values() for line in undocumented(room, modules)] == []
    assert unnamed_parameters(shardrules, modules) == []
    assert unannotated(modules) == []


# Planted violations.


def test_broken_unlisted_and_repeated_exports_are_reported() -> None:
    planted = ModuleType("planted")
    vars(planted).update({"__all__": ["here", "gone", "here"], "here": 1, "loose": 2, "ast": ast, "_own": 3})
    assert broken_exports(planted) == ["gone does not exist", "here is listed twice"]
    assert unlisted_exports(planted) == ["loose"]
    other = ModuleType("other")
    vars(other)["__all__"] = ["here", "there"]
    assert "here: planted, planted, other" in exported_twice({"planted": planted, "other": other})
    assert exported_twice({"other": other}) == []


def test_a_name_missing_from_the_pages_is_reported(tmp_path: Path) -> None:
    (tmp_path / "rules.md").write_text("::: planted.AutoShardingRule\n\n`planted.mesh_shape`")
    names = ["planted.AutoShardingRule", "planted.mesh_shape", "planted.Auto", "planted.mesh"]
    assert missing_from_pages(names, api_text(tmp_path)) == ["planted.Auto", "planted.mesh"]


def test_an_undocumented_export_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '''
import abc
__all__ = ["A", "B", "f"]
def f(): ...
def g(): ...
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
class C:
    def size(self): ...
'''
    modules = plant(tmp_path, {"a.py": text}, name="planted_docs")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["A.other", "B", "B.size", "f"]
    package = importlib.import_module("planted_docs.a")
    assert sorted(undocumented(package, modules)) == [f"planted_docs.a.{name}" for name in names]


def test_an_unnamed_parameter_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '''
import abc, attrs, typing
__all__ = ["f", "g", "A", "B", "C", "D"]
def f(left, right, *rest, _own=1):
    """Adds `left` to `*rest`, never to `rights`."""
def g(decode_left, decoder):
    """Takes `decode_*`."""
def private(left):
    """Takes anything."""
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
    package = importlib.import_module("planted_parameters.a")
    lines = [line.rpartition("planted_parameters.a.")[2] for line in unnamed_parameters(package, modules)]
    assert lines == ["f: right", "g: decoder", "A: weight", "A.g: x", "C: y", "D: total"]


def test_a_missing_annotation_is_reported(tmp_path: Path) -> None:
    text = """
class A:
    def f(self, x: int, y, *args, **kw: int) -> None: ...
    def _g(self): ...
def h(a: int) -> int:
    def inner(b) -> None: ...
"""
    lines = unannotated(plant(tmp_path, {"a.py": text}))
    assert [line.partition(" ")[2] for line in lines] == ["f: y", "f: args", "_g: its result", "inner: b"]
