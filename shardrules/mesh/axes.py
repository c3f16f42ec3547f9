"""Questions about the axes of a mesh: how long they are, and where on them a device stands."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardrules.core.axes import AnyMesh, check_mesh, mesh_text
from shardrules.core.context import get_incontext_mesh
from shardrules.core.errors import AxisTypeError, UnboundAxisError, UnknownAxisError, suggest


def get_axes_size_in_mesh(axis_names: str | Sequence[str], mesh: AnyMesh | None = None) -> int:
    """Returns in how many parts some axes together split.

    **Arguments:**

    - `axis_names`: one axis, or a list or tuple of them; none of them make 1.
    - `mesh`: the mesh; by default the one in force.

    **Returns:**

    The product of their sizes.

    **Raises:**

    `UnknownAxisError`, also a `KeyError`, for an axis that the mesh has not; `AxisTypeError` for what is no name.

    ```python
    assert get_axes_size_in_mesh(("data", "model"), sr.mesh_shape("data:4,model:2")) == 8
    ```
    """
    names = _names(axis_names)
    check_mesh(mesh)
    found = get_incontext_mesh() if mesh is None else mesh
    for name in names:
        if name not in found.axis_names:
            raise UnknownAxisError(f"mesh {mesh_text(found)} has no axis {name!r}{suggest(name, found.axis_names)}")
    return math.prod(found.shape[name] for name in names)


def get_mesh_axis_names(mesh: AnyMesh | None = None) -> list[str]:
    """Returns the axes of a mesh, the most major first.

    **Arguments:**

    - `mesh`: the mesh; by default the one in force.

    **Returns:**

    A list of names.

    **Raises:**

    `NoMeshError` where there is none; `AxisTypeError` for what is no mesh.

    ```python
    assert get_mesh_axis_names(sr.mesh_shape("data:4,model:2")) == ["data", "model"]
    ```
    """
    check_mesh(mesh)
    return list((get_incontext_mesh() if mesh is None else mesh).axis_names)


def get_mesh_axis_size(axis_names: str | Sequence[str]) -> int:
    """Returns in how many parts some axes together split, from inside `jax.shard_map`.

    **Arguments:**

    - `axis_names`: one mapped axis, or a list or tuple of them; none of them make 1.

    **Returns:**

    An integer, known while tracing.

    **Raises:**

    `UnboundAxisError`, also a `NameError`, where an axis is not mapped; `AxisTypeError` for what is no name.

    ```python
    mesh = sr.create_mesh("data:4,model:2")
    size = lambda x: x + get_mesh_axis_size("data")
    mapped = jax.shard_map(size, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert mapped(np.zeros(4)).tolist() == [4, 4, 4, 4]
    ```
    """
    names = _names(axis_names)
    try:
        return math.prod(jax.lax.axis_size(name) for name in names)
    except NameError as error:
        raise _unbound(names) from error


def get_submesh_device_index(axis_names: str | Sequence[str]) -> Any:
    """Returns which part of an array split over some axes a device holds, from inside `jax.shard_map`.

    **Arguments:**

    - `axis_names`: one mapped axis, or a list or tuple of them, the first most major; none of them make 0.

    **Returns:**

    An integer array, 0 on the first device.

    **Raises:**

    `UnboundAxisError`, also a `NameError`, where an axis is not mapped; `AxisTypeError` for what is no name.

    ```python
    mesh = sr.create_mesh("data:4,model:2")
    index = lambda x: x + get_submesh_device_index("data")
    mapped = jax.shard_map(index, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert mapped(np.zeros(4)).tolist() == [0, 1, 2, 3]
    ```
    """
    names = _names(axis_names)
    try:
        return jax.lax.axis_index(names) if names else jnp.int32(0)
    except NameError as error:
        raise _unbound(names) from error


def _names(axis_names: Any) -> tuple[str, ...]:
    names = (axis_names,) if isinstance(axis_names, str) else axis_names
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise AxisTypeError(f"mesh axes are given by name, or as a list or tuple of names; got {axis_names!r}")
    return tuple(names)


def _unbound(names: tuple[str, ...]) -> UnboundAxisError:
    return UnboundAxisError(
        f"not all of the axes {', '.join(map(repr, names))} are mapped here: a device has a place on an axis inside "
        "jax.shard_map over it. get_axes_size_in_mesh asks a mesh instead"
    )
