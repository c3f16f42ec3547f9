"""The shape of a mesh, without devices: what planning needs, from a line of text."""

import math
import operator
import re
from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from shardrules.core.errors import MeshError, shown
from shardrules.core.fields import LARGEST_INTEGER, whole_number


def mesh_shape(text: str) -> AbstractMesh:
    """Returns the mesh with these axes and no devices, for planning on a machine that has none.

    **Arguments:**

    - `text`: `name:size` pairs separated by commas, the most major axis first. Blanks are ignored.

    **Returns:**

    An `AbstractMesh` with Auto axes. JAX's backend is not initialised.

    **Raises:**

    `MeshError` when the text has another form, a size is not a positive integer, or a name occurs twice.

    ```python
    assert sr.mesh_shape("data:64, model:16").shape["model"] == 16
    ```
    """
    names, sizes = read_axes(text, least=1)
    # The type of an axis that is not specified differs between versions of JAX.
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def read_axes(text: str, *, least: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the names and the sizes in `"data:4,model:-1"`; `least` is -1 where sizes may be left open, else 1."""
    if not isinstance(text, str):
        raise MeshError(f"a mesh shape must be a string such as 'data:64,model:16', got {shown(text)}")
    pairs = [pair.strip().rpartition(":") for pair in text.split(",")] if text.strip() else []
    problems = [
        f"{':'.join(part for part in (name, size) if part)!r:.80} is not name:size with a size of 1 or more"
        f"{', or -1 for the remaining devices' if least < 0 else ''}"
        for name, colon, size in pairs
        if not (colon and name.strip() and _is_size(size.strip(), least))
    ]
    # With other separators than commas, all but the last size become a part of the name.
    problems += [
        f"{name.strip()!r:.80} is not the name of an axis: separate axes with commas"
        for name, _, _ in pairs
        if re.search(r"[:;=\s]", name.strip())
    ]
    names = tuple(name.strip() for name, _, _ in pairs)
    problems += [f"axis {name!r} occurs twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    if problems:
        raise MeshError(f"mesh shape {text!r:.200}: {'; '.join(problems)}. Write it as 'data:64,model:16'.")
    return names, tuple(int(size) for _, _, size in pairs)


def _is_size(text: str, least: int) -> bool:
    return text == str(least) or bool(whole_number(text))


def integers(values: Any, argument: str) -> tuple[int, ...]:
    """Returns a sequence of integers as a tuple of `int`; `argument` is its name for the error."""
    # These can be iterated, but the order of a set is not the user's, and a string is not a list of numbers.
    if isinstance(values, str | set | frozenset):
        raise MeshError(f"{argument} must be a tuple of integers, got {shown(values)}")
    try:
        sizes = tuple(operator.index(value) for value in values)
    except TypeError:
        raise MeshError(f"{argument} must be a tuple of integers, got {shown(values)}") from None
    if any(abs(size) > LARGEST_INTEGER for size in sizes):
        raise MeshError(f"{argument} must be integers of 64 bits")
    return sizes


def resolve_sizes(
    sizes: Sequence[int], names: Sequence[str], devices: int, *, source: str = "jax.devices()", placed: bool = False
) -> tuple[int, ...]:
    """Returns `sizes` with a -1 filled in, so that they multiply to the number of devices.

    For the error, `source` is the expression that the devices come from, and `placed` says that a part of them makes a
    mesh only if each device is placed by the user.
    """
    sizes = integers(sizes, "the sizes of a mesh")
    if len(sizes) != len(names):
        raise MeshError(f"a mesh needs one name for each size: {len(sizes)} sizes {sizes}, names {tuple(names)}")
    label = ",".join(f"{name}:{size}" for name, size in zip(names, sizes, strict=True))
    if invalid := [name for name in names if not isinstance(name, str) or not name]:
        raise MeshError(f"mesh {label}: an axis name must be a non-empty string, got {invalid[0]!r}")
    if repeated := [name for name in dict.fromkeys(names) if list(names).count(name) > 1]:
        raise MeshError(f"mesh {label}: axis {repeated[0]!r} occurs twice. Give each axis its own name")
    if too_small := [size for size in sizes if size != -1 and size < 1]:
        raise MeshError(f"mesh {label}: a size must be 1 or more, or -1 for the remaining devices; got {too_small[0]}")
    if devices < 1:
        raise MeshError(f"mesh {label}: there are no devices")
    if sizes.count(-1) > 1:
        raise MeshError(f"mesh {label}: can only specify one unknown dimension; at most one size can be -1")
    product = math.prod(size for size in sizes if size != -1)
    # Where the division leaves a remainder, the product of the sizes shows it below.
    filled = tuple(devices // product if size == -1 else size for size in sizes)
    if math.prod(filled) != devices:
        part = f"{source}[:{product}]"
        part = f"np.array({part}).reshape{sizes}" if placed else part
        enough = f"; devices={part} uses {product} of them" if -1 not in sizes and product < devices else ""
        raise MeshError(
            f"mesh {label}: cannot reshape array of size {devices} ({devices} devices): the sizes multiply to "
            f"{product}. A mesh uses each of its devices exactly once{enough}"
        )
    return filled
