"""Files that appear all at once: at every moment of a save the old or the new checkpoint is whole."""

import json
import os
import resource
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.checkpoints import commit
from shardrules.checkpoints.commit import replace_folder
from shardrules.core.errors import CheckpointError


def tree(value: int) -> dict[str, Any]:
    return {"a": np.full((8, 4), value, np.int32), "b": np.full(5, value, np.int32), "step": value}


SAVERS: dict[str, Callable[[Path, Any], None]] = {
    "folder": lambda path, tree: sr.save_safetensors(path / "saved", tree, max_file_bytes=100),
    "file": lambda path, tree: sr.save_safetensors(path / "saved.safetensors", tree),
    "equinox": lambda path, tree: sr.save_equinox(path / "saved.eqx", tree),
}
LOADERS: dict[str, Callable[[Path, Any], Any]] = {
    "folder": lambda path, like: sr.load_safetensors(path / "saved", like, P(), sr.create_mesh("data:8")),
    "file": lambda path, like: sr.load_safetensors(path / "saved.safetensors", like, P(), sr.create_mesh("data:8")),
    "equinox": lambda path, like: sr.load_equinox(path / "saved.eqx", like, P(), sr.create_mesh("data:8")),
}
STEPS = ((os, "open"), (os, "pwrite"), (os, "fsync"), (os, "truncate"), (Path, "replace"), (Path, "unlink"))
"""The calls that change the disk."""


def value_of(loaded: dict[str, Any]) -> int:
    """The one value that all of a checkpoint has."""
    values = {int(loaded["step"]), *np.unique(loaded["a"]).tolist(), *np.unique(loaded["b"]).tolist()}
    assert len(values) == 1, f"a mixture: {values}"
    return values.pop()


def only_checkpoint(folder: Path) -> bool:
    """Returns whether a folder holds one checkpoint and nothing else."""
    index = folder / "saved" / "model.safetensors.index.json"
    files = sorted(file.name for file in folder.rglob("*") if file.is_file())
    if not index.exists():
        return files in (["saved.safetensors"], ["saved.eqx"])
    return files == sorted({index.name, *json.loads(index.read_text())["weight_map"].values()})


@pytest.mark.parametrize("mode", [0o600, 0o444])
@pytest.mark.parametrize("name", SAVERS)
def test_files_keep_the_mode_of_those_that_they_replace(name: str, mode: int, tmp_path: Path) -> None:
    SAVERS[name](tmp_path, tree(1))
    for file in [file for file in tmp_path.rglob("*") if file.is_file()]:
        file.chmod(mode)
    SAVERS[name](tmp_path, tree(2))
    assert {file.stat().st_mode & 0o777 for file in tmp_path.rglob("*") if file.is_file()} == {mode}
    assert value_of(LOADERS[name](tmp_path, tree(0))) == 2


def test_an_orbax_folder_keeps_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / ("o" * 200)
    sr.save_orbax(folder, tree(1))
    folder.chmod(0o700)
    sr.save_orbax(folder, tree(2))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize("name", ["n" * 251 + ".eqx", "ä" * 121 + ".safetensors"])
def test_names_may_be_as_long_as_the_system_allows(name: str, tmp_path: Path) -> None:
    save = sr.save_equinox if name.endswith(".eqx") else sr.save_safetensors
    left = commit.temporary_name(tmp_path / name, "0" * 16)
    left.write_text("of a killed process")
    save(tmp_path / name, tree(1))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    load = sr.load_equinox if name.endswith(".eqx") else sr.load_safetensors
    assert value_of(load(tmp_path / name, tree(0), P(), sr.create_mesh("data:8"))) == 1
    other = tmp_path / (name[0] + name)
    assert commit.short_name(other) != commit.short_name(tmp_path / name)


@pytest.mark.parametrize("name", SAVERS)
def test_at_every_moment_a_checkpoint_is_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, snapshots = tmp_path / "folder", []
    folder.mkdir()
    SAVERS[name](folder, tree(1))

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with monkeypatch.context() as plain:
                for owner, step in STEPS:
                    plain.setattr(owner, step, originals[step])
                snapshots.append(shutil.copytree(folder, tmp_path / f"killed{len(snapshots)}"))
            return function(*args, **kwargs)

        return call

    originals = {step: getattr(owner, step) for owner, step in STEPS}
    with monkeypatch.context() as patched:
        for owner, step in STEPS:
            patched.setattr(owner, step, watched(originals[step]))
        SAVERS[name](folder, tree(2))
    values = [value_of(LOADERS[name](snapshot, tree(0))) for snapshot in snapshots]
    assert values == sorted(values)
    assert values[0] == 1
    assert len(values) > 5
    assert value_of(LOADERS[name](folder, tree(0))) == 2
    # What a killed process left is cleared away by the next save.
    for snapshot in snapshots:
        SAVERS[name](snapshot, tree(3))
        assert value_of(LOADERS[name](snapshot, tree(0))) == 3
        assert only_checkpoint(snapshot)


