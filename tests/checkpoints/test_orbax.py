"""`load_orbax`: what it reads, how, and what it refuses."""

import os
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.checkpoints.orbax import load_orbax
from tests.checkpoints.states import facts, make_state

RULES = sr.CompositeShardingRule(
    sr.RegexShardingRule([("bias|count|step|key", P())]),
    sr.DimShardingRule("model", 0) | sr.FSDPShardingRule("data", min_size_mb=0),
)
OTHER = sr.CompositeShardingRule(sr.RegexShardingRule([("bias|count|step|key", P())]), sr.DimShardingRule("data", -1))


def make_model() -> eqx.nn.MLP:
    return eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(0))


def make_arrays() -> Any:
    return eqx.filter(make_state(), eqx.is_array)


def make_nested() -> dict[str, Any]:
    return {
        "blocks": [{"w": jnp.arange(128.0).reshape(8, 16) + i} for i in range(3)],
        "empty": {"none": None, "no": {}},
        "half": jnp.linspace(-1, 1, 64).astype(jnp.bfloat16).reshape(8, 8),
        "pair": (jnp.arange(8), np.arange(16, dtype=np.int32)),
        "step": 7,
        "rate": 0.25,
        "flag": True,
    }


MAKE = {"model": lambda: eqx.filter(make_model(), eqx.is_array), "state": make_arrays, "nested": make_nested}


def save(path: Path, tree: Any, how: str = "standard") -> Path:
    """Saves a tree in one of three ways, and returns the folder that it is in."""
    if how == "standard":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)
        return path
    if how == "pytree":
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(path, tree)
        return path
    with ocp.CheckpointManager(path) as manager:
        manager.save(3, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    return path / "3" / "default"


def assert_placed(loaded: Any, expected: Any) -> None:
    pairs = list(zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True))
    arrays = [(new, old) for new, old in pairs if isinstance(old, jax.Array)]
    assert arrays
    for new, old in arrays:
        assert isinstance(new, jax.Array)
        assert new.sharding == old.sharding


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", list(MAKE))
@pytest.mark.parametrize("how", ["standard", "pytree", "manager"])
def test_a_tree_comes_back_on_another_mesh(tmp_path: Path, mesh: Mesh, kind: str, how: str) -> None:
    original = MAKE[kind]()
    folder = save(tmp_path / "saved", sr.filter_shard(original, RULES, mesh), how)
    like = eqx.filter_eval_shape(MAKE[kind])
    half = sr.create_mesh("data:2,model:2", devices=jax.devices()[:4])
    for rules, other in ((RULES, half), (OTHER, mesh), (RULES, sr.create_mesh("model:8,data:1"))):
        loaded = load_orbax(folder, like, rules.plan(like, other))
        assert jax.tree.structure(loaded) == jax.tree.structure(like)
        assert facts(loaded) == facts(original)
        assert_placed(loaded, sr.filter_shard(original, rules, other))


def test_a_whole_module_takes_what_its_arrays_were_saved_as(tmp_path: Path, mesh: Mesh) -> None:
    model = make_model()
    save(tmp_path / "saved", eqx.filter(model, eqx.is_array))
    loaded = load_orbax(tmp_path / "saved", eqx.filter_eval_shape(make_model), RULES, mesh)
    assert facts(eqx.filter(loaded, eqx.is_array)) == facts(eqx.filter(model, eqx.is_array))
    assert loaded.activation is model.activation


def test_only_a_part_is_asked_for(tmp_path: Path, mesh: Mesh) -> None:
    state = make_arrays()
    save(tmp_path / "saved", state)
    like = eqx.filter_eval_shape(make_model)
    loaded = load_orbax(tmp_path / "saved", like, RULES, mesh, names=lambda path: f"model/{path}", surplus="skip")
    assert facts(eqx.filter(loaded, eqx.is_array)) == facts(state.model)
    with pytest.raises(sr.errors.CheckpointError, match=r"error surplus: optimizer/0/mu/layers/\*/bias x2"):
        load_orbax(tmp_path / "saved", like, RULES, mesh, names=lambda path: f"model/{path}")


def test_only_requested_arrays_are_read(tmp_path: Path, mesh: Mesh) -> None:
    w = jnp.arange(2.0**20)
    save(tmp_path / "saved", {"w": w, "v": w + 1})
    restored: list[Any] = []
    plain = ocp.PyTreeCheckpointHandler.restore

    def look(self: Any, folder: Any, **kwargs: Any) -> Any:
        restored.append([leaf is not ocp.PLACEHOLDER for leaf in jax.tree.leaves(kwargs["args"].item)])
        return plain(self, folder, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocp.PyTreeCheckpointHandler, "restore", look)
        loaded = load_orbax(tmp_path / "saved", {"v": w}, P("data"), mesh, surplus="skip")
    assert restored == [[True, False]]
    assert facts(loaded) == facts({"v": w + 1})


