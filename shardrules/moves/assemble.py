"""Moves on CPU devices of one process: every new shard is written once, where it stays.

The arrays of CPU devices are memory of this process. A new shard is put together from views of the old ones, in memory
that is aligned as XLA wants it, and XLA adopts that memory: nothing else is ever allocated, and devices that hold the
same part share it. (XLA never writes into memory that it adopted, not even into a donated array.)
"""

import ctypes
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Sharding

from shardrules.moves.schedule import Box, Device, Schedule, box_shape, slices
from shardrules.placement.source import aligned_empty

Recipe: TypeAlias = dict[Box, tuple[tuple[Device, tuple[slice, ...], tuple[slice, ...]], ...]]
"""For each new box: the device, the part of its old shard, and the part of the box that this fills."""


def moves_in_memory(schedule: Schedule) -> bool:
    """Returns whether a move is on CPU devices of one process. Every process answers the same."""
    devices = (*schedule.source, *schedule.target)
    return len(schedule.processes) == 1 and all(device.platform == "cpu" for device in devices)


def make_recipe(schedule: Schedule) -> Recipe:
    """Returns how each distinct new shard is put together, the same for every array with this schedule."""
    # Devices with the same box share one buffer, which the pieces of the first of them fill.
    first_device: dict[Box, Device] = {}
    for device, box in schedule.target.items():
        first_device.setdefault(box, device)
    parts: dict[Box, list[Any]] = {box: [] for box in first_device}
    for piece in schedule.pieces:
        box = schedule.target[piece.receiver]
        if first_device[box] is piece.receiver:
            old_part, new_part = slices(piece.box, schedule.source[piece.sender]), slices(piece.box, box)
            parts[box].append((piece.sender, old_part, new_part))
    return {box: tuple(box_parts) for box, box_parts in parts.items()}


def assemble(
    shards: Mapping[Device, jax.Array], recipe: Recipe, schedule: Schedule, dtype: Any, sharding: Sharding
) -> jax.Array:
    """Returns an array in its new sharding, put together from its old shards in the memory of this process."""
    # Another process moves it.
    if not sharding.addressable_devices:
        return jax.make_array_from_single_device_arrays(schedule.shape, sharding, [], dtype=dtype)
    old = {device: np.asarray(shard) for device, shard in shards.items()}
    new: dict[Box, np.ndarray] = {}
    for box, parts in recipe.items():
        new[box] = aligned_empty(box_shape(box), np.dtype(dtype))
        for device, old_part, new_part in parts:
            new[box][new_part] = old[device][old_part]
    # JAX asks for the shards in the order of the sharding's devices, which is the schedule's order.
    boxes = iter(schedule.target.values())
    return jax.make_array_from_callback(schedule.shape, sharding, lambda _: new[next(boxes)], dtype=dtype)


def release_freed_memory() -> None:
    """Asks the C library to return freed memory to the system: otherwise shards that XLA's threads have freed stay in
    those threads' heaps, and nothing else can use them."""
    # Only glibc has it.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