@pytest.mark.parametrize("name", SAVERS)
@pytest.mark.parametrize("step", ["pwrite", "fsync"])
def test_a_full_disk_leaves_the_old_checkpoint(
    name: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SAVERS[name](tmp_path, tree(1))
    files = sorted(tmp_path.rglob("*"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, step, full)
        with pytest.raises(CheckpointError, match=r"save_\w+: .*saved.* cannot be saved: No space left on device"):
            SAVERS[name](tmp_path, tree(2))
    assert sorted(tmp_path.rglob("*")) == files
    assert value_of(LOADERS[name](tmp_path, tree(0))) == 1


@pytest.mark.parametrize("has_old", [True, False])
def test_an_index_that_cannot_be_written_leaves_no_new_file(
    has_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_old:
        SAVERS["folder"](tmp_path, tree(1))
    files = sorted(tmp_path.rglob("*.*"))
    replace = Path.replace

    def fail(path: Path, target: Path) -> Path:
        if target.name.endswith(".json"):
            raise OSError(5, "Input/output error")
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            SAVERS["folder"](tmp_path, tree(2))
    assert sorted(tmp_path.rglob("*.*")) == files
    if has_old:
        assert value_of(LOADERS["folder"](tmp_path, tree(0))) == 1


def test_an_interrupted_save_removes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt("by hand")

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt, match="by hand"):
        sr.save_equinox(tmp_path / "saved.eqx", tree(1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at_once", [True, False])
def test_a_folder_replaces_another(at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:
        monkeypatch.setattr(commit, "_exchange_names", lambda *_: False)
    for value in ("1", "2"):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "file").write_text(value)
        replace_folder(tmp_path / "new", tmp_path / "old")
        assert [path.name for path in tmp_path.iterdir()] == ["old"]
        assert (tmp_path / "old" / "file").read_text() == value


def test_a_failed_replacement_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "_exchange_names", lambda *_: False)
    (tmp_path / "old").mkdir()
    with pytest.raises(FileNotFoundError, match="missing"):
        replace_folder(tmp_path / "missing", tmp_path / "old")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_two_names_are_exchanged_at_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert commit._exchange_names(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert not commit._exchange_names(tmp_path / "a", tmp_path / "missing")


SAVE_ALL: dict[str, Callable[[Path, Any], None]] = {
    **SAVERS,
    "orbax": lambda path, tree: sr.save_orbax(path / "saved", tree),
}


@pytest.mark.parametrize("name", SAVE_ALL)
def test_links_and_files_at_foreseeable_names_are_left_alone(name: str, tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("precious")
    folder.mkdir()
    names = (
        "saved",
        "saved.safetensors",
        "saved.eqx",
        "model.safetensors.index.json",
        "model-00001-of-00001.safetensors",
    )
    links = [folder / f".{file}.saving" for file in names] + [folder / "saved" / f".{file}.saving" for file in names]
    for link in links if name == "folder" else links[:5]:
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(victim)
    SAVE_ALL[name](folder, {"w": np.ones(3, np.float32)})
    assert victim.read_text() == "precious"
    assert all(link.is_symlink() for link in links[:5])


@pytest.mark.parametrize("name", SAVE_ALL)
def test_temporary_names_differ_in_each_save(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    token = secrets.token_hex
    monkeypatch.setattr(secrets, "token_hex", lambda count: seen.append(token(count)) or seen[-1])
    for value in range(2):
        SAVE_ALL[name](tmp_path, {"w": np.full(3, value, np.float32)})
    assert len(seen) == len(dict.fromkeys(seen)) == 2


def test_a_file_that_has_the_temporary_name_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "remove_leftovers", lambda *_: None)
    monkeypatch.setattr(secrets, "token_hex", lambda count: "0" * 2 * count)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".saved.eqx.{'0' * 16}.saving").symlink_to(victim)
    with pytest.raises(CheckpointError, match="File exists"):
        SAVERS["equinox"](tmp_path, tree(1))
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", SAVE_ALL)
@pytest.mark.parametrize("has_old", [True, False])
def test_a_full_disk_leaves_nothing_behind(name: str, has_old: bool, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    if has_old:
        SAVE_ALL[name](folder, {"w": np.ones(3, np.float32)})
    before = sorted(tmp_path.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # as on a full disk, larger files cannot be written
    try:
        with pytest.raises(CheckpointError, match=r"(?i)file too large|cannot be saved"):
            SAVE_ALL[name](folder, {"w": np.random.default_rng(0).standard_normal(10**5)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.rglob("*")) == before


def reserving(number: int) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_disk_without_room_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", reserving(28))
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("something was written"))
    with pytest.raises(CheckpointError, match="No space left on device"):
        SAVERS["equinox"](tmp_path, tree(1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_function", [True, False])
def test_a_system_that_cannot_reserve_room_saves(
    has_function: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_function:
        monkeypatch.setattr(os, "posix_fallocate", reserving(95))
    else:
        monkeypatch.delattr(os, "posix_fallocate")
    SAVERS["equinox"](tmp_path, tree(1))
    assert value_of(LOADERS["equinox"](tmp_path, tree(0))) == 1


@pytest.mark.parametrize("name", LOADERS)
def test_whatever_is_not_a_regular_file_is_refused(name: str, tmp_path: Path) -> None:
    SAVERS[name](tmp_path, tree(1))
    for file in [path for path in tmp_path.rglob("*") if path.is_file()]:
        data = file.read_bytes()
        for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
            file.unlink()
            make(file)
            with pytest.raises(CheckpointError, match=r"is not a regular file|has no .safetensors file"):
                LOADERS[name](tmp_path, tree(0))
            file.rmdir() if file.is_dir() else file.unlink()
            file.write_bytes(data)
    assert value_of(LOADERS[name](tmp_path, tree(0))) == 1


def test_a_pipe_in_an_orbax_checkpoint_is_refused(tmp_path: Path) -> None:
    sr.save_orbax(tmp_path / "saved", {"w": np.ones(3, np.float32)})
    os.mkfifo(tmp_path / "saved" / "d" / "pipe")
    with pytest.raises(CheckpointError, match="pipe: it is not a regular file"):
        sr.load_orbax(tmp_path / "saved", {"w": np.ones(3, np.float32)}, P(), sr.create_mesh("data:8"))


def test_a_folder_whose_name_cannot_change_is_written_under_its_own() -> None:
    names: list[Path | None] = []
    commit.Saving("save", 10).save(lambda: commit.SavePlan([], "gs://bucket/state", write=names.append))
    assert names == [None]
