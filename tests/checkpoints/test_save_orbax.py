"""`save_orbax`: states with typed keys and Python values, replaced when the new checkpoint is complete."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.checkpoints import commit
from shardrules.core.errors import CheckpointError


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
    with monkeypatch.context() as patched:
        patched.setattr(ocp.PyTreeCheckpointHandler, "save", fail)
        with pytest.raises(CheckpointError, match=r"save_orbax: .*saved cannot be saved: orbax says: .*No space left"):
            sr.save_orbax(tmp_path / "saved", {"w": np.zeros(3)})
    restored = sr.load_orbax(tmp_path / "saved", like(3), P(), sr.create_mesh("data:8"), cast=True)
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


def like(size: int) -> dict[str, Any]:
    return {"w": jax.ShapeDtypeStruct((size,), np.float32)}


def test_a_folder_with_other_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"w": np.ones(3, np.float32)}
    sr.save_orbax(tmp_path / "run" / "first", tree)
    (tmp_path / "run" / "notes.txt").touch()
    monkeypatch.chdir(tmp_path / "run")
    for path, message in (("first/..", "the current folder"), (".", "the current folder"), (tmp_path, "of one: run")):
        files = sorted(tmp_path.rglob("*"))
        with pytest.raises(CheckpointError, match=message):
            sr.save_orbax(path, tree)
        assert sorted(tmp_path.rglob("*")) == files
    # A checkpoint with the user's file in it, and a step with several items.
    (tmp_path / "run" / "first" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"not part of one: notes.txt\. Pass another folder, such as first/state"):
        sr.save_orbax("first", tree)
    with ocp.CheckpointManager(tmp_path / "managed") as manager:
        manager.save(1, args=ocp.args.StandardSave(tree))
    with pytest.raises(CheckpointError, match="not part of one: default"):
        sr.save_orbax(tmp_path / "managed" / "1", tree)


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_a_checkpoint_that_orbax_wrote_is_replaced(use_ocdbt: bool, tmp_path: Path) -> None:
    with ocp.PyTreeCheckpointer(use_ocdbt=use_ocdbt) as checkpointer:
        checkpointer.save(tmp_path / "saved", {"w": np.ones(2), "a": {"b": jnp.ones(3)}, "name": "gpt"})
    sr.save_orbax(tmp_path / "saved", {"w": np.ones(3, np.float32)})
    restored = sr.load_orbax(tmp_path / "saved", like(3), P(), sr.create_mesh("data:8"))
    assert restored["w"].tolist() == [1, 1, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    sr.save_orbax(tmp_path / "saved", {"w": np.ones(3, np.float32)})
    assert (tmp_path / "saved" / "_METADATA").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a.b": np.ones(2), "a": {"b": np.zeros(3)}}, "name: a.b: 'a.b' is also the name of a/b"),
        ({"l": [np.ones(2), np.ones(2)], "l.0": np.zeros(2)}, "name: l.0: 'l.0' is also the name of l/0"),
        ({"a/b": np.ones(2), "a": {"b": np.zeros(3)}}, "name: a/b: 'a.b' is also the name of a/b"),
        ({"a.b": "text", "a": {"b": "other"}}, "name: a.b: 'a.b' is also the name of a/b"),
        ({"w": np.zeros((0, 3)), "v": np.ones(2)}, "empty: w (0, 3): it is empty, and orbax cannot store"),
    ],
)
def test_what_orbax_would_mix_up_or_drop_is_refused(tree: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing was written") as raised:
        sr.save_orbax(tmp_path / "saved", tree)
    assert f"  error {message}" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("step", target_is_directory=True)
    (tmp_path / f".step.{'0' * 16}.saving").symlink_to("elsewhere")
    for value in (1, 2):
        sr.save_orbax(tmp_path / "latest", {"w": np.full(3, value, np.float32)})
        restored = sr.load_orbax(tmp_path / "latest", like(3), P(), sr.create_mesh("data:8"))
        assert restored["w"].tolist() == [value] * 3
    assert sorted(file.name for file in tmp_path.iterdir()) == ["latest", "step"]
    assert (tmp_path / "latest").is_symlink()


def test_an_old_copy_that_cannot_be_removed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sr.save_orbax(tmp_path / "saved", {"w": np.ones(3, np.float32)})
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", fail)
        sr.save_orbax(tmp_path / "saved", {"w": np.zeros(3, np.float32)})
    restored = sr.load_orbax(tmp_path / "saved", like(3), P(), sr.create_mesh("data:8"))
    assert restored["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("made_anew", [False, True])
def test_a_kill_between_two_renames_loses_nothing(
    made_anew: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sr.save_orbax(tmp_path / "saved", {"w": np.ones(3, np.float32)})
    monkeypatch.setattr(commit, "_exchange_names", lambda *_: False)
    replace = Path.replace

    def kill(path: Path, target: Path) -> Path:
        if target.name == "saved":
            raise KeyboardInterrupt("killed")
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", kill)
        with pytest.raises(KeyboardInterrupt, match="killed"):
            sr.save_orbax(tmp_path / "saved", {"w": np.zeros(3, np.float32)})
    assert not (tmp_path / "saved").exists()
    if made_anew:  # by a script that makes its folders before it loads
        (tmp_path / "saved").mkdir()
    with pytest.raises(CheckpointError, match=r"a save was interrupted\n.*rename .*\.saved\.replaced to saved"):
        sr.load_orbax(tmp_path / "saved", like(3), P(), sr.create_mesh("data:8"))
    # A save that fails has brought the old one back before; one that succeeds leaves nothing else.
    with monkeypatch.context() as patched:
        patched.setattr(ocp.PyTreeCheckpointHandler, "save", fail)
        with pytest.raises(CheckpointError, match="No space left"):
            sr.save_orbax(tmp_path / "saved", {"w": np.zeros(3, np.float32)})
    restored = sr.load_orbax(tmp_path / "saved", like(3), P(), sr.create_mesh("data:8"))
    assert restored["w"].tolist() == [1, 1, 1]
    sr.save_orbax(tmp_path / "saved", {"w": np.zeros(3, np.float32)})
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]


def fail(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")
