"""A sharding constraint on an array that is being traced, on axes of whatever type.

JAX has one operation for each type of axis: `with_sharding_constraint` speaks of Auto axes, `reshard` of Explicit ones,
and inside `shard_map` neither may speak of a Manual one. On a mesh of mixed axes a spec is taken apart, each half goes
to the operation that understands it, and together they mean the whole.
"""

from collections.abc import Container
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from shardrules.core.axes import AnyMesh, mesh_text
from shardrules.core.errors import MeshError, SpecError
from shardrules.core.spec import UNCONSTRAINED, axis_names, entries, make_spec, spec_repr


def axis_types(mesh: AnyMesh) -> dict[str, AxisType]:
    """Returns the type of each axis as it is here: inside `shard_map` the axes that it maps are Manual.

    **Arguments:**

    - `mesh`: the mesh that is meant.

    **Returns:**

    From axis name to type, in mesh order.

    ```python
    assert axis_types(sr.mesh_shape("data:4")) == {"data": jax.sharding.AxisType.Auto}
    ```
    """
    return dict(zip(mesh.axis_names, _as_here(mesh).axis_types, strict=True))


def _as_here(mesh: AnyMesh) -> AnyMesh:
    """The mesh under the types that its axes have here, if it is the one in force; else as it is."""
    here = jax.sharding.get_abstract_mesh()
    is_in_force = here.axis_names == mesh.axis_names and dict(here.shape) == dict(mesh.shape)
    return here if is_in_force and here.axis_types != mesh.axis_types else mesh


def constrain_traced(x: Any, mesh: AnyMesh, spec: PartitionSpec, memory: str | None = None) -> Any:
    """Returns a traced array whose sharding is constrained.

    **Arguments:**

    - `x`: an array that is being traced.
    - `mesh`, `spec`: what it is to have. It is sound: every axis is there, is not Manual, and divides its dimension.
    - `memory`: the memory it is to be in, where that is not the device's own.

    **Returns:**

    The array, constrained.

    **Raises:**

    `SpecError` for a dimension split over an Auto axis and then over an Explicit one: JAX has no way to say that.
    `MeshError` on another mesh than the one in force: JAX may drop such a constraint without a word.
    """
    here = jax.sharding.get_abstract_mesh()
    if not here.empty and dict(here.shape) != dict(mesh.shape):
        raise MeshError(
            f"{spec_repr(spec)} is asked for on the mesh {mesh_text(mesh)}, while {mesh_text(here)} is in force. "
            "Inside jit JAX may drop such a constraint without a word: take the mesh in force, or leave that one"
        )
    types = axis_types(mesh)
    explicit = [name for name, kind in types.items() if kind == AxisType.Explicit]
    auto = [name for name, kind in types.items() if kind == AxisType.Auto]
    found = entries(spec, x.ndim)
    for entry in found:
        kinds = [] if entry is UNCONSTRAINED else [types[name] for name in entry]
        if AxisType.Explicit in kinds[1:] and kinds[0] == AxisType.Auto:
            raise SpecError(
                f"{spec_repr(spec)} splits a dimension over {entry!r}: the Auto axis {entry[0]!r} cannot come before "
                "an Explicit one. Write the Explicit axes first"
            )
    known = _as_here(mesh)
    if explicit:
        # `reshard` takes no memory kind, and a sharding on devices always has one.
        shape = known.abstract_mesh if isinstance(known, Mesh) else known
        x = jax.sharding.reshard(x, NamedSharding(shape, _filled(_only(found, explicit), x)))
    if auto:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(known, make_spec(_only(found, auto))))
    if memory is not None:
        x = jax.device_put(x, jax.memory.Space.Host if memory.endswith("host") else jax.memory.Space.Device)
    return x


def note_closure(error: Exception, who: str) -> None:
    """Adds what to do to JAX's error about an array on Explicit axes among Auto ones, which is one closed over.

    **Arguments:**

    - `error`: any error of a trace on Auto axes; other ones are left alone.
    - `who`: the caller's name.

    ```python
    error = ValueError("context mesh ... should match the aval mesh")
    note_closure(error, "filter_init")
    assert "as an argument" in error.__notes__[0]
    ```
    """
    if "should match the aval mesh" in str(error):
        error.add_note(
            f"{who}: the function sees Auto axes, and closes over an array on Explicit ones. Pass it as an argument"
        )


def host_memory(sharding: Sharding) -> str | None:
    """Returns the memory that a sharding names, where that is not simply the device's own.

    **Arguments:**

    - `sharding`: any sharding.

    **Returns:**

    For instance `"pinned_host"`, or `None`.

    ```python
    assert host_memory(NamedSharding(sr.create_mesh("data:8"), P(), memory_kind="pinned_host")) == "pinned_host"
    ```
    """
    kind = sharding.memory_kind
    if kind is None or isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return kind
    device = next(iter(sharding.device_set))
    return None if kind == device.default_memory().kind else kind


def _only(found: tuple[Any, ...], names: Container[str]) -> tuple[Any, ...]:
    return tuple(entry if entry is UNCONSTRAINED else tuple(name for name in entry if name in names) for entry in found)


def _filled(found: tuple[Any, ...], x: Any) -> PartitionSpec:
    """`reshard` knows no UNCONSTRAINED: such a dimension keeps what it has, as far as no other one takes it."""
    taken = axis_names(make_spec(found))
    has = entries(jax.typeof(x).sharding.spec, x.ndim)
    return make_spec(
        tuple(
            tuple(name for name in old if name not in taken) if entry is UNCONSTRAINED else entry
            for entry, old in zip(found, has, strict=True)
        )
    )
