"""Leaves of trees that checkpoints hold, requested by a loader or taken by a saver, and the paths of their files.

Files cannot hold typed PRNG keys: they hold the key data, which are wrapped again after they were read.
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import attrs
import jax
import numpy as np
from jax.sharding import Sharding

from shardrules.core.errors import CheckpointError, ConfigTypeError, TreeError, printable, shown
from shardrules.core.finding import Finding, listing, merged
from shardrules.core.jax_state import under_trace
from shardrules.core.keys import is_key
from shardrules.core.spec import device_dtype
from shardrules.core.storage.files import as_path
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.placement.destination import Destination
from shardrules.placement.source import ArraySource
from shardrules.placement.transfer import put

NUMBERS = (bool, int, float, complex)
PYTHON_TYPES = (*NUMBERS, str)
"""The types of Python values that a checkpoint may hold beside arrays."""

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+:/")
"""The beginning of the address of a cloud store; of two slashes a `Path` keeps one."""


def local_path(path: Any, caller: str) -> Path:
    """Returns a path, after checking that it is not the address of a cloud store."""
    file = as_path(path, caller)
    text = os.fspath(path)
    if _ADDRESS.match(text):
        raise CheckpointError(
            f"{caller}: {printable(text)} is an address, and these files are read and written only in file systems. "
            "save_orbax and load_orbax take addresses; or mount the bucket, and pass a path in it"
        )
    return file


def title_of(caller: str, path: Any) -> str:
    """Returns the caller and the file, for messages; the path may be anything that a user passes."""
    return f"{caller}: {printable(str(path)) if isinstance(path, str | os.PathLike) else shown(path)}"


def refuse(what: str, findings: Sequence[Finding], undone: str = "loaded, and nothing was") -> None:
    """Raises one `CheckpointError` that lists all findings, if there are any; `what` names the caller and the file."""
    if findings:
        raise CheckpointError(f"{what} cannot be {undone}:\n{listing(merged(findings))}")


def is_unicode(name: str) -> bool:
    """Returns whether files can hold a name: it has no half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in name)


