"""`save_orbax`: a tree of sharded arrays as an orbax checkpoint, which replaces an old one at once."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardrules.checkpoints.commit import (
    Saving,
    error_of,
    forget,
    make_folders,
    remove_folders,
    remove_leftover_folders,
    remove_leftovers,
    replace_folder,
    short_name,
    temporary_name,
)
from shardrules.checkpoints.orbax import import_orbax
from shardrules.checkpoints.requested import PYTHON_TYPES
from shardrules.checkpoints.saved import SavedLeaf, is_unicode, refuse_to_save, saved_leaves
from shardrules.core.boxes import plain_trees
from shardrules.core.errors import CheckpointError
from shardrules.core.finding import Finding
from shardrules.core.jax_state import process_id
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.placement.source import ArraySource

_UNSUPPORTED = ("uint2", "uint4", "float8_e4m3")
"""The dtypes of JAX that orbax's storage does not have."""

_WRITTEN = re.compile(
    r"_METADATA|_CHECKPOINT_METADATA|_sharding|_strings\.json|array_metadatas|checkpoint|orbax\.checkpoint"
    r"|commit_success\.txt|d|descriptor|manifest\.ocdbt|ocdbt\.process_\w+|ocdbt_(data|meta|tmp_meta)"
)
"""What orbax, in any version, writes into the checkpoint of a tree, beside the folders of arrays of its zarr form."""

_ZARR = (".zarray", "zarr.json")
"""The file that makes a folder an array, of version 2 and 3 of zarr."""


def save_orbax(path: Any, tree: Any, *, timeout: float = 1800) -> None:
    """Saves a tree as an orbax checkpoint. Every process calls it, with the same tree.

    Orbax writes from each process what its own devices hold. An old checkpoint at `path` is replaced when the new one
    is complete, so that a process that is killed leaves one of the two whole; any other folder that is not empty is
    refused. It needs orbax: `pip install "shardrules[orbax]"`.

    **Arguments:**

    - `path`: the folder of the checkpoint, which holds nothing else; of a cloud store, one that does not exist yet.
    - `tree`: any pytree: a module, a train state, typed PRNG keys, Python numbers and strings included. Other leaves,
        such as functions, are not saved: `load_orbax` takes them from `like`.
    - `timeout`: the seconds that a process waits for the others at each step.

    **Raises:**

    `CheckpointError`, listing everything that cannot be saved (among it empty arrays, and leaves that orbax would give
    one name), when `path` holds other files, when orbax cannot write, or when it is not installed: on all processes,
    whichever failed. `DisagreementError` where processes have different trees; `BarrierTimeoutError` and
    `BarrierError` as in `barrier_sync`.

    ```python
    state = {"w": jnp.ones((16, 8)), "step": 7, "key": jax.random.key(0)}
    sr.save_orbax("saved_state", sr.filter_shard(state, P(), sr.create_mesh("data:8")))
    restored = sr.load_orbax("saved_state", state, P(), sr.create_mesh("data:4,model:2"))
    assert restored["step"] == 7 and restored["key"] == jax.random.key(0)
    ```
    """
    orbax, folder = import_orbax(path, "save_orbax")
    saving = Saving(f"save_orbax: {folder}", timeout)

    def plan() -> list[SavedLeaf]:
        leaves, findings = saved_leaves(tree, "save_orbax", _unsupported)
        for leaf in leaves:
            if not is_unicode(leaf.path):
                findings.append(Finding("error", "name", "the path is not valid Unicode", leaf.path, "Rename it"))
            if isinstance(leaf.value, ArraySource):
                remedy = "Place it before"
                findings.append(Finding("error", "no-values", "it is an ArraySource", leaf.path, remedy, leaf.shape))
            elif isinstance(leaf.value, complex):
                why = "orbax cannot store a Python complex number"
                findings.append(Finding("error", "dtype", why, leaf.path, "Make it an array"))
            if math.prod(leaf.shape) == 0:
                why = "it is empty, and orbax cannot store an empty array"
                findings.append(Finding("error", "empty", why, leaf.path, "Leave it out", leaf.shape))
        findings += _repeated(tree)
        refuse_to_save(saving.title, findings)
        return leaves

    _, token, _ = saving.agree_on(saving.plan(plan), str(folder))
    is_local, is_first = "://" not in str(folder), process_id() == 0
    # Beside the old one: a name changes at once only within a file system.
    target = temporary_name(Path(folder), token) if is_local else folder
    folders: list[Path] = []

    def prepare() -> None:
        if not is_local and folder.exists():
            raise CheckpointError(f"{saving.title} exists already: save each step in a folder of its own")
        if is_local:
            folders.extend(make_folders(Path(folder).parent))
            remove_leftover_folders(Path(folder))
            _check_replaceable(Path(folder), saving.title)
            forget(Path(folder).rglob("*"))

    def write() -> None:
        checkpointer = orbax.Checkpointer(orbax.PyTreeCheckpointHandler())
        try:
            checkpointer.save(target, jax.tree.map(_value, plain_trees(tree)))
        except Exception as error:  # orbax has no narrower error for data that cannot be written
            raise CheckpointError(f"{saving.title} cannot be saved: orbax says: {error!s:.300}") from error
        finally:
            checkpointer.close()

    try:
        saving.agree("the folder", error_of(prepare if is_first else lambda: None))
        saving.agree("the arrays", error_of(write))
        if is_local:
            rename = lambda: replace_folder(Path(target), Path(folder))  # noqa: E731
            saving.agree("the names", error_of(rename if is_first else lambda: None))
    except BaseException:
        if is_local and is_first:
            remove_leftovers(Path(folder).parent, re.escape(short_name(Path(folder))))
            remove_folders(folders)
        raise


