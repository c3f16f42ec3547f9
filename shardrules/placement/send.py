"""Arrays of which some processes hold no part, sent to these whole."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from shardrules.core.keys import is_key


def on_some_processes(values: Sequence[Any]) -> list[int]:
    """Returns the indices of the arrays of which a process holds no part; all processes get the same ones."""
    partial = [
        index
        for index, value in enumerate(values)
        if isinstance(value, jax.Array)
        and isinstance(value.sharding, NamedSharding)
        and len(_processes(value)) < jax.process_count()
    ]
    if not partial:
        return []
    # An array on devices of one process may also be that process's own, with another in its place elsewhere. So all
    # processes say what they lack.
    is_lacking = np.zeros(len(values), bool)
    is_lacking[[index for index in partial if jax.process_index() not in _processes(values[index])]] = True
    return np.flatnonzero(multihost_utils.process_allgather(is_lacking).any(axis=0)).tolist()


def _processes(array: jax.Array) -> list[int]:
    """The processes that hold parts of an array, ascending."""
    return sorted({device.process_index for device in array.sharding.device_set})


def send(
    arrays: Sequence[jax.Array], replicated: Callable[[list[jax.Array]], list[jax.Array]]
) -> list[np.ndarray | jax.Array]:
    """Returns arrays whole on the host of every process, each sent by the first process that holds a part of it.

    `replicated` makes arrays whole on each of their devices; random keys stay JAX arrays.
    """
    present = [index for index, array in enumerate(arrays) if jax.process_index() in _processes(array)]
    parts = [jax.random.key_data(arrays[index]) if is_key(arrays[index].dtype) else arrays[index] for index in present]
    whole_parts = dict(zip(present, jax.device_get(replicated(parts)), strict=True))
    # Bytes, since the sum with zeros keeps all bits of them: of floats it would change -0.0, and what is in a NaN.
    sent: list[np.ndarray] = []
    for index, array in enumerate(arrays):
        like = _struct(array)
        is_sender = _processes(array)[0] == jax.process_index()
        zeros = np.zeros(math.prod(like.shape) * like.dtype.itemsize, np.uint8)
        sent.append(np.ravel(whole_parts[index]).view(np.uint8) if is_sender else zeros)
    # Each process is the source of what it sends, and adds zeros to the rest.
    received = multihost_utils.broadcast_one_to_all(sent, is_source=True)
    return [
        _wrapped(np.asarray(data).view(_struct(array).dtype).reshape(_struct(array).shape), array)
        for data, array in zip(received, arrays, strict=True)
    ]


def _struct(array: jax.Array) -> Any:
    """The shape and dtype of an array's data."""
    return jax.eval_shape(jax.random.key_data, array) if is_key(array.dtype) else array


def _wrapped(data: np.ndarray, array: jax.Array) -> np.ndarray | jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(array)) if is_key(array.dtype) else data
