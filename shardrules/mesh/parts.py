"""The part of a dimension that each process has: computed from the mesh, so that processes need not ask each other."""

from typing import Any, final

import attrs
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardrules.core.errors import MeshError, UnknownAxisError, suggest
from shardrules.core.spec import axis_names


@final
@attrs.frozen
class DimPart:
    """A process has part `index` of `count` equal parts of a dimension."""

    index: int
    count: int


def batch_part(spec: PartitionSpec | str, mesh: Mesh) -> tuple[int, int]:
    """Returns which part of the batch this process hands to `place_batch`, as its index and how many parts there are.

    `spec` says how the first dimension is split: a spec of the batch, or the name of an axis. Processes that hold the
    same rows have the same index: these are not `jax.process_index()` and `jax.process_count()` where an axis of the
    mesh, for a model that is larger than a process, joins several processes.

    ```python
    index, count = sr.meshes.batch_part("data", sr.create_mesh("data:4,model:2"))
    assert (index, count) == (0, 1)  # there is one process
    rows = np.arange(64)[index::count]
    ```
    """
    entries = (PartitionSpec(spec) if isinstance(spec, str) else spec).partitions
    axes = axis_names(PartitionSpec(entries[0])) if entries else ()
    for axis in axes:
        if axis not in mesh.axis_names:
            near = suggest(axis, mesh.axis_names)
            raise UnknownAxisError(f"batch_part: unknown axis {axis!r}{near}; the mesh has {mesh.axis_names}")
    part = dim_part(axes, mesh)
    return part.index, part.count


def dim_part(axes: tuple[str, ...], mesh: Mesh) -> DimPart:
    """Returns the part that this process has of a dimension that is split over `axes`.

    Raises a `MeshError` where the processes' parts are not equal, or overlap.
    """
    names = tuple(mesh.axis_names)
    axes = tuple(axis for axis in dict.fromkeys(axes) if axis in names)  # the check of specs reports others
    # Along the axes, a device's index in the dimension; along the others, devices have the same index.
    order = [names.index(axis) for axis in axes] + [dim for dim, name in enumerate(names) if name not in axes]
    count = int(np.prod([mesh.shape[axis] for axis in axes], dtype=int))
    rows: dict[int, set[int]] = {}
    for row, devices in enumerate(mesh.devices.transpose(order).reshape(count, -1)):
        for device in devices:
            rows.setdefault(device.process_index, set()).add(row)
    parts = sorted({tuple(sorted(part)) for part in rows.values()})
    if sum(map(len, parts)) > count or len({len(part) for part in parts}) > 1:
        described = ", ".join(f"process {process}: {sorted(rows[process])}" for process in sorted(rows))
        raise MeshError(
            f"the processes have unequal or overlapping parts of a dimension over {axes} ({described} of {count}); use "
            "a mesh in which each process has a box of devices, as create_mesh makes it"
        )
    process = jax.process_index()
    if process not in rows:
        raise MeshError(f"process {process} has no device of the mesh, so it has no part of the batch")
    return DimPart(parts.index(tuple(sorted(rows[process]))), len(parts))


def global_shape(shape: tuple[int, ...], sharding: Any) -> tuple[int, ...]:
    """Returns the shape of an array of which each process has a part of this shape."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return shape
    entries = [*sharding.spec.partitions, *[None] * len(shape)]
    parts = [dim_part(axis_names(PartitionSpec(entry)), sharding.mesh) for entry in entries[: len(shape)]]
    return tuple(size * part.count for size, part in zip(shape, parts, strict=True))
