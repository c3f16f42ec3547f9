"""The axes of a mesh: their sizes, and the position of a device on them."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardrules.core.axes import AnyMesh, check_mesh, shown_mesh
from shardrules.core.context import get_incontext_mesh
from shardrules.core.errors import AxisTypeError, UnboundAxisError, UnknownAxisError, suggest


def get_axes_size_in_mesh(axis_names: str | Sequence[str], mesh: AnyMesh | None = None) -> int:
    """Returns the product of the sizes of some axes of a mesh, by default the one in force; of no axes, 1.

    ```python
    assert sr.meshes.get_axes_size_in_mesh(("data", "model"), sr.mesh_shape("data:4,model:2")) == 8
    ```
    """
    names = _axis_names(axis_names)
    check_mesh(mesh)
    mesh = get_incontext_mesh() if mesh is None else mesh
    check_axes(mesh, names)
    return math.prod(mesh.shape[name] for name in names)


def check_axes(mesh: AnyMesh, names: Sequence[str], caller: str = "") -> None:
    """Refuses axes that a mesh does not have."""
    for name in names:
        if name not in mesh.axis_names:
            near = suggest(name, mesh.axis_names)
            raise UnknownAxisError(f"{caller}unknown axis {name!r}{near}; the mesh is {shown_mesh(mesh)}")


def get_mesh_axis_names(mesh: AnyMesh | None = None) -> list[str]:
    """Returns the axis names of a mesh, by default the one in force, the most major first."""
    check_mesh(mesh)
    return list((get_incontext_mesh() if mesh is None else mesh).axis_names)


def get_mesh_axis_size(axis_names: str | Sequence[str]) -> int:
    """Returns the product of the sizes of some mapped axes, inside `jax.shard_map`. It is known while tracing.

    ```python
    mesh = sr.create_mesh("data:4,model:2")
    size = lambda x: x + sr.meshes.get_mesh_axis_size("data")
    mapped = jax.shard_map(size, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert mapped(np.zeros(4)).tolist() == [4, 4, 4, 4]
    ```
    """
    with _mapped(_axis_names(axis_names)) as names:
        return math.prod(jax.lax.axis_size(name) for name in names)


def get_submesh_device_index(axis_names: str | Sequence[str]) -> Any:
    """Returns the index of a device along some mapped axes, the first most major, inside `jax.shard_map`.

    ```python
    mesh = sr.create_mesh("data:4,model:2")
    index = lambda x: x + sr.meshes.get_submesh_device_index("data")
    mapped = jax.shard_map(index, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert mapped(np.zeros(4)).tolist() == [0, 1, 2, 3]
    ```
    """
    with _mapped(_axis_names(axis_names)) as names:
        # JAX refuses an empty tuple of axes; of no axes every device has index 0.
        return jax.lax.axis_index(names) if names else jnp.int32(0)


def _axis_names(axis_names: Any) -> tuple[str, ...]:
    names = (axis_names,) if isinstance(axis_names, str) else axis_names
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise AxisTypeError(f"expected an axis name, or a list or tuple of names; got {axis_names!r}")
    return tuple(names)


@contextlib.contextmanager
def _mapped(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    try:
        yield names
    except NameError as error:
        raise UnboundAxisError(
            f"not all of the axes {', '.join(map(repr, names))} are mapped: call this inside jax.shard_map over them, "
            "or read sizes from a mesh with get_axes_size_in_mesh"
        ) from error
