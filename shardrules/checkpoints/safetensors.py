"""`load_safetensors`: safetensors files, one or many, straight into shardings.

Everything that the headers say is checked against `like` before any tensor is read.
"""

from collections.abc import Mapping
from typing import Any, Literal

from shardrules.checkpoints.headers import read_headers
from shardrules.checkpoints.names import Name, Names, flat_names, match, refuse, stack_shape
from shardrules.checkpoints.requested import (
    RequestedLeaf,
    check_flags,
    python_value,
    requested_leaves,
    with_values,
)
from shardrules.checkpoints.tensor_file import FileTensor, file_source, local_path
from shardrules.core.axes import AnyMesh
from shardrules.placement.destination import resolve_destination
from shardrules.rules.how import How


def load_safetensors(
    path: Any,
    like: Any,
    how: How,
    mesh: AnyMesh | None = None,
    *,
    names: Names = None,
    surplus: Literal["error", "skip"] = "error",
    cast: bool = False,
    verify: bool = True,
) -> Any:
    """Loads safetensors into a tree of sharded arrays. Each process reads only what its devices hold.

    No device gets more than its shards, and the host holds little more than an array at a time, mostly one shard. All
    headers are checked before anything is read, and what is read is compared with its checksums.

    **Arguments:**

    - `path`: a `.safetensors` file, a `.safetensors.index.json`, or a folder with an index or with such files.
    - `like`: a tree of arrays or `ShapeDtypeStruct`s with the expected shapes and dtypes, for example a module from
        `eqx.filter_eval_shape`. A Python number takes the one that the file has under its name, if there is one. Other
        leaves stay as they are.
    - `how`, `mesh`: where the arrays go, as for `filter_shard`.
    - `names`: from a leaf's path (`layers/0/mlp/up/weight`) to the name of its tensor: a function, or a table for the
        paths whose name is not the default. The default name is the path with dots, `layers.0.mlp.up.weight`. `None`
        for a path: the file lacks it, and the array in `like` is placed. A list of names is an array of stacked layers,
        each a tensor; lists may nest, as for experts in layers.
    - `surplus`: whether tensors that no leaf takes are an `"error"`, or to `"skip"`.
    - `cast`: whether a tensor of another dtype than the leaf's is converted, part by part on the host, or is an error.
        Integers may become floats, but not the other way round.
    - `verify`: whether what is read is compared with the checksums that `save_safetensors` wrote. Files of others have
        none.

    **Returns:**

    A tree like `like` with a sharded `jax.Array` at every array.

    **Raises:**

    `CheckpointError`, listing everything that is missing, surplus, of another shape or dtype, truncated or unreadable,
    or naming the first tensor that differs from its checksums; `PlanError`, `TreeError` and `NoMeshError` as
    `filter_shard`.

    ```python
    import safetensors.numpy

    safetensors.numpy.save_file({"model.up.weight": np.ones((16, 8), np.float32)}, "model.safetensors")
    like = {"up": {"weight": jax.ShapeDtypeStruct((16, 8), jnp.float32)}}
    params = sr.load_safetensors(
        "model.safetensors",
        like,
        sr.DimShardingRule("model", 0),
        sr.create_mesh("data:4,model:2"),
        names=lambda path: "model." + path.replace("/", "."),
    )
    assert params["up"]["weight"].sharding.spec == P("model", None)
    ```
    """
    check_flags("load_safetensors", cast=cast, verify=verify)
    destination = resolve_destination(like, how, mesh, caller="load_safetensors")
    leaves = requested_leaves(like, destination, "load_safetensors")
    headers = read_headers(local_path(path, "load_safetensors"), verify=verify)
    matches, findings = match(
        leaves, headers.stored, names, lambda path: path.replace("/", "."), surplus=surplus, cast=cast, stacks=True
    )
    if headers.problems:  # what is missing may be in a file that cannot be read
        findings = [finding for finding in findings if finding.code not in ("missing", "surplus")]
    refuse(f"load_safetensors: {path}", [*headers.problems, *findings])
    values = [
        leaf.value if name is None else _value(leaf, name, headers.tensors)
        for leaf, name in zip(leaves, matches, strict=True)
    ]
    return with_values(destination, leaves, values)


def _value(leaf: RequestedLeaf, name: Name, tensors: Mapping[str, FileTensor]) -> Any:
    """The array that a leaf takes, not read yet, or its Python number."""
    stack = [tensors[layer] for layer in flat_names(name)]
    if not leaf.is_array:
        return python_value(file_source(stack, (), stack[0].dtype), leaf)
    return file_source(stack, stack_shape(name) or (), leaf.device_dtype)
