"""Patches of whole programs: on both kinds of meshes, applied, run and compared with the plan."""

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
from shardrules.programs.patches.text import annotated
from tests.programs.patches.projects import copied, imported, mesh_of, planned

PROGRAMS = ("plain", "blocks", "scanned", "modules", "encoder_decoder", "experts")

OF_OTHERS = ("modules",)
"""Programs that compute in the code of another package, where no annotation of the user's can be."""

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


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow
def test_a_patched_program_is_the_planned_one(name: str, axis_types: str, tmp_path: Path) -> None:
    fn, args = copied(name, tmp_path).make()
    plan = planned(fn, args, axis_types)
    if (name, axis_types) == ("encoder_decoder", "explicit"):
        # The plan splits parameters, which `vmap` is given whole in a tree, over the axis that the batch is split over.
        with pytest.raises(PatchError, match="Unmapped values passed to vmap cannot be sharded"):
            plan.to_patch(fn, root=tmp_path)
        return
    patch = plan.to_patch(fn, root=tmp_path, time_limit=900)
    count = sum(1 for _ in equations(plan.call.jaxpr))
    assert 10 * len(patch.annotations) <= count
    verification = patch.verify()
    assert verification.error is not None
    assert verification.error <= verification.tolerance
    if name in OF_OTHERS:
        assert "unsaid-layouts" in str(patch)
    else:
        assert verification, str(verification)
    # As files, the patched program is the same again.
    patch.apply()
    patched_fn, patched_args = imported(tmp_path / f"{name}.py").make()
    mesh = mesh_of(axis_types)
    arrays = [leaf for leaf in jax.tree.leaves(patched_args) if isinstance(leaf, jax.Array)]
    specs = iter(plan.specs)
    put = [jax.device_put(array, NamedSharding(mesh, next(specs))) for array in arrays]
    leaves, treedef = jax.tree.flatten(patched_args)
    rest = iter(put)
    placed = treedef.unflatten([next(rest) if isinstance(leaf, jax.Array) else leaf for leaf in leaves])
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(fn)(*args)
        with jax.set_mesh(mesh):
            assert difference(expected, jax.jit(patched_fn)(*placed)) <= verification.tolerance


def test_a_patched_file_runs_without_shardrules(tmp_path: Path) -> None:
    module = copied("experts", tmp_path)
    fn, args = module.make()
    patch = planned(fn, args).to_patch(fn, root=tmp_path)
    assert patch.changes
    before = (tmp_path / "experts.py").read_text()
    assert patch.apply() == (tmp_path / "experts.py",)
    assert (tmp_path / "experts.py").read_text() != before
    environment = {**os.environ, "PYTHONPATH": ""}
    command = [sys.executable, "-c", RUN.format(name="experts"), str(tmp_path), str(tmp_path / "results.npz")]
    subprocess.run(command, env=environment, check=True)
    results = np.load(tmp_path / "results.npz")
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(fn)(*args)
    assert difference(expected, list(results.values())) <= 1e-6


@pytest.mark.slow
def test_each_annotation_is_needed(tmp_path: Path) -> None:
    module = copied("experts", tmp_path)
    fn, args = module.make()
    patch = planned(fn, args).to_patch(fn, root=tmp_path)
    verification = patch.verify()
    for index in range(len(patch.annotations)):
        fewer = [*patch.annotations[:index], *patch.annotations[index + 1 :]]
        changes = tuple(annotated(change.file, fewer, ("data", "model")) for change in patch.changes)
        assert attrs.evolve(patch, changes=changes).verify().patched != verification.patched


def test_a_diff_is_what_patch_applies(tmp_path: Path) -> None:
    module = copied("experts", tmp_path)
    fn, args = module.make()
    patch = planned(fn, args).to_patch(fn, root=tmp_path)
    (tmp_path / "changes.diff").write_text(str(patch))
    subprocess.run(["patch", "-p1", "-i", "changes.diff"], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "experts.py").read_bytes() == patch.changes[0].new


def test_explicit_lines_are_listed_with_what_mends_them(tmp_path: Path) -> None:
    fn, args = copied("plain", tmp_path).make()
    check = planned(fn, args, "explicit").check_explicit(fn, root=tmp_path)
    assert not check
    text = str(check)
    assert 'params["embed"][tokens]' in text
    assert "out_sharding" in text
    assert "jnp.take_along_axis" in text
    assert "nothing mends it" not in text


def test_a_function_that_type_checks_has_no_problem(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import jax.numpy as jnp\n\n\ndef f(x):\n    return jnp.tanh(x) * 2\n")
    fn = imported(tmp_path / "model.py").f
    assert planned(fn, (jnp.ones((64, 32)),), "explicit").check_explicit(fn, root=tmp_path)