def test_names_ties_casts_and_missing_arrays(tmp_path: Path, mesh: Mesh) -> None:
    w = jnp.linspace(-1, 1, 128).reshape(16, 8)
    save(tmp_path / "saved", {"model": {"w": w}, "step": jnp.array(7), "text": "text"}, "pytree")
    like = {
        "w": jax.ShapeDtypeStruct((16, 8), jnp.bfloat16),
        "tied": jax.ShapeDtypeStruct((16, 8), jnp.float32),
        "new": jnp.ones(8),
        "step": 0,
        "text": "",
        "rate": 0.5,
    }
    names = {"w": "model/w", "tied": "model/w", "new": None}
    loaded = load_orbax(tmp_path / "saved", like, P("data"), mesh, names=names, cast=True)
    expected = {**like, "w": w.astype(jnp.bfloat16), "tied": w, "step": 7, "text": "text"}
    assert facts(loaded) == facts(expected)
    assert loaded["new"].sharding.spec == P("data")


@pytest.mark.parametrize("saved_as", ["keys", "numbers"])
@pytest.mark.parametrize("wanted_as", ["keys", "numbers"])
def test_keys(tmp_path: Path, mesh: Mesh, saved_as: str, wanted_as: str) -> None:
    keys = jax.random.split(jax.random.key(3), 8)
    forms = {"keys": keys, "numbers": jax.random.key_data(keys)}
    save(tmp_path / "saved", {"k": forms[saved_as]})
    loaded = load_orbax(tmp_path / "saved", {"k": forms[wanted_as]}, P("data"), mesh)["k"]
    assert facts(loaded) == facts(forms[wanted_as])
    assert loaded.sharding.spec == P("data")


# What is wrong.


def test_all_problems_are_listed_before_anything_is_read(tmp_path: Path, mesh: Mesh, no_reads: None) -> None:
    save(tmp_path / "saved", make_nested())
    like = make_nested()
    like["blocks"] = [{"w": jax.ShapeDtypeStruct((8, 8), jnp.float32), "v": jnp.ones(2)} for _ in range(3)]
    like["half"] = jnp.ones((8, 8))
    like["step"] = 0.0
    del like["pair"]
    with pytest.raises(sr.errors.CheckpointError, match="saved cannot be loaded, and nothing was:") as caught:
        load_orbax(tmp_path / "saved", like, P(), mesh)
    assert [line.strip() for line in str(caught.value).splitlines()[1:] if "->" not in line] == [
        "error missing: blocks/*/v (2,) x3: the checkpoint has no 'blocks/0/v' (did you mean 'blocks/0/w'?)",
        "error shape: blocks/*/w (8, 8) x3: 'blocks/0/w' has shape (8, 16)",
        "error dtype: half (8, 8): 'half' is bfloat16[8, 8], expected float32",
        "error value: step: 'step' is int64[], and `like` has a Python float",
        "error surplus: pair/0: no leaf of `like` takes it, int32[8]",
        "error surplus: pair/1: no leaf of `like` takes it, int32[16]",
    ]


def test_folders_without_a_checkpoint_are_errors(tmp_path: Path, mesh: Mesh) -> None:
    like = {"w": jnp.ones(8)}
    save(tmp_path / "run", like, "manager")
    save(tmp_path / "broken", like)
    (tmp_path / "broken" / "_METADATA").write_text("{")
    (tmp_path / "empty").mkdir()
    complaints = {
        "gone": "no such folder",
        "empty": "this folder itself is not the checkpoint of a tree\n +-> pass the folder that was saved",
        "run": "this folder itself is not the checkpoint of a tree\n +-> pass the folder of an item: 3/default",
        "run/3": "this folder itself is not the checkpoint of a tree\n +-> pass the folder of an item: default",
        "broken": "orbax cannot read its metadata: JSONDecodeError",
    }
    for folder, complaint in complaints.items():
        with pytest.raises(sr.errors.CheckpointError, match=complaint):
            load_orbax(tmp_path / folder, like, P(), mesh)


def test_data_that_is_gone_is_an_error(tmp_path: Path, mesh: Mesh) -> None:
    like = {"w": jax.random.normal(jax.random.key(0), (2**18,))}
    save(tmp_path / "saved", like)
    largest = max((tmp_path / "saved").rglob("d/*"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: 2**16])
    with pytest.raises(sr.errors.CheckpointError, match="saved: orbax cannot read it: "):
        load_orbax(tmp_path / "saved", like, P(), mesh)


def test_without_orbax_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(sr.errors.CheckpointError, match=r'is not installed: pip install "shardrules\[orbax\]"'):
        load_orbax("anywhere", {}, P())


def test_a_path_need_not_be_absolute(tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "saved", {"w": jnp.ones(8)})
    monkeypatch.chdir(tmp_path)
    assert load_orbax("saved", {"w": jnp.ones(8)}, P("data"), mesh)["w"].sum() == 8
    assert load_orbax(os.path.abspath("saved"), {"w": jnp.ones(8)}, P(), mesh)["w"].sum() == 8
