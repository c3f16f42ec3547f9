"""Pytrees as lists of plain arrays, and back: typed keys as their data, and what is not an array kept aside."""

from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp

from shardrules.core.keys import is_key

Arrays = list[Any]


@final
@attrs.frozen(eq=False)
class Structure:
    """A pytree without its arrays."""

    treedef: Any
    leaves: tuple[Any, ...]
    """The leaves that are not arrays; `None` for arrays."""
    indices: tuple[int, ...]
    """The indices of leaves that are arrays."""
    key_types: tuple[Any, ...]
    """The implementation of the keys in each array, or `None`."""

    def unpack(self, arrays: Sequence[Any]) -> Any:
        leaves = list(self.leaves)
        for index, array, key_type in zip(self.indices, arrays, self.key_types, strict=True):
            leaves[index] = array if key_type is None else jax.random.wrap_key_data(array, impl=key_type)
        return jax.tree.unflatten(self.treedef, leaves)


def pack(tree: Any) -> tuple[Arrays, Structure]:
    """The arrays of a tree, and the rest."""
    leaves, treedef = jax.tree.flatten(tree)
    indices = tuple(index for index, leaf in enumerate(leaves) if eqx.is_array(leaf))
    arrays = [jnp.asarray(leaves[index]) for index in indices]
    key_types = tuple(jax.random.key_impl(array) if is_key(array.dtype) else None for array in arrays)
    aside = tuple(None if index in indices else leaf for index, leaf in enumerate(leaves))
    data = [jax.random.key_data(array) if is_key(array.dtype) else array for array in arrays]
    return data, Structure(treedef, aside, indices, key_types)


def is_float(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def floats(arrays: Sequence[Any]) -> Arrays:
    return [array for array in arrays if is_float(array)]


def with_floats(arrays: Sequence[Any], replacements: Sequence[Any]) -> Arrays:
    """The arrays, with others for those that have derivatives."""
    rest = iter(replacements)
    return [next(rest) if is_float(array) else array for array in arrays]


def of_floats(fn: Callable[..., Any], *operands: Sequence[Any]) -> tuple[Callable[..., Any], list[Arrays]]:
    """A function of lists of arrays as one of the floats in them, and these floats."""

    def of(*replacements: Sequence[Any]) -> Any:
        return fn(*(with_floats(arrays, floats) for arrays, floats in zip(operands, replacements, strict=True)))

    return of, [floats(arrays) for arrays in operands]


def zeros(arrays: Sequence[Any], *lead: int) -> Arrays:
    """Zeros of these shapes and dtypes, behind more dims."""
    return [jnp.zeros((*lead, *array.shape), array.dtype) for array in arrays]


def as_others(arrays: Sequence[Any], others: Sequence[Any]) -> Arrays:
    """The arrays in the dtypes of others."""
    return [array.astype(other.dtype) for array, other in zip(arrays, others, strict=True)]


def add(arrays: Sequence[Any], others: Sequence[Any]) -> Arrays:
    """Sums, array by array, in the dtypes of the first."""
    return [array + other.astype(array.dtype) for array, other in zip(arrays, others, strict=True)]


def put(arrays: Sequence[Any], rows: Sequence[Any], index: Any) -> Arrays:
    return [array.at[index].set(row.astype(array.dtype)) for array, row in zip(arrays, rows, strict=True)]


def add_at(arrays: Sequence[Any], rows: Sequence[Any], index: Any) -> Arrays:
    return [array.at[index].add(row.astype(array.dtype)) for array, row in zip(arrays, rows, strict=True)]


def at(arrays: Sequence[Any], index: Any) -> Arrays:
    return [jax.lax.dynamic_index_in_dim(array, index, keepdims=False) for array in arrays]


def once_if(condition: Any, fn: Callable[[Any], Any], carry: Any) -> Any:
    """`fn(carry)` if the condition holds, else `carry`: a loop of one round or none.

    Compilers copy arrays that go through a branch and may come out changed. What goes round a loop stays where it is.
    """
    rounds = jnp.asarray(condition, jnp.int32)
    return jax.lax.fori_loop(jnp.int32(0), rounds, lambda _, carry: fn(carry), carry)


def only_if(condition: Any, arrays: Sequence[Any]) -> Arrays:
    """The arrays if the condition holds, else zeros."""
    return [jnp.where(condition, array, jnp.zeros_like(array)) for array in arrays]
