"""The leaves of a batch as arrays: what data loaders hand out is not always numpy's."""

from typing import Any

import jax
import numpy as np

from shardrules.core.errors import printable, shown
from shardrules.core.finding import Finding
from shardrules.core.spec import device_dtype
from shardrules.core.tree import array_kind
from shardrules.placement.source import ArraySource

STACK_NOTE = "Each array of a list is placed by itself; stack the rows of a batch into one array first: np.stack(rows)"

_REMEDY = "Pass a numpy array, or keep it out of the batch"


def is_rows(node: Any) -> bool:
    """Returns whether a node of a batch is one array, written as lists of numbers or of rows of numbers."""
    return isinstance(node, list) and all(map(_is_row, node)) and any(map(_has_number, node))


def has_equal_parts(batch: Any) -> bool:
    """Returns whether a batch has a list of equal parts with arrays, as of loaders that do not stack their rows."""
    nodes = jax.tree.leaves(batch, is_leaf=lambda node: isinstance(node, list))
    return any(isinstance(node, list) and len(node) > 1 and len({*map(_structure, node)}) == 1 for node in nodes)


def as_array(value: Any) -> Any:
    """Returns a leaf of a batch as it is placed, numbers and functions as they are, or why it cannot be placed."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        remedy = "Pass value.filled(number), and the mask as an array of its own"
        return Finding("error", "masked", "arrays of JAX have no mask, and this one would be lost", "", remedy)
    if why := _not_local(value):
        return Finding("error", "not-local", why, "", "Pass this process's part as a numpy array", value.shape)
    # A number of numpy is checked for its range, and stays the number that it is.
    if isinstance(value, np.number):
        array = _narrowed(np.asarray(value))
        return array if isinstance(array, Finding) else value
    if isinstance(value, jax.Array | type) or _is_number(value):
        return value
    try:
        array = _rows(value) if isinstance(value, list) else _host_array(value)
        kind = None if array is None else array_kind(array)
    except Exception as error:  # noqa: BLE001  other libraries' values raise errors of their own
        return _not_array(value, f"it cannot be read: {type(error).__name__}: {printable(str(error))}")
    # A function is no mistake, as a field of a module may be one; anything else in a batch probably is.
    if array is None:
        return value if callable(value) else _not_array(value, "it has neither __array__ nor __dlpack__")
    if kind is None or (isinstance(array, np.ndarray) and array.dtype.char in "gG"):  # floats of 80 bits
        return _not_array(value, f"{array.dtype} is not a dtype of JAX")
    return _narrowed(array) if isinstance(array, np.ndarray) else array


def _is_row(node: Any) -> bool:
    return node is None or _is_number(node) or (isinstance(node, list | tuple) and all(map(_is_row, node)))


def _has_number(node: Any) -> bool:
    return any(map(_has_number, node)) if isinstance(node, list | tuple) else _is_number(node)


def _is_number(node: Any) -> bool:
    return isinstance(node, bool | int | float | complex | np.number | np.bool_)


def _structure(part: Any) -> Any:
    leaves, treedef = jax.tree.flatten(part)
    return treedef, tuple(map(array_kind, leaves))


def _rows(rows: list[Any]) -> np.ndarray:
    """Returns the array that lists of numbers stand for."""
    array = np.asarray(rows)
    if array.dtype == object:
        raise ValueError("its rows hold None, or integers beyond 64 bits")
    return array


def _narrowed(array: np.ndarray) -> np.ndarray | Finding:
    """Returns an array in the dtype and byte order of devices, or that it has numbers beyond the range of that."""
    dtype = device_dtype(array.dtype.newbyteorder("="))
    if array.dtype == dtype:
        return array
    # Casts of integers wrap and casts of floats give infinity, both without a word, so both are looked for.
    fits = True
    if array.size and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        fits = int(array.min()) >= limits.min and int(array.max()) <= limits.max
    try:
        with np.errstate(over="raise"):
            narrow = array.astype(dtype)
    except FloatingPointError:
        fits, narrow = False, array
    if fits:
        return narrow
    why = f"it has numbers beyond those of {dtype}, from {array.min()} to {array.max()}"
    remedy = f"Set jax_enable_x64, which keeps {array.dtype}, or make them smaller"
    return Finding("error", "out-of-range", why, "", remedy, array.shape)


def _host_array(value: Any) -> Any:
    """Returns the values of an array of any library, where possible without a copy; `None` for anything else."""
    has_array, has_dlpack = hasattr(value, "__array__"), hasattr(value, "__dlpack__")
    try:
        if has_array:
            return np.asarray(value)
        return np.from_dlpack(value) if has_dlpack else None
    except Exception:
        if not has_dlpack:
            raise
    return np.asarray(jax.numpy.from_dlpack(value))  # of dtypes that numpy lacks, and on other devices


def _not_array(value: Any, why: str) -> Finding:
    return Finding("error", "not-array", f"expected an array, got {shown(value, 60)}; {why}", "", _REMEDY)


def _not_local(value: Any) -> str:
    if isinstance(value, jax.ShapeDtypeStruct):
        return "it has a shape and no values"
    if isinstance(value, ArraySource):
        return "it is an ArraySource, which filter_shard reads"
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return "it is placed over several processes already"
    return ""
