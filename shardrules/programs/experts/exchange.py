"""Rows go to the devices of their experts, as many as there are, and come back: the sizes are in arrays.

Backends with `jax.lax.ragged_all_to_all` run it. XLA for CPUs has none: there each device pads what it sends.
"""

import functools
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from shardrules.programs.regions.declaration import Axes


@final
class SentSlices(NamedTuple):
    """The slices of rows that go from one device to the others, as `jax.lax.ragged_all_to_all` takes them: the same
    number for each device."""

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


@final
class Ways(NamedTuple):
    """The ways of rows to the experts and back."""

    outward: SentSlices
    back: SentSlices
    sizes: jax.Array
    """[experts here]: how many rows come for each expert."""


def ways_of(sizes: jax.Array, axis_name: Axes, stride: int | None) -> Ways:
    """The ways of rows that are sorted by expert, with so many rows for each of all experts.

    They come sorted by expert and then by device. An expert has its first row at a multiple of `stride`, or right after
    the rows of the expert before it.
    """
    devices, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    all_sizes = lax.all_gather(sizes, axis_name).reshape(devices, devices, -1)  # [from, to, expert]
    # Every device knows all sizes: senders can say where their rows go, and receivers what comes.
    rows_there = all_sizes.sum(0)  # [to, expert]
    starts = (
        _starts(rows_there) if stride is None else jnp.broadcast_to(_multiples(rows_there, stride), rows_there.shape)
    )
    arrivals = starts + jnp.cumsum(all_sizes, 0) - all_sizes  # [from, to, expert]: the first row there
    departures = _starts(all_sizes.reshape(devices, -1)).reshape(all_sizes.shape)
    sent, received = all_sizes[index], all_sizes[:, index]
    outward = departures[index], sent, arrivals[index], received
    back = arrivals[:, index], received, departures[:, index], sent
    slices = [SentSlices(*(table.ravel() for table in tables)) for tables in (outward, back)]
    return Ways(slices[0], slices[1], rows_there[index])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def send(rows: jax.Array, outward: SentSlices, back: SentSlices, row_count: int, axis_name: Axes) -> jax.Array:
    """Sends rows to where they go, and returns the `row_count` rows that come, zeros between them."""
    return send_rows_p.bind(rows, *outward, row_count=row_count, axis_name=axis_name)


def _forward(
    rows: jax.Array, outward: SentSlices, back: SentSlices, row_count: int, axis_name: Axes
) -> tuple[jax.Array, Any]:
    return send(rows, outward, back, row_count, axis_name), (outward, back, len(rows))


def _backward(row_count: int, axis_name: Axes, saved: Any, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    outward, back, count = saved
    # Each row goes to one place, so gradients go back the way that rows came.
    return send(gradient, back, outward, count, axis_name), None, None


send.defvjp(_forward, _backward)

send_rows_p = Primitive("send_rows")


def _result_aval(rows: Any, *slices: Any, row_count: int, axis_name: Axes) -> ShapedArray:
    return ShapedArray((row_count, *rows.shape[1:]), rows.dtype)


def _ragged(rows: jax.Array, *slices: jax.Array, row_count: int, axis_name: Axes) -> jax.Array:
    results = jnp.zeros((row_count, *rows.shape[1:]), rows.dtype)
    return lax.ragged_all_to_all(rows, results, *slices, axis_name=axis_name)


def _padded(rows: jax.Array, *arrays: jax.Array, row_count: int, axis_name: Axes) -> jax.Array:
    """As `ragged_all_to_all`: no two devices can exchange more rows than the shorter side has."""
    # The sender says where its rows go; here the receiver writes them there, and has to be told.
    slices, most, devices = SentSlices(*arrays), min(len(rows), row_count), lax.axis_size(axis_name)
    offsets = lax.all_to_all(slices.output_offsets, axis_name, 0, 0, tiled=True)
    sources = _rows_of_slices(slices.input_offsets, slices.send_sizes, devices, most, len(rows))
    targets = _rows_of_slices(offsets, slices.recv_sizes, devices, most, row_count)
    packed = rows.at[sources].get(mode="fill", fill_value=0)
    packed = lax.all_to_all(packed, axis_name, 0, 0, tiled=True)
    return jnp.zeros((row_count, *rows.shape[1:]), rows.dtype).at[targets].set(packed, mode="drop")


def _batched(operands: Any, dims: Any, **params: Any) -> tuple[jax.Array, int]:
    rows, *slices = operands
    # Rows alone may be batched: then the batch goes behind their first dim, and each row takes it along.
    if all(dim is None for dim in dims[1:]):
        return send_rows_p.bind(jnp.moveaxis(rows, dims[0], 1), *slices, **params), 1
    (size,) = {operand.shape[dim] for operand, dim in zip(operands, dims, strict=True) if dim is not None}
    moved = [
        jnp.broadcast_to(operand, (size, *operand.shape)) if dim is None else jnp.moveaxis(operand, dim, 0)
        for operand, dim in zip(operands, dims, strict=True)
    ]
    return lax.map(lambda each: send_rows_p.bind(*each, **params), moved), 0


send_rows_p.def_abstract_eval(_result_aval)
batching.primitive_batchers[send_rows_p] = _batched
mlir.register_lowering(send_rows_p, mlir.lower_fun(_ragged, multiple_results=False))
mlir.register_lowering(send_rows_p, mlir.lower_fun(_padded, multiple_results=False), platform="cpu")


def _rows_of_slices(offsets: jax.Array, sizes: jax.Array, devices: int, most: int, row_count: int) -> jax.Array:
    """[devices, most]: the rows of the slices of each device, one after the other; `row_count` past the last."""

    def rows_of_device(offsets: jax.Array, sizes: jax.Array) -> jax.Array:
        ends, rows = jnp.cumsum(sizes), jnp.arange(most)
        slices = jnp.searchsorted(ends, rows, side="right")
        shifts = (offsets - ends + sizes).at[slices].get(mode="fill", fill_value=row_count)
        return jnp.minimum(rows + shifts, row_count)

    return jax.vmap(rows_of_device)(offsets.reshape(devices, -1), sizes.reshape(devices, -1))


def _starts(sizes: jax.Array) -> jax.Array:
    return jnp.cumsum(sizes, -1) - sizes


def _multiples(sizes: jax.Array, stride: int) -> jax.Array:
    return jnp.arange(sizes.shape[-1], dtype=sizes.dtype) * stride
