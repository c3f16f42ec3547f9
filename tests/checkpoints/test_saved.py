"""What a checkpoint takes from a tree, and what it refuses."""

import enum
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.checkpoints.leaves import saved_leaves
from shardrules.core.errors import CheckpointError, ConfigTypeError


def supported(_: np.dtype) -> str:
    return ""


def test_arrays_numbers_and_keys_are_saved_in_order() -> None:
    tree = {
        "array": jnp.ones((2, 3), jnp.bfloat16),
        "big-endian": np.ones(2, ">f4"),
        "function": jax.nn.relu,
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 3),
        "number": 3,
        "source": sr.ArraySource((4,), np.float32, lambda index: np.ones(4, np.float32)[index]),
        "text": "x",
        "truth": True,
        "type": np.float32,
    }
    leaves, findings = saved_leaves(tree, "save", supported)
    assert findings == []
    assert [(leaf.path, str(leaf.dtype), leaf.shape, leaf.nbytes) for leaf in leaves] == [
        ("array", "bfloat16", (2, 3), 12),
        ("big-endian", "float32", (2,), 8),
        ("keys", "uint32", (3, 4), 48),
        ("number", "int64", (), 8),
        ("source", "float32", (4,), 16),
        ("truth", "bool", (), 1),
    ]


def test_paths_are_those_of_the_loaders() -> None:
    model = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))
    paths = dict(zip(sr.leaf_paths(model), jax.tree.leaves(model), strict=True))
    leaves, _ = saved_leaves(model, "save", supported)
    assert [leaf.path for leaf in leaves] == [path for path, value in paths.items() if eqx.is_array(value)]


def test_everything_without_values_is_listed() -> None:
    deleted = jnp.ones(3)
    deleted.delete()
    tree: Any = {"deleted": deleted, "shape": jax.ShapeDtypeStruct((2,), np.float32), "large": 2**64, "fine": 1}
    leaves, findings = saved_leaves(tree, "save", supported)
    assert [leaf.path for leaf in leaves] == ["fine"]
    assert [(finding.path, finding.code) for finding in findings] == [
        ("deleted", "no-values"),
        ("large", "too-large"),
        ("shape", "no-values"),
    ]


def test_unsupported_dtypes_are_listed() -> None:
    tree = {"a": jnp.ones(2, jnp.int4), "b": jnp.ones(2)}
    _, findings = saved_leaves(tree, "save", lambda dtype: "it is int4" if dtype == jnp.int4 else "")
    assert [(finding.path, finding.message) for finding in findings] == [("a", "it is int4")]


def test_inside_jit_there_is_nothing_to_save() -> None:
    with pytest.raises(ConfigTypeError, match="save: inside jit arrays have no values"):
        jax.jit(lambda x: saved_leaves({"x": x}, "save", supported))(jnp.ones(3))


def test_placed_arrays_are_local_in_one_process() -> None:
    placed = sr.filter_shard({"w": np.ones((8, 8))}, P("data"), sr.create_mesh("data:8"))
    leaves, _ = saved_leaves(placed, "save", supported)
    assert leaves[0].is_local


FORMATS = {
    "safetensors": (sr.save_safetensors, sr.load_safetensors),
    "equinox": (sr.save_equinox, sr.load_equinox),
    "orbax": (sr.save_orbax, sr.load_orbax),
}


class Phase(enum.IntEnum):
    WARM = 1
    TRAIN = 2


class Rate(float):
    """A subclass of a Python number."""


@pytest.mark.parametrize("name", FORMATS)
def test_subclasses_of_numbers_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    save, load = FORMATS[name]
    mesh = sr.create_mesh("data:8")
    tree = {"phase": Phase.TRAIN, "rate": Rate(0.5), "truth": True}
    save(tmp_path / "saved", tree)
    restored = load(tmp_path / "saved", {"phase": Phase.WARM, "rate": Rate(0), "truth": False}, P(), mesh)
    assert restored == tree
    assert [type(value) for value in restored.values()] == [Phase, Rate, bool]
    with pytest.raises(CheckpointError, match=r"(?s)value: .*value: "):
        load(tmp_path / "saved", {"phase": True, "rate": 0.0, "truth": 1}, P(), mesh)


@pytest.mark.parametrize("name", FORMATS)
def test_a_number_that_an_enum_lacks_is_an_error_with_its_path(name: str, tmp_path: Path) -> None:
    save, load = FORMATS[name]
    save(tmp_path / "saved", {"phase": 7})
    with pytest.raises(CheckpointError, match="phase: 7 cannot become a Phase"):
        load(tmp_path / "saved", {"phase": Phase.WARM}, P(), sr.create_mesh("data:8"))


@pytest.mark.parametrize("name", ["safetensors", "orbax"])
def test_a_path_with_half_a_surrogate_pair_is_refused(name: str, tmp_path: Path) -> None:
    save, _ = FORMATS[name]
    with pytest.raises(CheckpointError, match=r"name: w\\ud800.* is not valid Unicode"):
        save(tmp_path / "saved", {"w\ud800": np.ones(3)})
    assert list(tmp_path.iterdir()) == []


def test_a_format_without_paths_takes_half_a_surrogate_pair(tmp_path: Path) -> None:
    tree = {"w\ud800": np.ones(3, np.float32)}
    sr.save_equinox(tmp_path / "saved", tree)
    assert (sr.load_equinox(tmp_path / "saved", tree, P(), sr.create_mesh("data:8"))["w\ud800"] == 1).all()
