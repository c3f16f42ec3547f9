"""Experts as users write them: a callable pytree whose arrays are stacked along their first dim, by expert."""

import inspect
from collections.abc import Hashable, Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from shardrules.core.errors import ConfigError, ConfigTypeError

_WITH_CAPACITY, _WITHOUT_CAPACITY = "rows", "rows, group_sizes"
"""The arguments of experts."""


@final
@attrs.frozen
class StackedExperts:
    """All of a pytree of experts but its arrays."""

    structure: Any
    others: tuple[Hashable, ...]
    """Its leaves; `_ARRAY` for arrays."""

    def one_by_one(self, params: Sequence[jax.Array], rows: jax.Array) -> jax.Array:
        """The results of each expert for its rows: [experts, rows, ...]."""
        results = jax.vmap(lambda arrays, rows: self._with(arrays)(rows))(list(params), rows)
        return _checked(results, rows.shape[:2], _WITH_CAPACITY)

    def in_groups(self, params: Sequence[jax.Array], rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """The results of all experts for rows that are sorted by expert; zeros for rows of none."""
        results = _checked(self._with(params)(rows, sizes), rows.shape[:1], _WITHOUT_CAPACITY)
        is_routed = jnp.arange(len(rows)) < sizes.sum()
        return jnp.where(is_routed[:, None], results, 0)

    def _with(self, params: Sequence[jax.Array]) -> Any:
        arrays = iter(params)
        leaves = [next(arrays) if leaf is _ARRAY else leaf for leaf in self.others]
        return jax.tree.unflatten(self.structure, leaves)


def unstack(experts: Any) -> tuple[StackedExperts, list[jax.Array]]:
    leaves, structure = jax.tree.flatten(experts)
    arrays = [jnp.asarray(leaf) for leaf in leaves if _is_array(leaf)]
    others = tuple(_ARRAY if _is_array(leaf) else leaf for leaf in leaves)
    return StackedExperts(structure, others), arrays


def expert_count(experts: Any) -> int | None:
    """The number of stacked experts; `None` if they are not stacked."""
    counts = {leaf.shape[:1] for leaf in jax.tree.leaves(experts) if _is_array(leaf)}
    return next(iter(counts))[0] if len(counts) == 1 and () not in counts else None


def stacking_problems(experts: Any) -> list[str]:
    """The reasons why these cannot be experts."""
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(experts)]
    shapes = {path: leaf.shape for path, leaf in leaves if _is_array(leaf)}
    if not callable(experts) or not shapes:
        description = f"{type(experts).__name__} with {len(shapes)} arrays"
        remedy = "a module, or jax.tree_util.Partial(function, arrays)"
        return [f"experts must be a callable pytree of arrays, got {description}: pass {remedy}"]
    if expert_count(experts) is None:
        listed = ", ".join(f"{path or 'experts'} {shape}" for path, shape in shapes.items())
        return [f"arrays of experts must be stacked along their first dim, one row for each expert: {listed}"]
    return []


def check_signature(experts: Any, has_capacity: bool) -> None:
    """Raises an error where experts cannot take what they are called with."""
    operands = _WITH_CAPACITY if has_capacity else _WITHOUT_CAPACITY
    try:
        inspect.signature(experts).bind(*operands.split(", "))
    except ValueError:  # some callables have no signature
        return
    except TypeError as error:
        form = f"{'with' if has_capacity else 'without'} a capacity, as experts({operands})"
        raise ConfigTypeError(f"expert_exchange: experts are called {form}: {error}") from error


def inner_dims(inner: Any, count: int) -> tuple[Any, ...]:
    """The dim of each array that a user calls inner, or `None`."""
    return (None,) * count if inner is None else tuple(jax.tree.leaves(inner, is_leaf=lambda leaf: leaf is None))


def inner_problems(inner: Any, experts: Any) -> list[str]:
    """The reasons why these cannot be inner dims of experts."""
    arrays = [leaf for leaf in jax.tree.leaves(experts) if _is_array(leaf)]
    dims = inner_dims(inner, len(arrays))
    if len(dims) != len(arrays):
        return [f"inner must have a dim, or None, for each of {len(arrays)} arrays of experts, got {inner!r:.60}"]
    pairs = [(dim, array.shape) for dim, array in zip(dims, arrays, strict=True) if dim is not None]
    listed = ", ".join(f"{dim!r:.20} of {shape}" for dim, shape in pairs)
    if not all(isinstance(dim, int) and 0 < dim < len(shape) for dim, shape in pairs):
        return [f"inner dims must be positions after the first in their arrays, got {listed}"]
    if len({shape[dim] for dim, shape in pairs}) > 1:
        return [f"inner dims are split together and must have one size, got {listed}"]
    return []


@final
@attrs.frozen
class _Array:
    """Stands for an array."""


_ARRAY = _Array()


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _checked(results: Any, shape: tuple[int, ...], operands: str) -> jax.Array:
    if not isinstance(results, jax.Array):
        raise ConfigTypeError(f"experts({operands}) must return an array, got {type(results).__name__}")
    if results.ndim != len(shape) + 1 or results.shape[:-1] != shape:
        raise ConfigError(
            f"experts({operands}) must return a vector for each row: for {shape[-1]} rows it returned shape "
            f"{results.shape[len(shape) - 1 :]}"
        )
    return results
