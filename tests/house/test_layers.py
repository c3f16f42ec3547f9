"""Imports point down, form no cycle, avoid private JAX and are at the top of their file."""

import ast
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.house.source import Function, Module, plant, shardrules_source

TREES = ("core", "mesh", "rules", "placement", "checkpoints", "moves", "checks", "presets")
"""The rooms below the wall, about trees of arrays: none of them loads what reads programs."""

PROGRAMS = (
    *("jaxprs", "machine", "compiled", "costs", "compiling", "profiles", "audits", "patches"),
    *("regions", "attention", "experts", "pipelines", "traced", "compilers", "autoplan", "training"),
)
"""The rooms of `programs`."""

LAYERS = (
    *TREES,
    "drawing",
    *(f"programs.{room}" for room in PROGRAMS),
    *("errors", "meshes", "reports", "specs", "page", "cli", "__main__"),
)
"""Each may import itself and what stands before it."""

PRIVATE_JAX = "core.jax_state"
"""The one module that may read `jax._src`; it says why."""

LAZY: dict[str, str] = {
    "ast": "before the command line says what Ctrl-C does, every millisecond counts",
    "inspect": "as ast",
    "orbax": "an extra; importing it takes long, and only load_orbax needs it",
    "etils": "comes with orbax, which takes only its paths",
    "matplotlib": "an extra, and slow to import; only figures need it",
    "jax.experimental.pallas.ops.tpu.megablox.gmm": "imports Pallas, which only programs with its kernels have done",
    "shardrules.programs.patches.patch": "a fifth of what planning a function loads, and few plans become a patch",
    "shardrules.programs.autoplan.answer.code": "as shardrules.programs.patches.patch",
    "shardrules.rules.from_plan.rules_of": "as shardrules.programs.patches.patch: few plans become rules",
    "shardrules.cli.main": "it needs an extra; without it the user gets a one-line message",
}
"""What may be imported inside a function, and why."""

BY_NAME = {
    "rules.text": "texts and files name the rules of presets too, which are imported when they are made",
    "core.rule": "a plan becomes rules of patterns, which are rules like any other",
}
"""The modules that may name a module above theirs in a string, and why."""


def imports(module: Module, names: frozenset[str], node: ast.AST | None = None) -> Iterator[tuple[int, str]]:
    """Yields line and dotted name of every import in `node` (else the module), down to the submodules in `names`."""
    for statement in ast.walk(node or module.tree):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield statement.lineno, alias.name
        elif isinstance(statement, ast.ImportFrom):
            parents, is_package = module.name.split("."), module.path.name == "__init__.py"
            above = parents[: len(parents) - statement.level + is_package] if statement.level else []
            base = ".".join([*above, *([statement.module] if statement.module else [])])
            for alias in statement.names:
                inner = f"{base}.{alias.name}"
                yield statement.lineno, inner if inner in names or base == "jax" else base


def names_of(modules: tuple[Module, ...]) -> frozenset[str]:
    return frozenset(module.name for module in modules)


def room_of(name: str) -> str:
    """The room of a module, whose name is without that of the package."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "programs" else parts[0]


def upward_imports(modules: tuple[Module, ...]) -> list[str]:
    """Imports of a layer that stands above, of a layer that is not listed, or of the package's root."""
    bad = []
    for module in modules:
        root, _, rest = module.name.partition(".")
        package = room_of(rest)
        if not package or rest == "programs":
            continue  # the root re-exports everything
        if package not in LAYERS:
            bad.append(f"{module.name} is in no layer")
            continue
        below = LAYERS[: LAYERS.index(package) + 1]
        for line, name in imports(module, names_of(modules)):
            if name.split(".")[0] != root:
                continue
            target = name.partition(".")[2]
            if room_of(target) not in below:
                bad.append(f"{module.name}:{line} imports {name}")
    return bad


def upward_names(modules: tuple[Module, ...], allowed: Iterable[str]) -> list[str]:
    """Strings that are the dotted name of a module in a layer above: what they are for may import it."""
    bad: list[str] = []
    names = names_of(modules)
    for module in modules:
        rest = module.name.partition(".")[2]
        if rest in allowed or room_of(rest) not in LAYERS:
            continue
        above = LAYERS[LAYERS.index(room_of(rest)) + 1 :]
        constants = [node for node in ast.walk(module.tree) if isinstance(node, ast.Constant)]
        bad += [
            f"{module.name}:{node.lineno} names {node.value}"
            for node in constants
            if node.value in names and room_of(str(node.value).partition(".")[2]) in above
        ]
    return bad


