"""Contents of shards: cut out of old ones and put into new ones, in the memory of the process or by programs."""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding

from shardrules.core.jax_state import device_put, jit
from shardrules.moves.sync.flows import PartFlow
from shardrules.moves.sync.strided import SOURCE, TARGET, Side, StridedStep
from shardrules.placement.source import aligned_empty

Changes = tuple[tuple[str, Any], ...]


class ShardKind(abc.ABC):
    """One of two ways to work on the shards of devices. A content has the sizes of its flow's inner steps."""

    @abc.abstractmethod
    def open(self, shard: jax.Array) -> Any:
        """Returns a shard in the form in which contents are cut out of it."""

    @abc.abstractmethod
    def blank(self, shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
        """Returns a new shard without values."""

    @abc.abstractmethod
    def cut(self, shard: Any, flow: PartFlow, offset: Sequence[int], changes: Changes) -> Any:
        """Returns the content that begins at an offset of a shard of the source, after it is cast and scaled."""

    @abc.abstractmethod
    def join(self, shard: Any, content: Any, flow: PartFlow, offset: Sequence[int]) -> Any:
        """Returns a shard of the target with a content at an offset; the shard before is gone."""

    @abc.abstractmethod
    def change(self, content: Any, changes: Changes) -> Any:
        """Returns a content after it is cast and scaled."""

    @abc.abstractmethod
    def send(self, content: Any, device: Any) -> Any:
        """Returns a content on another device of this process."""

    @abc.abstractmethod
    def to_device(self, content: Any, device: Any) -> jax.Array:
        """Returns a content as an array on a device."""

    @abc.abstractmethod
    def from_device(self, content: jax.Array) -> Any:
        """Returns what `to_device` made, perhaps on another device."""

    @abc.abstractmethod
    def finish(self, shape: tuple[int, ...], dtype: Any, sharding: Sharding, shards: dict[Any, Any]) -> jax.Array:
        """Returns the array of all shards of this process."""


@final
@attrs.frozen
class HostShards(ShardKind):
    """Shards in the memory of this process: those of CPU devices."""

    def open(self, shard: jax.Array) -> np.ndarray:
        return np.asarray(shard)

    def blank(self, shape: tuple[int, ...], dtype: Any, device: Any) -> np.ndarray:
        return aligned_empty(shape, np.dtype(dtype))

    def cut(self, shard: np.ndarray, flow: PartFlow, offset: Sequence[int], changes: Changes) -> np.ndarray:
        return self.change(_view(shard, flow.inner, SOURCE, offset), changes)

    def join(self, shard: np.ndarray, content: Any, flow: PartFlow, offset: Sequence[int]) -> np.ndarray:
        _view(shard, flow.inner, TARGET, offset)[...] = content
        return shard

    def change(self, content: Any, changes: Changes) -> Any:
        for name, value in changes:
            if name == "cast":
                content = content.astype(value)
            elif name == "scale":
                content = (content * np.asarray(value, content.dtype)).astype(content.dtype)
            else:
                content = np.asarray(value)
        return content

    def send(self, content: np.ndarray, device: Any) -> np.ndarray:
        return content

    def to_device(self, content: np.ndarray, device: Any) -> jax.Array:
        return device_put(np.ascontiguousarray(content).reshape(content.shape), SingleDeviceSharding(device))

    def from_device(self, content: jax.Array) -> np.ndarray:
        return np.asarray(content)

    def finish(self, shape: tuple[int, ...], dtype: Any, sharding: Sharding, shards: dict[Any, Any]) -> jax.Array:
        if not shards:  # other processes have them
            return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
        # JAX asks for shards in the order of devices, and once where all are equal.
        ordered = (shards[device] for device in sharding.addressable_devices_indices_map(shape))
        return jax.make_array_from_callback(shape, sharding, lambda _: next(ordered), dtype=dtype)


def _view(shard: np.ndarray, steps: Sequence[StridedStep], side: Side, offset: Sequence[int]) -> np.ndarray:
    """A view of the positions that steps visit."""
    start = shard[(*(slice(first, None) for first in offset), ...)]  # the dots: a scalar would be copied
    sizes = [step.size for step in steps]
    strides = [shard.strides[step.dims[side]] * step.strides[side] for step in steps]
    return np.lib.stride_tricks.as_strided(start, sizes, strides)


@final
@attrs.frozen
class DeviceShards(ShardKind):
    """Shards on devices, which programs cut and join."""

    def open(self, shard: jax.Array) -> jax.Array:
        return shard

    def blank(self, shape: tuple[int, ...], dtype: Any, device: Any) -> jax.Array:
        return _zeros(shape, dtype, device)()

    def cut(self, shard: jax.Array, flow: PartFlow, offset: Sequence[int], changes: Changes) -> jax.Array:
        # A content is never in memory in the wider dtype.
        dtype, rest = (
            (changes[0][1], changes[1:]) if changes[:1] and changes[0][0] == "cast" else (shard.dtype, changes)
        )
        return self.change(_cut(shard, np.array(offset, np.int32), steps=_shape(flow.inner, SOURCE), dtype=dtype), rest)

    def join(self, shard: jax.Array, content: Any, flow: PartFlow, offset: Sequence[int]) -> jax.Array:
        return _join(shard, content, np.array(offset, np.int32), steps=_shape(flow.inner, TARGET))

    def change(self, content: Any, changes: Changes) -> Any:
        if changes and changes[0][0] == "fill":  # a constant has no device
            return HostShards().change(content, changes)
        # One program for each: inside of one XLA would keep more digits than the dtype between has.
        for name, value in changes:
            content = _change(content, name=name, value=value)
        return content

    def send(self, content: jax.Array, device: Any) -> jax.Array:
        return device_put(content, device)

    def to_device(self, content: jax.Array, device: Any) -> jax.Array:
        return content

    def from_device(self, content: jax.Array) -> jax.Array:
        return content

    def finish(self, shape: tuple[int, ...], dtype: Any, sharding: Sharding, shards: dict[Any, Any]) -> jax.Array:
        arrays = [shards[device] for device in sharding.addressable_devices_indices_map(shape)]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)


