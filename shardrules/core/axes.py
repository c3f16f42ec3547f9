"""Mesh axes: what planning needs to know of a mesh, which is its axis names and sizes and nothing else."""

from collections.abc import Mapping
from typing import TypeAlias

from jax.sharding import AbstractMesh, Mesh

from shardrules.core.errors import AxisTypeError, SpecError

Axis: TypeAlias = str | tuple[str, ...]
"""One mesh axis, or several that split one dimension together, the first most major."""

AnyMesh: TypeAlias = Mesh | AbstractMesh
"""A mesh of devices, or only its shape: planning takes either."""


def as_axis(axis: Axis | list[str]) -> Axis:
    """Returns `axis` in its normal form: a name, or a tuple of two or more names.

    **Arguments:**

    - `axis`: a name, or a list or tuple of names.

    **Returns:**

    The name itself where there is only one.

    **Raises:**

    `SpecError` when it is neither, is empty, or names an axis twice.

    ```python
    assert as_axis(["data", "model"]) == ("data", "model")
    assert as_axis(("data",)) == "data"
    ```
    """
    names = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, tuple | list) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise SpecError(f"a mesh axis is a name or a tuple of names, got {axis!r}")
    if len(dict.fromkeys(names)) < len(names):
        raise SpecError(f"axis {axis!r} names a mesh axis twice")
    return names[0] if len(names) == 1 else names


def axis_tuple(axis: Axis) -> tuple[str, ...]:
    """Returns the names in `axis`, always as a tuple.

    **Arguments:**

    - `axis`: a name or a tuple of names.

    **Returns:**

    A tuple of names.

    ```python
    assert axis_tuple("data") == ("data",)
    ```
    """
    return (axis,) if isinstance(axis, str) else axis


def check_mesh(mesh: object) -> None:
    """Refuses what is no mesh, a text among them. Whatever has a `shape` from axis to size will do.

    **Arguments:**

    - `mesh`: what was passed; `None` for none.

    **Raises:**

    `AxisTypeError`.
    """
    if mesh is not None and not isinstance(getattr(mesh, "shape", None), Mapping):
        raise AxisTypeError(
            f"a mesh is a Mesh or an AbstractMesh, got {mesh!r}; sr.mesh_shape('data:4,model:2') makes one"
        )


def as_mesh(mesh: AnyMesh | None) -> AnyMesh | None:
    """Returns the mesh of a rule after a check that it is one.

    **Arguments:**

    - `mesh`: what was passed; `None` for none.

    **Returns:**

    The same.

    **Raises:**

    `AxisTypeError`.

    ```python
    assert as_mesh(None) is None
    ```
    """
    check_mesh(mesh)
    return mesh


def mesh_sizes(mesh: AnyMesh | None) -> dict[str, int]:
    """Returns the size of every axis of `mesh`, in mesh order; of no mesh, nothing.

    **Arguments:**

    - `mesh`: a `Mesh`, an `AbstractMesh`, or `None`.

    **Returns:**

    A dictionary from axis name to size.

    ```python
    assert mesh_sizes(sr.mesh_shape("data:4,model:2")) == {"data": 4, "model": 2}
    ```
    """
    return {} if mesh is None else dict(mesh.shape)


def mesh_text(mesh: AnyMesh | None) -> str:
    """Returns the shape of `mesh` as text, in the form that `mesh_shape` reads.

    **Arguments:**

    - `mesh`: a `Mesh`, an `AbstractMesh`, or `None`.

    **Returns:**

    For instance `"data:4,model:2"`.

    ```python
    assert mesh_text(sr.mesh_shape("data:4,model:2")) == "data:4,model:2"
    ```
    """
    return "no mesh" if mesh is None else ",".join(f"{name}:{size}" for name, size in mesh.shape.items())


def mesh_repr(mesh: AnyMesh | None) -> str:
    """Returns how a mesh is written inside the repr of a rule: as the call that builds it, where there is one.

    **Arguments:**

    - `mesh`: a `Mesh`, an `AbstractMesh`, or `None`.

    **Returns:**

    A text; for an `AbstractMesh` with Auto axes it evaluates to an equal mesh.

    ```python
    assert mesh_repr(sr.mesh_shape("data:4")) == "mesh_shape('data:4')"
    ```
    """
    return f"mesh_shape({mesh_text(mesh)!r})" if isinstance(mesh, AbstractMesh) else repr(mesh)


def mesh_key(mesh: AnyMesh | None) -> tuple[tuple[str, int], ...]:
    """Returns by what meshes of rules are compared: names and sizes.

    **Arguments:**

    - `mesh`: a mesh, or `None`.

    **Returns:**

    Pairs of name and size.
    """
    return tuple(mesh_sizes(mesh).items())
