"""Meshes derived from another: the same devices under other axes, or a part of them. The original does not change.

Axis types are kept. A mesh without devices gives one without devices.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardrules.core.axes import mesh_text
from shardrules.core.errors import MeshError
from shardrules.mesh.axes import check_axes
from shardrules.mesh.shape import integers

_M = TypeVar("_M", Mesh, AbstractMesh)


def fold_axes(mesh: _M, names: Sequence[str], into: str) -> _M:
    """Returns the mesh with several axes merged into one, which takes the position of the first of them.

    The first of `names` becomes the most major. They need not be neighbours, but must be of one axis type.

    ```python
    mesh = sr.create_mesh("data:2,fsdp:2,model:2")
    assert dict(sr.meshes.fold_axes(mesh, ("data", "fsdp"), "batch").shape) == {"batch": 4, "model": 2}
    ```
    """
    folded = (names,) if isinstance(names, str) else tuple(names)
    check_axes(mesh, folded)
    if not folded or len(dict.fromkeys(folded)) < len(folded):
        raise MeshError(f"fold_axes needs at least one axis, and each only once; got {folded}")
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if len({types[name] for name in folded}) > 1:
        listing = ", ".join(f"{name!r} is {types[name].name}" for name in folded)
        raise MeshError(f"fold_axes({mesh_text(mesh)}): {listing}; only axes of the same type can be folded")
    rest = [name for name in mesh.axis_names if name not in folded]
    position = sum(name in rest for name in mesh.axis_names[: mesh.axis_names.index(folded[0])])
    # The folded axes must be neighbours for the reshape; that moves them to the position of the first.
    order = [*rest[:position], *folded, *rest[position:]]
    new_names = [*rest[:position], into, *rest[position:]]
    sizes = {**mesh.shape, into: math.prod(mesh.shape[name] for name in folded)}
    types[into] = types[folded[0]]
    return _rebuild(mesh, order, new_names, [sizes[name] for name in new_names], [types[name] for name in new_names])


def split_axis(mesh: _M, name: str, into: Mapping[str, int]) -> _M:
    """Returns the mesh with one axis split into several: name and size of each, the most major first; one may be -1.

    ```python
    mesh = sr.meshes.split_axis(sr.create_mesh("data:8"), "data", {"replica": 2, "fsdp": -1})
    assert dict(mesh.shape) == {"replica": 2, "fsdp": 4}
    ```
    """
    check_axes(mesh, (name,))
    try:
        requested = dict(into)
    except (TypeError, ValueError):
        raise MeshError(f"split_axis takes the name and the size of each new axis, {{'x': 2}}; got {into!r}") from None
    sizes = dict(zip(requested, integers(requested.values(), "the sizes of split_axis"), strict=True))
    whole = mesh.shape[name]
    product = math.prod(size for size in sizes.values() if size != -1)
    # Two open sizes stay -1 and are refused below, like every size that does not fit.
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) == 1 and product > 0:
        sizes[open_axes[0]] = whole // product
    if not sizes or min(sizes.values()) < 1 or math.prod(sizes.values()) != whole:
        listing = ",".join(f"{axis}:{size}" for axis, size in requested.items()) or "no axes"
        raise MeshError(f"split_axis({mesh_text(mesh)}): axis {name!r} of size {whole} cannot be split into {listing}")
    index = mesh.axis_names.index(name)
    names, old_sizes, types = list(mesh.axis_names), list(mesh.shape.values()), list(mesh.axis_types)
    return _rebuild(
        mesh,
        names,
        [*names[:index], *sizes, *names[index + 1 :]],
        [*old_sizes[:index], *sizes.values(), *old_sizes[index + 1 :]],
        [*types[:index], *[types[index]] * len(sizes), *types[index + 1 :]],
    )


def rename_axes(mesh: _M, names: Mapping[str, str]) -> _M:
    """Returns the mesh with new names for some axes, from the old name to the new one. Axes may swap names.

    ```python
    mesh = sr.meshes.rename_axes(sr.create_mesh("data:4,model:2"), {"data": "dp", "model": "tp"})
    assert mesh.axis_names == ("dp", "tp")
    ```
    """
    check_axes(mesh, tuple(names))
    new_names = [names.get(name, name) for name in mesh.axis_names]
    return _rebuild(mesh, list(mesh.axis_names), new_names, list(mesh.shape.values()), list(mesh.axis_types))


def submesh(mesh: Mesh, devices: Iterable[Any]) -> Mesh:
    """Returns the mesh of exactly these devices of `mesh`, in its order, with the same axes.

    The devices must form a box: every combination of their coordinates along the axes. The box may have gaps.

    ```python
    mesh = sr.create_mesh("data:4,model:2")
    assert dict(sr.meshes.submesh(mesh, mesh.devices[:, :1].flat).shape) == {"data": 4, "model": 1}
    ```
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(f"submesh({mesh_text(mesh)}): a mesh without devices has no submesh")
    if not isinstance(devices, Iterable):
        raise MeshError(f"submesh({mesh_text(mesh)}): devices must be a list of devices, got {devices!r}")
    requested = list(dict.fromkeys(np.asarray(list(devices), dtype=object).flat))
    coordinates_of = {device: coordinates for coordinates, device in np.ndenumerate(mesh.devices)}
    foreign = [device for device in requested if device not in coordinates_of]
    if foreign or not requested:
        reason = f"{foreign[0]} is not one of its devices" if foreign else "devices is empty"
        raise MeshError(f"submesh({mesh_text(mesh)}): {reason}")
    coordinates = [coordinates_of[device] for device in requested]
    along = [sorted(dict.fromkeys(position[dim] for position in coordinates)) for dim in range(mesh.devices.ndim)]
    # Every device is in the box that the coordinates span: they are the whole box if they are as many.
    if math.prod(map(len, along)) != len(requested):
        box = " x ".join(f"{name} {positions}" for name, positions in zip(mesh.axis_names, along, strict=True))
        raise MeshError(
            f"submesh({mesh_text(mesh)}): {len(requested)} devices do not form a mesh: they span {box}, which is "
            f"{math.prod(map(len, along))} positions"
        )
    return Mesh(mesh.devices[np.ix_(*along)], mesh.axis_names, axis_types=mesh.axis_types)


def _rebuild(
    mesh: _M, order: Sequence[str], names: Sequence[str], sizes: Sequence[int], types: Sequence[AxisType]
) -> _M:
    """The mesh with its axes put in `order` and then cut into `names` and `sizes`."""
    for name in names:
        if not isinstance(name, str) or not name or list(names).count(name) > 1:
            raise MeshError(
                f"mesh {mesh_text(mesh)}: invalid axis names {', '.join(map(repr, names))}: {name!r} is not a "
                "non-empty string, or occurs twice"
            )
    if isinstance(mesh, AbstractMesh):
        # `update` keeps the device kind that the mesh is for, which the constructor would lose.
        return mesh.update(axis_sizes=tuple(sizes), axis_names=tuple(names), axis_types=tuple(types))
    devices = mesh.devices.transpose([mesh.axis_names.index(name) for name in order]).reshape(tuple(sizes))
    return Mesh(devices, tuple(names), axis_types=tuple(types))