def _check_replaceable(folder: Path, title: str) -> None:
    """Raises unless `folder` is missing, empty, or a checkpoint and nothing else: all that is in it is removed."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{title} is a file, and a checkpoint is a folder")
    if folder == Path.cwd():
        raise CheckpointError(f"{title} is the current folder, which cannot be replaced: save to a folder in it")
    entries = sorted(folder.iterdir()) if folder.exists() else []
    others = [entry.name for entry in entries if not _is_written(entry)]
    if others or (entries and not (folder / "_METADATA").exists()):
        names = ", ".join((others or [entry.name for entry in entries])[:5])
        raise CheckpointError(
            f"{title} cannot be saved: a checkpoint replaces its whole folder, and this one holds what is not part of "
            f"one: {names}. Pass another folder, such as {folder.name}/state"
        )


def _is_written(entry: Path) -> bool:
    """Whether orbax has written what is in the folder of a checkpoint."""
    return bool(_WRITTEN.fullmatch(entry.name)) or any((entry / name).exists() for name in _ZARR)


def _repeated(tree: Any) -> Iterator[Finding]:
    """Finds leaves that orbax would save under one name: it joins the parts of a path with dots."""
    paths: dict[str, list[str]] = {}
    for path, value in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True):
        if _value(value) is not None:
            paths.setdefault(path.replace("/", "."), []).append(path)
    for name, same in paths.items():
        if len(same) > 1:
            why = f"{name!r} is also the name of {', '.join(same[:-1])}"
            yield Finding("error", "name", why, same[-1], "Rename a key of the tree: orbax joins keys with dots")


def _unsupported(dtype: np.dtype) -> str:
    return f"it is {dtype}, which orbax cannot store" if str(dtype) in _UNSUPPORTED else ""


def _value(leaf: Any) -> Any:
    """What orbax gets for a leaf: nothing for functions and the like, which it refuses."""
    return leaf if array_kind(leaf) is not None or isinstance(leaf, PYTHON_TYPES) else None
