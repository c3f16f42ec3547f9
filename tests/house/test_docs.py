"""Every Python block of the README, of the documentation and of the docstrings runs as it is printed."""

import ast
import os
import re
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.house.pages import blocks, filled, misfits, pages, printed_by, printed_by_an_interpreter, run_blocks
from tests.house.source import (
    REPOSITORY,
    Module,
    plant,
    public_constants,
    public_definitions,
    shardrules_source,
    string_of,
)
from tests.quick import QUICK_FLAGS

SCOPE: dict[str, Any] = {"sr": sr, "P": P, "jax": jax, "jnp": jnp, "np": np, "eqx": eqx}
"""What an example in a docstring may use without importing it. The Start page shows these imports."""


def docstrings(modules: tuple[Module, ...]) -> list[tuple[str, str, str, int]]:
    """Returns module, qualified name, text and first line of every public docstring with an example in it."""
    entries = []
    for module in modules:
        for name, node in [("", module.tree), *public_definitions(module.tree)]:
            text, line = string_of(node.body[0] if node.body else None)
            entries.append((module.name, name, text, line))
        entries += [(module.name, *constant) for constant in public_constants(module.tree)]
    return [entry for entry in entries if "```" in entry[2] or "~~~" in entry[2]]


def environment_variables() -> dict[str, str]:
    """The environment, without what JAX writes into it at the first Pallas kernel if its CUDA plugin is installed."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MOSAIC_GPU_")}


def lasting_effects(run: Callable[[], object]) -> list[str]:
    """Runs an example, and returns the global state that it changed, which the next example would see."""
    before = environment_variables(), dict(jax.config.values), jax.sharding.get_abstract_mesh()
    run()
    after = environment_variables(), dict(jax.config.values), jax.sharding.get_abstract_mesh()
    names = ("the environment", "the configuration of JAX", "the mesh: write `with jax.set_mesh(...)`")
    return [name for name, old, new in zip(names, before, after, strict=True) if old != new]


PAGES = [
    # What runs whole programs takes a minute.
    pytest.param(page, marks=pytest.mark.slow) if 'python title="' in page.read_text() else page
    for page in pages(REPOSITORY)
]
DOCSTRINGS = docstrings(shardrules_source())


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example may write files; none of them lands in the repository."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.sample(8)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_page_runs(page: Path) -> None:
    text = page.read_text()
    assert misfits(text) == []
    printed: list[str] = []
    assert lasting_effects(lambda: printed.extend(printed_by(page))) == []
    assert filled(text, printed) == text, "what it prints has changed; python -m tests.house.pages refreshes it"


WITH_DEVICES = [
    page
    for page in pages(REPOSITORY)
    if any(block.runs and "create_mesh" in block.text for block in blocks(page.read_text()))
]
"""Shapes need no devices, and commands see the same devices in every test: other pages run alike everywhere."""


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_DEVICES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_page_runs_where_there_is_one_device(page: Path) -> None:
    """Where JAX has one CPU device, as on most machines."""
    printed_by_an_interpreter(page, XLA_FLAGS=QUICK_FLAGS)


def test_the_tutorial_takes_80_lines() -> None:
    page = REPOSITORY / "docs" / "how-to" / "from-a-model-to-a-gated-training.md"
    files = [block.text for block in blocks(page.read_text()) if block.is_file]
    assert len(files) == 3
    assert sum(bool(line.strip()) for text in files for line in text.splitlines()) == 80


@pytest.mark.sample(60)
@pytest.mark.parametrize(
    ("module", "name", "text", "line"), DOCSTRINGS, ids=[f"{entry[0]}:{entry[1]}" for entry in DOCSTRINGS]
)
def test_docstring_runs(module: str, name: str, text: str, line: int) -> None:
    assert misfits(text) == []
    source = import_module(module)
    assert lasting_effects(lambda: run_blocks(text, source.__file__ or module, SCOPE, line)) == []


def finding_codes(modules: tuple[Module, ...]) -> list[str]:
    """Returns the codes of the findings that these modules make, not counting examples."""
    calls = (
        node
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding"
    )
    codes = [call.args[1].value for call in calls if len(call.args) > 1 and isinstance(call.args[1], ast.Constant)]
    return sorted(dict.fromkeys(map(str, codes)))


def tabled_codes(page: str) -> list[str]:
    """Returns the codes in the first column of the table of findings."""
    return sorted(re.findall(r"^\| `([a-z-]+)` \| (?:error|warning|note) \|", page, re.MULTILINE))


def test_every_finding_of_a_plan_is_in_the_table() -> None:
    makers = tuple(
        module
        for module in shardrules_source()
        if module.name.startswith(("shardrules.core.", "shardrules.rules.")) and not module.name.endswith(".how")
    )
    page = (REPOSITORY / "docs" / "how-to" / "plan-a-model.md").read_text()
    assert len(finding_codes(makers)) > 15
    assert tabled_codes(page) == finding_codes(makers)


# Planted violations.


def test_codes_are_read_off_source_and_table(tmp_path: Path) -> None:
    source = 'Finding("note", "listed", "x")\nyielded = [Finding("error", "unlisted", f"{1}")]\nFinding(*1)\n'
    assert finding_codes(plant(tmp_path, {"a.py": source})) == ["listed", "unlisted"]
    assert tabled_codes("| code |\n| `listed` | note | x |\n| `no` | never | x |\n") == ["listed"]


PAGE = """
# A page

