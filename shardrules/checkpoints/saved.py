"""What a checkpoint takes from a tree, leaf by leaf: arrays, Python numbers, and the key data of typed PRNG keys."""

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import jax
import numpy as np

from shardrules.core.errors import CheckpointError, ConfigTypeError, TreeError
from shardrules.core.finding import Finding, listing, merged
from shardrules.core.jax_state import under_trace
from shardrules.core.keys import is_key
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.placement.source import ArraySource

_NUMBERS = (bool, int, float, complex)


@final
@attrs.frozen(eq=False)
class SavedLeaf:
    """A leaf that a checkpoint holds."""

    path: str
    value: Any
    """The value in the tree; of typed PRNG keys, their key data."""
    shape: tuple[int, ...]
    dtype: np.dtype
    """As it is written: native, and of a Python number the widest of its kind."""

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in a file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_local(self) -> bool:
        """Whether this process has all of it."""
        return not isinstance(self.value, jax.Array) or self.value.is_fully_addressable


def saved_leaves(
    tree: Any, caller: str, unsupported: Callable[[np.dtype], str]
) -> tuple[list[SavedLeaf], list[Finding]]:
    """Returns the arrays and Python numbers of a tree, and what cannot be saved.

    `unsupported` says why a dtype cannot be saved, or nothing.

    ```python
    from shardrules.checkpoints.saved import saved_leaves

    leaves, _ = saved_leaves({"key": jax.random.key(0), "step": 3, "act": jax.nn.relu}, "save", lambda dtype: "")
    assert [(leaf.path, str(leaf.dtype)) for leaf in leaves] == [("key", "uint32"), ("step", "int64")]
    ```
    """
    if under_trace():
        raise ConfigTypeError(f"{caller}: inside jit arrays have no values; call it outside, with the results")
    paths, values = leaf_paths(tree), jax.tree.leaves(tree)
    if len(paths) != len(values):
        raise TreeError(f"{caller}: a box in the tree holds several arrays or none; unbox it first")
    leaves: list[SavedLeaf] = []
    findings: list[Finding] = []
    for path, value in zip(paths, values, strict=True):
        is_number = isinstance(value, _NUMBERS)
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


def is_unicode(name: str) -> bool:
    """Whether files can hold a name: it has no half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in name)


def refuse_to_save(what: str, findings: Sequence[Finding]) -> None:
    """Raises one `CheckpointError` that lists all findings, if there are any; `what` names the caller and the file."""
    if findings:
        raise CheckpointError(f"{what} cannot be saved, and nothing was written:\n{listing(merged(findings))}")
