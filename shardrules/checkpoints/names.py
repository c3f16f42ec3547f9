"""Which tensor of a checkpoint goes to which leaf of a tree, and what is wrong with that.

A model repeats itself, so what is wrong with it is wrong in every layer. Mismatches are kept as data until all are
known; then mismatches of equal layers become one finding.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax.numpy as jnp
import numpy as np

from shardrules.checkpoints.requested import PYTHON_TYPES, RequestedLeaf
from shardrules.core.errors import CheckpointError, ConfigError, ConfigTypeError, suggest
from shardrules.core.finding import Finding, common_path, listing, shape_text, template

Name: TypeAlias = "str | Sequence[Name] | None"
"""The name of a tensor; several names, of which the array is the stack; or `None`: the checkpoint lacks it, and `like`
has its values."""

Names: TypeAlias = Callable[[str], Name] | Mapping[str, Name] | None
"""From the path of a leaf to the name of its tensor."""

_DTYPE_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
_PYTHON_TYPES = (bool, int, float, complex)  # of the same kinds

_SUGGESTIONS = 16
"""For how many findings a similar name is suggested. Over 45,000 tensors one suggestion takes seconds: twice as many
would double that, half as many leave more typos without one."""


@final
@attrs.frozen
class StoredArray:
    """A tensor as a checkpoint describes it."""

    shape: tuple[int, ...]
    dtype: np.dtype | None
    """`None` for one that JAX arrays cannot have."""
    dtype_name: str
    """How the checkpoint writes the dtype."""

    def __str__(self) -> str:
        return f"{self.dtype_name}{list(self.shape)}"

    @property
    def python_type(self) -> type | None:
        """The type that it has as a Python value: numbers without dimensions and strings have one."""
        if self.dtype is None:
            return str if self.dtype_name == "string" else None
        return None if self.shape else _PYTHON_TYPES[_dtype_kind(self.dtype)]


@final
@attrs.frozen
class Mismatch:
    """What is wrong with one leaf or one tensor."""

    code: str
    path: str
    """The leaf, or the tensor where no leaf takes it."""
    name: str = ""
    """The tensor, in words."""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    """With `shape`, what the leaf expects."""
    stored: StoredArray | None = None


def match(
    leaves: Sequence[RequestedLeaf],
    stored: Mapping[str, StoredArray],
    names: Names,
    default: Callable[[str], str],
    *,
    surplus: str,
    cast: bool,
    stacks: bool = False,
) -> tuple[list[Name], list[Finding]]:
    """Returns the name of the tensor that each leaf takes, `None` where it keeps its value, and all that is wrong.

    Paths that `names` lacks have the name `default(path)`. `surplus` says whether tensors that no leaf takes are an
    `"error"` or to `"skip"`, `cast` whether tensors may have other dtypes than the leaves, `stacks` whether leaves may
    be stacks of tensors.

    ```python
    from shardrules.checkpoints.names import RequestedLeaf, StoredArray, match

    stored = {"w": StoredArray((4,), np.dtype("float32"), "F32"), "v": StoredArray((4,), np.dtype("float32"), "F32")}
    leaves = [RequestedLeaf("u", 2.0), RequestedLeaf("w", 1.0)]
    names, findings = match(leaves, stored, {"u": "v"}, str, surplus="error", cast=False)
    assert names == ["v", "w"] and [finding.code for finding in findings] == ["value", "value"]
    ```
    """
    if surplus not in ("error", "skip"):
        raise ConfigError(f"surplus must be 'error' or 'skip', got {surplus!r}")
    if not (names is None or isinstance(names, Mapping) or callable(names)):
        raise ConfigTypeError(
            f"names must be a table from paths to tensors, or a function from one to the other; got {names!r:.80}"
        )
    table = names if isinstance(names, Mapping) else {}
    name_of = default if names is None or isinstance(names, Mapping) else names
    paths = dict.fromkeys(leaf.path for leaf in leaves)
    mismatches = [Mismatch("no-leaf", path) for path in table if path not in paths]
    matches: list[Name] = []
    matched: dict[str, None] = {}
    for leaf in leaves:
        name: Any = table[leaf.path] if leaf.path in table else name_of(leaf.path)
        if leaf.first_path and (name is None or isinstance(name, str)) and name not in stored:
            name = table[leaf.first_path] if leaf.first_path in table else name_of(leaf.first_path)
        if stacks and leaf.is_array and isinstance(name, list | tuple):
            wrong = _stack_mismatches(leaf, name, stored, cast=cast)
            mismatches += wrong
            matched.update(dict.fromkeys([] if wrong else flat_names(name)))
            matches.append(None if wrong else name)
            continue
        if name is not None and not isinstance(name, str):
            mismatches.append(Mismatch("no-name", leaf.path, f"{name!r:.60}", leaf.shape))
            name = None
        elif name is None and leaf.is_array and not leaf.has_values:
            mismatches.append(Mismatch("no-values", leaf.path, "", leaf.shape))
        elif name is not None and name not in stored:
            # A Python number that the file lacks keeps its value; an array that it lacks is an error.
            if leaf.is_array:
                mismatches.append(Mismatch("missing", leaf.path, name, leaf.shape))
            name = None
        elif name is not None:
            mismatches += compare(leaf, repr(name), stored[name], cast=cast)
            matched[name] = None
        matches.append(name)
    if surplus == "error":
        mismatches += [Mismatch("surplus", name, stored=array) for name, array in stored.items() if name not in matched]
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


def _stack_mismatches(
    leaf: RequestedLeaf, names: Sequence[Any], stored: Mapping[str, StoredArray], *, cast: bool
) -> list[Mismatch]:
    """Returns what is wrong if a leaf takes a stack of tensors."""
    dims = stack_shape(names)
    if dims is None or not all(isinstance(name, str) for name in flat_names(names)):
        return [Mismatch("no-name", leaf.path, f"{names!r:.60}", leaf.shape)]
    if leaf.shape[: len(dims)] != dims:
        return [Mismatch("stack", leaf.path, " x ".join(map(str, dims)), leaf.shape)]
    layer = attrs.evolve(leaf, shape=leaf.shape[len(dims) :])
    mismatches: list[Mismatch] = []
    for name in flat_names(names):
        if name in stored:
            mismatches += compare(layer, repr(name), stored[name], cast=cast)
        else:
            mismatches.append(Mismatch("missing", leaf.path, name, layer.shape))
    return mismatches


def compare(leaf: RequestedLeaf, name: str, stored: StoredArray, *, cast: bool) -> Iterator[Mismatch]:
    """Yields what is wrong if a leaf takes a tensor, which messages call `name`.

    ```python
    from shardrules.checkpoints.names import RequestedLeaf, StoredArray, compare

    stored = StoredArray((), np.dtype("float64"), "float64")
    mismatches = compare(RequestedLeaf("step", 3), "block 0", stored, cast=False)
    assert [mismatch.code for mismatch in mismatches] == ["value"]
    ```
    """
    if not leaf.is_array:
        # The type or a subclass of it, such as an IntEnum; of booleans the first is theirs, though they are integers.
        if stored.python_type is not next(kind for kind in PYTHON_TYPES if isinstance(leaf.value, kind)):
            yield Mismatch("value", leaf.path, name, None, type(leaf.value).__name__, stored)
        return
    mismatch = Mismatch("", leaf.path, name, leaf.shape, str(leaf.dtype), stored)
    if stored.shape != leaf.shape:
        yield attrs.evolve(mismatch, code="shape")
    if stored.dtype is None:
        yield attrs.evolve(mismatch, code="unreadable")
    # JAX would narrow it silently, whatever `cast` says.
    elif leaf.device_dtype != leaf.dtype and stored.dtype.itemsize > np.dtype(leaf.device_dtype).itemsize:
        yield attrs.evolve(mismatch, code="narrow", dtype=str(leaf.device_dtype))
    elif stored.dtype.newbyteorder("=") != leaf.dtype:
        if not cast:
            yield attrs.evolve(mismatch, code="dtype")
        elif _dtype_kind(stored.dtype) > _dtype_kind(leaf.dtype):
            yield attrs.evolve(mismatch, code="lossy")


def mismatch_findings(mismatches: Iterable[Mismatch], names: Iterable[str], paths: Iterable[str]) -> list[Finding]:
    """Returns mismatches as findings, one for all equal layers; suggests from the `names` and `paths` that exist.

    ```python
    from shardrules.checkpoints.names import Mismatch, mismatch_findings

    mismatches = [Mismatch("missing", f"layers/{i}/w", f"layers.{i}.w", (4,)) for i in range(3)]
    (finding,) = mismatch_findings(mismatches, ["layers.0.v"], [])
    assert (finding.path, finding.count) == ("layers/*/w", 3)
    assert "did you mean 'layers.0.v'" in finding.message
    ```
    """
    # Equal but for the index of the layer and the name of the tensor: one finding with a count.
    groups: dict[Mismatch, list[Mismatch]] = {}
    for mismatch in mismatches:
        key = attrs.evolve(mismatch, path=_template(mismatch.path), name="")
        groups.setdefault(key, []).append(mismatch)
    tensors, leaves = list(names), list(paths)
    findings: list[Finding] = []
    for index, group in enumerate(groups.values()):
        first = group[0]
        candidates = tensors if first.code == "missing" else leaves if first.code == "no-leaf" else []
        hint = "" if index >= _SUGGESTIONS else suggest(first.name or first.path, candidates)
        message, remedy = _words(first, hint)
        path = first.path
        for other in group[1:]:
            path = _common(path, other.path)
        findings.append(Finding("error", first.code, message, path, remedy=remedy, shape=first.shape, count=len(group)))
    return findings


def refuse(what: str, findings: Sequence[Finding]) -> None:
    """Raises one `CheckpointError` that lists all findings, if there are any; `what` names the caller and the file."""
    if findings:
        raise CheckpointError(f"{what} cannot be loaded, and nothing was:\n{listing(findings)}")


def _dtype_kind(dtype: Any) -> int:
    """Returns 0 to 3 for booleans, integers, floats and complex numbers: each can hold the kinds before it."""
    kinds = (index for index, kind in enumerate(_DTYPE_KINDS) if jnp.issubdtype(dtype, kind))
    return next(kinds, len(_DTYPE_KINDS) - 1)


def _template(path: str) -> str:
    return template(path.replace(".", "/"))


def _common(left: str, right: str) -> str:
    """As `common_path`, also for names with dots."""
    if "/" in left:
        return common_path(left, right)
    return common_path(left.replace(".", "/"), right.replace(".", "/")).replace("/", ".")


def _words(mismatch: Mismatch, hint: str) -> tuple[str, str]:
    """Returns what is wrong, and what to do about it."""
    name, stored = mismatch.name, mismatch.stored
    match mismatch.code:
        case "missing":
            return (
                f"the checkpoint has no {name!r}{hint}",
                f"name its tensor, names={{{mismatch.path!r}: ...}}; None there keeps the values in `like`",
            )
        case "no-leaf":
            return (
                f"`names` has this path, and `like` has no such leaf{hint}",
                "write paths as sr.leaf_paths(like) does",
            )
        case "no-name":
            why = f"`names` gives {name} for it, which is not the name of a tensor"
            return why, "give a name, a list of names to stack, or None"
        case "stack":
            return f"`names` gives {name} tensors for it", "give as many names as the array has layers"
        case "no-values":
            return "`names` gives None for it, and `like` has only its shape", "put an array of values there"
        case "shape":
            shape = shape_text(stored.shape if stored else ())
            return f"{name} has shape {shape}", "give `like` the shape that was saved, or use another tensor"
        case "dtype":
            return f"{name} is {stored}, expected {mismatch.dtype}", "cast=True converts it"
        case "narrow":
            why = f"{name} is {stored}, and JAX makes it {mismatch.dtype} while jax_enable_x64 is off"
            return why, f"turn it on, or give `like` {mismatch.dtype} and pass cast=True"
        case "lossy":
            return f"{name} is {stored}, which {mismatch.dtype} cannot hold", "give `like` a dtype that can hold it"
        case "unreadable":
            return f"{name} is {stored}, a dtype without JAX arrays", "convert the file, or keep the values in `like`"
        case "value":
            return f"{name} is {stored}, and `like` has a Python {mismatch.dtype}", "put what was saved into `like`"
        case _:  # surplus
            return f"no leaf of `like` takes it, {stored}", 'surplus="skip" ignores it; names=... gives it to a leaf'
