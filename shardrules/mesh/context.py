"""The mesh that is in force here: the one place that knows how JAX keeps it.

JAX offers `jax.set_mesh` with public readers. The older `with mesh:` still exists, and code in the wild still uses it,
but its only reader is private; this module is where that reader is isolated.
"""

import jax
from jax._src import mesh as _legacy

from shardrules.core.axes import AnyMesh


def current_mesh() -> AnyMesh | None:
    """Returns the mesh set by `jax.set_mesh`, else the one of a legacy `with mesh:`, else `None`.

    **Returns:**

    A `Mesh` where there is one with devices, an `AbstractMesh` where only a shape is known (inside `jit`, say).

    ```python
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        assert current_mesh().axis_names == ("data",)
    ```
    """
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        try:
            concrete = jax.sharding.get_mesh()
        except ValueError:  # refused while tracing, where the shape is all that counts
            return abstract
        return abstract if concrete.empty else concrete
    legacy = _legacy.thread_resources.env.physical_mesh
    return None if legacy.empty else legacy
