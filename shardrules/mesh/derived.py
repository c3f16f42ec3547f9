"""Meshes made of another: the same devices under other axes, or a part of them. The mesh they come from stays as it is.

Axis types are kept. A mesh without devices gives one without devices.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardrules.core.axes import AnyMesh, mesh_text
from shardrules.core.errors import MeshError, UnknownAxisError, suggest
from shardrules.mesh.shape import integers

_M = TypeVar("_M", Mesh, AbstractMesh)


def fold_axes(mesh: _M, names: Sequence[str], into: str) -> _M:
    """Returns the mesh with several axes made one.

    **Arguments:**

    - `mesh`: a mesh.
    - `names`: the axes to fold, the most major first. They need not be neighbours.
    - `into`: the name of the new axis, which stands where the first of them stood.

    **Returns:**

    A mesh of the same devices.

    **Raises:**

    `UnknownAxisError` for an axis that is not there, `MeshError` when the axes are of different types or the name is
    taken.

    ```python
    mesh = sr.create_mesh("data:2,fsdp:2,model:2")
    assert dict(sr.meshes.fold_axes(mesh, ("data", "fsdp"), "batch").shape) == {"batch": 4, "model": 2}
    ```
    """
    folded = (names,) if isinstance(names, str) else tuple(names)
    _check_known(mesh, folded)
    if not folded or len(dict.fromkeys(folded)) < len(folded):
        raise MeshError(f"fold_axes folds one axis or more, each once; got {folded}")
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if len({types[name] for name in folded}) > 1:
        said = ", ".join(f"{name!r} is {types[name].name}" for name in folded)
        raise MeshError(f"fold_axes({mesh_text(mesh)}): {said}; only axes of one type make one axis")
    left = [name for name in mesh.axis_names if name not in folded]
    place = sum(name in left for name in mesh.axis_names[: mesh.axis_names.index(folded[0])])
    order = [*left[:place], *folded, *left[place:]]
    new = [*left[:place], into, *left[place:]]
    sizes = {**mesh.shape, into: math.prod(mesh.shape[name] for name in folded)}
    return _rebuilt(
        mesh, order, new, [sizes[name] for name in new], [{**types, into: types[folded[0]]}[name] for name in new]
    )


def split_axis(mesh: _M, name: str, into: Mapping[str, int]) -> _M:
    """Returns the mesh with one axis made several.

    **Arguments:**

    - `mesh`: a mesh.
    - `name`: the axis to split.
    - `into`: the name and the size of each new axis, the most major first; one size may be -1.

    **Returns:**

    A mesh of the same devices in the same order.

    **Raises:**

    `UnknownAxisError` for an axis that is not there, `MeshError` when the sizes do not multiply to that of the axis or
    a name is taken.

    ```python
    mesh = sr.meshes.split_axis(sr.create_mesh("data:8"), "data", {"replica": 2, "fsdp": -1})
    assert dict(mesh.shape) == {"replica": 2, "fsdp": 4}
    ```
    """
    _check_known(mesh, (name,))
    try:
        asked = dict(into)
    except (TypeError, ValueError):
        raise MeshError(f"split_axis takes the name and the size of each new axis, {{'x': 2}}; got {into!r}") from None
    parts = dict(zip(asked, integers(asked.values(), "the sizes of split_axis"), strict=True))
    whole = mesh.shape[name]
    known = math.prod(size for size in parts.values() if size != -1)
    open_parts = [part for part, size in parts.items() if size == -1]
    if len(open_parts) == 1 and known > 0:
        parts[open_parts[0]] = whole // known
    if not parts or min(parts.values()) < 1 or math.prod(parts.values()) != whole:
        said = ",".join(f"{part}:{size}" for part, size in asked.items())
        raise MeshError(f"split_axis({mesh_text(mesh)}): axis {name!r} of size {whole} is not {said or 'nothing'}")
    place = mesh.axis_names.index(name)
    new = [*mesh.axis_names[:place], *parts, *mesh.axis_names[place + 1 :]]
    old = list(mesh.shape.values())
    types = list(mesh.axis_types)
    return _rebuilt(
        mesh,
        list(mesh.axis_names),
        new,
        [*old[:place], *parts.values(), *old[place + 1 :]],
        [*types[:place], *[types[place]] * len(parts), *types[place + 1 :]],
    )


def rename_axes(mesh: _M, names: Mapping[str, str]) -> _M:
    """Returns the mesh with other names for some axes.

    **Arguments:**

    - `mesh`: a mesh.
    - `names`: from the old name to the new one. Axes may swap names.

    **Returns:**

    A mesh of the same devices in the same order.

    **Raises:**

    `UnknownAxisError` for an axis that is not there, `MeshError` when two axes would have one name.

    ```python
    mesh = sr.meshes.rename_axes(sr.create_mesh("data:4,model:2"), {"data": "dp", "model": "tp"})
    assert mesh.axis_names == ("dp", "tp")
    ```
    """
    _check_known(mesh, tuple(names))
    new = [names.get(name, name) for name in mesh.axis_names]
    return _rebuilt(mesh, list(mesh.axis_names), new, list(mesh.shape.values()), list(mesh.axis_types))


def submesh(mesh: Mesh, devices: Iterable[Any]) -> Mesh:
    """Returns the part of a mesh that consists of exactly these devices.

    **Arguments:**

    - `mesh`: a mesh of devices.
    - `devices`: some of its devices, in any order, such as `mesh.devices[:2]`. On every axis they must take the same
        places everywhere: a box, though not one without gaps.

    **Returns:**

    A mesh with the same axes, shorter ones among them, and the devices in the order of `mesh`.

    **Raises:**

    `MeshError` when a device is not of the mesh, or they are not such a part of it.

    ```python
    mesh = sr.create_mesh("data:4,model:2")
    assert dict(sr.meshes.submesh(mesh, mesh.devices[:, :1].flat).shape) == {"data": 4, "model": 1}
    ```
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(f"submesh({mesh_text(mesh)}): a mesh without devices has no part that consists of devices")
    if not isinstance(devices, Iterable):
        raise MeshError(f"submesh({mesh_text(mesh)}): devices is a list of devices, got {devices!r}")
    asked = list(dict.fromkeys(np.asarray(list(devices), dtype=object).flat))
    place_of = {device: place for place, device in np.ndenumerate(mesh.devices)}
    strange = [device for device in asked if device not in place_of]
    if strange or not asked:
        which = f"{strange[0]} is none of its devices" if strange else "no devices were given"
        raise MeshError(f"submesh({mesh_text(mesh)}): {which}")
    places = [place_of[device] for device in asked]
    taken = [sorted(dict.fromkeys(place[dim] for place in places)) for dim in range(mesh.devices.ndim)]
    if math.prod(map(len, taken)) != len(asked):
        box = " x ".join(f"{name} {rows}" for name, rows in zip(mesh.axis_names, taken, strict=True))
        raise MeshError(
            f"submesh({mesh_text(mesh)}): {len(asked)} devices are not a mesh: they stand at {box}, which is "
            f"{math.prod(map(len, taken))} places"
        )
    return Mesh(mesh.devices[np.ix_(*taken)], mesh.axis_names, axis_types=mesh.axis_types)


def _check_known(mesh: AnyMesh, names: Sequence[str]) -> None:
    for name in names:
        if name not in mesh.axis_names:
            raise UnknownAxisError(f"mesh {mesh_text(mesh)} has no axis {name!r}{suggest(name, mesh.axis_names)}")


def _rebuilt(
    mesh: _M, order: Sequence[str], names: Sequence[str], sizes: Sequence[int], types: Sequence[AxisType]
) -> _M:
    """The mesh with its axes put in `order` and then cut into `names` and `sizes`."""
    for name in names:
        if not isinstance(name, str) or not name or list(names).count(name) > 1:
            raise MeshError(
                f"mesh {mesh_text(mesh)}: its axes cannot be called {', '.join(map(repr, names))}: {name!r} is taken"
            )
    if isinstance(mesh, AbstractMesh):
        # With `update` it stays known of what devices the mesh is.
        return mesh.update(axis_sizes=tuple(sizes), axis_names=tuple(names), axis_types=tuple(types))
    devices = mesh.devices.transpose([mesh.axis_names.index(name) for name in order]).reshape(tuple(sizes))
    return Mesh(devices, tuple(names), axis_types=tuple(types))
