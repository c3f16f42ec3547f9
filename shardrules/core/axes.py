"""Mesh axes: all that planning needs to know of a mesh is the names and sizes of its axes."""

from collections.abc import Mapping
from typing import TypeAlias

from jax.sharding import AbstractMesh, Mesh

from shardrules.core.errors import AxisTypeError, ConfigError, ConfigTypeError, shortened

Axis: TypeAlias = str | tuple[str, ...]
"""One mesh axis, or several that split one dimension together, the first most major."""

AnyMesh: TypeAlias = Mesh | AbstractMesh
"""A mesh of devices, or only its shape: planning takes either."""


def as_axis(axis: Axis | list[str]) -> Axis:
    """Returns `axis` in its normal form: a name, or a tuple of two or more names.

    ```python
    from shardrules.core.axes import as_axis

    assert as_axis(["data", "model"]) == ("data", "model")
    assert as_axis(("data",)) == "data"
    ```
    """
    names = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, tuple | list) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"a mesh axis must be a name or a tuple of names, got {axis!r}")
    if len(dict.fromkeys(names)) < len(names):
        raise ConfigError(f"axis {axis!r} has a mesh axis twice")
    return names[0] if len(names) == 1 else names


def axis_tuple(axis: Axis) -> tuple[str, ...]:
    """Returns the names in `axis`, always as a tuple."""
    return (axis,) if isinstance(axis, str) else axis


def axis_argument(caller: str, axis: object) -> tuple[str, ...]:
    """Returns the names in the argument `axis=` of a function, which may be `None`."""
    names = () if axis is None else (axis,) if isinstance(axis, str) else axis
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigTypeError(f"{caller}: axis must be a name or a tuple of names, got {axis!r:.60}")
    return names


def check_mesh(mesh: object) -> None:
    """Raises an `AxisTypeError` unless `mesh` is `None` or has a `shape` from axis to size."""
    if mesh is not None and not isinstance(getattr(mesh, "shape", None), Mapping):
        raise AxisTypeError(
            f"a mesh must be a Mesh or an AbstractMesh, got {mesh!r}; sr.mesh_shape('data:4,model:2') makes one"
        )


def as_mesh(mesh: AnyMesh | None) -> AnyMesh | None:
    """Returns `mesh` after checking that it is one, or `None`."""
    check_mesh(mesh)
    return mesh


def mesh_sizes(mesh: AnyMesh | None) -> dict[str, int]:
    """Returns the size of every axis of `mesh`, in mesh order; nothing without a mesh."""
    return {} if mesh is None else dict(mesh.shape)


def mesh_text(mesh: AnyMesh | None) -> str:
    """Returns the shape of `mesh` as text that `mesh_shape` reads, `"data:4,model:2"`."""
    return "no mesh" if mesh is None else ",".join(f"{name}:{size}" for name, size in mesh.shape.items())


def shown_mesh(mesh: AnyMesh | None) -> str:
    """Returns the shape of `mesh` for a message; of many axes the first.

    ```python
    from shardrules.core.axes import shown_mesh

    assert shown_mesh(sr.mesh_shape("data:4,model:2")) == "data:4,model:2"
    assert shown_mesh(sr.mesh_shape(",".join(f"a{i}:1" for i in range(99)))).endswith("a19:1,and 79 more")
    ```
    """
    return ",".join(shortened(mesh_text(mesh).split(",")))


def mesh_repr(mesh: AnyMesh | None) -> str:
    """Returns `mesh` as it appears in the repr of a rule; an `AbstractMesh` as the call that builds it."""
    return f"mesh_shape({mesh_text(mesh)!r})" if isinstance(mesh, AbstractMesh) else repr(mesh)


def mesh_key(mesh: AnyMesh | None) -> tuple[tuple[str, int], ...]:
    """Returns the names and sizes by which rules compare their meshes."""
    return tuple(mesh_sizes(mesh).items())
