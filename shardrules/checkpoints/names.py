"""The names of tensors in a checkpoint for the leaves of a tree, and what is wrong with them.

A model repeats itself, so what is wrong with it is wrong in every layer: mismatches of equal layers become one finding.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax.numpy as jnp
import numpy as np

from shardrules.checkpoints.leaves import NUMBERS, PYTHON_TYPES, RequestedLeaf
from shardrules.core.errors import ConfigTypeError, suggest
from shardrules.core.finding import Finding, common_path, shape_text, template

Name: TypeAlias = "str | Sequence[Name] | None"
"""The name of a tensor; several names, of which the array is the stack; or `None`: the checkpoint lacks it, and `like`
has its values."""

Names: TypeAlias = Callable[[str], Name] | Mapping[str, Name] | None
"""From the path of a leaf to the name of its tensor."""

Mismatch: TypeAlias = tuple[Finding, str]
"""A finding about one leaf or tensor, and the name of the tensor: `{}` stands for it in the message, and in the remedy
for the path."""

_DTYPE_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)  # as NUMBERS

_SUGGESTIONS = 16
"""For how many findings a similar name is suggested: over 45,000 tensors one suggestion takes seconds."""


@final
@attrs.frozen
class StoredArray:
    """A tensor as a checkpoint describes it."""

    shape: tuple[int, ...]
    dtype: np.dtype | None
    """`None` for one that JAX arrays cannot have."""
    dtype_name: str
    """The dtype as the checkpoint writes it."""

    def __str__(self) -> str:
        return f"{self.dtype_name}{list(self.shape)}"

    @property
    def python_type(self) -> type | None:
        """The type that it has as a Python value: numbers without dimensions and strings have one."""
        if self.dtype is None:
            return str if self.dtype_name == "string" else None
        return None if self.shape else NUMBERS[_dtype_kind(self.dtype)]


@final
@attrs.frozen(eq=False)
class Contents:
    """The tensors of a checkpoint, as a format describes them."""

    stored: Mapping[str, StoredArray]
    tensor_names: Sequence[Any]
    """The name of the tensor of each leaf, which may be anything that a user passes."""
    read: Callable[[Sequence[RequestedLeaf], Sequence[Name]], list[Any]]
    """From leaves and the names of their tensors to arrays or sources of them, and Python values."""
    problems: Sequence[Finding] = ()
    has_stacks: bool = False
    """True where several tensors may be one array."""
    label: Callable[[str], str] = repr
    """The name of a tensor as messages write it."""


def name_function(names: Names, default: Callable[[str], str], caller: str) -> Callable[[str], Any]:
    """Returns the function from paths to names; paths that a table lacks have the name `default(path)`."""
    if callable(names):
        return names
    if not isinstance(names, Mapping | None):
        raise ConfigTypeError(
            f"{caller}: names must be a table or a function from paths to names of tensors, got {names!r:.80}"
        )
    table = names or {}
    return lambda path: table[path] if path in table else default(path)


def unknown_paths(names: Names, paths: Sequence[str], tree: str) -> Iterator[Mismatch]:
    """Yields a mismatch for each key of a table of names that is not the path of a leaf."""
    leaves = dict.fromkeys(paths)
    for path in names if isinstance(names, Mapping) else ():
        if path not in leaves:
            why = f"`names` has this path, and {tree} has no such leaf"
            yield Finding("error", "no-leaf", why, str(path), "write paths as sr.leaf_paths does"), ""


def requested_names(
    leaves: Sequence[RequestedLeaf], stored: Mapping[str, StoredArray], name_of: Callable[[str], Any]
) -> list[Any]:
    """Returns the name of the tensor of each leaf; a variable that occurs twice may be saved only at its first path."""
    names = [name_of(leaf.path) for leaf in leaves]
    return [
        name_of(leaf.first_path)
        if leaf.first_path and (name is None or isinstance(name, str)) and name not in stored
        else name
        for leaf, name in zip(leaves, names, strict=True)
    ]


def match(
    leaves: Sequence[RequestedLeaf], contents: Contents, names: Names = None, *, surplus: str, cast: bool
) -> tuple[list[Name], list[Finding]]:
    """Returns the name of the tensor that each leaf takes, `None` where it keeps its value, and all that is wrong.

    Keys of a table of `names` that are no paths of leaves are wrong, too. Tensors that no leaf takes are wrong if
    `surplus` is `"error"`, other dtypes than the leaves' unless `cast`.
    """
    stored, paths = contents.stored, [leaf.path for leaf in leaves]
    mismatches = list(unknown_paths(names, paths, "`like`"))
    matches: list[Name] = []
    matched: dict[str, None] = {}
    for leaf, name in zip(leaves, contents.tensor_names, strict=True):
        # A Python number that the file lacks keeps its value; an array that it lacks is an error.
        if not leaf.is_array and isinstance(name, str) and name not in stored:
            name = None
        is_stack = contents.has_stacks and leaf.is_array and isinstance(name, list | tuple)
        wrong = list(_mismatches(leaf, name, contents, cast=cast, is_stack=is_stack))
        mismatches += wrong
        # A tensor that a leaf names is not surplus, even where it does not fit. What is no name may have no hash.
        if name is not None and not any(finding.code == "no-name" for finding, _ in wrong):
            matched.update(dict.fromkeys(flat_names(name)))
        # No tensor can be read for it, though what else is wrong may be wrong with its values alone.
        is_missing = (wrong and is_stack) or any(finding.code in ("no-name", "missing") for finding, _ in wrong)
        matches.append(None if is_missing else name)
    if surplus == "error":
        remedy = 'surplus="skip" ignores it; names=... gives it to a leaf'
        mismatches += [
            (Finding("error", "surplus", f"no leaf of `like` takes it, {array}", name, remedy), "")
            for name, array in stored.items()
            if name not in matched
        ]
    return matches, mismatch_findings(mismatches, stored, paths)


def flat_names(names: Any) -> Iterator[Any]:
    """Yields the names of a stack, or a single one."""
    if isinstance(names, list | tuple):
        for name in names:
            yield from flat_names(name)
    else:
        yield names


def stack_shape(names: Any) -> tuple[int, ...] | None:
    """Returns how many names there are in each dimension of a stack; `None` where that differs."""
    if not isinstance(names, list | tuple):
        return ()
    shapes = list(dict.fromkeys(map(stack_shape, names)))
    if len(shapes) != 1 or shapes[0] is None:
        return None
    return (len(names), *shapes[0])


def _mismatches(
    leaf: RequestedLeaf, name: Any, contents: Contents, *, cast: bool, is_stack: bool
) -> Iterator[Mismatch]:
    """Yields what is wrong if a leaf takes a tensor or a stack of tensors, or keeps its value."""
    shape = leaf.shape if leaf.is_array else None
    dims = stack_shape(name) if is_stack else ()
    if name is None:
        if leaf.is_array and not leaf.has_values:
            why = "`names` gives None for it, and `like` has only its shape"
            yield Finding("error", "no-values", why, leaf.path, "put an array of values there", shape), ""
        return
    if dims is None or not (is_stack or isinstance(name, str)) or not all(isinstance(n, str) for n in flat_names(name)):
        why = "`names` gives {} for it, which is not the name of a tensor"
        remedy = "give a name, a list of names to stack, or None"
        yield Finding("error", "no-name", why, leaf.path, remedy, shape), f"{name!r:.60}"
        return
    if leaf.shape[: len(dims)] != dims:
        why, remedy = "`names` gives {} tensors for it", "give as many names as the array has layers"
        yield Finding("error", "stack", why, leaf.path, remedy, shape), " x ".join(map(str, dims))
        return
    # A tensor of a stack is one layer: it is compared with the dims behind those of the stack.
    layer = attrs.evolve(leaf, shape=leaf.shape[len(dims) :]) if dims else leaf
    for tensor in flat_names(name):
        if tensor in contents.stored:
            yield from _compare(layer, contents.label(tensor), contents.stored[tensor], cast=cast)
        else:
            remedy = "name its tensor, names={{}: ...}; None there keeps the values in `like`"
            why = "the checkpoint has no '{}'"
            yield Finding("error", "missing", why, leaf.path, remedy, layer.shape), tensor


def _compare(leaf: RequestedLeaf, name: str, stored: StoredArray, *, cast: bool) -> Iterator[Mismatch]:
    """Yields what is wrong if a leaf takes a tensor, which messages call `name`."""

    def mismatch(code: str, why: str, remedy: str) -> Mismatch:
        shape = leaf.shape if leaf.is_array else None
        return Finding("error", code, f"{{}} {why}", leaf.path, remedy, shape), name

    if not leaf.is_array:
        # The type or a subclass of it, such as an IntEnum; of booleans the first is theirs, though they are integers.
        if stored.python_type is not next(kind for kind in PYTHON_TYPES if isinstance(leaf.value, kind)):
            why = f"is {stored}, and `like` has a Python {type(leaf.value).__name__}"
            yield mismatch("value", why, "put what was saved into `like`")
        return
    if stored.shape != leaf.shape:
        remedy = "give `like` the shape that was saved, or use another tensor"
        yield mismatch("shape", f"has shape {shape_text(stored.shape)}", remedy)
    if stored.dtype is None:
        remedy = "convert the file, or keep the values in `like`"
        yield mismatch("unreadable", f"is {stored}, a dtype without JAX arrays", remedy)
    # JAX would narrow it silently, whatever `cast` says.
    elif leaf.device_dtype != leaf.dtype and stored.dtype.itemsize > np.dtype(leaf.device_dtype).itemsize:
        why = f"is {stored}, and JAX makes it {leaf.device_dtype} while jax_enable_x64 is off"
        yield mismatch("narrow", why, f"turn it on, or give `like` {leaf.device_dtype} and pass cast=True")
    elif stored.dtype.newbyteorder("=") != leaf.dtype:
        if not cast:
            yield mismatch("dtype", f"is {stored}, expected {leaf.dtype}", "cast=True converts it")
        elif _dtype_kind(stored.dtype) > _dtype_kind(leaf.dtype):
            why = f"is {stored}, which {leaf.dtype} cannot hold"
            yield mismatch("lossy", why, "give `like` a dtype that can hold it")


def mismatch_findings(
    mismatches: Iterable[Mismatch], names: Iterable[str] = (), paths: Iterable[str] = ()
) -> list[Finding]:
    """Returns mismatches as findings, one for all equal layers; suggests from the `names` and `paths` that exist."""
    groups: dict[Finding, list[Mismatch]] = {}
    for mismatch in mismatches:
        # The name is filled in after grouping: without it, the messages of equal layers are equal.
        groups.setdefault(attrs.evolve(mismatch[0], path=template(mismatch[0].path)), []).append(mismatch)
    candidates = {"missing": list(names), "no-leaf": list(paths)}
    findings: list[Finding] = []
    for index, group in enumerate(groups.values()):
        first, name = group[0]
        near = candidates.get(first.code, []) if index < _SUGGESTIONS else []
        message = first.message.replace("{}", name, 1) + suggest(name or first.path, near)
        path = functools.reduce(common_path, (finding.path for finding, _ in group))
        remedy = first.remedy.replace("{}", repr(first.path), 1)
        findings.append(attrs.evolve(first, message=message, path=path, remedy=remedy, count=len(group)))
    return findings


def _dtype_kind(dtype: Any) -> int:
    """Returns 0 to 3 for booleans, integers, floats and complex numbers: each can hold the kinds before it."""
    kinds = (index for index, kind in enumerate(_DTYPE_KINDS) if jnp.issubdtype(dtype, kind))
    return next(kinds, len(_DTYPE_KINDS) - 1)
