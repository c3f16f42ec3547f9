"""Arrays back to the host, and the pair of trees of functions that checkpoint code of other libraries expects."""

from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardrules.core.axes import AnyMesh, check_mesh
from shardrules.core.context import get_incontext_mesh
from shardrules.core.errors import TreeError
from shardrules.placement.shard import filter_shard


def filter_gather(tree: Any) -> Any:
    """Returns a tree with every JAX array on the host, whole: one batched transfer.

    **Arguments:**

    - `tree`: any pytree. Leaves that are no JAX arrays stay as they are.

    **Returns:**

    The tree with numpy arrays; random keys stay JAX arrays, since numpy has none. Over many processes each gets the
    whole, and all must call it.

    ```python
    mesh = sr.create_mesh("data:8")
    placed = sr.filter_shard({"w": np.arange(8), "act": jax.nn.gelu}, P("data"), mesh)
    assert isinstance(sr.filter_gather(placed)["w"], np.ndarray)
    ```
    """
    values, treedef = jax.tree.flatten(tree)
    numbers = [number for number, value in enumerate(values) if isinstance(value, jax.Array)]
    away = [n for n in numbers if not (values[n].is_fully_addressable or values[n].is_fully_replicated)]
    if away:
        whole = _replicated([values[number] for number in away])
        for number, array in zip(away, whole, strict=True):
            values[number] = array
    gathered = jax.device_get([values[number] for number in numbers])
    for number, array in zip(numbers, gathered, strict=True):
        values[number] = array
    return treedef.unflatten(values)


def _replicated(arrays: list[jax.Array]) -> list[jax.Array]:
    """Arrays of which no process has the whole, on every device of theirs: one program for each mesh."""
    groups: dict[Mesh, list[int]] = {}
    for number, array in enumerate(arrays):
        if not isinstance(array.sharding, NamedSharding) or not isinstance(array.sharding.mesh, Mesh):
            raise TreeError(f"filter_gather: an array over several processes has no mesh: {array.sharding}")
        groups.setdefault(array.sharding.mesh, []).append(number)
    result = list(arrays)
    for mesh, numbers in groups.items():
        whole = NamedSharding(mesh, PartitionSpec())
        moved = jax.jit(lambda group: group, out_shardings=whole)([arrays[number] for number in numbers])
        for number, array in zip(numbers, moved, strict=True):
            result[number] = array
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
        found = filter_gather(x)
        return found if isinstance(found, jax.Array) else np.asarray(found)


def make_shard_and_gather_fns(partition_specs: Any, mesh: AnyMesh | None = None) -> tuple[Any, Any]:
    """Returns two trees of functions: one that places an array by its spec, one that fetches it back whole.

    For code that is built around such pairs. `filter_shard` and `filter_gather` do a tree at once, and faster.

    **Arguments:**

    - `partition_specs`: a tree of PartitionSpecs or `NamedSharding`s. `None` in it stays `None` in both trees.
    - `mesh`: the mesh; by default the one in force.

    **Returns:**

    A tree of functions from an array (a numpy array or number, too) to a placed one, and a tree of functions from an
    array to a numpy array.

    **Raises:**

    `NoMeshError`, which is also an `AssertionError`; `TreeError` for something else than a spec.

    ```python
    from shardrules.presets import eformer

    shard, gather = eformer.make_shard_and_gather_fns({"w": P("data")}, sr.create_mesh("data:8"))
    assert (gather["w"](shard["w"](np.arange(8))) == np.arange(8)).all()
    ```
    """
    check_mesh(mesh)
    where = get_incontext_mesh() if mesh is None else mesh
    specs, treedef = jax.tree.flatten(partition_specs, is_leaf=lambda node: isinstance(node, PartitionSpec | Sharding))
    shardings: list[NamedSharding] = []
    wrong: list[str] = []
    for spec in specs:
        if isinstance(spec, NamedSharding):
            shardings.append(spec)
        elif isinstance(spec, PartitionSpec):
            shardings.append(NamedSharding(where, spec))
        else:
            wrong.append(repr(spec))
    if wrong:
        raise TreeError(f"make_shard_and_gather_fns takes PartitionSpecs, got {', '.join(wrong)}")
    return treedef.unflatten(map(_Shard, shardings)), treedef.unflatten([_Gather()] * len(shardings))
