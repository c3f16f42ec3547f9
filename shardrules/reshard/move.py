"""`reshard`: arrays from where they are to where they should be."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import Sharding

from shardrules.core.errors import TreeError
from shardrules.placement.target import check_placeable, target
from shardrules.placement.transfer import put


def reshard(tree: Any, shardings: Any) -> Any:
    """Moves every array of a tree to its sharding. Numbers become arrays.

    **Arguments:**

    - `tree`: a pytree of arrays and numbers, on devices or on the host.
    - `shardings`: a sharding, or a tree or prefix of them.

    **Returns:**

    The tree on devices. An array that lies as it should is returned as it is.

    **Raises:**

    `PlanError`, listing every array that its sharding cannot split; `TreeError` for something that is no sharding, or a
    tree that is no prefix.

    ```python
    whole = jax.sharding.NamedSharding(sr.create_mesh("data:8"), P())
    assert sr.reshard({"scale": 3.0}, whole)["scale"].sharding == whole
    ```
    """
    is_sharding = lambda node: node is None or isinstance(node, Sharding)  # noqa: E731
    wrong = [repr(one) for one in jtu.tree_leaves(shardings, is_leaf=is_sharding) if not isinstance(one, Sharding)]
    if wrong:
        raise TreeError(f"reshard takes shardings, got {', '.join(wrong)}; filter_shard takes specs, plans and rules")
    arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, int | float | complex) else leaf, tree)
    found = target(arrays, shardings, who="reshard")
    check_placeable(arrays, found, "reshard")
    return found.with_arrays(put(*found.arrays()))
