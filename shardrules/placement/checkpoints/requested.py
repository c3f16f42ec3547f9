"""What a tree asks of a checkpoint, leaf by leaf, and the way back from what was found to the tree.

Files hold numbers. So an array of typed PRNG keys asks for the numbers that its keys are made of, and is made of them
again in the end.
"""

from collections.abc import Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from shardrules.core.errors import CheckpointError, TreeError
from shardrules.core.spec import device_dtype
from shardrules.core.tree import leaf_paths
from shardrules.placement.destination import Destination
from shardrules.placement.source import ArraySource
from shardrules.placement.transfer import put

PLAIN = (bool, int, float, complex, str)
"""The types of Python values that a checkpoint may hold beside arrays."""


@final
@attrs.frozen(eq=False)
class RequestedLeaf:
    """A leaf that a checkpoint may hold: an array, or a Python number or text.

    **Arguments:**

    - `path`: its path.
    - `value`: what stands in the tree.
    - `shape`, `dtype`: those of the array as a file holds it. A Python value has none.
    - `sharding`: where the array is to be; `None` for a Python value.
    """

    path: str
    value: Any
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    sharding: Sharding | None = None

    @property
    def is_array(self) -> bool:
        """Whether it is an array, rather than a Python value."""
        return self.sharding is not None

    @property
    def has_values(self) -> bool:
        """Whether there are values in the tree already, rather than a shape only."""
        return not isinstance(self.value, jax.ShapeDtypeStruct)

    @property
    def device_dtype(self) -> Any:
        """The dtype of the array once it is on a device."""
        return device_dtype(self.dtype)


def requested_leaves(like: Any, found: Destination, who: str) -> list[RequestedLeaf]:
    """Returns what a tree asks for.

    **Arguments:**

    - `like`: the tree.
    - `found`: the same, taken apart.
    - `who`: the caller's name, for messages.

    **Returns:**

    One item for each array and each Python number or text, in the order of the leaves.

    **Raises:**

    `TreeError` where a box in the tree does not hold one array.

    ```python
    from shardrules.placement.destination import resolve_destination

    like = {"w": np.ones((8, 4), np.float32), "step": 3, "act": jax.nn.relu}
    found = requested_leaves(like, resolve_destination(like, P("data"), sr.create_mesh("data:8")), "load")
    assert [(one.path, one.shape, one.is_array) for one in found] == [("step", (), False), ("w", (8, 4), True)]
    ```
    """
    paths = leaf_paths(like)
    if len(paths) != len(found.values):
        raise TreeError(f"{who}: a box in the tree holds more than one array, or none; unbox it first")
    return [
        RequestedLeaf(path, value) if sharding is None else RequestedLeaf(path, value, *_as_numbers(value), sharding)
        for path, value, sharding in zip(paths, found.values, found.shardings, strict=True)
        if sharding is not None or isinstance(value, PLAIN)
    ]


def with_values(found: Destination, wants: Sequence[RequestedLeaf], values: Sequence[Any]) -> Any:
    """Returns the tree with what a checkpoint holds in it.

    **Arguments:**

    - `found`: the tree, taken apart.
    - `wants`: what it asks for.
    - `values`: what is to stand in it, one for each of them: an array, an `ArraySource`, or a Python value.

    **Returns:**

    The tree. Arrays are placed as `found` says.
    """
    arrays = [(want, value) for want, value in zip(wants, values, strict=True) if want.is_array]
    plain = iter([value for want, value in zip(wants, values, strict=True) if not want.is_array])
    leaves = [
        next(plain) if sharding is None and isinstance(value, PLAIN) else value
        for value, sharding in zip(found.values, found.shardings, strict=True)
    ]
    placed = put([value for _, value in arrays], found.arrays()[1])
    finished = [_as_asked(array, want) for array, (want, _) in zip(placed, arrays, strict=True)]
    return attrs.evolve(found, values=leaves).with_arrays(finished)


def plain_value(source: ArraySource, want: RequestedLeaf) -> Any:
    """Reads a Python number.

    **Arguments:**

    - `source`: an array without dimensions.
    - `want`: what stands in the tree.

    **Returns:**

    A value of the type that stands there.

    ```python
    assert plain_value(ArraySource((), np.int64, lambda index: np.array(7)), RequestedLeaf("step", 0)) == 7
    ```
    """
    return type(want.value)(source.part(()).item())


def _as_numbers(value: Any) -> tuple[tuple[int, ...], np.dtype]:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(value.shape, value.dtype))
    return tuple(map(int, value.shape)), np.dtype(value.dtype)


def _as_asked(array: jax.Array, want: RequestedLeaf) -> jax.Array:
    """Returns keys where keys were asked for, and their numbers where these were."""
    has_keys = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    wants_keys = jnp.issubdtype(want.value.dtype, jax.dtypes.prng_key)
    if wants_keys and not has_keys:
        return jax.random.wrap_key_data(array, impl=_key_kind(want.value))
    if has_keys and not wants_keys:
        return jax.random.key_data(array)
    if has_keys and array.dtype != want.value.dtype:
        raise CheckpointError(f"{want.path} holds {array.dtype}, wanted {want.value.dtype}: make `like` with that kind")
    return array


def _key_kind(keys: Any) -> Any:
    """The implementation of keys of which only the shape may be there: JAX tells it of arrays only."""
    found: list[Any] = []
    jax.eval_shape(
        lambda traced: found.append(jax.random.key_impl(traced)), jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    )
    return found[0]
