"""Arrays onto devices: one batched transfer for what is in memory, shard by shard what is not."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from shardrules.core.errors import MeshError
from shardrules.core.jax_state import device_put, jit, under_trace
from shardrules.core.keys import is_key
from shardrules.core.spec import device_dtype
from shardrules.placement.source import WHOLE_BYTES, ArraySource, Index

_PENDING_BYTES = 64 * 2**20
"""The bytes that may wait on the host for their transfer to end: enough to keep a disk busy meanwhile. Chosen by
hand."""


def put(values: Sequence[Any], shardings: Sequence[Sharding]) -> list[Any]:
    """Returns arrays, numpy arrays and `ArraySource`s on devices; arrays that are there come back as they are."""
    result = list(values)
    local_indices: list[int] = []
    spanning_indices: list[int] = []
    for index, (value, sharding) in enumerate(zip(values, shardings, strict=True)):
        if isinstance(value, ArraySource):
            continue
        if isinstance(value, jax.Array) and value.committed and value.sharding == sharding:
            continue
        # Three ways: from many processes together, within this process, and from this process to a mesh of several.
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            spanning_indices.append(index)
        elif sharding.is_fully_addressable:
            local_indices.append(index)
        else:
            result[index] = _put_addressable(value, sharding)
    # One batch for all: a transfer per array costs seconds where there are hundreds.
    for indices, move in ((local_indices, device_put), (spanning_indices, _move_together)):
        if indices:
            moved = move([values[index] for index in indices], [shardings[index] for index in indices])
            for index, array in zip(indices, moved, strict=True):
                result[index] = array
    # Sources come last: each is read only when it is placed, so that the host holds few of them at a time.
    pending = _Pending()
    for index, value in enumerate(values):
        if isinstance(value, ArraySource):
            result[index] = _read_source(value, shardings[index], pending)
    return result


def put_some(values: Sequence[Any], shardings: Mapping[int, Sharding]) -> list[Any]:
    """Returns `values` with those at the indices in `shardings` placed; shapes without values only get the sharding."""
    result = list(values)
    arrays: dict[int, Any] = {}
    for index, sharding in shardings.items():
        if isinstance(values[index], jax.ShapeDtypeStruct):
            result[index] = values[index].update(sharding=sharding)
        else:
            arrays[index] = values[index]
    for index, array in zip(arrays, put([*arrays.values()], [shardings[index] for index in arrays]), strict=True):
        result[index] = array
    return result


def put_unplaced(values: Sequence[Any], shardings: Sequence[Sharding | None]) -> list[Any]:
    """Returns `values` with those that are not committed to devices placed by their `NamedSharding`, outside of jit.

    `jax.jit` compiles separately for arrays that it has to place and for arrays that are placed already. Without this,
    the second step of a training loop, which gets the results of the first, would compile again.
    """
    if under_trace():
        return list(values)
    pairs = enumerate(zip(values, shardings, strict=True))
    unplaced = {n: to for n, (value, to) in pairs if isinstance(to, NamedSharding) and not is_placed(value)}
    return put_some(values, unplaced)


def is_placed(value: Any) -> bool:
    """Returns whether an array is committed to devices, or the shape of one has a sharding."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.sharding is not None
    return isinstance(value, jax.Array) and value.committed


@final
@attrs.define(eq=False)
class _Pending:
    """Transfers that may still be running: until they end, the host keeps what was read for them."""

    arrays: list[jax.Array] = attrs.field(factory=list)
    host_bytes: int = 0

    def add(self, arrays: Sequence[jax.Array], host_bytes: int) -> None:
        """Adds transfers, and waits for all of them once the host keeps too much."""
        self.arrays += arrays
        self.host_bytes += host_bytes
        if self.host_bytes > _PENDING_BYTES:
            jax.block_until_ready(self.arrays)
            self.arrays.clear()
            self.host_bytes = 0


def _put_addressable(value: Any, sharding: Sharding) -> jax.Array:
    """Places the shards for this process's devices of an array that this process holds whole."""
    if isinstance(value, jax.Array) and is_key(value.dtype):
        data = _put_addressable(jax.random.key_data(value), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    host = np.asarray(value)
    # The dtype is passed since a process may hold no shard to infer it from.
    dtype = device_dtype(host.dtype)
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: host[() if index is None else index], dtype=dtype
    )


def _move_together(values: list[jax.Array], shardings: list[Sharding]) -> list[jax.Array]:
    """Moves arrays that span processes, all in one program, since no process has the whole of any."""
    for value, sharding in zip(values, shardings, strict=True):
        if value.sharding.device_set != sharding.device_set:
            raise MeshError(
                f"an array {value.dtype}{list(value.shape)} over several processes can only move between meshes of the "
                f"same devices, and the {len(value.sharding.device_set)} devices that it is on are not the "
                f"{len(sharding.device_set)} of the destination. Gather it first: "
                "filter_shard(filter_gather(tree), how, mesh)"
            )
    return jit(lambda arrays: arrays, out_shardings=shardings)(values)


def _read_source(source: ArraySource, sharding: Sharding, pending: _Pending) -> jax.Array:
    """Reads each distinct shard of this process once, and places it on each device that holds it.

    What is read together is placed before more is read, so that the host holds little of the array.
    """
    shard_devices: dict[str, tuple[Index, list[Any]]] = {}
    for device, index in sharding.addressable_devices_indices_map(source.shape).items():
        slices = (slice(None),) * source.ndim if index is None else index
        shard_devices.setdefault(repr(slices), (slices, []))[1].append(device)  # no hash before Python 3.12
    groups = source.groups([slices for slices, _ in shard_devices.values()])
    dtype = device_dtype(source.dtype)  # a process may hold no shard to infer it from
    if source.nbytes <= WHOLE_BYTES:
        keys = list(shard_devices)
        parts = {keys[position]: part for group in groups for position, part in group}
        whole = repr((slice(None),) * source.ndim)
        array = jax.make_array_from_callback(
            source.shape, sharding, lambda index: parts[whole if index is None else repr(index)], dtype=dtype
        )
        pending.add([array], sum(part.nbytes for part in parts.values()))
        return array
    devices = [devices for _, devices in shard_devices.values()]
    shards: list[jax.Array] = []
    for group in groups:
        pairs = [(part, device) for position, part in group for device in devices[position]]
        targets = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for _, device in pairs]
        copies = device_put([part for part, _ in pairs], targets)
        shards += copies
        pending.add(copies, sum(part.nbytes for _, part in group))
    return jax.make_array_from_single_device_arrays(source.shape, sharding, shards, dtype=dtype)
