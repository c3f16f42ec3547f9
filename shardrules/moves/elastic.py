"""Training after devices are lost, or come back: another mesh, another batch size, and the state moved to it.

The caller passes in which devices are alive. How to find that out differs from platform to platform; what follows from
it does not.
"""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from shardrules.core.axes import AnyMesh, Axis, as_axis, axis_tuple, mesh_sizes, mesh_text
from shardrules.core.errors import ConfigTypeError, MeshError, MeshWarning, suggest
from shardrules.core.fields import integer
from shardrules.moves.move import move_tree
from shardrules.moves.prepare import MoveOptions, prepare
from shardrules.moves.schedule import networks
from shardrules.rules.how import How


def group_devices(devices: Iterable[Any]) -> dict[int, tuple[Any, ...]]:
    """Returns devices by what fails together: by slice where there are several, else by process.

    ```python
    assert sr.meshes.group_devices(jax.devices()) == {0: tuple(jax.devices())}
    ```
    """
    groups: dict[int, list[Any]] = {}
    for device, (_, index) in networks(sorted(devices, key=lambda device: device.id)).items():
        groups.setdefault(index, []).append(device)
    return {index: tuple(group) for index, group in sorted(groups.items())}


def surviving_mesh(mesh: Mesh, alive: Iterable[Any], axis: str, *, divides: int | None = None) -> Mesh:
    """Returns the largest mesh with the axes of `mesh` on the devices in `alive`, spare ones included. Only the size of
    `axis` changes; if `divides` is set, such as to the batch size, the new size divides it.

    Rows of the mesh (the devices at one index of the axis) that lost nothing stay in place as long as there are as many
    rows. Whole rows are made of what is left of the others, inside one slice or process if possible. `MeshError` if not
    a single row can be made, or `axis` is unknown.

    ```python
    mesh = sr.create_mesh("data:4,model:2")
    alive = [device for device in jax.devices() if device.id != 5]
    assert dict(sr.meshes.surviving_mesh(mesh, alive, "data").shape) == {"data": 3, "model": 2}
    assert dict(sr.meshes.surviving_mesh(mesh, alive, "data", divides=64).shape) == {"data": 2, "model": 2}
    ```
    """
    if axis not in mesh.axis_names:
        raise _unknown_axis(axis, mesh)
    multiple = None if divides is None else integer("divides", 1)(divides)
    living = _check_devices(alive)
    dim = mesh.axis_names.index(axis)
    rows = [mesh.devices.take([index], axis=dim) for index in range(mesh.devices.shape[dim])]
    intact = [row for row in rows if all(device in living for device in row.flat)]
    used = {device for row in intact for device in row.flat}
    # Devices of broken rows first, in the order of the mesh, then spare ones.
    candidates = [*mesh.devices.flat, *sorted(living, key=lambda device: device.id)]
    spare = [device for device in dict.fromkeys(candidates) if device in living and device not in used]
    # Rows of neighbours come first: mixed ones are made only of what is left.
    near, mixed = _new_rows(spare, rows[0].size)
    possible = len(intact) + len(near) + len(mixed)
    # The largest size that fits, and divides what it must.
    size = next((size for size in range(possible, 0, -1) if multiple is None or multiple % size == 0), None)
    if size is None:
        others = {name: length for name, length in mesh_sizes(mesh).items() if name != axis}
        raise MeshError(
            f"{len(living)} devices are alive, but one row of {mesh_text(mesh)} takes {math.prod(others.values())} "
            f"({', '.join(f'{name}:{length}' for name, length in others.items()) or 'no other axis'})"
        )
    new = [np.array(row, dtype=object).reshape(rows[0].shape) for row in (*near, *mixed)]
    new = new[: max(0, size - len(intact))]
    if len(new) > len(near):
        warnings.warn(
            f"surviving_mesh: {len(new) - len(near)} of {size} rows of {axis!r} mix devices of several slices or "
            "processes: there the collectives of the other axes use the slow network",
            MeshWarning,
            stacklevel=2,
        )
    # Each intact row keeps its index, and each new one takes the index of a broken one.
    unused = iter(new)
    slots = [row if any(row is other for other in intact) else next(unused, None) for row in rows]
    chosen = [row for row in (*slots, *unused) if row is not None][:size]
    return Mesh(np.concatenate(chosen, axis=dim), mesh.axis_names, axis_types=mesh.axis_types)


