"""The parts of arrays: shards on devices, and for PRNG keys the integers behind them."""

from collections.abc import Container, Hashable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Sharding

from shardrules.core.keys import is_key
from shardrules.moves.schedule import Device


def physical(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype of the data behind an array: `(3, 2)` and uint32 for three PRNG keys."""
    if not is_key(dtype):
        return shape, dtype
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    return data.shape, data.dtype


def local_shards(array: jax.Array) -> dict[Device, jax.Array]:
    """Returns the shard of each device of this process, without checking whether the array was deleted."""
    # Then `addressable_data` has a single copy.
    if array.is_fully_replicated:
        return {shard.device: shard.data for shard in array.addressable_shards}
    # `addressable_shards` works too, but keeps some 2 kB for each of them.
    devices = array.sharding.addressable_devices_indices_map(array.shape)
    return {device: array.addressable_data(index) for index, device in enumerate(devices)}


def data_shards(shards: Mapping[Device, jax.Array], dtype: Any, devices: Container[Device]) -> dict[Device, jax.Array]:
    """Returns the shards on some devices, PRNG keys as the integers behind them."""
    chosen = {device: shard for device, shard in shards.items() if device in devices}
    return {device: jax.random.key_data(shard) for device, shard in chosen.items()} if is_key(dtype) else chosen


def from_data(data: jax.Array, like: jax.Array, sharding: Sharding) -> jax.Array:
    """Returns the array behind which `data` is: `data` itself, or PRNG keys of the dtype of `like`."""
    if not is_key(like.dtype):
        return data
    impl = jax.random.key_impl(like)
    keys = {device: jax.random.wrap_key_data(shard, impl=impl) for device, shard in local_shards(data).items()}
    return _from_shards(like.shape, like.dtype, sharding, keys)


def with_sharding(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Returns an array in another sharding that has the same data on every device. It shares its memory."""
    return _from_shards(array.shape, array.dtype, sharding, local_shards(array))


def _from_shards(shape: tuple[int, ...], dtype: Any, sharding: Sharding, shards: dict[Device, jax.Array]) -> jax.Array:
    ordered = [shards[device] for device in sharding.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, sharding, ordered, dtype=dtype)


def buffers_of(value: Any) -> Iterator[Hashable]:
    """Yields a name for each buffer of an array, and nothing for other values; arrays that share memory share names."""
    if not isinstance(value, jax.Array):
        return
    for device, shard in local_shards(value).items():
        if shard.size:
            yield device.id, shard.unsafe_buffer_pointer()
