"""The part of a dimension that each process has: computed from the mesh, so that processes need not ask each other."""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardrules.core.errors import MeshError
from shardrules.core.spec import axis_names
from shardrules.mesh.axes import check_axes


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
    check_axes(mesh, axes, "batch_part: ")
    return dim_part(axes, mesh)


def dim_part(axes: tuple[str, ...], mesh: Mesh) -> tuple[int, int]:
    """Returns the index of this process's part of a dimension that is split over `axes`, and the number of parts.

    Raises a `MeshError` where the processes' parts are not equal, or overlap.
    """
    names = tuple(mesh.axis_names)
    axes = tuple(axis for axis in dict.fromkeys(axes) if axis in names)  # the check of specs reports others
    # Along the axes, a device's index in the dimension; along the others, devices have the same index.
    order = [names.index(axis) for axis in axes] + [dim for dim, name in enumerate(names) if name not in axes]
    count = math.prod(mesh.shape[axis] for axis in axes)
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
    return parts.index(tuple(sorted(rows[process]))), len(parts)


def global_shape(shape: tuple[int, ...], sharding: Any) -> tuple[int, ...]:
    """Returns the shape of an array whose parts on the processes have this shape."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return shape
    entries = [*sharding.spec.partitions, *[None] * len(shape)]
    parts = [dim_part(axis_names(PartitionSpec(entry)), sharding.mesh) for entry in entries[: len(shape)]]
    return tuple(size * count for size, (_, count) in zip(shape, parts, strict=True))
