"""`filter_shard`: a tree of arrays onto the devices of a mesh."""

from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardrules.core.axes import AnyMesh
from shardrules.core.errors import ConfigTypeError
from shardrules.core.jax_state import device_put, under_trace
from shardrules.placement.destination import not_placeable, resolve_destination
from shardrules.placement.source import ArraySource
from shardrules.placement.traced import constrain_traced, host_memory
from shardrules.placement.transfer import put
from shardrules.rules.how import How, refuse_leaves


def filter_shard(tree: Any, how: How, mesh: AnyMesh | None = None) -> Any:
    """Places every array of a tree on the devices of a mesh; inside `jit` it constrains them instead.

    If any array cannot be placed as `how` says, the error lists all such arrays, and nothing is moved.

    **Arguments:**

    - `tree`: any pytree: a module, an optimizer state, numpy arrays, `ArraySource`s. Leaves that are not arrays, Python
        numbers among them, stay as they are.
    - `how`: a rule, a plan, a PartitionSpec, a sharding, a device, a tree or prefix of specs and shardings, or a
        function from the tree to one of those. `P()` and `None` put a whole copy on every device.
    - `mesh`: a mesh with axes of any type. The default is the mesh of the rule or the plan, else the one the arrays are
        on, else the one in force.

    **Returns:**

    The tree with a `jax.Array` at every array. An array that is placed so already is returned as it is. Under a spec an
    array stays in the kind of memory that it is in.

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
    destination = resolve_destination(tree, how, mesh)
    arrays, shardings = destination.arrays()
    if not under_trace():
        refuse_leaves("filter_shard", tree, not_placeable(destination))
        return destination.with_arrays(put(arrays, shardings))
    if any(isinstance(x, ArraySource) for x in arrays):
        raise ConfigTypeError("filter_shard: an ArraySource is read outside of jit; place it before")
    constrained = [
        constrain_traced(jnp.asarray(x), sharding.mesh, sharding.spec, host_memory(sharding))
        if isinstance(sharding, NamedSharding)
        else device_put(x, sharding)
        for x, sharding in zip(arrays, shardings, strict=True)
    ]
    return destination.with_arrays(constrained)
