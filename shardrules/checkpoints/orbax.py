"""`load_orbax`: an orbax checkpoint straight into shardings, on a mesh other than the one that saved it.

Orbax reads the parts of arrays itself. This module tells it which arrays to read and where they go, and reports what is
wrong before anything is read.
"""

import collections
import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Literal

import jax
import numpy as np

from shardrules.checkpoints.commit import replaced_folder
from shardrules.checkpoints.names import Names, StoredArray, match, refuse
from shardrules.checkpoints.requested import (
    RequestedLeaf,
    as_type_of,
    check_flags,
    requested_leaves,
    with_values,
)
from shardrules.core.axes import AnyMesh
from shardrules.core.errors import CheckpointError
from shardrules.core.finding import Finding
from shardrules.core.storage.files import as_path
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.placement.destination import resolve_destination
from shardrules.rules.how import How

_VALUE = "/value"


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
    - `surplus`: whether arrays of the checkpoint that no leaf takes are an `"error"`, or to `"skip"`.
    - `cast`: whether an array of another dtype than the leaf's is converted, or is an error. Integers may become
        floats, but not the other way round.

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
    check_flags("load_orbax", cast=cast)
    orbax, folder = import_orbax(path, "load_orbax")
    destination = resolve_destination(like, how, mesh, caller="load_orbax")
    leaves = requested_leaves(like, destination, "load_orbax")
    title = f"load_orbax: {folder}"
    handler = orbax.PyTreeCheckpointHandler()
    try:
        metadata = _metadata(handler, folder, title)
        stored = _stored_arrays(metadata)
        names, default = _plain_names(names, stored), functools.partial(_plain_name, stored)
        matches, findings = match(leaves, stored, names, default, surplus=surplus, cast=cast)
        refuse(title, findings)
        values = [leaf.value for leaf in leaves]
        rest = [(index, name) for index, name in enumerate(matches) if isinstance(name, str)]
        # One restore reads each array once: a second one is for arrays that several leaves take.
        while rest:
            batch: dict[str, int] = {}
            for index, name in rest:
                batch.setdefault(name, index)
            rest = [(index, name) for index, name in rest if batch[name] != index]
            requested = {name: leaves[index] for name, index in batch.items()}
            for name, value in _restore(handler, orbax, folder, metadata, requested, title).items():
                values[batch[name]] = value
    finally:
        handler.close()
    return with_values(destination, leaves, values)


def _restore(
    handler: Any, orbax: ModuleType, folder: Any, metadata: Any, requested: dict[str, RequestedLeaf], title: str
) -> dict[str, Any]:
    """Reads the requested arrays and Python values, by their names in the checkpoint."""
    names, treedef = _leaf_names(metadata), jax.tree.structure(metadata)
    items = [_item(requested[name]) if name in requested else orbax.PLACEHOLDER for name in names]
    options = [_options(requested[name], orbax) if name in requested else orbax.RestoreArgs() for name in names]
    arguments = orbax.args.PyTreeRestore(treedef.unflatten(items), treedef.unflatten(options))
    try:
        restored = jax.tree.leaves(handler.restore(folder, args=arguments))
    except Exception as error:  # orbax has no narrower error for data that cannot be read
        raise CheckpointError(f"{title}: orbax cannot read it: {error!s:.300}") from error
    return {
        name: value if requested[name].is_array else _python_value(value, requested[name])
        for name, value in zip(names, restored, strict=True)
        if name in requested
    }


def read_orbax_metadata(path: Any) -> dict[str, StoredArray]:
    """Returns the arrays of a checkpoint by their paths, in the order of the tree; none of them is read."""
    orbax, folder = import_orbax(path, "read_orbax_metadata")
    # By default it starts a backend of JAX to find out whether to use host memory.
    handler = orbax.PyTreeCheckpointHandler(enable_pinned_host_transfer=False)
    try:
        metadata = _metadata(handler, folder, str(folder))
    finally:
        handler.close()
    return _stored_arrays(metadata)


def _stored_arrays(metadata: Any) -> dict[str, StoredArray]:
    pairs = zip(_leaf_names(metadata), jax.tree.leaves(metadata), strict=True)
    return {name: _stored_array(array) for name, array in pairs}


def _leaf_names(metadata: Any) -> list[str]:
    """Returns the path of each array. Orbax saves a box or a variable of flax as a folder with nothing but `value`."""
    paths = leaf_paths(metadata)
    counts = collections.Counter(folder for path in paths for folder in _folders(path))
    return [path.removesuffix(_VALUE) if counts[path.removesuffix(_VALUE)] == 1 else path for path in paths]


def _folders(path: str) -> Iterator[str]:
    """The paths of all containers that an array is in."""
    return itertools.accumulate(path.split("/")[:-1], "{}/{}".format)


def _plain_name(stored: Mapping[str, StoredArray], name: str) -> str:
    """Returns a name as it is in `stored`, also where a box or variable is named with its `value`."""
    return name if name in stored else name.removesuffix(_VALUE)


def _plain_names(names: Names, stored: Mapping[str, StoredArray]) -> Names:
    def plain(name: Any) -> Any:
        return _plain_name(stored, name) if isinstance(name, str) else name

    if isinstance(names, Mapping):
        return {path: plain(name) for path, name in names.items()}
    return (lambda path: plain(names(path))) if callable(names) else names


def import_orbax(path: Any, caller: str) -> tuple[ModuleType, Any]:
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


def _stored_array(leaf: Any) -> StoredArray:
    kind = array_kind(leaf)
    if kind is None or leaf.dtype is None:
        return StoredArray((), None, type(leaf).__name__.removesuffix("Metadata").lower())
    return StoredArray(kind[0], kind[1], str(kind[1]))


def _item(leaf: RequestedLeaf) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.device_dtype) if leaf.is_array else leaf.value


def _options(leaf: RequestedLeaf, orbax: ModuleType) -> Any:
    """Returns how orbax restores a leaf."""
    if leaf.is_array:
        return orbax.ArrayRestoreArgs(
            restore_type=jax.Array, sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.device_dtype
        )
    return orbax.RestoreArgs() if isinstance(leaf.value, str) else orbax.RestoreArgs(restore_type=np.ndarray)


def _python_value(value: Any, leaf: RequestedLeaf) -> Any:
    return as_type_of(leaf, value if isinstance(leaf.value, str) else np.asarray(value).item())