@final
@attrs.frozen(eq=False)
class RequestedLeaf:
    """A leaf that a loader asks for: an array, or a Python number or string."""

    path: str
    value: Any
    """The value in the tree."""
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    """The dtype of the array in a file; a Python value has none."""
    sharding: Sharding | None = None
    """`None` for a Python value."""
    first_path: str = ""
    """The first path of a variable that occurs twice: it may be saved only there."""

    @property
    def is_array(self) -> bool:
        return self.sharding is not None

    @property
    def has_values(self) -> bool:
        """Returns whether the tree has values for it, rather than only a shape."""
        return not isinstance(self.value, jax.ShapeDtypeStruct)

    @property
    def device_dtype(self) -> Any:
        """The dtype of the array once it is on a device."""
        return device_dtype(self.dtype)

    def python_value(self, value: Any) -> Any:
        """Returns a Python value as the type that the tree has, which may be a subclass, such as an enum."""
        kind = type(self.value)
        try:
            return kind(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{printable(self.path)}: {value!r:.60} cannot become a {kind.__name__}") from error


def requested_leaves(like: Any, destination: Destination, caller: str) -> list[RequestedLeaf]:
    """Returns one item for each array and each Python number or string in `like`, in the order of the leaves."""
    paths = _paths(like, destination.values, caller)
    first_paths = {index: paths[first] for index, first in destination.shared.items()}
    return [
        RequestedLeaf(path, value)
        if sharding is None
        else RequestedLeaf(path, value, *_stored_as(value), sharding, first_paths.get(index, ""))
        for index, (path, value, sharding) in enumerate(
            zip(paths, destination.values, destination.shardings, strict=True)
        )
        if sharding is not None or isinstance(value, PYTHON_TYPES)
    ]


def with_values(destination: Destination, leaves: Sequence[RequestedLeaf], values: Sequence[Any]) -> Any:
    """Returns the tree with one of `values` (arrays, `ArraySource`s, Python values) at each of `leaves`, placed."""
    # All arrays are placed in one call, which reads sources last and part by part.
    arrays = [(leaf, value) for leaf, value in zip(leaves, values, strict=True) if leaf.is_array]
    python_values = iter([value for leaf, value in zip(leaves, values, strict=True) if not leaf.is_array])
    tree_values = [
        next(python_values) if sharding is None and isinstance(value, PYTHON_TYPES) else value
        for value, sharding in zip(destination.values, destination.shardings, strict=True)
    ]
    placed_arrays = put([value for _, value in arrays], destination.arrays()[1])
    tree_arrays = [_with_keys(array, leaf) for array, (leaf, _) in zip(placed_arrays, arrays, strict=True)]
    return attrs.evolve(destination, values=tree_values).with_arrays(tree_arrays)


def _paths(tree: Any, values: Sequence[Any], caller: str) -> tuple[str, ...]:
    paths = leaf_paths(tree)
    if len(paths) != len(values):
        raise TreeError(f"{caller}: a box in the tree holds several arrays or none; unbox it first")
    return paths


def _stored_as(value: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Returns the shape and dtype that an array has in a file: for keys, their key data's."""
    if is_key(value.dtype):
        value = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(value.shape, value.dtype))
    return tuple(map(int, value.shape)), np.dtype(value.dtype)


def _with_keys(array: jax.Array, leaf: RequestedLeaf) -> jax.Array:
    """Returns keys where the tree has keys, and key data where it has numbers."""
    has_keys = is_key(array.dtype)
    wants_keys = is_key(leaf.value.dtype)
    if wants_keys and not has_keys:
        return jax.random.wrap_key_data(array, impl=_key_impl(leaf.value))
    if has_keys and not wants_keys:
        return jax.random.key_data(array)
    if has_keys and array.dtype != leaf.value.dtype:
        path = printable(leaf.path)
        raise CheckpointError(
            f"{path} holds {array.dtype}, expected {leaf.value.dtype}: make `like` with keys of that kind"
        )
    return array


def _key_impl(keys: Any) -> Any:
    """Returns the PRNG implementation of keys that may be shapes only. JAX returns it for arrays, so one is traced."""
    impls: list[Any] = []
    jax.eval_shape(
        lambda traced: impls.append(jax.random.key_impl(traced)), jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    )
    return impls[0]


@final
@attrs.frozen(eq=False)
class SavedLeaf:
    """A leaf that a saver takes."""

    path: str
    value: Any
    """The value in the tree; of typed PRNG keys, their key data."""
    shape: tuple[int, ...]
    dtype: np.dtype
    """As it is written: native, and of a Python number the widest of its kind."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_local(self) -> bool:
        return not isinstance(self.value, jax.Array) or self.value.is_fully_addressable


def saved_leaves(
    tree: Any, caller: str, unsupported: Callable[[np.dtype], str]
) -> tuple[list[SavedLeaf], list[Finding]]:
    """Returns the arrays and Python numbers of a tree, and what cannot be saved.

    `unsupported` says why a dtype cannot be saved, or nothing.
    """
    if under_trace():
        raise ConfigTypeError(f"{caller}: inside jit arrays have no values; call it outside, with the results")
    values = jax.tree.leaves(tree)
    leaves: list[SavedLeaf] = []
    findings: list[Finding] = []
    for path, value in zip(_paths(tree, values, caller), values, strict=True):
        is_number = isinstance(value, NUMBERS)
        kind = array_kind(np.asarray(value) if is_number else value)
        if kind is None:
            if is_number:
                findings.append(Finding("error", "too-large", f"{value!r:.40} does not fit in 64 bits", path))
            continue
        problem = None if is_number else _problem(value)
        if problem:
            findings.append(Finding("error", "no-values", problem[0], path, problem[1], kind[0]))
            continue
        if is_key(kind[1]):
            value = jax.random.key_data(value)
            kind = value.shape, np.dtype(value.dtype)
        dtype = np.dtype(kind[1]).newbyteorder("=")
        why = unsupported(dtype)
        if why:
            findings.append(Finding("error", "dtype", why, path, "Convert it, or leave it out", kind[0]))
        leaves.append(SavedLeaf(path, value, kind[0], dtype))
    return leaves, findings


def _problem(value: Any) -> tuple[str, str] | None:
    """Returns why an array has no values, and what to do about it."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return "it has a shape and no values", "Save the tree itself, not its shapes"
    if isinstance(value, jax.Array) and value.is_deleted():
        return "it was deleted, since it was donated", "Save the result of the step, not its argument"
    if isinstance(value, ArraySource | jax.Array | np.ndarray | np.generic) or hasattr(value, "__array__"):
        return None
    return f"a {type(value).__name__} cannot be read as an array", "Convert it"


def name_findings(names: Sequence[tuple[str, str]], clash_remedy: str) -> list[Finding]:
    """Returns what is wrong with the names of leaves in a file, as pairs of path and name."""
    paths: dict[str, list[str]] = {}
    for path, name in names:
        paths.setdefault(name, []).append(path)
    findings: list[Finding] = []
    for name, same in paths.items():
        if not is_unicode(name):
            findings.append(Finding("error", "name", f"{name!r} is not valid Unicode", same[-1], "Rename it"))
        if len(same) > 1:
            why = f"{name!r} is also the name of {', '.join(same[:-1])}"
            findings.append(Finding("error", "name", why, same[-1], clash_remedy))
    return findings
