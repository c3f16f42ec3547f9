"""What to do when devices are lost, or come back: another mesh, another batch size, and the state moved there.

Which devices are alive is a value that you pass in. How one finds out differs from platform to platform; what follows
from it does not.
"""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from shardrules.core.axes import AnyMesh, Axis, as_axis, axis_tuple, mesh_sizes, mesh_text
from shardrules.core.errors import MeshError, MeshWarning, suggest
from shardrules.core.fields import integer
from shardrules.placement.destination import How
from shardrules.reshard.move import moved
from shardrules.reshard.prepare import prepare
from shardrules.reshard.schedule import networks


def group_devices(devices: Iterable[Any]) -> dict[int, tuple[Any, ...]]:
    """Returns devices by what fails together: by slice where there are several, else by process.

    **Arguments:**

    - `devices`: devices.

    **Returns:**

    A dict from the number of the slice or process to its devices, both in order.

    ```python
    assert sr.meshes.group_devices(jax.devices()) == {0: tuple(jax.devices())}
    ```
    """
    groups: dict[int, list[Any]] = {}
    for device, (_, number) in networks(sorted(devices, key=lambda device: device.id)).items():
        groups.setdefault(number, []).append(device)
    return {number: tuple(group) for number, group in sorted(groups.items())}


def surviving_mesh(mesh: Mesh, alive: Iterable[Any], axis: str, *, divides: int | None = None) -> Mesh:
    """Returns the largest mesh with the axes of another one on the devices that are alive. One axis gives way.

    Rows of the mesh (what lies at one place of the axis) that lost nothing stay where they are as long as there are as
    many rows. Whole rows are made of what is left of the others, inside one slice or process if possible.

    **Arguments:**

    - `mesh`: the mesh as it was. All its axes but one keep their sizes.
    - `alive`: the devices that can be used, spare ones among them.
    - `axis`: the axis that shrinks, or grows when devices come back.
    - `divides`: a number that its size has to divide, such as the batch size or a dimension that is split over it.

    **Returns:**

    A mesh, all of whose devices are alive.

    **Raises:**

    `MeshError` when not a single row can be made, or there is no such axis.

    ```python
    mesh = sr.create_mesh("data:4,model:2")
    alive = [device for device in jax.devices() if device.id != 5]
    assert dict(sr.meshes.surviving_mesh(mesh, alive, "data").shape) == {"data": 3, "model": 2}
    assert dict(sr.meshes.surviving_mesh(mesh, alive, "data", divides=64).shape) == {"data": 2, "model": 2}
    ```
    """
    if axis not in mesh.axis_names:
        raise MeshError(f"{axis!r} is no axis of {mesh_text(mesh)}{suggest(str(axis), mesh.axis_names)}")
    whole = None if divides is None else integer("divides", 1)(divides)
    living = _living(alive)
    dim = mesh.axis_names.index(axis)
    rows = [mesh.devices.take([place], axis=dim) for place in range(mesh.devices.shape[dim])]
    intact = [row for row in rows if all(device in living for device in row.flat)]
    used = {device for row in intact for device in row.flat}
    spare = [device for device in (*mesh.devices.flat, *sorted(living, key=lambda one: one.id)) if device in living]
    near, mixed = _rows([device for device in dict.fromkeys(spare) if device not in used], rows[0].size)
    possible = len(intact) + len(near) + len(mixed)
    sizes = [size for size in range(possible, 0, -1) if whole is None or whole % size == 0]
    if not sizes:
        others = {name: size for name, size in mesh_sizes(mesh).items() if name != axis}
        raise MeshError(
            f"{len(living)} devices are alive, and one row of {mesh_text(mesh)} takes {math.prod(others.values())} "
            f"({', '.join(f'{name}:{size}' for name, size in others.items()) or 'no other axis'})"
        )
    made = [np.array(row, dtype=object).reshape(rows[0].shape) for row in (*near, *mixed)]
    new = made[: max(0, sizes[0] - len(intact))]
    if len(new) > len(near):
        warnings.warn(
            f"surviving_mesh: {len(new) - len(near)} of {sizes[0]} rows of {axis!r} are made of devices of several "
            "slices or processes: what the other axes send goes over the slow network there",
            MeshWarning,
            stacklevel=2,
        )
    # Each row keeps its place, and a new one takes that of a broken one.
    left = iter(new)
    placed = [row if any(row is one for one in intact) else next(left, None) for row in rows]
    taken = [row for row in (*placed, *left) if row is not None][: sizes[0]]
    return Mesh(np.concatenate(taken, axis=dim), mesh.axis_names, axis_types=mesh.axis_types)


