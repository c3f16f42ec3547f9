"""The mesh that is in force here, and questions about its axes.

JAX offers `jax.set_mesh` with public readers. The older `with mesh:` still exists, and code in the wild still uses it.
"""

from contextlib import AbstractContextManager

import jax
import numpy as np
from jax.sharding import Mesh

from shardrules.core.axes import AnyMesh
from shardrules.core.errors import NoMeshError
from shardrules.core.jax_state import legacy_mesh

_TRACE_MESH = jax.make_user_context(None)
"""The mesh of the innermost function that brought its own while being traced, when JAX does not allow to set one."""


def trace_mesh(mesh: AnyMesh | None) -> AbstractContextManager[None]:
    """Returns a context in which `current_mesh` is `mesh`, also while tracing, where `jax.set_mesh` is not allowed."""
    return _TRACE_MESH(mesh)


def current_mesh() -> AnyMesh | None:
    """Returns the mesh set by `jax.set_mesh`, else the one of a legacy `with mesh:`, else `None`.

    **Returns:**

    A `Mesh` if the devices are known, an `AbstractMesh` if only a shape is: inside `jit`, say, or where
    `jax.sharding.use_abstract_mesh` sets another shape than the devices have.

    ```python
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        assert sr.meshes.current_mesh().axis_names == ("data",)
    ```
    """
    if _TRACE_MESH.value is not None:
        return _TRACE_MESH.value
    # `jax.set_mesh` sets both meshes, `use_abstract_mesh` only the abstract one. If they agree, devices are known.
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        try:
            concrete = jax.sharding.get_mesh()
        except ValueError:  # raised while tracing, where only the shape matters
            return abstract
        return concrete if _mesh_identity(concrete) == _mesh_identity(abstract) else abstract
    return legacy_mesh()


def _mesh_identity(mesh: AnyMesh) -> tuple[object, ...]:
    """Names, sizes and types: an abstract mesh may also know a kind of device, which must not count here."""
    return mesh.axis_names, tuple(mesh.shape.values()), mesh.axis_types


def get_incontext_mesh(raise_error: bool = True) -> AnyMesh:
    """Returns `current_mesh()`; without one, an empty mesh, or a `NoMeshError` if `raise_error`.

    ```python
    with jax.set_mesh(sr.create_mesh("data:8")):
        assert dict(sr.meshes.get_incontext_mesh().shape) == {"data": 8}
    assert sr.meshes.get_incontext_mesh(raise_error=False).empty
    ```
    """
    mesh = current_mesh()
    if mesh is not None:
        return mesh
    if raise_error:
        raise NoMeshError(
            "No mesh found under this context manager. Set one for a block, `with jax.set_mesh(mesh):`, or pass it"
        )
    return Mesh(np.empty((), dtype=object), ())


def names_in_current_mesh(*names: str) -> bool:
    """Returns whether the mesh in force has all axes `names`; `False` without a mesh.

    ```python
    with jax.set_mesh(sr.create_mesh("data:8")):
        assert sr.meshes.names_in_current_mesh("data") and not sr.meshes.names_in_current_mesh("data", "model")
    ```
    """
    mesh = current_mesh()
    return all(name in (() if mesh is None else mesh.axis_names) for name in names)
