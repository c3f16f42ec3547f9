"""Arrays onto devices: one batched transfer for whatever is in memory, part by part what is not."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from shardrules.placement.source import ArraySource, Index

_PENDING_BYTES = 64 * 2**20
"""How much of what was read may wait on the host for its transfer to end."""


def put(values: Sequence[Any], shardings: Sequence[Sharding]) -> list[Any]:
    """Returns `values` on devices, each placed by its sharding. What lies there already is returned as it is.

    **Arguments:**

    - `values`: JAX arrays, numpy arrays or `ArraySource`s.
    - `shardings`: one for each of them.

    **Returns:**

    A list of JAX arrays.

    ```python
    mesh = sr.create_mesh("data:8")
    placed = put([np.arange(8)], [NamedSharding(mesh, P("data"))])
    assert put(placed, [NamedSharding(mesh, P("data"))])[0] is placed[0]
    ```
    """
    result = list(values)
    local: list[int] = []
    across: list[int] = []
    for number, (value, sharding) in enumerate(zip(values, shardings, strict=True)):
        if isinstance(value, ArraySource):
            continue
        if isinstance(value, jax.Array) and value.committed and value.sharding == sharding:
            continue
        if sharding.is_fully_addressable:
            local.append(number)
        elif isinstance(value, jax.Array) and not value.is_fully_addressable:
            across.append(number)
        else:
            result[number] = _put_own(value, sharding)
    for numbers, move in ((local, jax.device_put), (across, _move_across)):
        if numbers:
            moved = move([values[number] for number in numbers], [shardings[number] for number in numbers])
            for number, array in zip(numbers, moved, strict=True):
                result[number] = array
    pending: list[jax.Array] = []
    for number, value in enumerate(values):
        if isinstance(value, ArraySource):
            result[number] = array = _read(value, shardings[number])
            pending.append(array)
            if sum(one.nbytes for one in pending) > _PENDING_BYTES:
                jax.block_until_ready(pending)
                pending.clear()
    return result


def _put_own(value: Any, sharding: Sharding) -> jax.Array:
    """Places the parts that this process owns of an array that it has the whole of."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = _put_own(jax.random.key_data(value), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[() if index is None else index])


def _move_across(values: list[jax.Array], shardings: list[Sharding]) -> list[jax.Array]:
    """Moves arrays that several processes hold together: all in one program, since none has the whole."""
    return jax.jit(lambda arrays: arrays, out_shardings=shardings)(values)


def _read(source: ArraySource, sharding: Sharding) -> jax.Array:
    """Reads each distinct shard of this process once, and places it wherever it is held."""
    parts: dict[str, np.ndarray] = {}

    def part(index: Index | None) -> np.ndarray:
        where = (slice(None),) * source.ndim if index is None else index
        key = repr(where)
        if key not in parts:
            parts[key] = source.part(where)
        return parts[key]

    return jax.make_array_from_callback(source.shape, sharding, part)
