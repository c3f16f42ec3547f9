"""Ragged matmuls of pieces: each device finds which of its rows are in the groups that it has."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

_Axes: TypeAlias = str | tuple[str, ...] | None


def ragged_dot_of_pieces(
    equation: Any, operands: Sequence[jax.Array], specs: Sequence[PartitionSpec], result_spec: PartitionSpec
) -> jax.Array:
    """Returns what a ragged matmul computes from pieces of its operands; rows of other devices' groups are zeros."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    # Gradients say how whole results are split.
    params = {name: None if name == "out_sharding" else value for name, value in equation.params.items()}
    (row_dim,), (contracted, batch) = numbers.lhs_ragged_dimensions, numbers.dot_dimension_numbers
    left, right, sizes, *others = operands
    row_axes = entry(specs[0], row_dim)
    if row_axes is not None:
        sizes = sizes_among(sizes, left.shape[row_dim], lax.axis_index(row_axes))
    sums_rows = row_dim in contracted[0]
    group_axes = entry(result_spec, 0) if sums_rows else entry(specs[1], numbers.rhs_group_dimensions[0])
    if group_axes is None:
        return equation.primitive.bind(left, right, sizes, *others, **params)
    count = sizes.shape[0] // lax.axis_size(group_axes)
    first = lax.axis_index(group_axes) * count
    start = jnp.where(jnp.arange(sizes.shape[0]) < first, sizes, 0).sum()
    sizes = lax.dynamic_slice_in_dim(sizes, first, count)
    # Groups begin at the first row, so that rows of groups before these go to the end.
    left = jnp.roll(left, -start, row_dim)
    if sums_rows:
        right = jnp.roll(right, -start, contracted[1][contracted[0].index(row_dim)])
        return equation.primitive.bind(left, right, sizes, *others, **params)
    result = equation.primitive.bind(left, right, sizes, *others, **params)
    free = [dim for dim in range(left.ndim) if dim not in (*contracted[0], *batch[0])]
    result_dim = len(batch[0]) + free.index(row_dim)
    is_here = lax.broadcasted_iota(sizes.dtype, result.shape, result_dim) < sizes.sum()
    return jnp.roll(jnp.where(is_here, result, 0), start, result_dim)


def sizes_among(sizes: jax.Array, rows: int, index: Any) -> jax.Array:
    """The number of rows of each group among the `rows` of a device."""
    # The rows from `first` on are here: of each group those between its start and its end.
    first, ends = index * rows, lax.cumsum(sizes)
    sizes_here = lax.clamp(0, ends - first, rows) - lax.clamp(0, ends - sizes - first, rows)
    return sizes_here.astype(sizes.dtype)


def entry(spec: PartitionSpec, dim: int) -> _Axes:
    entries = tuple(spec)
    return entries[dim] if dim < len(entries) else None