```bash
pip install nothing
```

```python
x = 1
```

!!! note

    ```python title="two"
    class A:
        y = x + 1
    ```

<!-- no-run: the shell -->
```bash
python
```

```python
assert A.y == {value}
```
"""


def test_a_page_runs_in_order_in_one_namespace() -> None:
    run_blocks(PAGE.format(value=2), "page.md", {})


FILES = """
```python title="tiny/text.py"
TEXT = "{text}"
if __name__ == "__main__":
    print(TEXT)
```

```console
$ python -m tiny.text
{printed}
```
"""


def test_titled_blocks_are_files_for_the_commands() -> None:
    page = FILES.format(text="hello", printed="hello")
    assert filled(page, run_blocks(page, "page.md", {})) == page
    old = FILES.format(text="hello", printed="bye")
    assert filled(old, run_blocks(old, "page.md", {})) == page


def test_a_block_that_fails_is_seen_with_its_line() -> None:
    with pytest.raises(AssertionError, match=r"^$") as caught:
        run_blocks(PAGE.format(value=3), "page.md", {})
    frame = traceback.extract_tb(caught.tb)[-1]
    assert (frame.filename, frame.lineno) == ("page.md", PAGE[: PAGE.index("assert")].count("\n") + 1)


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("<!-- no-run: slow -->\n```python\nx\n```", ["line 3: Python always runs"]),
        ("    <!-- no-run: slow -->\n\n    ```python\n    x\n    ```", ["line 4: Python always runs"]),
        ("```py\nx\n```", ["line 2: write python, not py"]),
        ("``` {.python3 .cls}\nx\n```", ["line 2: write python, not python3"]),
        ('```python title="a/b.py"\nx\n```\n```console\n$ python -m a.c\n```', ["line 2: no command runs a/b.py"]),
        ('```python title="a/b.py"\nx\n```\n```console\n$ python -m a.b\n```', []),
        ("<!-- no-run: a shell -->\n```bash\nx\n```\n\n```python\nx\n```\n\n~~~text\nx\n~~~", []),
    ],
)
def test_a_block_that_hides_is_seen(text: str, complaints: list[str]) -> None:
    assert misfits(text) == complaints


def test_docstrings_of_every_kind_are_collected(tmp_path: Path) -> None:
    example = '"""Text.\n\n{indent}```python\n{indent}assert {name}\n{indent}```\n{indent}"""\n'

    def text(name: str, depth: int) -> str:
        return "    " * depth + example.format(indent="    " * depth, name=name)

    source = text("module", 0) + "X = 1\n" + text("constant", 0) + "class A:\n" + text("cls", 1)
    source += (
        "    def f(self):\n" + text("method", 2) + "def g():\n" + text("function", 1) + "def _h():\n" + text("no", 1)
    )
    entries = docstrings(plant(tmp_path, {"a.py": source}))
    assert [(module, name) for module, name, _, _ in entries] == [
        ("planted.a", name) for name in ["", "A", "A.f", "g", "X"]
    ]
    with pytest.raises(NameError, match="method"):
        run_blocks(entries[2][2], "a.py", {})


PRINTING = """
```python
print("a")
print("b ")
```

Which shows:

```text
{shown}
```

```python
c = 1
```

```text
not printed
```
"""


def test_printed_output_replaces_shown_output() -> None:
    page = PRINTING.format(shown="a\nb")
    assert filled(page, run_blocks(page, "page.md", {})) == page
    old = PRINTING.format(shown="a\nc\nd")
    assert filled(old, run_blocks(old, "page.md", {})) == page
    hidden = PRINTING.replace("```text\n{shown}\n```\n", "")
    with pytest.raises(ValueError, match="line 11: the output of the block above is not shown: 'a"):
        filled(hidden, run_blocks(hidden, "page.md", {}))
    last = "```python\nprint('a')\n```\n"
    with pytest.raises(ValueError, match="the output of the last block is not shown"):
        filled(last, run_blocks(last, "page.md", {}))


def test_lasting_effects_of_an_example_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDRULES_PLANTED", "0")
    assert lasting_effects(lambda: monkeypatch.setenv("SHARDRULES_PLANTED", "1")) == ["the environment"]
    assert lasting_effects(lambda: None) == []
    precision = jax.config.values["jax_default_matmul_precision"]
    complaints = lasting_effects(lambda: jax.config.update("jax_default_matmul_precision", "high"))
    jax.config.update("jax_default_matmul_precision", precision)
    assert complaints == ["the configuration of JAX"]
    mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
    setters = []
    complaints = lasting_effects(lambda: setters.append(jax.set_mesh(mesh)))
    with setters[0]:
        pass  # puts back what was set before
    assert complaints == ["the mesh: write `with jax.set_mesh(...)`"]
    assert jax.sharding.get_abstract_mesh().empty
