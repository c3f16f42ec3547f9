"""Patches of whole programs: on both kinds of meshes, applied, run and compared with the plan."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from shardrules.errors import PatchError
from shardrules.programs.jaxprs.walk import equations
from shardrules.programs.patches.reading import Reading
from shardrules.programs.patches.text import annotated
from tests.programs.patches.projects import copied, imported, mesh_of, planned, written

RUN = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding
sys.path.insert(0, sys.argv[1])
import {name}
fn, args = {name}.make()
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
with jax.set_mesh(mesh):
    results = jax.jit(fn)(*args)
assert "shardrules" not in sys.modules
np.savez(sys.argv[2], *jax.tree.leaves(results))
"""


def difference(old: Any, new: Any) -> float:
    """The largest difference of two trees of arrays, as a part of the norm of an array."""
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    ]
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-30)) for a, b in pairs)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The patch of a loop for Auto axes."""
    folder = tmp_path_factory.mktemp("loop")
    fn, args = copied("loop", folder).make()
    return planned(fn, args).to_patch(fn, root=folder)


def check_applied(name: str, axis_types: str, fn: Any, patch: Any, verification: Any) -> None:
    """Checks that files with a patch compute what the function computes, with arguments as planned."""
    patch.apply()
    patched_fn, args = imported(patch.root / f"{name}.py").make()
    mesh, specs = mesh_of(axis_types), iter(patch.plan.specs)
    placed = jax.tree.map(lambda array: jax.device_put(array, NamedSharding(mesh, next(specs))), args)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(fn)(*args)
        with jax.set_mesh(mesh):
            assert difference(expected, jax.jit(patched_fn)(*placed)) <= verification.tolerance


@pytest.mark.sample(1)
@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
@pytest.mark.parametrize("name", ["loop", "layers"])
def test_a_patched_program_is_the_planned_one(name: str, axis_types: str, tmp_path: Path) -> None:
    fn, args = copied(name, tmp_path).make()
    patch = planned(fn, args, axis_types).to_patch(fn, root=tmp_path)
    verification = patch.verify()
    assert verification, str(verification)
    assert len(patch.annotations) <= 2
    check_applied(name, axis_types, fn, patch, verification)


@pytest.mark.slow
def test_a_patched_transformer_is_the_planned_one(tmp_path: Path) -> None:
    fn, args = copied("plain", tmp_path).make()
    plan = planned(fn, args)
    patch = plan.to_patch(fn, root=tmp_path)
    assert 0 < 10 * len(patch.annotations) <= sum(1 for _ in equations(plan.call.jaxpr))
    verification = patch.verify()
    assert verification, str(verification)
    unpatched = attrs.evolve(patch, changes=()).verify()
    assert not unpatched
    assert verification.patched.seconds < unpatched.patched.seconds
    check_applied("plain", "auto", fn, patch, verification)


@pytest.mark.slow
def test_layouts_in_code_of_others_are_said_to_be_left(tmp_path: Path) -> None:
    fn, args = copied("library", tmp_path).make()
    patch = planned(fn, args).to_patch(fn, root=tmp_path)
    assert "unsaid-layouts: with layouts that no annotation says, here or in code of others" in str(patch)
    verification = patch.verify()
    assert not verification
    assert verification.patched.seconds > verification.planned.seconds
    assert any(line.startswith("time: ") for line in verification.differences)
    assert verification.error is not None
    assert verification.error <= verification.tolerance
    assert str(verification).startswith("not as planned: ")


def test_what_vmap_cannot_map_on_explicit_axes_is_refused_with_its_line(tmp_path: Path) -> None:
    fn, args = copied("examples", tmp_path).make()
    message = r"JAX refuses lines on Explicit axes that nothing mends:\nexamples.py:15: jax.vmap\(score.*passed to vmap"
    with pytest.raises(PatchError, match=message):
        planned(fn, args, "explicit").to_patch(fn, root=tmp_path)


def test_a_patched_file_runs_without_shardrules(loop: Any, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_bytes(loop.changes[0].new)
    environment = {**os.environ, "PYTHONPATH": ""}
    command = [sys.executable, "-c", RUN.format(name="loop"), str(tmp_path), str(tmp_path / "results.npz")]
    subprocess.run(command, env=environment, check=True)
    results = np.load(tmp_path / "results.npz")
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(loop.fn)(*loop.plan.args)
    assert difference(expected, list(results.values())) <= 1e-6


def test_each_annotation_is_needed(loop: Any) -> None:
    verification = loop.verify()
    assert loop.annotations
    for index in range(len(loop.annotations)):
        fewer = [*loop.annotations[:index], *loop.annotations[index + 1 :]]
        changes = tuple(annotated(change.file, fewer, ("data", "model")) for change in loop.changes)
        assert attrs.evolve(loop, changes=changes).verify().patched != verification.patched


def test_weights_that_a_loop_takes_apart_may_get_annotations_in_its_body(loop: Any) -> None:
    reading = Reading.of(loop.fn, loop.plan, loop.root)
    texts = [ast.unparse(reading.sources.places[number].node) for number in reading.candidates]
    assert {"w['up']", "w['down']"} <= set(texts)


def test_a_diff_is_what_patch_applies(loop: Any, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_bytes(loop.changes[0].file.raw)
    (tmp_path / "changes.diff").write_text(str(loop))
    subprocess.run(["patch", "-p1", "-i", "changes.diff"], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "loop.py").read_bytes() == loop.changes[0].new


WORDS = """import jax
import jax.numpy as jnp


def loss(params, tokens):
    x = params["embed"][tokens]
    logits = jnp.tanh(x @ params["up"]) @ params["down"] @ params["embed"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
    return -jnp.mean(picked)


grads = jax.value_and_grad(loss)
"""


def test_explicit_lines_are_listed_with_what_mends_them(tmp_path: Path) -> None:
    fn = written(WORDS, tmp_path).grads
    key = jax.random.key(0)
    shapes = {"embed": (64, 32), "up": (32, 64), "down": (64, 32)}
    params = {name: jax.random.normal(key, shape) for name, shape in shapes.items()}
    plan = planned(fn, (params, jax.random.randint(key, (16, 8), 0, 64)), "explicit")
    check = plan.check_explicit(fn, root=tmp_path)
    assert not check
    text = str(check)
    assert 'params["embed"][tokens]' in text
    assert "-> out_sharding P(" in text
    assert "jnp.take_along_axis" in text
    assert "nothing mends it" not in text


def test_a_function_that_type_checks_has_no_problem(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import jax.numpy as jnp\n\n\ndef f(x):\n    return jnp.tanh(x) * 2\n")
    fn = imported(tmp_path / "model.py").f
    assert planned(fn, (jnp.ones((64, 32)),), "explicit").check_explicit(fn, root=tmp_path)
