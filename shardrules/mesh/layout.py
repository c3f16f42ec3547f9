"""The position of each device in a mesh: arithmetic on descriptions, so that a pod can be planned without one.

Devices that a fast network joins form a granule: a slice if there are several slices, else a process. Every axis of the
mesh is a product of an outer part, which goes from granule to granule over the slow network, and an inner part, which
stays inside one. The outer parts multiply to the number of granules, the inner ones to the devices of a granule.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias, final

import attrs
import numpy as np
from jax.experimental import mesh_utils

from shardrules.core.errors import MeshError
from shardrules.mesh.shape import integers, resolve_sizes

Granule: TypeAlias = Literal["slice", "process"]
"""Devices that a fast network joins."""


@final
@attrs.frozen
class DeviceInfo:
    """The properties of a device on which the layout of a mesh depends. The fields are named as in `jax.Device`.

    `coords` is the position in the torus of a slice: only TPUs have one, and the coordinates of GPUs are ignored.
    """

    id: int
    process_index: int = 0
    slice_index: int | None = None
    coords: tuple[int, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(tuple))
    core_on_chip: int = 0
    platform: str = "cpu"  # as JAX names it: "tpu"
    device_kind: str = "cpu"  # "TPU v4"

    def __attrs_post_init__(self) -> None:
        if self.platform == "tpu" and self.coords is None:
            raise MeshError(f"device {self.id} is a TPU without coords, but every TPU has a position in its torus")

    @classmethod
    def of(cls, device: Any) -> "DeviceInfo":
        """Returns the description of a `jax.Device`."""
        # Only TPUs have all of these attributes.
        values = {field.name: getattr(device, field.name, field.default) for field in attrs.fields(cls)}
        if not isinstance(values["id"], int):
            raise MeshError(f"a mesh needs devices, got {device!r}; jax.devices() lists them")
        return cls(**values)


@final
@attrs.frozen(eq=False)
class Layout:
    """The position of every device of a mesh.

    `ids` has the shape of the mesh. `outer` is how many granules each axis spans (the most, if lines along it differ).
    `granule` is what the slow network joins, `None` for a single granule.
    """

    ids: np.ndarray
    outer: tuple[int, ...]
    granule: Granule | None


def outer_shapes(shape: Sequence[int], granules: int) -> Iterator[tuple[int, ...]]:
    """Yields every way to spread a number of granules over the axes of a mesh, those with most on the first axes first.

    ```python
    from shardrules.mesh.layout import outer_shapes

    assert list(outer_shapes((4, 6), 6)) == [(2, 3), (1, 6)]
    ```
    """
    if not shape:
        if granules == 1:
            yield ()
        return
    # The share of an axis divides its size and the number of granules, hence their greatest common divisor.
    shared = math.gcd(shape[0], granules)
    for first in range(shared, 0, -1):
        if shared % first == 0:
            for rest in outer_shapes(shape[1:], granules // first):
                yield (first, *rest)


def lay_out(
    shape: Sequence[int],
    names: Sequence[str],
    devices: Sequence[Any],
    *,
    dcn_mesh_dims: Sequence[int] | None = None,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = True,
) -> Layout:
    """Returns the position of each device in a mesh of exactly this shape. Options are as in `create_mesh`.

    `devices` are descriptions, or devices of JAX. Processes with different numbers of devices are laid out one after
    the other. The error for impossible `dcn_mesh_dims` lists the possible ones.

    ```python
    two_slices = [sr.meshes.DeviceInfo(i, slice_index=i // 4) for i in range(8)]
    assert sr.meshes.lay_out((4, 2), ("data", "model"), two_slices).outer == (2, 1)
    ```
    """
    infos = [DeviceInfo.of(device) for device in devices]
    shape = resolve_sizes(shape, names, len(infos), source="devices")
    label = ",".join(f"{name}:{size}" for name, size in zip(names, shape, strict=True))
    requested = None if dcn_mesh_dims is None else integers(dcn_mesh_dims, "dcn_mesh_dims")
    kind, granules = _granules(infos, requested, should_sort_granules_by_key)
    sizes = [len(granule) for granule in granules]
    if len(dict.fromkeys(sizes)) > 1:
        # Hosts that lost a device, or a part of the devices: no axis can be a product, but their order still keeps
        # most neighbours on one host.
        if kind == "process" and requested is None:
            return layout_of([info for granule in granules for info in granule], shape)
        raise MeshError(
            f"mesh {label}: the {_plural(kind)} hold {', '.join(map(str, sizes))} devices, but a layout needs equally "
            f"many of each. Pass devices= with equally many of each, or place each device: "
            f"devices=np.array(devices).reshape{shape}"
        )
    outer = _outer(shape, label, kind, len(granules), requested)
    inner = tuple(size // part for size, part in zip(shape, outer, strict=True))
    # The mesh is a grid of granules, and inside each of them a grid of devices.
    blocks = np.empty(len(granules), object)
    for index, granule in enumerate(granules):
        blocks[index] = _granule_ids(inner, label, granule, allow_split_physical_axes)
    ids = np.block(blocks.reshape(outer).tolist())
    return Layout(ids, outer, kind if len(granules) > 1 else None)


def layout_of(devices: Sequence[DeviceInfo], shape: tuple[int, ...]) -> Layout:
    """Returns the layout of devices that fill a mesh of this shape row by row."""
    kind, granules = _granules(devices, None, ordered=True)
    granule_of = {device.id: index for index, granule in enumerate(granules) for device in granule}
    ids = np.array([device.id for device in devices]).reshape(shape)
    granule_indices = np.array([granule_of[device.id] for device in devices]).reshape(shape)
    lines = [np.moveaxis(granule_indices, dim, -1).reshape(-1, size) for dim, size in enumerate(shape)]
    # Devices that a user placed may cross granules on some lines only; one slow line is enough to slow down the axis.
    outer = tuple(max(len(dict.fromkeys(line)) for line in along.tolist()) for along in lines)
    return Layout(ids, outer, kind if len(granules) > 1 else None)


def _plural(kind: Granule) -> str:
    return "slices" if kind == "slice" else "processes"


def _granules(
    devices: Sequence[DeviceInfo], dcn_mesh_dims: Sequence[int] | None, ordered: bool
) -> tuple[Granule, list[list[DeviceInfo]]]:
    slices = [-1 if device.slice_index is None else device.slice_index for device in devices]
    if len(dict.fromkeys(slices)) > 1:
        return "slice", _grouped(devices, slices, ordered)
    # The processes of one torus are joined by it, and it is the torus that a layout has to follow.
    torus = all(device.platform == "tpu" for device in devices)
    split_by_process = dcn_mesh_dims is not None and any(part != 1 for part in dcn_mesh_dims)
    if torus and not split_by_process:
        return "process", [list(devices)]
    return "process", _grouped(devices, [device.process_index for device in devices], ordered)


def _grouped(devices: Sequence[DeviceInfo], keys: Sequence[int], ordered: bool) -> list[list[DeviceInfo]]:
    groups: dict[int, list[DeviceInfo]] = {}
    for device, key in zip(devices, keys, strict=True):
        groups.setdefault(key, []).append(device)
    return [groups[index] for index in (sorted(groups) if ordered else groups)]


def _outer(
    shape: tuple[int, ...], label: str, kind: Granule, count: int, requested: tuple[int, ...] | None
) -> tuple[int, ...]:
    """The number of granules that each axis spans."""
    if requested is not None:
        return _requested_outer(shape, label, kind, count, requested)
    # All slices on one axis, if possible: then the other axes never use the slow network.
    dims = [dim for dim, size in enumerate(shape) if size % count == 0] if kind == "slice" else []
    if dims:
        return tuple(count if dim == dims[0] else 1 for dim in range(len(shape)))
    # It exists: granules of equal size times their number is the size of the mesh, so every prime finds an axis.
    return next(outer_shapes(shape, count))


def _requested_outer(
    shape: tuple[int, ...], label: str, kind: Granule, count: int, requested: tuple[int, ...]
) -> tuple[int, ...]:
    """`dcn_mesh_dims`, its -1 filled in, after checking that a mesh can be built with it."""
    # Eight examples fit a message; the ninth only says that there are more.
    first = list(itertools.islice(outer_shapes(shape, count), 9))
    which = "these and others" if len(first) > 8 else "these"
    works = ", ".join(map(str, first[:8]))
    remedy = f"On mesh {label} over {count} {_plural(kind) if count > 1 else kind} {which} work: {works}"
    too_small = [part for part in requested if part != -1 and part < 1]
    if len(requested) != len(shape):
        raise MeshError(f"dcn_mesh_dims needs one entry for each of the {len(shape)} axes; got {requested}. {remedy}")
    if too_small:
        raise MeshError(f"dcn_mesh_dims entries must be > 0 or -1, got {too_small[0]} in {requested}. {remedy}")
    if requested.count(-1) > 1:
        raise MeshError(f"Only one -1 is supported in dcn_mesh_dims. Got {requested}. {remedy}")
    product = math.prod(part for part in requested if part != -1)
    # The remainder of this division is not lost: the product of the filled sizes differs from the count.
    filled = tuple(count // product if part == -1 else part for part in requested)
    if math.prod(filled) != count:
        raise MeshError(f"dcn_mesh_dims product {product} must equal {count}; got {requested}. {remedy}")
    if any(size % part for size, part in zip(shape, filled, strict=True)):
        raise MeshError(f"dcn_mesh_dims {filled} do not divide the axes of mesh {label}. {remedy}")
    return filled


def _granule_ids(shape: tuple[int, ...], label: str, devices: list[DeviceInfo], split: bool) -> np.ndarray:
    """The ids of one granule's devices, laid along its torus where it has one."""
    # Each of these errors of JAX means that the shape does not fit the torus.
    try:
        placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=split)
    except (NotImplementedError, ValueError, AssertionError) as error:
        hint = "" if split else " allow_split_physical_axes=True lets one axis of the torus serve several of the mesh."
        reason = str(error).rstrip(".")
        raise MeshError(f"mesh {label}: its devices cannot be laid out as {shape}: {reason}.{hint}") from error
    return np.array([device.id for device in placed.flat]).reshape(shape)
