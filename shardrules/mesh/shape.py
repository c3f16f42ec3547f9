"""The shape of a mesh, without devices: what planning needs, from a line of text."""

import math
import operator
from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from shardrules.core.errors import MeshError, SpecError


def mesh_shape(text: str) -> AbstractMesh:
    """Returns the mesh with these axes and no devices, for planning on a machine that has none.

    **Arguments:**

    - `text`: `name:size` pairs joined by commas, the most major axis first. Blanks are ignored.

    **Returns:**

    An `AbstractMesh` with Auto axes. JAX's backend is not initialised.

    **Raises:**

    `SpecError` when the text has another form, a size is not a positive integer, or a name comes twice.

    ```python
    assert sr.mesh_shape("data:64, model:16").shape["model"] == 16
    ```
    """
    names, sizes = read_axes(text, least=1)
    # Which type axes have when nobody says so differs between versions of JAX.
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def read_axes(text: str, *, least: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the names and the sizes in `"data:4,model:-1"`.

    **Arguments:**

    - `text`: `name:size` pairs joined by commas. Blanks are ignored.
    - `least`: the least size that may be written: 1, or -1 where one size may be left open.

    **Returns:**

    Two tuples of equal length.

    **Raises:**

    `SpecError`, which lists all that is wrong with the text.

    ```python
    assert read_axes("data:4, model:-1", least=-1) == (("data", "model"), (4, -1))
    ```
    """
    if not isinstance(text, str):
        raise SpecError(f"a mesh shape is a text such as 'data:64,model:16', got {text!r}")
    pairs = [pair.strip().rpartition(":") for pair in text.split(",")] if text.strip() else []
    problems = [
        f"{':'.join(part for part in (name, size) if part)!r} is not name:size with a size of 1 or more"
        f"{', or -1 for what is left' if least < 0 else ''}"
        for name, colon, size in pairs
        if not (colon and name.strip() and _is_size(size.strip(), least))
    ]
    names = tuple(name.strip() for name, _, _ in pairs)
    problems += [f"axis {name!r} comes twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    if problems:
        raise SpecError(f"mesh shape {text!r}: {'; '.join(problems)}. Write it as 'data:64,model:16'.")
    return names, tuple(int(size) for _, _, size in pairs)


def _is_size(text: str, least: int) -> bool:
    return text == str(least) or (text.isdecimal() and int(text) > 0)


def integers(values: Any, what: str) -> tuple[int, ...]:
    """Returns a sequence of integers as a tuple.

    **Arguments:**

    - `values`: what was passed.
    - `what`: what it is called, for the message.

    **Returns:**

    A tuple of `int`.

    **Raises:**

    `MeshError` when it is no sequence, or holds something else than integers.

    ```python
    assert integers(np.array([2, 4]), "axis_dims") == (2, 4)
    ```
    """
    if isinstance(values, str | set | frozenset):
        raise MeshError(f"{what}: a tuple of integers is wanted, got {values!r}")
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise MeshError(f"{what}: a tuple of integers is wanted, got {values!r}") from None


def resolve_sizes(
    sizes: Sequence[int], names: Sequence[str], devices: int, *, source: str = "jax.devices()", placed: bool = False
) -> tuple[int, ...]:
    """Returns `sizes` with the one that is -1 filled in, so that they multiply to the number of devices.

    **Arguments:**

    - `sizes`, `names`: the axes that were asked for.
    - `devices`: how many devices there are.
    - `source`: where they come from, as an expression for the message.
    - `placed`: whether a part of them makes a mesh only where each is put in its place.

    **Returns:**

    The sizes.

    **Raises:**

    `MeshError` when names and sizes do not pair up, or the devices cannot be shaped so.

    ```python
    assert resolve_sizes((2, -1), ("data", "model"), 8) == (2, 4)
    ```
    """
    sizes = integers(sizes, "the sizes of a mesh")
    if len(sizes) != len(names):
        raise MeshError(f"a mesh needs one name for each size: {len(sizes)} sizes {sizes}, names {tuple(names)}")
    label = ",".join(f"{name}:{size}" for name, size in zip(names, sizes, strict=True))
    strange = [name for name in names if not isinstance(name, str) or not name]
    if strange:
        raise MeshError(f"mesh {label}: the name of an axis is a text that is not empty, got {strange[0]!r}")
    twice = [name for name in dict.fromkeys(names) if list(names).count(name) > 1]
    if twice:
        raise MeshError(f"mesh {label}: axis {twice[0]!r} comes twice. Give each axis a name of its own")
    wrong = [size for size in sizes if size != -1 and size < 1]
    if wrong:
        raise MeshError(f"mesh {label}: a size is 1 or more, or -1 for what is left; got {wrong[0]}")
    if devices < 1:
        raise MeshError(f"mesh {label}: there are no devices to make it of")
    if sizes.count(-1) > 1:
        raise MeshError(f"mesh {label}: can only specify one unknown dimension, write out all sizes but one")
    known = math.prod(size for size in sizes if size != -1)
    filled = tuple(devices // known if size == -1 else size for size in sizes)
    if math.prod(filled) != devices:
        part = f"{source}[:{known}]"
        part = f"np.array({part}).reshape{sizes}" if placed else part
        enough = f"; devices={part} uses {known} of them" if -1 not in sizes and known < devices else ""
        raise MeshError(
            f"mesh {label}: cannot reshape array of size {devices} ({devices} devices): the sizes that are given "
            f"multiply to {known}. A mesh takes every device that it is given, once{enough}"
        )
    return filled
