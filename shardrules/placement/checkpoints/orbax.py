"""`load_orbax`: an orbax checkpoint straight into shardings, on a mesh other than the one that saved it.

Orbax reads the parts of arrays itself. What is done here is to say which arrays are wanted and where, and to say
what is wrong before anything is read.
"""

import os
from types import ModuleType
from typing import Any, Literal

import jax
import numpy as np

from shardrules.core.axes import AnyMesh
from shardrules.core.errors import CheckpointError
from shardrules.core.finding import Finding
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.placement.checkpoints.names import Names, StoredArray, match, refuse
from shardrules.placement.checkpoints.requested import RequestedLeaf, requested_leaves, with_values
from shardrules.placement.destination import How, resolve_destination


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

    Only what is asked for is read, and each process reads only what its devices hold. Everything that the checkpoint
    says of its arrays is checked before. It needs orbax: `pip install "shardrules[orbax]"`.

    **Arguments:**

    - `path`: the folder that `StandardCheckpointer` or `PyTreeCheckpointer` wrote; of a `CheckpointManager`, that of
        one item of one step, such as `run/1000/default`.
    - `like`: a tree of arrays or `ShapeDtypeStruct`s that says what is wanted. It need not be of the classes that were
        saved: leaves are found by their paths. A Python number or text takes what the checkpoint holds at its path, if
        that is there. What else is no array stays as it is.
    - `how`, `mesh`: where the arrays are to be, as `filter_shard` takes them.
    - `names`: from a leaf's path to the path in the checkpoint, as a function, or as a table for the paths that differ.
        `None` for a path: the checkpoint does not have it, and the array that stands in `like` is placed.
    - `surplus`: what arrays of the checkpoint are that no leaf takes: an `"error"`, or nothing to talk about, `"skip"`.
    - `cast`: whether an array of another dtype than the leaf's is converted, or is an error. Whole numbers may become
        fractions, but not the other way round.

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
    orbax, folder = _orbax(path)
    found = resolve_destination(like, how, mesh, caller="load_orbax")
    wants = requested_leaves(like, found, "load_orbax")
    who = f"load_orbax: {folder}"
    handler = orbax.PyTreeCheckpointHandler()
    try:
        saved = _saved(handler, folder, who)
        paths, (leaves, treedef) = leaf_paths(saved), jax.tree.flatten(saved)
        held = {name: _held(leaf) for name, leaf in zip(paths, leaves, strict=True)}
        takes, wrong = match(wants, held, names, str, surplus=surplus, cast=cast)
        refuse(who, wrong)
        values = [want.value for want in wants]
        rest = [(number, name) for number, name in enumerate(takes) if name is not None]
        while rest:  # a second time round for what two leaves take
            batch: dict[str, int] = {}
            for number, name in rest:
                batch.setdefault(name, number)
            rest = [(number, name) for number, name in rest if batch[name] != number]
            asked = {name: wants[number] for name, number in batch.items()}
            items = [_item(asked[name]) if name in asked else orbax.PLACEHOLDER for name in paths]
            ways = [_way(asked[name], orbax) if name in asked else orbax.RestoreArgs() for name in paths]
            arguments = orbax.args.PyTreeRestore(treedef.unflatten(items), treedef.unflatten(ways))
            try:
                restored = jax.tree.leaves(handler.restore(folder, args=arguments))
            except Exception as error:  # data that cannot be read is no narrower error of orbax
                raise CheckpointError(f"{who}: orbax cannot read it: {error!s:.300}") from error
            for name, value in zip(paths, restored, strict=True):
                if name in asked:
                    values[batch[name]] = value if asked[name].is_array else _plain(value, asked[name])
    finally:
        handler.close()
    return with_values(found, wants, values)


def read_orbax_metadata(path: Any) -> dict[str, StoredArray]:
    """Returns what a checkpoint says of its arrays. None of them is read.

    **Arguments:**

    - `path`: as for `load_orbax`.

    **Returns:**

    What each of them is, by its path, in the order of the tree.

    **Raises:**

    `CheckpointError` where there is none, or where orbax is not installed.
    """
    orbax, folder = _orbax(path)
    # Unless it is told whether to use host memory, it starts a backend of JAX to find out.
    handler = orbax.PyTreeCheckpointHandler(enable_pinned_host_transfer=False)
    try:
        saved = _saved(handler, folder, str(folder))
    finally:
        handler.close()
    return {name: _held(leaf) for name, leaf in zip(leaf_paths(saved), jax.tree.leaves(saved), strict=True)}


def _orbax(path: Any) -> tuple[ModuleType, Any]:
    """Returns orbax, and the path as it wants it: it takes those of cloud stores too, and absolute ones only."""
    try:
        import orbax.checkpoint as ocp
        from etils import epath
    except ImportError as error:
        raise CheckpointError(
            'checkpoints of orbax need orbax, which is not installed: pip install "shardrules[orbax]"'
        ) from error
    text = os.fspath(path)
    return ocp, epath.Path(text if "://" in text else os.path.abspath(text))


def _saved(handler: Any, folder: Any, who: str) -> Any:
    """Returns what the checkpoint says of itself: a tree that describes each array."""
    try:
        return handler.metadata(folder).tree
    except FileNotFoundError:
        what, remedy = "there is no such folder", ""
        if folder.is_dir():
            inside = sorted(str(each.relative_to(folder)) for each in folder.glob("*/_METADATA"))
            inside += sorted(str(each.relative_to(folder)) for each in folder.glob("*/*/_METADATA"))
            what = "no checkpoint of a tree lies in this folder itself"
            items = [os.path.dirname(each) for each in inside]
            remedy = (
                f"give the folder of an item: {', '.join(items[-3:])}" if items else "give the folder that was saved"
            )
        refuse(who, [Finding("error", "file", what, str(folder), remedy)])
    except (ValueError, KeyError, TypeError, OSError) as error:
        refuse(
            who, [Finding("error", "file", f"orbax cannot read what it says of itself: {error!r:.160}", str(folder))]
        )


def _held(leaf: Any) -> StoredArray:
    kind = array_kind(leaf)
    if kind is None or leaf.dtype is None:
        return StoredArray((), None, type(leaf).__name__.removesuffix("Metadata").lower())
    return StoredArray(kind[0], kind[1], str(kind[1]))


def _item(want: RequestedLeaf) -> Any:
    return jax.ShapeDtypeStruct(want.shape, want.device_dtype) if want.is_array else want.value


def _way(want: RequestedLeaf, orbax: ModuleType) -> Any:
    """How orbax is to restore it."""
    if want.is_array:
        return orbax.ArrayRestoreArgs(
            restore_type=jax.Array, sharding=want.sharding, global_shape=want.shape, dtype=want.device_dtype
        )
    return orbax.RestoreArgs() if isinstance(want.value, str) else orbax.RestoreArgs(restore_type=np.ndarray)


def _plain(value: Any, want: RequestedLeaf) -> Any:
    return value if isinstance(want.value, str) else type(want.value)(np.asarray(value).item())
