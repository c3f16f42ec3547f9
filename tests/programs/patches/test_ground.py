"""Source that is hard to change, or must not be: the answer is clear, and no file is touched in part."""

import functools
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardrules.errors import PatchError
from shardrules.programs.patches import apply
from tests.programs.patches.projects import imported, planned, written

MODEL = """import jax
import jax.numpy as jnp


def f(w, x):
    return jnp.sum(jnp.tanh(x @ w["up"]) @ w["down"])
"""


def arguments() -> tuple[Any, ...]:
    key = jax.random.key(0)
    return {"up": jax.random.normal(key, (64, 256)), "down": jax.random.normal(key, (256, 64))}, jnp.ones((8, 64))


def pinned_patch(fn: Callable[..., Any], root: Path | None, args: tuple[Any, ...] | None = None) -> Any:
    """The patch of a plan that needs annotations: what it splits, no compiler would."""
    args = arguments() if args is None else args
    plan = planned(fn, args)
    return plan.to_patch(fn, root=root)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Annotations for the products of any program, whatever the compiler would choose."""
    from shardrules.programs.patches import patch as module
    from shardrules.programs.patches.text import Annotation

    def products(reading: Any, machine: Any, goal: Any, deadline: float) -> tuple[list[Annotation], Any]:
        needs, places = reading.needs, reading.sources.places
        chosen = [Annotation(places[each], needs[each].spec, "constraint") for each in needs if needs[each].has_matmul]
        return chosen, goal

    monkeypatch.setattr(module, "auto_annotations", products)


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("line_end", ["\r\n", "\n"])
def test_line_ends_stay(line_end: str, tmp_path: Path) -> None:
    text = MODEL.replace("\n", line_end).encode()
    patch = pinned_patch(written(text, tmp_path).f, tmp_path)
    assert patch.verify()
    patch.apply()
    new = (tmp_path / "model.py").read_bytes()
    assert b"with_sharding_constraint" in new
    assert new.count(b"\n") == new.count(line_end.encode())


@pytest.mark.usefixtures("forced")
def test_tabs_and_letters_of_several_bytes_stay(tmp_path: Path) -> None:
    text = MODEL.replace("    return", "\té = 'größe'; ä = 1\n\treturn ").replace("x @", "(x) @")
    patch = pinned_patch(written(text, tmp_path).f, tmp_path)
    assert patch.verify()
    patch.apply()
    new = (tmp_path / "model.py").read_text()
    assert "\té = 'größe'; ä = 1\n" in new
    assert "    " not in new.replace("\t", "")
    imported(tmp_path / "model.py")


@pytest.mark.usefixtures("forced")
def test_a_file_in_another_encoding_stays_in_it(tmp_path: Path) -> None:
    text = ("# -*- coding: latin-1 -*-\n" + MODEL.replace("return", "größe = 'é'\n    return")).encode("latin-1")
    pinned_patch(written(text, tmp_path).f, tmp_path).apply()
    new = (tmp_path / "model.py").read_bytes()
    assert "größe".encode("latin-1") in new
    imported(tmp_path / "model.py")


@pytest.mark.usefixtures("forced")
@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "text",
    [
        "f = lambda w, x: jnp.sum(jnp.tanh(x @ w['up']) @ w['down'])\n",
        "f, g = lambda w, x: jnp.sum(jnp.tanh(x @ w['up']) @ w['down']), lambda w, x: x @ w['up']\n",
        "def g(w, x): return jnp.tanh(x @ w)\n\ndef f(w, x): return jnp.sum(g(w['up'], x)) + jnp.sum(g(w['up'], x))\n",
        "def d(fn):\n    return lambda *a: fn(*a)\n\n@d\n@jax.jit\ndef f(w, x):\n    return jnp.sum(x @ w['up'])\n",
        "def make(s):\n    def f(w, x):\n        return s * jnp.sum(x @ w['up'])\n    return f\n\nf = make(2.0)\n",
        "def f(w, x):\n    y = [x @ w['up'] for _ in range(2)]; z = y[0]\n    z += y[1]\n    return jnp.sum(z)\n",
        "def f(w, x):\n    return jnp.sum(  # a sum\n        (x\n         @ w['up'])  # of a product\n    )\n",
        "P = 3\nDATA = 'x'\n\ndef f(w, x):\n    jax_partitionspec = 1\n    return jnp.sum(x @ w['up'])\n",
        "class A:\n    def __call__(self, w, x):\n        return jnp.sum(x @ w['up'])\n\nf = A()\n",
        "import functools\n\ndef g(w, x, n):\n    return jnp.sum(x @ w['up']) * n\n\nf = functools.partial(g, n=2)\n",
    ],
)
def test_all_kinds_of_functions_are_patched(text: str, tmp_path: Path) -> None:
    module = written(f"import jax\nimport jax.numpy as jnp\n\n{text}", tmp_path)
    patch = pinned_patch(module.f, tmp_path)
    assert patch.annotations
    assert patch.verify()
    patch.apply()
    args = arguments()
    with jax.set_mesh(planned(module.f, args).mesh):
        new = jax.jit(imported(tmp_path / "model.py").f)(*args)
    assert jnp.allclose(new, module.f(*args), rtol=1e-5)


def test_source_that_is_no_file_is_refused(tmp_path: Path) -> None:
    space: dict[str, Any] = {"jnp": jnp}
    exec("def f(w, x):\n    return jnp.sum(x @ w['up'])", space)
    with pytest.raises(PatchError, match="is no file: its code comes from a prompt, a notebook or a string"):
        pinned_patch(space["f"], tmp_path)
    cell = compile("def f(w, x):\n    return jnp.sum(x @ w['up'])", "/tmp/ipykernel_1/2.py", "exec")
    exec(cell, space)
    with pytest.raises(PatchError, match="is no file"):
        pinned_patch(space["f"], tmp_path)


def test_a_file_that_has_changed_since_the_import_is_refused(tmp_path: Path) -> None:
    fn = written(MODEL, tmp_path).f
    (tmp_path / "model.py").write_text("# a line\n" + MODEL)
    with pytest.raises(PatchError, match="changed since the import"):
        pinned_patch(fn, tmp_path)


def test_a_line_more_at_the_end_is_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # the time of the file that was read stands there
    fn = written(MODEL, tmp_path).f
    (tmp_path / "model.py").write_text(MODEL + "# a line\n")
    with pytest.raises(PatchError, match="changed since the import"):
        pinned_patch(fn, tmp_path)


@pytest.mark.usefixtures("forced")
def test_a_file_that_has_changed_since_the_patch_is_refused(tmp_path: Path) -> None:
    patch = pinned_patch(written(MODEL, tmp_path).f, tmp_path)
    (tmp_path / "model.py").write_text(MODEL + "# a line\n")
    with pytest.raises(PatchError, match="has changed since the patch was made"):
        patch.apply()
    assert (tmp_path / "model.py").read_text() == MODEL + "# a line\n"


TWO = {
    "model_a.py": "def g(w, x):\n    return x @ w\n",
    "model_b.py": "import jax.numpy as jnp\nfrom {name} import g\n\n\n"
    "def f(w, x):\n    return jnp.sum(jnp.tanh(g(w['up'], x)) @ w['down'])\n",
}


def two_files(folder: Path) -> Any:
    first = written(TWO["model_a.py"], folder, "model_a.py")
    return written(TWO["model_b.py"].format(name=first.__name__), folder, "model_b.py")


@pytest.mark.usefixtures("forced")
def test_a_read_only_file_keeps_all_files_as_they_are(tmp_path: Path) -> None:
    patch = pinned_patch(two_files(tmp_path).f, tmp_path)
    assert len(patch.changes) == 2
    before = {path: path.read_bytes() for path in tmp_path.glob("*.py")}
    os.chmod(tmp_path / "model_b.py", stat.S_IRUSR)
    with pytest.raises(PatchError, match=r"nothing was written:\n.*model_b.py: is read-only"):
        patch.apply()
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.usefixtures("forced")
def test_a_failure_in_the_middle_puts_all_files_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = pinned_patch(two_files(tmp_path).f, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.py")}
    replace, calls = os.replace, list[Any]()

    def failing(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError("the disk is full")
        replace(source, target)

    monkeypatch.setattr(apply.os, "replace", failing)
    with pytest.raises(PatchError, match="no file has changed: the disk is full"):
        patch.apply()
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.usefixtures("forced")
def test_a_link_out_of_the_project_is_left_alone(tmp_path: Path) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    project.mkdir()
    other.mkdir()
    (other / "shared.py").write_text(TWO["model_a.py"])
    (project / "shared.py").symlink_to(other / "shared.py")
    first = imported(project / "shared.py")
    module = written(TWO["model_b.py"].format(name=first.__name__), project)
    patch = pinned_patch(module.f, project)
    assert [change.file.path.name for change in patch.changes] == ["model.py"]
    assert "is a link out of the project" in str(patch)
    patch.apply()
    assert (other / "shared.py").read_text() == TWO["model_a.py"]


@pytest.mark.usefixtures("forced")
def test_files_outside_of_the_project_are_left_alone(tmp_path: Path) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    project.mkdir()
    other.mkdir()
    first = written(TWO["model_a.py"], other, "model_a.py")
    (project / "pyproject.toml").write_text("")
    patch = pinned_patch(written(TWO["model_b.py"].format(name=first.__name__), project).f, None)
    assert patch.root == project
    assert [change.file.path.parent for change in patch.changes] == [project]
    assert "outside of the project" in str(patch)


def test_code_without_a_line_of_the_user_is_refused() -> None:
    fn = functools.partial(jnp.matmul)
    with pytest.raises(PatchError, match="no line of it can be changed"):
        pinned_patch(fn, None, (jnp.ones((64, 64)), jnp.ones((64, 64))))
