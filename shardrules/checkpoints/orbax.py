"""`load_orbax` and `save_orbax`: orbax checkpoints from and into shardings, on any mesh.

Orbax reads and writes the parts of arrays itself. This module tells it which arrays, and where they go, reports what is
wrong before anything is read or written, and replaces an old checkpoint at once.
"""

import collections
import functools
import itertools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax
import numpy as np

from shardrules.checkpoints.commit import SavePlan, Saving, replaced_folder
from shardrules.checkpoints.leaves import PYTHON_TYPES, RequestedLeaf, name_findings, refuse, saved_leaves
from shardrules.checkpoints.load import load
from shardrules.checkpoints.names import Contents, Name, Names, StoredArray, name_function, requested_names
from shardrules.core.axes import AnyMesh
from shardrules.core.boxes import plain_trees
from shardrules.core.errors import CheckpointError
from shardrules.core.finding import Finding
from shardrules.core.jax_state import process_id
from shardrules.core.storage.files import as_path
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.placement.source import ArraySource
from shardrules.rules.how import How

_VALUE = "/value"

_UNSUPPORTED = ("uint2", "uint4", "float8_e4m3")
"""The dtypes of JAX that orbax's storage does not have."""

_WRITTEN = re.compile(
    r"_METADATA|_CHECKPOINT_METADATA|_sharding|_strings\.json|array_metadatas|checkpoint|orbax\.checkpoint"
    r"|commit_success\.txt|d|descriptor|manifest\.ocdbt|ocdbt\.process_\w+|ocdbt_(data|meta|tmp_meta)"
)
"""The names in a checkpoint of a tree of any version of orbax, beside the folders of arrays of its zarr form."""

_ZARR = (".zarray", "zarr.json")
"""The file that makes a folder an array, of version 2 and 3 of zarr."""


def load_orbax(
    path: Any,
    like: Any,
    how: How,
    mesh: AnyMesh | None = None,
    *,
    names: Names = None,
    surplus: Literal["error", "skip"] = "error",
    cast: bool = False,
) -> Any:
    """Loads an orbax checkpoint into a tree of sharded arrays, whatever mesh it was saved on.

    Only the requested arrays are read, and each process reads only what its devices hold. Everything that the
    checkpoint says about its arrays is checked before. It needs orbax: `pip install "shardrules[orbax]"`.

    **Arguments:**

    - `path`: the folder that `StandardCheckpointer` or `PyTreeCheckpointer` wrote; of a `CheckpointManager`, the folder
        of one item of one step, such as `run/1000/default`.
    - `like`: a tree of arrays or `ShapeDtypeStruct`s with the expected shapes and dtypes. Its classes may differ from
        those that were saved: leaves are found by their paths. A Python number or string takes what the checkpoint has
        at its path, if it has that. Other leaves stay as they are.
    - `how`, `mesh`: where the arrays go, as for `filter_shard`.
    - `names`: from a leaf's path to the path in the checkpoint, as a function, or as a table for the paths that differ.
        Paths of flax boxes and variables end without `value`. `None` for a path: the checkpoint lacks it, and the
        array in `like` is placed.
    - `surplus`, `cast`: as for `load_safetensors`.

    **Returns:**

    A tree like `like` with a sharded `jax.Array` at every array.

    **Raises:**

    `CheckpointError`, listing everything that is missing, surplus, or of another shape or dtype, or when orbax is not
    installed; `PlanError`, `TreeError` and `NoMeshError` as `filter_shard`.

    ```python
    import os
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(os.path.abspath("saved"), {"w": jnp.ones((16, 8)), "step": 7})
    like = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32), "step": 0}
    state = sr.load_orbax("saved", like, P("data", "model"), sr.create_mesh("data:4,model:2"))
    assert state["step"] == 7 and state["w"].sharding.spec == P("data", "model")
    ```
    """
    orbax, folder = _import_orbax(path, "load_orbax")
    handler = orbax.PyTreeCheckpointHandler()

    def contents(leaves: Sequence[RequestedLeaf]) -> Contents:
        metadata = _metadata(handler, folder, f"load_orbax: {folder}")
        stored, name_of = _stored_arrays(metadata), name_function(names, str, "load_orbax")

        def plain_name_of(leaf_path: str) -> Any:
            # A box or variable may also be named with its `value`.
            name = name_of(leaf_path)
            return name.removesuffix(_VALUE) if isinstance(name, str) and name not in stored else name

        tensor_names = requested_names(leaves, stored, plain_name_of)
        return Contents(stored, tensor_names, functools.partial(_read, handler, orbax, folder, metadata))

    try:
        return load("load_orbax", folder, like, how, mesh, contents, names, surplus=surplus, cast=cast)
    finally:
        handler.close()


