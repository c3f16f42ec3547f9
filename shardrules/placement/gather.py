"""Arrays back to the host, and the pair of trees of functions that checkpoint code of other libraries expects."""

from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardrules.core.axes import AnyMesh, check_mesh
from shardrules.core.boxes import refuse_cycles, share_variables, shared_leaves
from shardrules.core.context import get_incontext_mesh
from shardrules.core.errors import ConfigTypeError, MeshError
from shardrules.core.jax_state import jit
from shardrules.placement.send import on_some_processes, send
from shardrules.placement.shard import filter_shard


def filter_gather(tree: Any) -> Any:
    """Returns a tree with every JAX array on the host, whole: one batched transfer.

    **Arguments:**

    - `tree`: any pytree. Leaves that are not JAX arrays stay as they are.

    **Returns:**

    The tree with numpy arrays; random keys stay JAX arrays, since numpy has none. Over many processes each gets the
    whole, also of arrays of which it holds no part, and all must call it.

    ```python
    mesh = sr.create_mesh("data:8")
    placed = sr.filter_shard({"w": np.arange(8), "act": jax.nn.gelu}, P("data"), mesh)
    assert isinstance(sr.filter_gather(placed)["w"], np.ndarray)
    ```
    """
    refuse_cycles(tree)
    values, treedef = jax.tree.flatten(tree)
    elsewhere = on_some_processes(values) if jax.process_count() > 1 else []
    if elsewhere:
        for index, array in zip(elsewhere, send([values[n] for n in elsewhere], _replicated), strict=True):
            values[index] = array
    indices = [index for index, value in enumerate(values) if isinstance(value, jax.Array)]
    # One batched transfer: fetching hundreds of arrays one by one takes seconds.
    gathered = jax.device_get(_replicated([values[index] for index in indices]))
    for index, array in zip(indices, gathered, strict=True):
        values[index] = array
    return share_variables(treedef.unflatten(values), shared_leaves(tree))


def _replicated(arrays: list[jax.Array]) -> list[jax.Array]:
    """Returns arrays so that this process holds them whole: one program for each mesh with arrays over processes."""
    groups: dict[Mesh, list[int]] = {}
    for index, array in enumerate(arrays):
        if array.is_fully_addressable or array.is_fully_replicated:
            continue
        if not isinstance(array.sharding, NamedSharding) or not isinstance(array.sharding.mesh, Mesh):
            raise MeshError(f"filter_gather: an array over several processes has no mesh: {array.sharding}")
        groups.setdefault(array.sharding.mesh, []).append(index)
    result = list(arrays)
    # Groups are in the order of the leaves, so that all processes run the same programs one after the other.
    for mesh, indices in groups.items():
        whole = NamedSharding(mesh, PartitionSpec())
        moved = jit(lambda group: group, out_shardings=whole)([arrays[index] for index in indices])
        for index, array in zip(indices, moved, strict=True):
            result[index] = array
    return result


@final
@attrs.frozen
class _Shard:
    sharding: NamedSharding

    def __call__(self, x: Any) -> Any:
        return filter_shard(jnp.asarray(x) if isinstance(x, int | float | complex) else x, self.sharding)


@final
@attrs.frozen
class _Gather:
    def __call__(self, x: Any) -> Any:
        gathered = filter_gather(x)
        return gathered if isinstance(gathered, jax.Array) else np.asarray(gathered)


def make_shard_and_gather_fns(partition_specs: Any, mesh: AnyMesh | None = None) -> tuple[Any, Any]:
    """Returns two trees of functions: the first place an array by its spec, the second fetch it back whole.

    For code that is built around such pairs; `filter_shard` and `filter_gather` do a tree at once, and faster.
    `partition_specs` is a tree of PartitionSpecs or `NamedSharding`s; `None` in it stays `None` in both trees. Without
    `mesh` the one in force is used.

    ```python
    from shardrules.presets import eformer

    shard, gather = eformer.make_shard_and_gather_fns({"w": P("data")}, sr.create_mesh("data:8"))
    assert (gather["w"](shard["w"](np.arange(8))) == np.arange(8)).all()
    ```
    """
    check_mesh(mesh)
    mesh = get_incontext_mesh() if mesh is None else mesh
    specs, treedef = jax.tree.flatten(partition_specs, is_leaf=lambda node: isinstance(node, PartitionSpec | Sharding))
    wrong = [repr(spec) for spec in specs if not isinstance(spec, PartitionSpec | NamedSharding)]
    if wrong:
        raise ConfigTypeError(f"make_shard_and_gather_fns takes PartitionSpecs, got {', '.join(wrong)}")
    shardings = [spec if isinstance(spec, NamedSharding) else NamedSharding(mesh, spec) for spec in specs]
    return treedef.unflatten(map(_Shard, shardings)), treedef.unflatten([_Gather()] * len(shardings))