def _unknown_axis(name: str, mesh: AnyMesh) -> MeshError:
    return MeshError(f"unknown axis {name!r}; the mesh is {mesh_text(mesh)}{suggest(str(name), mesh.axis_names)}")


def _new_rows(devices: list[Any], size: int) -> tuple[list[list[Any]], list[list[Any]]]:
    """Rows of devices on one network, and rows of what is left over on several."""
    groups: dict[Any, list[Any]] = {}
    for device, network in networks(devices).items():
        groups.setdefault(network, []).append(device)
    near: list[list[Any]] = []
    rest: list[Any] = []
    for group in groups.values():
        full = len(group) // size
        near += [group[row * size : (row + 1) * size] for row in range(full)]
        rest += group[full * size :]
    return near, [rest[row * size : (row + 1) * size] for row in range(len(rest) // size)]


def scale_batch(batch_size: int, before: AnyMesh, after: AnyMesh, axis: Axis) -> int:
    """Returns the batch size with which every device gets as much on mesh `after` as on `before`, if the batch is split
    over `axis`, one axis or several. `MeshError` if it was not split into equal parts, or a mesh lacks the axis.

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
                raise _unknown_axis(name, mesh)
    old, new = (math.prod(mesh_sizes(mesh)[name] for name in names) for mesh in (before, after))
    if size % old:
        nearest = [count * old for count in (size // old, size // old + 1) if count]
        raise MeshError(
            f"a batch of {size} over {old} devices is {size / old:.2f} for each, which no batch over {new} devices "
            f"matches; start from {' or '.join(map(str, nearest))}"
        )
    return size // old * new


def recover(tree: Any, shardings: How, alive: Iterable[Any], *, max_bytes_in_flight: int | None = None) -> Any:
    """Moves arrays as `reshard` does, reading only from devices that are alive.

    Parts that only lost devices held are lost with them; parts that a living device holds too are not. So keep a second
    copy of the state, on an axis that splits nothing (`"replica:2,data:4"`), or a recent checkpoint.

    **Arguments:**

    - `tree`: a pytree of arrays; some of their devices may be lost.
    - `shardings`: where they go, as in `reshard`; all of its devices are alive.
    - `alive`: the devices that can be used.
    - `max_bytes_in_flight`: as in `reshard`.

    **Returns:**

    The tree on living devices. An array that is already in place is returned as it is.

    **Raises:**

    `PlanError`, listing every array that lost a part, with the part, and every array whose new sharding has a device
    that is not alive. Then nothing has moved.

    ```python
    mesh = sr.create_mesh("replica:2,data:4")
    x = sr.filter_shard(np.arange(64.0).reshape(8, 8), P("data"), mesh)
    alive = jax.devices()[:6]
    after = sr.meshes.surviving_mesh(mesh, alive, "replica")
    y = sr.recover({"w": x}, jax.NamedSharding(after, P("data")), alive)["w"]
    assert y.sharding.mesh.shape["replica"] == 1 and (np.asarray(y) == np.arange(64.0).reshape(8, 8)).all()
    ```
    """
    options = MoveOptions(max_bytes_in_flight=max_bytes_in_flight)
    return move_tree(prepare(tree, shardings, options, alive=_check_devices(alive), caller="recover"))


def _check_devices(alive: Iterable[Any]) -> tuple[Any, ...]:
    devices = tuple(dict.fromkeys(alive))
    wrong = [repr(device) for device in devices if isinstance(device, int | str)]
    if wrong:
        raise ConfigTypeError(f"alive must be a list of devices, such as jax.devices()[:4]; got {', '.join(wrong[:3])}")
    return devices
