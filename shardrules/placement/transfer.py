"""Arrays onto devices: one batched transfer for whatever is in memory, part by part what is not."""

from collections.abc import Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from shardrules.core.errors import MeshError
from shardrules.core.spec import device_dtype
from shardrules.placement.source import ArraySource, Index

_PENDING_BYTES = 64 * 2**20
"""How much of what was read may wait on the host for its transfer to end."""

_WHOLE_BYTES = 8 * 2**20
"""Up to this size all shards of an array are read before any is placed."""


def put(values: Sequence[Any], shardings: Sequence[Sharding]) -> list[Any]:
    """Returns `values` on devices, each placed by its sharding. What lies there already is returned as it is.

    **Arguments:**

    - `values`: JAX arrays, numpy arrays or `ArraySource`s.
    - `shardings`: one for each of them.

    **Returns:**

    A list of JAX arrays.

    ```python
    mesh = sr.create_mesh("data:8")
    placed = put([np.arange(8)], [jax.NamedSharding(mesh, P("data"))])
    assert put(placed, [jax.NamedSharding(mesh, P("data"))])[0] is placed[0]
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
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            across.append(number)
        elif sharding.is_fully_addressable:
            local.append(number)
        else:
            result[number] = _put_own(value, sharding)
    for numbers, move in ((local, jax.device_put), (across, _move_across)):
        if numbers:
            moved = move([values[number] for number in numbers], [shardings[number] for number in numbers])
            for number, array in zip(numbers, moved, strict=True):
                result[number] = array
    pending = _Pending()
    for number, value in enumerate(values):
        if isinstance(value, ArraySource):
            result[number] = _read(value, shardings[number], pending)
    return result


@final
@attrs.define(eq=False)
class _Pending:
    """Transfers that may still be under way, each of which keeps what was read for it on the host."""

    arrays: list[jax.Array] = attrs.field(factory=list)
    host_bytes: int = 0

    def add(self, arrays: Sequence[jax.Array], host_bytes: int) -> None:
        """Waits for all of them once they keep too much."""
        self.arrays += arrays
        self.host_bytes += host_bytes
        if self.host_bytes > _PENDING_BYTES:
            jax.block_until_ready(self.arrays)
            self.arrays.clear()
            self.host_bytes = 0


def _put_own(value: Any, sharding: Sharding) -> jax.Array:
    """Places the parts that this process owns of an array that it has the whole of."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = _put_own(jax.random.key_data(value), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    host = np.asarray(value)
    # A process may hold no part that would tell the dtype.
    dtype = device_dtype(host.dtype)
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: host[() if index is None else index], dtype=dtype
    )


def _move_across(values: list[jax.Array], shardings: list[Sharding]) -> list[jax.Array]:
    """Moves arrays that several processes hold together: all in one program, since none has the whole."""
    for value, sharding in zip(values, shardings, strict=True):
        if value.sharding.device_set != sharding.device_set:
            raise MeshError(
                f"an array {value.dtype}{list(value.shape)} that several processes hold can only go to a mesh of "
                f"the same devices: it lies on {len(value.sharding.device_set)}, and is to be on "
                f"{len(sharding.device_set)} others. Gather it first: filter_shard(filter_gather(tree), how, mesh)"
            )
    return jax.jit(lambda arrays: arrays, out_shardings=shardings)(values)


def _read(source: ArraySource, sharding: Sharding, pending: _Pending) -> jax.Array:
    """Reads each distinct shard of this process once, and places it wherever it is held."""
    if source.nbytes > _WHOLE_BYTES:
        return _read_by_shards(source, sharding, pending)
    parts: dict[str, np.ndarray] = {}

    def part(index: Index | None) -> np.ndarray:
        where = (slice(None),) * source.ndim if index is None else index
        key = repr(where)
        if key not in parts:
            parts[key] = source.part(where)
        return parts[key]

    array = jax.make_array_from_callback(source.shape, sharding, part, dtype=device_dtype(source.dtype))
    pending.add([array], sum(one.nbytes for one in parts.values()))
    return array


def _read_by_shards(source: ArraySource, sharding: Sharding, pending: _Pending) -> jax.Array:
    """Lets go of each shard before the next is read. It costs a transfer for each, which only large ones are worth."""
    places: dict[str, tuple[Index, list[Any]]] = {}
    for device, index in sharding.addressable_devices_indices_map(source.shape).items():
        where = (slice(None),) * source.ndim if index is None else index
        places.setdefault(repr(where), (where, []))[1].append(device)
    shards: list[jax.Array] = []
    for where, devices in places.values():
        part = source.part(where)
        copies = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        placed = jax.device_put([part] * len(copies), copies)
        shards += placed
        pending.add(placed, part.nbytes)
    dtype = device_dtype(source.dtype)  # a process may hold no shard that would tell
    return jax.make_array_from_single_device_arrays(source.shape, sharding, shards, dtype=dtype)
