"""A sharding constraint on an array that is being traced, on axes of whatever type.

JAX has one operation per type of axis: `with_sharding_constraint` is for Auto axes, `reshard` for Explicit ones, and
inside `shard_map` neither may name a Manual one. On a mesh of mixed axes a spec is split in two, each half goes to the
operation that understands it, and together they mean the whole.
"""

from collections.abc import Container
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from shardrules.core.axes import AnyMesh, mesh_text
from shardrules.core.errors import MeshError, SpecError
from shardrules.core.jax_state import device_put, reshard, with_sharding_constraint
from shardrules.core.spec import UNCONSTRAINED, axis_names, entries, make_spec, spec_repr


def axis_types(mesh: AnyMesh) -> dict[str, AxisType]:
    """Returns the type that each axis has here: inside `shard_map` the axes that it maps are Manual."""
    return dict(zip(mesh.axis_names, _as_in_force(mesh).axis_types, strict=True))


def _as_in_force(mesh: AnyMesh) -> AnyMesh:
    """Returns the mesh with the axis types that are in force here, if it is the mesh in force; else as it is."""
    here = jax.sharding.get_abstract_mesh()
    is_in_force = here.axis_names == mesh.axis_names and dict(here.shape) == dict(mesh.shape)
    return here if is_in_force and here.axis_types != mesh.axis_types else mesh


def constrain_traced(x: Any, mesh: AnyMesh, spec: PartitionSpec, memory: str | None = None) -> Any:
    """Returns a traced array with its sharding constrained to a sound spec, moved to `memory` if that is named."""
    here = jax.sharding.get_abstract_mesh()
    if not here.empty and dict(here.shape) != dict(mesh.shape):
        raise MeshError(
            f"{spec_repr(spec)} is on the mesh {mesh_text(mesh)}, while {mesh_text(here)} is in force. Inside jit JAX "
            "may drop such a constraint silently: use the mesh in force, or leave its block"
        )
    # Explicit axes first: what `reshard` splits, the constraint on Auto axes then refines.
    types = axis_types(mesh)
    explicit = [name for name, axis_type in types.items() if axis_type == AxisType.Explicit]
    auto = [name for name, axis_type in types.items() if axis_type == AxisType.Auto]
    spec_entries = entries(spec, x.ndim)
    for entry in spec_entries:
        entry_types = [] if entry is UNCONSTRAINED else [types[name] for name in entry]
        if AxisType.Explicit in entry_types[1:] and entry_types[0] == AxisType.Auto:
            raise SpecError(
                f"{spec_repr(spec)} splits a dimension over {entry!r}: the Auto axis {entry[0]!r} cannot come before "
                "an Explicit one. Write the Explicit axes first"
            )
    local_mesh = _as_in_force(mesh)
    if explicit:
        # `reshard` accepts no memory kind, and a sharding on devices always has one: so it gets the shape of the mesh.
        shape = local_mesh.abstract_mesh if isinstance(local_mesh, Mesh) else local_mesh
        # It does not know UNCONSTRAINED either.
        current = jax.typeof(x).sharding.spec
        on_explicit = fill_unconstrained(make_spec(_restricted(spec_entries, explicit)), current, x.ndim)
        x = reshard(x, NamedSharding(shape, on_explicit))
    if auto:
        on_auto = make_spec(_restricted(spec_entries, auto))
        x = with_sharding_constraint(x, NamedSharding(local_mesh, on_auto))
    if memory is not None:
        x = device_put(x, jax.memory.Space.Host if memory.endswith("host") else jax.memory.Space.Device)
    return x


def note_closure(error: Exception, caller: str) -> None:
    """Adds a remedy to JAX's error about a closed-over array on Explicit axes; other errors are left alone."""
    if "should match the aval mesh" in str(error):
        error.add_note(
            f"{caller}: the function sees Auto axes, and closes over an array on Explicit ones. Pass it as an argument"
        )


def host_memory(sharding: Sharding) -> str | None:
    """Returns the memory kind of a sharding, `"pinned_host"` say, or `None` for the default memory of its devices."""
    memory = sharding.memory_kind
    if memory is None or isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return memory
    device = next(iter(sharding.device_set))
    return None if memory == device.default_memory().kind else memory


def fill_unconstrained(spec: PartitionSpec, current: PartitionSpec, ndim: int) -> PartitionSpec:
    """Returns a spec in which UNCONSTRAINED dimensions keep the axes of `current` that no other dimension uses."""
    used = axis_names(spec)
    pairs = zip(entries(spec, ndim), entries(current, ndim), strict=True)
    return make_spec(
        tuple(
            tuple(name for name in before if name not in used) if entry is UNCONSTRAINED else entry
            for entry, before in pairs
        )
    )


def _restricted(spec_entries: tuple[Any, ...], names: Container[str]) -> tuple[Any, ...]:
    """Returns the entries with only those axes that are in `names`."""
    return tuple(
        entry if entry is UNCONSTRAINED else tuple(name for name in entry if name in names) for entry in spec_entries
    )