def _rows(devices: list[Any], count: int) -> tuple[list[list[Any]], list[list[Any]]]:
    """Rows of devices on one network, and then what can be made of those that are left over."""
    groups: dict[Any, list[Any]] = {}
    for device, network in networks(devices).items():
        groups.setdefault(network, []).append(device)
    near: list[list[Any]] = []
    rest: list[Any] = []
    for group in groups.values():
        full = len(group) // count
        near += [group[number * count : (number + 1) * count] for number in range(full)]
        rest += group[full * count :]
    return near, [rest[number * count : (number + 1) * count] for number in range(len(rest) // count)]


def scale_batch(batch_size: int, before: AnyMesh, after: AnyMesh, axis: Axis) -> int:
    """Returns the batch size that gives every device as much as before.

    **Arguments:**

    - `batch_size`: as it was.
    - `before`, `after`: the meshes.
    - `axis`: the mesh axis or axes that the batch is split over.

    **Returns:**

    The new batch size.

    **Raises:**

    `MeshError` when the batch was not split into equal parts, or a mesh lacks the axis.

    ```python
    before, after = sr.mesh_shape("data:8"), sr.mesh_shape("data:6")
    assert sr.meshes.scale_batch(512, before, after, "data") == 384
    ```
    """
    size = integer("batch_size", 1)(batch_size)
    names = axis_tuple(as_axis(axis))
    for mesh in (before, after):
        for name in names:
            if name not in mesh.axis_names:
                raise MeshError(f"{name!r} is no axis of {mesh_text(mesh)}{suggest(name, mesh.axis_names)}")
    old, new = (math.prod(mesh_sizes(mesh)[name] for name in names) for mesh in (before, after))
    if size % old:
        raise MeshError(
            f"a batch of {size} over {old} devices is {size / old:.2f} for each: it has no size for {new} devices that "
            f"keeps this. {size // old * old} and {(size // old + 1) * old} would have one"
        )
    return size // old * new


def recover(tree: Any, shardings: How, alive: Iterable[Any], *, max_bytes_in_flight: int | None = None) -> Any:
    """Moves arrays as `reshard` does, taking everything from devices that are alive.

    What was split over the lost devices alone is lost with them; what a living device holds, too, is not. So keep a
    second copy of the state, on an axis that nothing is split over (`"replica:2,data:4"`), or a recent checkpoint.

    **Arguments:**

    - `tree`: a pytree of arrays, on devices of which some may be lost.
    - `shardings`: where they go, as in `reshard`; all of its devices are alive.
    - `alive`: the devices that can be used.
    - `max_bytes_in_flight`: as in `reshard`.

    **Returns:**

    The tree on living devices. What lies there as it should is returned as it is.

    **Raises:**

    `PlanError`, listing every array of which a part is lost, with the part, and every one that is to go to a device
    that is not alive. Nothing has moved then.

    ```python
    mesh = sr.create_mesh("replica:2,data:4")
    x = sr.filter_shard(np.arange(64.0).reshape(8, 8), P("data"), mesh)
    alive = jax.devices()[:6]
    after = sr.meshes.surviving_mesh(mesh, alive, "replica")
    y = sr.recover({"w": x}, jax.NamedSharding(after, P("data")), alive)["w"]
    assert y.sharding.mesh.shape["replica"] == 1 and (np.asarray(y) == np.arange(64.0).reshape(8, 8)).all()
    ```
    """
    return moved(prepare(tree, shardings, max_bytes_in_flight=max_bytes_in_flight, alive=_living(alive), who="recover"))


def _living(alive: Iterable[Any]) -> tuple[Any, ...]:
    living = tuple(dict.fromkeys(alive))
    wrong = [repr(one) for one in living if isinstance(one, int | str)]
    if wrong:
        raise MeshError(f"alive is a list of devices, such as jax.devices()[:4]; got {', '.join(wrong[:3])}")
    return living
