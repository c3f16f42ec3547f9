"""The specs of arrays if a user names the mesh axes of experts."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from shardrules.placement.constrain import with_sharding_constraint
from shardrules.programs.regions.declaration import Axes


def split_experts(params: Sequence[jax.Array], axes: Axes, inner: Sequence[int | None]) -> list[jax.Array]:
    """Splits the first dim over these axes. On an Explicit mesh other dims but the inner ones are gathered."""
    if not _is_explicit():
        return [_constrained(param, [axes]) for param in params]
    layouts = [_layout(param, param.ndim) for param in params]
    return [
        _constrained(
            param, [axes, *(_without(layout[dim], axes) if dim == split else () for dim in range(1, param.ndim))]
        )
        for param, layout, split in zip(params, layouts, inner, strict=True)
    ]


def split_tokens(operands: Sequence[jax.Array], axes: Axes, free_count: int) -> list[jax.Array]:
    """Splits the first dim over these axes besides those that split the tokens, filled up to what they divide.

    The first `free_count` dims may be split. On an Explicit mesh others are gathered.
    """
    # On an Auto mesh the axes that split experts split tokens, too.
    layout = _layout(operands[0], free_count) if _is_explicit() else [axes]
    mesh = jax.sharding.get_abstract_mesh()
    first = tuple(name for name in mesh.axis_names if name in (*axes, *layout[0]))
    missing = -len(operands[0]) % math.prod(mesh.shape[name] for name in first)
    if missing:
        operands = [
            jnp.pad(whole_first(operand), [(0, missing), *[(0, 0)] * (operand.ndim - 1)], constant_values=fill)
            for operand, fill in zip(operands, (0, -1, 0), strict=True)  # what is filled in goes to no expert
        ]
    if not _is_explicit():
        return [*operands]
    layout = [first, *(_without(names, first) for names in layout[1:])]
    return [_constrained(operand, layout) for operand in operands]


def tokens_for_sum(operands: Sequence[jax.Array], axes: Axes, free_count: int) -> list[jax.Array]:
    """Gathers tokens along these axes on an Explicit mesh."""
    if not _is_explicit():
        return [*operands]
    layout = [_without(names, axes) for names in _layout(operands[0], free_count)]
    return [_constrained(operand, layout) for operand in operands]


def first_rows(array: jax.Array, count: int) -> jax.Array:
    return array if len(array) == count else whole_first(array)[:count]


def whole_first(array: jax.Array) -> jax.Array:
    """Gathers the first dim on an Explicit mesh: of what is split nothing can be cut off."""
    if AxisType.Explicit not in jax.typeof(array).sharding.mesh.axis_types:
        return array
    entries = tuple(jax.typeof(array).sharding.spec)[1:]
    return jax.reshard(array, PartitionSpec(None, *entries))


def _layout(tokens: jax.Array, free_count: int) -> list[Axes]:
    """The axes that split each dim that may be split; at least of the first."""
    entries = (*tuple(jax.typeof(tokens).sharding.spec), *[None] * tokens.ndim)[:free_count]
    return [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries] or [()]


def _without(names: Axes, others: Axes) -> Axes:
    return tuple(name for name in names if name not in others)


def _is_explicit() -> bool:
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def _constrained(array: Any, layout: Sequence[Axes]) -> Any:
    rest = None if _is_explicit() else PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(*layout, *[rest] * (array.ndim - len(layout)))
    return with_sharding_constraint(array, spec, missing="error")
