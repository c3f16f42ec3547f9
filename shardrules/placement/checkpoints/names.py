"""Which tensor of a checkpoint goes to which leaf of a tree, and everything that stands against it, in words.

A model repeats itself, so what is wrong with it is wrong in every layer. Problems are kept as data until all are known;
then those of equal layers are told once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax.numpy as jnp
import numpy as np

from shardrules.core.errors import CheckpointError, TreeError, suggest
from shardrules.core.finding import Finding, common_path, listing, shape_text, template
from shardrules.placement.checkpoints.requested import RequestedLeaf

Names: TypeAlias = Callable[[str], str | None] | Mapping[str, str | None] | None
"""From the path of a leaf to the name of a tensor. `None` for a leaf: it is not there, `like` has its values."""

_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
_TYPES = (bool, int, float, complex)
_SUGGESTIONS = 16  # finding near names takes time that grows with the number of names


@final
@attrs.frozen
class StoredArray:
    """A tensor as a checkpoint describes it.

    **Arguments:**

    - `shape`: its shape.
    - `dtype`: its dtype; `None` for one that no array here can have.
    - `dtype_name`: how the checkpoint writes the dtype.
    """

    shape: tuple[int, ...]
    dtype: np.dtype | None
    dtype_name: str

    def __str__(self) -> str:
        return f"{self.dtype_name}{list(self.shape)}"

    @property
    def python_type(self) -> type | None:
        """The type of the Python value that it would be: one for numbers without dimensions and for texts."""
        if self.dtype is None:
            return str if self.dtype_name == "string" else None
        return None if self.shape else _TYPES[_kind(self.dtype)]


@final
@attrs.frozen
class Mismatch:
    """What stands against one leaf or one tensor.

    **Arguments:**

    - `code`: what kind of problem it is.
    - `path`: the leaf, or the tensor where no leaf has to do with it.
    - `name`: the tensor, in words.
    - `shape`, `dtype`: what the leaf wants.
    - `held`: what the checkpoint has.
    """

    code: str
    path: str
    name: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    held: StoredArray | None = None


def match(
    wants: Sequence[RequestedLeaf],
    held: Mapping[str, StoredArray],
    names: Names,
    default: Callable[[str], str],
    *,
    surplus: str,
    cast: bool,
) -> tuple[list[str | None], list[Finding]]:
    """Returns which tensor each leaf takes, and all that is wrong.

    **Arguments:**

    - `wants`: the leaves.
    - `held`: the tensors, by name.
    - `names`: the name for a path, as a function or a table; paths that a table lacks have their default name.
    - `default`: the default name.
    - `surplus`: `"error"` or `"skip"`: what tensors are that no leaf takes.
    - `cast`: whether a tensor may have another dtype than the leaf.

    **Returns:**

    A name for each leaf, `None` where it keeps what it has; and findings.

    **Raises:**

    `ValueError` when `surplus` is neither.

    ```python
    held = {"w": StoredArray((4,), np.dtype("float32"), "F32"), "v": StoredArray((4,), np.dtype("float32"), "F32")}
    wants = [RequestedLeaf("u", np.ones(4)), RequestedLeaf("w", 1.0)]
    takes, wrong = match(wants, held, {"u": "v"}, str, surplus="error", cast=False)
    assert takes == ["v", "w"] and [found.code for found in wrong] == ["value", "value"]
    ```
    """
    if surplus not in ("error", "skip"):
        raise ValueError(f"surplus must be 'error' or 'skip', not {surplus!r}")
    if not (names is None or isinstance(names, Mapping) or callable(names)):
        raise TreeError(
            f"names is a table from path to tensor, or a function from the one to the other; got {names!r:.80}"
        )
    table = names if isinstance(names, Mapping) else {}
    ask = default if names is None or isinstance(names, Mapping) else names
    paths = dict.fromkeys(want.path for want in wants)
    problems = [Mismatch("no-leaf", path) for path in table if path not in paths]
    takes: list[str | None] = []
    for want in wants:
        name: Any = table[want.path] if want.path in table else ask(want.path)
        if name is not None and not isinstance(name, str):
            problems.append(Mismatch("no-name", want.path, f"{name!r:.60}", want.shape))
            name = None
        elif name is None and want.is_array and not want.has_values:
            problems.append(Mismatch("no-values", want.path, "", want.shape))
        elif name is not None and name not in held:
            if want.is_array:
                problems.append(Mismatch("missing", want.path, name, want.shape))
            name = None
        elif name is not None:
            problems += compare(want, repr(name), held[name], cast=cast)
        takes.append(name)
    if surplus == "error":
        taken = dict.fromkeys(takes)
        problems += [Mismatch("surplus", name, held=one) for name, one in held.items() if name not in taken]
    return takes, told(problems, held, paths)


def compare(want: RequestedLeaf, name: str, held: StoredArray, *, cast: bool) -> Iterator[Mismatch]:
    """Yields what stands against a leaf's taking a tensor.

    **Arguments:**

    - `want`: the leaf.
    - `name`: the tensor, in words.
    - `held`: what it is.
    - `cast`: whether it may have another dtype.

    **Returns:**

    An iterator of problems.

    ```python
    held = StoredArray((), np.dtype("float64"), "float64")
    assert [found.code for found in compare(RequestedLeaf("step", 3), "block 0", held, cast=False)] == ["value"]
    ```
    """
    if not want.is_array:
        if held.python_type is not type(want.value):
            yield Mismatch("value", want.path, name, None, type(want.value).__name__, held)
        return
    has = Mismatch("", want.path, name, want.shape, str(want.dtype), held)
    if held.shape != want.shape:
        yield attrs.evolve(has, code="shape")
    if held.dtype is None:
        yield attrs.evolve(has, code="unreadable")
    elif want.device_dtype != want.dtype and held.dtype.itemsize > np.dtype(want.device_dtype).itemsize:
        yield attrs.evolve(has, code="narrow", dtype=str(want.device_dtype))
    elif held.dtype.newbyteorder("=") != want.dtype:
        if not cast:
            yield attrs.evolve(has, code="dtype")
        elif _kind(held.dtype) > _kind(want.dtype):
            yield attrs.evolve(has, code="lossy")


def told(problems: Iterable[Mismatch], names: Iterable[str], paths: Iterable[str]) -> list[Finding]:
    """Returns problems in words, those of equal layers as one.

    **Arguments:**

    - `problems`: the problems.
    - `names`: the tensors that there are, to suggest one.
    - `paths`: the leaves that there are.

    **Returns:**

    A list of findings.

    ```python
    found = told([Mismatch("missing", f"layers/{i}/w", f"layers.{i}.w", (4,)) for i in range(3)], ["layers.0.v"], [])
    assert [(one.path, one.count) for one in found] == [("layers/*/w", 3)]
    assert "did you mean 'layers.0.v'" in found[0].message
    ```
    """
    groups: dict[Mismatch, list[Mismatch]] = {}
    for problem in problems:
        alike = attrs.evolve(problem, path=_template(problem.path), name="")
        groups.setdefault(alike, []).append(problem)
    known, leaves = list(names), list(paths)
    findings: list[Finding] = []
    for number, same in enumerate(groups.values()):
        near = known if same[0].code == "missing" else leaves if same[0].code == "no-leaf" else []
        what, remedy = _words(same[0], "" if number >= _SUGGESTIONS else suggest(same[0].name or same[0].path, near))
        path = same[0].path
        for other in same[1:]:
            path = _common(path, other.path)
        findings.append(Finding("error", same[0].code, what, path, remedy=remedy, shape=same[0].shape, count=len(same)))
    return findings


def refuse(what: str, findings: Sequence[Finding]) -> None:
    """Raises one error that lists everything, where there is anything.

    **Arguments:**

    - `what`: who refuses what.
    - `findings`: what is wrong.

    **Raises:**

    `CheckpointError`.
    """
    if findings:
        raise CheckpointError(f"{what} cannot be loaded, and nothing was:\n{listing(findings)}")


def _kind(dtype: Any) -> int:
    """How much a dtype can say: truth values, whole numbers, numbers, complex numbers."""
    return next((number for number, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), len(_KINDS) - 1)


def _template(path: str) -> str:
    return template(path.replace(".", "/"))


def _common(one: str, two: str) -> str:
    """As `common_path`, for names with dots too."""
    if "/" in one:
        return common_path(one, two)
    return common_path(one.replace(".", "/"), two.replace(".", "/")).replace("/", ".")


def _words(problem: Mismatch, near: str) -> tuple[str, str]:
    """What is wrong, and what to do about it."""
    name, held = problem.name, problem.held
    match problem.code:
        case "missing":
            return (
                f"there is no {name!r}{near}",
                f"say what it is called, names={{{problem.path!r}: ...}}; None there keeps the values in `like`",
            )
        case "no-leaf":
            return f"`names` has it, and it is no array of `like`{near}", "write the path as sr.leaf_paths(like) does"
        case "no-name":
            return f"`names` gives {name} for it, which is no text", "give the name of a tensor, or None"
        case "no-values":
            return "`names` says that it is not there, and `like` has its shape only", "put an array of values there"
        case "shape":
            shape = shape_text(held.shape if held else ())
            return f"{name} has shape {shape}", "give `like` the shape that was saved, or take another tensor"
        case "dtype":
            return f"{name} is {held}, wanted {problem.dtype}", "cast=True converts it"
        case "narrow":
            why = f"{name} is {held}, of which JAX makes {problem.dtype} while jax_enable_x64 is off"
            return why, f"turn it on, or give `like` {problem.dtype} and pass cast=True"
        case "lossy":
            return f"{name} is {held}, and {problem.dtype} cannot say that", "give `like` a dtype that can"
        case "unreadable":
            return f"{name} is {held}, which no array here can be", "convert the file, or keep the values in `like`"
        case "value":
            return f"{name} is {held}, and `like` has a Python {problem.dtype}", "put there what was saved"
        case _:  # surplus
            return f"no leaf of `like` takes it, {held}", 'surplus="skip" leaves it; names=... says who takes it'
