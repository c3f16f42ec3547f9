"""`save_equinox`: the files of Equinox, with typed keys, from sharded arrays."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import CheckpointError
from tests.checkpoints.states import facts, make_state


def test_equinox_reads_the_file(tmp_path: Path) -> None:
    tree = {
        "w": jnp.arange(12.0).reshape(3, 4),
        "half": jnp.ones(3, jnp.bfloat16),
        "step": 7,
        "rate": 0.5,
        "f": jax.nn.relu,
    }
    sr.save_equinox(tmp_path / "tree.eqx", tree)
    like = {**tree, "w": jnp.zeros((3, 4)), "half": jnp.zeros(3, jnp.bfloat16), "step": 0, "rate": 0.0}
    restored = eqx.tree_deserialise_leaves(tmp_path / "tree.eqx", like)
    assert facts(restored) == facts(tree)


def test_without_keys_it_is_the_file_of_equinox_and_checksums(tmp_path: Path) -> None:
    model = make_state().model
    eqx.tree_serialise_leaves(tmp_path / "theirs.eqx", model)
    sr.save_equinox(tmp_path / "ours.eqx", sr.filter_shard(model, P(), sr.create_mesh("data:8")))
    theirs, ours = (tmp_path / "theirs.eqx").read_bytes(), (tmp_path / "ours.eqx").read_bytes()
    assert ours.startswith(theirs + b"\x93SHARDRULES crc=")


def test_all_that_cannot_be_saved_is_listed(tmp_path: Path) -> None:
    tree = {"a": jax.ShapeDtypeStruct((2,), np.float32), "b": 2**64}
    with pytest.raises(CheckpointError, match=r"(?s)save_equinox: .*no-values: a \(2,\).*too-large: b"):
        sr.save_equinox(tmp_path / "tree.eqx", tree)
    assert list(tmp_path.iterdir()) == []


def test_a_tree_without_arrays_is_saved(tmp_path: Path) -> None:
    sr.save_equinox(tmp_path / "tree.eqx", {"f": jax.nn.relu, "none": np.zeros((0, 3), np.float32)})
    like = {"f": jax.nn.relu, "none": np.ones((0, 3), np.float32)}
    restored = sr.load_equinox(tmp_path / "tree.eqx", like, P(), sr.create_mesh("data:8"))
    assert restored["none"].shape == (0, 3)
    sr.save_equinox(tmp_path / "tree.eqx", {"f": jax.nn.relu})
    assert sr.load_equinox(tmp_path / "tree.eqx", {"f": jax.nn.relu}, P(), sr.create_mesh("data:8"))