def _read(
    handler: Any,
    orbax: ModuleType,
    folder: Any,
    metadata: Any,
    leaves: Sequence[RequestedLeaf],
    matches: Sequence[Name],
) -> list[Any]:
    """Reads what leaves take."""
    names, treedef = _leaf_names(metadata), jax.tree.structure(metadata)
    values = [leaf.value for leaf in leaves]
    rest = [(index, name) for index, name in enumerate(matches) if isinstance(name, str)]
    # One restore reads each array once: a second one is for arrays that several leaves take.
    while rest:
        batch: dict[str, int] = {}
        for index, name in rest:
            batch.setdefault(name, index)
        rest = [(index, name) for index, name in rest if batch[name] != index]
        requests = [_request(leaves[batch[name]] if name in batch else None, orbax) for name in names]
        items, options = (treedef.unflatten(parts) for parts in zip(*requests, strict=True))
        try:
            restored = handler.restore(folder, args=orbax.args.PyTreeRestore(items, options))
        except Exception as error:  # orbax has no narrower error for data that cannot be read
            raise CheckpointError(f"load_orbax: {folder}: orbax cannot read it: {error!s:.300}") from error
        for name, value in zip(names, jax.tree.leaves(restored), strict=True):
            if name in batch:
                leaf = leaves[batch[name]]
                if not leaf.is_array:
                    value = leaf.python_value(value if isinstance(leaf.value, str) else np.asarray(value).item())
                values[batch[name]] = value
    return values


def read_orbax_metadata(path: Any) -> dict[str, StoredArray]:
    """Returns the arrays of a checkpoint by their paths, in the order of the tree; none of them is read."""
    orbax, folder = _import_orbax(path, "read_orbax_metadata")
    # By default it starts a backend of JAX to find out whether to use host memory.
    handler = orbax.PyTreeCheckpointHandler(enable_pinned_host_transfer=False)
    try:
        metadata = _metadata(handler, folder, str(folder))
    finally:
        handler.close()
    return _stored_arrays(metadata)


def _stored_arrays(metadata: Any) -> dict[str, StoredArray]:
    stored: dict[str, StoredArray] = {}
    for name, leaf in zip(_leaf_names(metadata), jax.tree.leaves(metadata), strict=True):
        kind = array_kind(leaf)
        if kind is None or leaf.dtype is None:
            stored[name] = StoredArray((), None, type(leaf).__name__.removesuffix("Metadata").lower())
        else:
            stored[name] = StoredArray(kind[0], kind[1], str(kind[1]))
    return stored


def _leaf_names(metadata: Any) -> list[str]:
    """Returns the path of each array. Orbax saves a box or a variable of flax as a folder with nothing but `value`."""
    paths = leaf_paths(metadata)
    counts = collections.Counter(
        folder for path in paths for folder in itertools.accumulate(path.split("/")[:-1], "{}/{}".format)
    )
    return [path.removesuffix(_VALUE) if counts[path.removesuffix(_VALUE)] == 1 else path for path in paths]


def _import_orbax(path: Any, caller: str) -> tuple[ModuleType, Any]:
    """Returns orbax, and the path as it accepts it: absolute, without links, or in a cloud store."""
    try:
        import orbax.checkpoint as ocp
        from etils import epath
    except ImportError as error:
        raise CheckpointError(
            'orbax checkpoints need orbax, which is not installed: pip install "shardrules[orbax]"'
        ) from error
    as_path(path, caller)
    text = os.fspath(path)
    return ocp, epath.Path(text if "://" in text else os.path.realpath(text))


def _metadata(handler: Any, folder: Any, title: str) -> Any:
    """Returns the tree in which a checkpoint describes its arrays."""
    # Orbax would wait for the writer of a pipe.
    files = [os.path.join(place, name) for place, _, names in os.walk(os.fspath(folder)) for name in names]
    others = [Finding("error", "file", "it is not a regular file", path) for path in files if not os.path.isfile(path)]
    refuse(title, sorted(others, key=lambda finding: finding.path))
    try:
        return handler.metadata(folder).tree
    except FileNotFoundError:
        message, remedy = "no such folder", ""
        aside = replaced_folder(folder)
        if aside.exists():
            message, remedy = "a save was interrupted", f"rename {aside} to {folder.name}, or save again"
        elif folder.is_dir():
            inside = sorted(str(path.relative_to(folder)) for path in folder.glob("*/_METADATA"))
            inside += sorted(str(path.relative_to(folder)) for path in folder.glob("*/*/_METADATA"))
            message = "this folder itself is not the checkpoint of a tree"
            items = [os.path.dirname(path) for path in inside]
            remedy = (
                f"pass the folder of an item: {', '.join(items[-3:])}" if items else "pass the folder that was saved"
            )
        refuse(title, [Finding("error", "file", message, str(folder), remedy)])
    except (ValueError, KeyError, TypeError, OSError) as error:
        message = f"orbax cannot read its metadata: {error!r:.160}"
        refuse(title, [Finding("error", "file", message, str(folder))])


