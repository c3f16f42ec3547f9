"""Names are nouns: no binding is a pronoun or a participle, no two modules define the same public class."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardrules
from tests.house.source import REPOSITORY, Definition, Module, plant, read_package, shardrules_source

VAGUE = frozenset(
    (
        *("one", "found", "said", "told", "held", "asked", "known"),
        *("own", "given", "made", "there", "heard", "wanted", "taken"),
    )
)
"""Words that say nothing of what a variable is: the reader would have to keep the binding in mind."""

SECTION = "**Arguments:**"


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of every variable, parameter and import that a module binds."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name


def vague_names(modules: tuple[Module, ...]) -> list[str]:
    """Bindings called by one of the vague words."""
    return [
        f"{module.name}:{line} {name}"
        for module in modules
        for line, name in bound_names(module.tree)
        if name.strip("_") in VAGUE
    ]


def repeated_classes(modules: tuple[Module, ...]) -> list[str]:
    """Public classes that several modules define under the same name."""
    owners: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(module.name)
    return [f"{name}: {', '.join(names)}" for name, names in owners.items() if len(names) > 1]


def private_sections(modules: tuple[Module, ...], exports: list[str]) -> list[str]:
    """Definitions that the package does not export, with a docstring in sections."""
    return [
        f"{module.name}.{definition.name}"
        for module in modules
        for node in module.tree.body
        if isinstance(node, Definition) and node.name not in exports
        for definition in ([node, *node.body] if isinstance(node, ast.ClassDef) else [node])
        if isinstance(definition, Definition) and SECTION in (ast.get_docstring(definition) or "")
    ]


def test_bindings_are_nouns() -> None:
    assert vague_names(shardrules_source()) == []


@pytest.mark.slow
def test_bindings_of_tests_and_benchmarks_are_nouns() -> None:
    assert vague_names((*read_package(REPOSITORY / "tests"), *read_package(REPOSITORY / "benchmarks"))) == []


def test_public_classes_have_names_of_their_own() -> None:
    assert repeated_classes(shardrules_source()) == []


def test_sections_are_for_exports() -> None:
    assert private_sections(shardrules_source(), shardrules.__all__) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("one = 1", "one"),
        ("def f(found): ...", "found"),
        ("def f(*told): ...", "told"),
        ("x = [held for held in ()]", "held"),
        ("def f():\n    for _asked in (): ...", "_asked"),
        ("with open('x') as known: ...", "known"),
        ("import os as own", "own"),
        ("try: ...\nexcept ValueError as said: ...", "said"),
        ("match 1:\n    case (1, *made): ...", "made"),
        ("(given := 1)", "given"),
    ],
)
def test_a_vague_name_is_reported(tmp_path: Path, text: str, name: str) -> None:
    assert [line.split()[1] for line in vague_names(plant(tmp_path, {"a.py": text}))] == [name]


def test_nouns_and_attributes_are_accepted(tmp_path: Path) -> None:
    assert vague_names(plant(tmp_path, {"a.py": "everyone = 1\nx.one = everyone.found"})) == []


def test_a_repeated_class_is_reported(tmp_path: Path) -> None:
    files = {"core/a.py": "class Row: ...\nclass _Row: ...", "core/b.py": "class Row: ...\nclass _Row: ..."}
    assert repeated_classes(plant(tmp_path, files)) == ["Row: planted.core.a, planted.core.b"]


def test_sections_of_a_private_name_are_reported(tmp_path: Path) -> None:
    doc = f'"""Does.\n\n{SECTION}\n"""'
    text = (
        f"def f():\n    {doc.replace(chr(10), chr(10) + '    ')}\nclass A:\n    def g(self):\n        '''{SECTION}'''\n"
    )
    modules = plant(tmp_path, {"a.py": text})
    assert private_sections(modules, ["A"]) == ["planted.a.f"]
    assert private_sections(modules, ["f"]) == ["planted.a.g"]
