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

_HELD = jax.make_user_context(None)
"""The mesh of the innermost function that brought its own while something was traced: JAX lets nobody set one there."""


def holding(mesh: AnyMesh | None) -> AbstractContextManager[None]:
    """Puts a mesh in force for `current_mesh` where `jax.set_mesh` is refused: while something is being traced.

    **Arguments:**

    - `mesh`: the mesh.

    **Returns:**

    A context manager.

    ```python
    with holding(sr.mesh_shape("data:4")):
        assert current_mesh().axis_names == ("data",)
    ```
    """
    return _HELD(mesh)


def current_mesh() -> AnyMesh | None:
    """Returns the mesh set by `jax.set_mesh`, else the one of a legacy `with mesh:`, else `None`.

    **Returns:**

    A `Mesh` where there is one with devices, an `AbstractMesh` where only a shape is known (inside `jit`, say, or where
    `jax.sharding.use_abstract_mesh` says another shape than that of the devices set).

    ```python
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        assert current_mesh().axis_names == ("data",)
    ```
    """
    if _HELD.value is not None:
        return _HELD.value
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        try:
            concrete = jax.sharding.get_mesh()
        except ValueError:  # refused while tracing, where the shape is all that counts
            return abstract
        return concrete if _shape(concrete) == _shape(abstract) else abstract
    return legacy_mesh()


def _shape(mesh: AnyMesh) -> tuple[object, ...]:
    """Names, sizes and types: an abstract mesh may also know what devices it is for, which a text does not."""
    return mesh.axis_names, tuple(mesh.shape.values()), mesh.axis_types


def get_incontext_mesh(raise_error: bool = True) -> AnyMesh:
    """Returns the mesh in force: `current_mesh`, for code that cannot go on without one.

    **Arguments:**

    - `raise_error`: with `False`, an empty mesh is returned where there is none.

    **Returns:**

    A `Mesh` or an `AbstractMesh`.

    **Raises:**

    `NoMeshError`, which is also an `AssertionError`.

    ```python
    with jax.set_mesh(sr.create_mesh("data:8")):
        assert dict(get_incontext_mesh().shape) == {"data": 8}
    assert get_incontext_mesh(raise_error=False).empty
    ```
    """
    found = current_mesh()
    if found is not None:
        return found
    if raise_error:
        raise NoMeshError(
            "No mesh found under this context manager. Set one for a block, `with jax.set_mesh(mesh):`, or pass it"
        )
    return Mesh(np.empty((), dtype=object), ())


def names_in_current_mesh(*names: str) -> bool:
    """Whether the mesh in force has all of these axes.

    **Arguments:**

    - `names`: names of axes; without any, the answer is yes.

    **Returns:**

    `False` where there is no mesh.

    ```python
    with jax.set_mesh(sr.create_mesh("data:8")):
        assert names_in_current_mesh("data") and not names_in_current_mesh("data", "model")
    ```
    """
    found = current_mesh()
    return all(name in (() if found is None else found.axis_names) for name in names)