_Steps = tuple[tuple[int, int, int], ...]
"""The size, dim and stride of each step along one side."""


def _shape(steps: Sequence[StridedStep], side: Side) -> _Steps:
    return tuple((step.size, step.dims[side], step.strides[side]) for step in steps)


@functools.lru_cache(1024)
def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Callable[[], jax.Array]:
    """A program for a device, which does not send zeros there."""
    return jit(lambda: jnp.zeros(shape, dtype), out_shardings=SingleDeviceSharding(device))


def _window(steps: _Steps, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shape of a box, and the order of its dims with steps; `None` for what is not a box."""
    dims = [dim for _, dim, _ in steps]
    if len(dict.fromkeys(dims)) < len(dims) or any(stride != 1 for _, _, stride in steps):
        return None
    sizes = {dim: size for size, dim, _ in steps}
    rest = [dim for dim in range(rank) if dim not in sizes]
    return tuple(sizes.get(dim, 1) for dim in range(rank)), (*dims, *rest)


def _indices(steps: _Steps, starts: jax.Array) -> tuple[jax.Array, ...]:
    """The positions along each dim, in the shape of the content."""
    sizes = [size for size, _, _ in steps]
    places = [jnp.broadcast_to(start, sizes) for start in starts]
    for axis, (_, dim, stride) in enumerate(steps):
        places[dim] = places[dim] + stride * lax.broadcasted_iota(jnp.int32, sizes, axis)
    return tuple(places)


@functools.partial(jit, static_argnames=("steps", "dtype"))
def _cut(shard: jax.Array, starts: Any, *, steps: _Steps, dtype: Any) -> jax.Array:
    window = _window(steps, shard.ndim)
    if window is None:
        return shard[_indices(steps, starts)].astype(dtype)
    shape, order = window
    box = lax.dynamic_slice(shard, list(starts), shape).astype(dtype)
    return box.transpose(order).reshape([size for size, _, _ in steps])


@functools.partial(jit, static_argnames=("steps",), donate_argnums=0)
def _join(shard: jax.Array, content: jax.Array, starts: Any, *, steps: _Steps) -> jax.Array:
    window = _window(steps, shard.ndim)
    content = jnp.broadcast_to(content, [size for size, _, _ in steps]).astype(shard.dtype)
    if window is None:
        return shard.at[_indices(steps, starts)].set(content)
    shape, order = window
    box = content.reshape([shape[dim] for dim in order]).transpose(np.argsort(np.array(order, int)).tolist())
    return lax.dynamic_update_slice(shard, box, list(starts))


@functools.partial(jit, static_argnames=("name", "value"))
def _change(content: jax.Array, *, name: str, value: Any) -> jax.Array:
    return content.astype(value) if name == "cast" else content * jnp.asarray(value, content.dtype)
