"""What a tree requests from a checkpoint, leaf by leaf, and how what was read becomes the tree.

Files cannot hold typed PRNG keys: an array of keys requests their key data, and is wrapped again after it was read.
"""

from collections.abc import Sequence
from typing import Any, final

import attrs
import jax
import numpy as np
from jax.sharding import Sharding

from shardrules.core.errors import CheckpointError, ConfigError, TreeError, printable, shown
from shardrules.core.keys import is_key
from shardrules.core.spec import device_dtype
from shardrules.core.tree import leaf_paths
from shardrules.placement.destination import Destination
from shardrules.placement.source import ArraySource
from shardrules.placement.transfer import put

PYTHON_TYPES = (bool, int, float, complex, str)
"""The types of Python values that a checkpoint may hold beside arrays."""


@final
@attrs.frozen(eq=False)
class RequestedLeaf:
    """A leaf that a checkpoint may hold: an array, or a Python number or string."""

    path: str
    value: Any
    """What the tree has there."""
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    """The dtype of the array in a file; a Python value has none."""
    sharding: Sharding | None = None
    """`None` for a Python value."""
    first_path: str = ""
    """Where the variable that it belongs to occurred first, if it occurs twice: it may be saved only there."""

    @property
    def is_array(self) -> bool:
        """Whether it is an array, rather than a Python value."""
        return self.sharding is not None

    @property
    def has_values(self) -> bool:
        """Whether the tree has values for it, rather than only a shape."""
        return not isinstance(self.value, jax.ShapeDtypeStruct)

    @property
    def device_dtype(self) -> Any:
        """The dtype of the array once it is on a device."""
        return device_dtype(self.dtype)


def check_flags(caller: str, **flags: Any) -> None:
    """Refuses options of a loader that are neither true nor false: text, such as `"no"`, would count as true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{caller}: {name} must be True or False, got {shown(value)}")


def requested_leaves(like: Any, destination: Destination, caller: str) -> list[RequestedLeaf]:
    """Returns one item for each array and each Python number or string in `like`, in the order of the leaves.

    ```python
    from shardrules.checkpoints.requested import requested_leaves
    from shardrules.placement.destination import resolve_destination

    like = {"w": np.ones((8, 4), np.float32), "step": 3, "act": jax.nn.relu}
    destination = resolve_destination(like, P("data"), sr.create_mesh("data:8"))
    leaves = requested_leaves(like, destination, "load")
    assert [(leaf.path, leaf.shape, leaf.is_array) for leaf in leaves] == [("step", (), False), ("w", (8, 4), True)]
    ```
    """
    paths = leaf_paths(like)
    if len(paths) != len(destination.values):
        raise TreeError(f"{caller}: a box in the tree holds several arrays or none; unbox it first")
    first_paths = {index: paths[first] for index, first in destination.shared.items()}
    return [
        RequestedLeaf(path, value)
        if sharding is None
        else RequestedLeaf(path, value, *_stored_as(value), sharding, first_paths.get(index, ""))
        for index, (path, value, sharding) in enumerate(
            zip(paths, destination.values, destination.shardings, strict=True)
        )
        if sharding is not None or isinstance(value, PYTHON_TYPES)
    ]


def with_values(destination: Destination, leaves: Sequence[RequestedLeaf], values: Sequence[Any]) -> Any:
    """Returns the tree with one of `values` (arrays, `ArraySource`s, Python values) at each of `leaves`, placed."""
    # All arrays are placed in one call, which reads sources last and part by part.
    arrays = [(leaf, value) for leaf, value in zip(leaves, values, strict=True) if leaf.is_array]
    python_values = iter([value for leaf, value in zip(leaves, values, strict=True) if not leaf.is_array])
    tree_values = [
        next(python_values) if sharding is None and isinstance(value, PYTHON_TYPES) else value
        for value, sharding in zip(destination.values, destination.shardings, strict=True)
    ]
    placed_arrays = put([value for _, value in arrays], destination.arrays()[1])
    tree_arrays = [_with_keys(array, leaf) for array, (leaf, _) in zip(placed_arrays, arrays, strict=True)]
    return attrs.evolve(destination, values=tree_values).with_arrays(tree_arrays)


def python_value(source: ArraySource, leaf: RequestedLeaf) -> Any:
    """Reads a Python number of the type that the tree has at `leaf`.

    ```python
    from shardrules.checkpoints.requested import RequestedLeaf, python_value

    assert python_value(sr.ArraySource((), np.int64, lambda index: np.array(7)), RequestedLeaf("step", 0)) == 7
    ```
    """
    return as_type_of(leaf, source.part(()).item())


def as_type_of(leaf: RequestedLeaf, value: Any) -> Any:
    """Returns a Python value as the type that the tree has at `leaf`, which may be a subclass, such as an enum."""
    kind = type(leaf.value)
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{printable(leaf.path)}: {value!r:.60} cannot become a {kind.__name__}") from error


def _stored_as(value: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Returns the shape and dtype that an array has in a file: for keys, those of their key data."""
    if is_key(value.dtype):
        value = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(value.shape, value.dtype))
    return tuple(map(int, value.shape)), np.dtype(value.dtype)


def _with_keys(array: jax.Array, leaf: RequestedLeaf) -> jax.Array:
    """Returns keys where the tree has keys, and key data where it has numbers."""
    has_keys = is_key(array.dtype)
    wants_keys = is_key(leaf.value.dtype)
    if wants_keys and not has_keys:
        return jax.random.wrap_key_data(array, impl=_key_impl(leaf.value))
    if has_keys and not wants_keys:
        return jax.random.key_data(array)
    if has_keys and array.dtype != leaf.value.dtype:
        path = printable(leaf.path)
        raise CheckpointError(
            f"{path} holds {array.dtype}, expected {leaf.value.dtype}: make `like` with keys of that kind"
        )
    return array


def _key_impl(keys: Any) -> Any:
    """Returns the PRNG implementation of keys that may be shapes only. JAX returns it for arrays, so one is traced."""
    impls: list[Any] = []
    jax.eval_shape(
        lambda traced: impls.append(jax.random.key_impl(traced)), jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    )
    return impls[0]
