"""`save_orbax`: states with typed keys and Python values, replaced when the new checkpoint is complete."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import CheckpointError
from tests.placement.checkpoints.states import facts, like_state, make_state, place


def test_a_state_comes_back_on_another_mesh(tmp_path: Path) -> None:
    state = place(make_state(), sr.create_mesh("data:4,model:2"))
    sr.save_orbax(tmp_path / "run" / "state", state)
    mesh = sr.create_mesh("model:2", devices=jax.devices()[:2])
    restored = sr.load_orbax(tmp_path / "run" / "state", like_state(), P(), mesh)
    assert facts(restored) == facts(state)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["state"]


def test_strings_and_nibbles_are_saved(tmp_path: Path) -> None:
    tree = {"name": "gpt", "bits": jnp.arange(4, dtype=jnp.int4), "count": np.int8(3)}
    sr.save_orbax(tmp_path / "saved", tree)
    restored = sr.load_orbax(tmp_path / "saved", {**tree, "name": ""}, P(), sr.create_mesh("data:8"))
    assert restored["name"] == "gpt"
    assert restored["bits"].tolist() == [0, 1, 2, 3]


def test_orbax_reads_the_checkpoint(tmp_path: Path) -> None:
    sr.save_orbax(tmp_path / "saved", {"layers": [np.arange(3.0), np.ones(2)], "step": 7})
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "saved")
    assert restored["step"] == 7
    assert [layer.tolist() for layer in restored["layers"]] == [[0, 1, 2], [1, 1]]


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sr.save_orbax(tmp_path / "saved", {"w": np.ones(3)})

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ocp.PyTreeCheckpointHandler, "save", fail)
        with pytest.raises(CheckpointError, match=r"save_orbax: .*saved cannot be saved: orbax says: .*No space left"):
            sr.save_orbax(tmp_path / "saved", {"w": np.zeros(3)})
    like = {"w": jax.ShapeDtypeStruct((3,), np.float32)}
    restored = sr.load_orbax(tmp_path / "saved", like, P(), sr.create_mesh("data:8"), cast=True)
    assert restored["w"].tolist() == [1, 1, 1]
    # The next save clears away what the failed one left.
    sr.save_orbax(tmp_path / "saved", {"w": np.zeros(3)})
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]


def test_all_that_cannot_be_saved_is_listed(tmp_path: Path) -> None:
    tree: Any = {
        "complex": 1j,
        "shape": jax.ShapeDtypeStruct((2,), np.float32),
        "source": sr.ArraySource((2,), np.float32, lambda _: np.ones(2, np.float32)),
        "bits": jnp.ones(4, jnp.uint4),
    }
    with pytest.raises(CheckpointError, match="cannot be saved, and nothing was written") as raised:
        sr.save_orbax(tmp_path / "saved", tree)
    for line in ("dtype: bits (4,)", "no-values: shape (2,)", "no-values: source (2,)", "dtype: complex"):
        assert f"  error {line}" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "saved").touch()
    with pytest.raises(CheckpointError, match="saved is a file, and a checkpoint is a folder"):
        sr.save_orbax(tmp_path / "saved", {"w": np.ones(3)})