def _request(leaf: RequestedLeaf | None, orbax: ModuleType) -> tuple[Any, Any]:
    """Returns what orbax reads for a leaf, and its options; nothing is read for `None`."""
    if leaf is None:
        return orbax.PLACEHOLDER, orbax.RestoreArgs()
    if leaf.is_array:
        kind = jax.ShapeDtypeStruct(leaf.shape, leaf.device_dtype)
        options = {"sharding": leaf.sharding, "global_shape": leaf.shape, "dtype": leaf.device_dtype}
        return kind, orbax.ArrayRestoreArgs(restore_type=jax.Array, **options)
    options = {} if isinstance(leaf.value, str) else {"restore_type": np.ndarray}
    return leaf.value, orbax.RestoreArgs(**options)


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
    orbax, folder = _import_orbax(path, "save_orbax")
    title = f"save_orbax: {folder}"
    # In a cloud store names do not change, and no checkpoint is replaced.
    local = None if "://" in str(folder) else Path(folder)

    def plan() -> SavePlan:
        leaves, findings = saved_leaves(tree, "save_orbax", _unsupported)
        for leaf in leaves:
            if isinstance(leaf.value, ArraySource):
                remedy = "Place it before"
                findings.append(Finding("error", "no-values", "it is an ArraySource", leaf.path, remedy, leaf.shape))
            elif isinstance(leaf.value, complex):
                why = "orbax cannot store a Python complex number"
                findings.append(Finding("error", "dtype", why, leaf.path, "Make it an array"))
            if math.prod(leaf.shape) == 0:
                why = "it is empty, and orbax cannot store an empty array"
                findings.append(Finding("error", "empty", why, leaf.path, "Leave it out", leaf.shape))
        values = zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
        names = [(path, path.replace("/", ".")) for path, value in values if _value(value) is not None]
        findings += name_findings(names, "Rename a key of the tree: orbax joins keys with dots")
        refuse(title, findings, "saved, and nothing was written")
        # Another process may not see yet what the first one has just changed.
        if process_id() == 0 and local is not None:
            _check_replaceable(local, title)
        elif process_id() == 0 and folder.exists():
            raise CheckpointError(f"{title} exists already: save each step in a folder of its own")
        own_names = re.escape(folder.name)
        return SavePlan(leaves, str(folder), own_names=own_names, folder=local, write=write)

    def write(temporary: Path | None) -> None:
        checkpointer = orbax.Checkpointer(orbax.PyTreeCheckpointHandler())
        try:
            checkpointer.save(temporary or folder, jax.tree.map(_value, plain_trees(tree)))
        except Exception as error:  # orbax has no narrower error for data that cannot be written
            raise CheckpointError(f"{title} cannot be saved: orbax says: {error!s:.300}") from error
        finally:
            checkpointer.close()

    Saving(title, timeout).save(plan)


def _check_replaceable(folder: Path, title: str) -> None:
    """Raises unless `folder` is missing, empty, or a checkpoint and nothing else: all that is in it is removed."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{title} is a file, and a checkpoint is a folder")
    if folder == Path.cwd():
        raise CheckpointError(f"{title} is the current folder, which cannot be replaced: save to a folder in it")
    entries = sorted(folder.iterdir()) if folder.exists() else []
    others = [
        entry.name
        for entry in entries
        if not _WRITTEN.fullmatch(entry.name) and not any((entry / name).exists() for name in _ZARR)
    ]
    if others or (entries and not (folder / "_METADATA").exists()):
        names = ", ".join((others or [entry.name for entry in entries])[:5])
        raise CheckpointError(
            f"{title} cannot be saved: a checkpoint replaces its whole folder, and this one holds what is not part of "
            f"one: {names}. Pass another folder, such as {folder.name}/state"
        )


def _unsupported(dtype: np.dtype) -> str:
    return f"it is {dtype}, which orbax cannot store" if str(dtype) in _UNSUPPORTED else ""


def _value(leaf: Any) -> Any:
    """Returns a leaf for orbax, or `None` for functions and the like, which it refuses."""
    return leaf if array_kind(leaf) is not None or isinstance(leaf, PYTHON_TYPES) else None