def import_cycle(modules: tuple[Module, ...]) -> list[str]:
    """A cycle of imports, if there is one; imports inside functions and under TYPE_CHECKING count too."""
    names = names_of(modules)
    graph = {module.name: sorted({name for _, name in imports(module, names)} & names) for module in modules}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def private_jax(modules: tuple[Module, ...], allowed: str) -> list[str]:
    """Uses of `jax._src` outside the module that is allowed to, by import, by attribute or by name in a string."""
    bad = []
    for module in modules:
        if module.name.partition(".")[2] == allowed:
            continue
        lines = [line for line, name in imports(module, frozenset()) if name.startswith("jax._src")]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax._src":
                lines.append(node.lineno)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("jax._src"):
                lines.append(node.lineno)
        bad += [f"{module.name}:{line} uses jax._src" for line in sorted(lines)]
    return bad


def lazy_imports(modules: tuple[Module, ...], allowed: dict[str, str]) -> list[str]:
    """Imports inside functions, other than those with a reason."""
    return [
        f"{module.name}:{line} imports {name} inside {node.name}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, Function)
        for line, name in imports(module, names_of(modules), node)
        if name not in allowed and name.split(".")[0] not in allowed
    ]


def test_imports_point_down_and_are_at_the_top() -> None:
    modules = shardrules_source()
    assert upward_imports(modules) == []
    assert upward_names(modules, BY_NAME) == []
    assert import_cycle(modules) == []
    assert private_jax(modules, PRIVATE_JAX) == []
    assert lazy_imports(modules, LAZY) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("core/leaf.py", "from planted.rules import auto", "planted.core.leaf:1 imports planted.rules.auto"),
        ("core/leaf.py", "import planted.mesh.shape", "planted.core.leaf:1 imports planted.mesh.shape"),
        ("core/leaf.py", "from planted import x", "planted.core.leaf:1 imports planted"),
        ("mesh/shape.py", "def f():\n    from ..rules import auto", "planted.mesh.shape:2 imports planted.rules.auto"),
        ("rules/auto.py", "import planted.programs.audits", "planted.rules.auto:1 imports planted.programs.audits"),
        ("programs/audits/__init__.py", "from ...cli import x", "planted.programs.audits:1 imports planted.cli"),
        (
            "programs/costs/x.py",
            "import planted.programs.audits",
            "planted.programs.costs.x:1 imports planted.programs.audits",
        ),
        ("helpers/x.py", "", "planted.helpers is in no layer"),
    ],
)
def test_an_upward_import_is_reported(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    empty = dict.fromkeys(
        ["rules/auto.py", "mesh/shape.py", "programs/__init__.py", "programs/audits/__init__.py", "cli/__init__.py"], ""
    )
    assert complaint in upward_imports(plant(tmp_path, {**empty, file: text}))


def test_downward_imports_are_fine(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from planted.rules.auto import x",
        "core/errors.py": "import os",
        "core/leaf.py": "from .errors import x",
        "mesh/shape.py": "from planted.core.errors import x",
        "rules/auto.py": "from planted.core import leaf\nimport planted.mesh.shape",
    }
    assert upward_imports(plant(tmp_path, files)) == []


def test_a_string_that_names_a_module_above_is_reported(tmp_path: Path) -> None:
    files = {"rules/text.py": "x = 'planted.presets.a'\ny = 'planted.core.b'", "presets/a.py": "", "core/b.py": ""}
    modules = plant(tmp_path, files)
    assert upward_names(modules, []) == ["planted.rules.text:1 names planted.presets.a"]
    assert upward_names(modules, BY_NAME) == []


@pytest.mark.parametrize(
    "back", ["from planted.core import a", "def f():\n    import planted.core.a", "from .a import x"]
)
def test_a_cycle_is_reported(tmp_path: Path, back: str) -> None:
    files = {"core/a.py": "from planted.core.b import x", "core/b.py": "import planted.core.c", "core/c.py": back}
    circle = import_cycle(plant(tmp_path, files))
    assert sorted(circle[1:]) == ["planted.core.a", "planted.core.b", "planted.core.c"]


@pytest.mark.parametrize(
    "text",
    [
        "import jax._src.mesh",
        "from jax._src import mesh",
        "from jax import _src",
        "import jax\nx = jax._src.mesh",
        "import importlib\nx = importlib.import_module('jax._src.mesh')",
    ],
)
def test_private_jax_is_reported(tmp_path: Path, text: str) -> None:
    modules = plant(tmp_path, {"core/a.py": text, "core/b.py": "import jax"})
    assert [line.split(":")[0] for line in private_jax(modules, PRIVATE_JAX)] == ["planted.core.a"]
    assert private_jax(modules, "core.a") == []


def test_an_import_inside_a_function_is_reported(tmp_path: Path) -> None:
    modules = plant(tmp_path, {"core/a.py": "class A:\n    def f(self):\n        import os\n        import rich.table"})
    assert lazy_imports(modules, {"rich": "an extra"}) == ["planted.core.a:3 imports os inside f"]
