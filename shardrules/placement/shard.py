"""`filter_shard`: a tree of arrays onto the devices of a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardrules.core.axes import AnyMesh
from shardrules.core.errors import TreeError
from shardrules.core.jax_state import under_trace
from shardrules.placement.destination import How, check_placeable, resolve_destination
from shardrules.placement.source import ArraySource
from shardrules.placement.traced import constrain_traced, host_memory
from shardrules.placement.transfer import put


def filter_shard(tree: Any, how: How, mesh: AnyMesh | None = None) -> Any:
    """Places every array of a tree on the devices of a mesh; inside `jit` it constrains them instead.

    Nothing is left where it was without a word: what cannot be placed as asked is an error that lists every such array,
    and nothing is moved.

    **Arguments:**

    - `tree`: any pytree: a module, an optimizer state, numpy arrays, `ArraySource`s. Leaves that are no arrays, Python
        numbers among them, stay as they are.
    - `how`: a rule, a plan, a PartitionSpec, a sharding, a device, or a tree or prefix of specs and shardings. `P()`
        and `None` put a whole copy on every device.
    - `mesh`: a mesh with axes of any type. By default that of the rule or the plan, else the one the arrays are on,
        else the one in force.

    **Returns:**

    The tree with a `jax.Array` at every array. An array that lies where it should is returned as it is, and one that a
    spec sends elsewhere stays in the kind of memory that it is in.

    **Raises:**

    `PlanError`, listing everything that is wrong; `TreeError` where a plan or a tree of specs is for another tree;
    `NoMeshError`.

    ```python
    mesh = sr.create_mesh("data:4,model:2")
    model = eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(0))
    model = sr.filter_shard(model, sr.DimShardingRule("model", 0) | sr.FSDPShardingRule("data", min_size_mb=0), mesh)
    assert model.layers[0].weight.sharding.spec == P("model", "data")
    ```
    """
    found = resolve_destination(tree, how, mesh)
    arrays, shardings = found.arrays()
    if not under_trace():
        check_placeable(tree, found, "filter_shard")
        return found.with_arrays(put(arrays, shardings))
    if any(isinstance(x, ArraySource) for x in arrays):
        raise TreeError("filter_shard: an ArraySource is read outside of jit; place it before")
    constrained = [
        constrain_traced(jnp.asarray(x), one.mesh, one.spec, host_memory(one))
        if isinstance(one, NamedSharding)
        else jax.device_put(x, one)
        for x, one in zip(arrays, shardings, strict=True)
    ]
    return found.with_arrays(constrained)
