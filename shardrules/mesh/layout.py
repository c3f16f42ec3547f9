"""Which device stands where in a mesh: arithmetic on descriptions of devices, so that a pod is planned without one.

Devices that a fast network joins form a granule: a slice where there are several, else a process. Every axis of the
mesh is a product of an outer part, which goes from granule to granule over the slow network, and an inner part, which
stays inside one. The outer parts multiply to the number of granules, the inner ones to the devices of a granule.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, final

import attrs
import numpy as np
from jax.experimental import mesh_utils

from shardrules.core.errors import MeshError
from shardrules.mesh.shape import integers, resolve_sizes

Granule: TypeAlias = Literal["slice", "process"]
"""What the devices behind one fast network are called."""


@final
@attrs.frozen
class DeviceInfo:
    """What the layout of a mesh reads of a device.

    **Arguments:**

    - `id`: the number of the device, unique in the whole job.
    - `process_index`: the process that holds it.
    - `slice_index`: the slice it is in, or `None` where devices know of no slices.
    - `coords`: where it stands in the torus of its slice. Only TPUs have one: what GPUs say here is not read.
    - `core_on_chip`: which core of its chip it is.
    - `platform`, `device_kind`: as JAX names them, `"tpu"` and `"TPU v4"`.

    ```python
    assert sr.meshes.DeviceInfo.of(jax.devices()[3]).id == 3
    ```
    """

    id: int
    process_index: int = 0
    slice_index: int | None = None
    coords: tuple[int, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(tuple))
    core_on_chip: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"

    def __attrs_post_init__(self) -> None:
        if self.platform == "tpu" and self.coords is None:
            raise MeshError(f"device {self.id} is a TPU without coords: every TPU stands somewhere in its torus")

    @classmethod
    def of(cls, device: Any) -> "DeviceInfo":
        """Returns the description of a device of JAX.

        **Arguments:**

        - `device`: a `jax.Device`.

        **Returns:**

        A `DeviceInfo`.

        **Raises:**

        `MeshError` for what is no device.
        """
        read = {
            field.name: getattr(device, field.name, field.default) for field in attrs.fields(cls)
        }  # not all have all
        if not isinstance(read["id"], int):
            raise MeshError(f"a mesh is made of devices, got {device!r}: jax.devices() lists them")
        return cls(**read)


@final
@attrs.frozen(eq=False)
class Layout:
    """Where every device of a mesh stands.

    **Arguments:**

    - `ids`: the id of the device at each place; its shape is that of the mesh.
    - `outer`: for each axis, how many granules it spans; where lines of it differ, the most.
    - `granule`: what the slow network joins; `None` when there is one granule only.
    """

    ids: np.ndarray
    outer: tuple[int, ...]
    granule: Granule | None


def outer_shapes(shape: Sequence[int], granules: int) -> Iterator[tuple[int, ...]]:
    """Yields every way to spread a number of granules over the axes of a mesh, the first axes taking most first.

    **Arguments:**

    - `shape`: the sizes of the axes.
    - `granules`: how many there are.

    **Returns:**

    Tuples with one entry for each axis: it divides the axis, and together they multiply to `granules`.

    ```python
    assert list(outer_shapes((4, 6), 6)) == [(2, 3), (1, 6)]
    ```
    """
    if not shape:
        if granules == 1:
            yield ()
        return
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
    """Returns where each device stands in a mesh of exactly this shape.

    **Arguments:**

    - `shape`, `names`: the sizes and the names of the axes.
    - `devices`: as many as the sizes multiply to; descriptions, or devices of JAX.
    - `dcn_mesh_dims`: how many granules each axis spans; one of them may be -1. By default the slices go to the first
        axis that they divide, and are split over several where they divide none. Processes fill the axes from the first
        one on: each takes as many of them as it can, and the next one what is left. Where processes hold different
        numbers of devices, these are taken in their order.
    - `should_sort_granules_by_key`: take granules by number, rather than in the order in which they appear.
    - `allow_split_physical_axes`: one axis of a torus may serve several axes of the mesh.

    **Returns:**

    A `Layout`.

    **Raises:**

    `MeshError` when there is no such layout; it names the layouts that there are.

    ```python
    two_slices = [DeviceInfo(i, slice_index=i // 4) for i in range(8)]
    assert lay_out((4, 2), ("data", "model"), two_slices).outer == (2, 1)
    ```
    """
    infos = [DeviceInfo.of(device) for device in devices]
    shape = resolve_sizes(shape, names, len(infos), source="devices")
    label = ",".join(f"{name}:{size}" for name, size in zip(names, shape, strict=True))
    asked = None if dcn_mesh_dims is None else integers(dcn_mesh_dims, "dcn_mesh_dims")
    kind, granules = _granules(infos, asked, should_sort_granules_by_key)
    sizes = [len(granule) for granule in granules]
    if len(dict.fromkeys(sizes)) > 1:
        if kind == "process" and asked is None:
            joined = np.empty(len(infos), object)
            joined[:] = [info for granule in granules for info in granule]
            return layout_of(joined.reshape(shape))
        raise MeshError(
            f"mesh {label}: the {_plural(kind)} hold {', '.join(map(str, sizes))} devices, and a mesh that is laid out "
            "for them needs as many of each. Pass devices= with as many of each, or say where each one goes: "
            f"devices=np.array(devices).reshape{shape}"
        )
    outer = _outer(shape, label, kind, len(granules), asked)
    inner = tuple(size // part for size, part in zip(shape, outer, strict=True))
    blocks = np.empty(len(granules), object)
    for place, granule in enumerate(granules):
        blocks[place] = _inside(inner, label, granule, allow_split_physical_axes)
    ids = np.block(blocks.reshape(outer).tolist())
    return Layout(ids, outer, kind if len(granules) > 1 else None)


def layout_of(placed: np.ndarray) -> Layout:
    """Returns the layout of devices that stand in the mesh already.

    **Arguments:**

    - `placed`: an array of `DeviceInfo`, in the shape of the mesh.

    **Returns:**

    A `Layout`.

    ```python
    pod = np.array([DeviceInfo(number, slice_index=number % 2) for number in range(8)], object)
    assert layout_of(pod.reshape(4, 2)).outer == (1, 2)
    ```
    """
    kind, granules = _granules(placed.ravel().tolist(), None, ordered=True)
    place_of = {device.id: place for place, granule in enumerate(granules) for device in granule}
    ids = np.vectorize(lambda device: device.id, otypes=[int])(placed)
    stands = np.vectorize(place_of.__getitem__, otypes=[int])(ids)
    lines = [np.moveaxis(stands, dim, -1).reshape(-1, size) for dim, size in enumerate(placed.shape)]
    outer = tuple(max(len(dict.fromkeys(line)) for line in along.tolist()) for along in lines)
    return Layout(ids, outer, kind if len(granules) > 1 else None)


def _plural(kind: Granule) -> str:
    return "slices" if kind == "slice" else "processes"


def _granules(
    devices: Sequence[DeviceInfo], dcn_mesh_dims: Sequence[int] | None, ordered: bool
) -> tuple[Granule, list[list[DeviceInfo]]]:
    by_slice = _grouped(devices, lambda device: -1 if device.slice_index is None else device.slice_index, ordered)
    if len(by_slice) > 1:
        return "slice", by_slice
    # The processes of one torus are joined by it, and it is the torus that a layout has to follow.
    torus = all(device.platform == "tpu" for device in devices)
    wanted = dcn_mesh_dims is not None and any(part != 1 for part in dcn_mesh_dims)
    if torus and not wanted:
        return "process", [list(devices)]
    return "process", _grouped(devices, lambda device: device.process_index, ordered)


def _grouped(devices: Sequence[DeviceInfo], key: Callable[[DeviceInfo], int], ordered: bool) -> list[list[DeviceInfo]]:
    groups: dict[int, list[DeviceInfo]] = {}
    for device in devices:
        groups.setdefault(key(device), []).append(device)
    return [groups[number] for number in (sorted(groups) if ordered else groups)]


def _outer(
    shape: tuple[int, ...], label: str, kind: Granule, count: int, asked: tuple[int, ...] | None
) -> tuple[int, ...]:
    """How many granules each axis spans."""
    if asked is not None:
        return _asked(shape, label, kind, count, asked)
    if kind == "slice":
        for place, size in enumerate(shape):
            if size % count == 0:
                return tuple(count if other == place else 1 for other in range(len(shape)))
    # There is one: granules of equal size times their number is the size of the mesh, so every prime finds an axis.
    return next(outer_shapes(shape, count))


def _asked(shape: tuple[int, ...], label: str, kind: Granule, count: int, asked: tuple[int, ...]) -> tuple[int, ...]:
    """`dcn_mesh_dims`, its -1 filled in, after checking that a mesh can be built with it."""
    first = list(itertools.islice(outer_shapes(shape, count), 9))
    which = "these and others" if len(first) > 8 else "these"
    works = ", ".join(map(str, first[:8]))
    remedy = f"On mesh {label} over {count} {_plural(kind) if count > 1 else kind} {which} work: {works}"
    wrong = [part for part in asked if part != -1 and part < 1]
    if len(asked) != len(shape):
        raise MeshError(f"dcn_mesh_dims needs one entry for each of the {len(shape)} axes; got {asked}. {remedy}")
    if wrong:
        raise MeshError(f"dcn_mesh_dims entries must be > 0 or -1, got {wrong[0]} in {asked}. {remedy}")
    if asked.count(-1) > 1:
        raise MeshError(f"Only one -1 is supported in dcn_mesh_dims. Got {asked}. {remedy}")
    known = math.prod(part for part in asked if part != -1)
    filled = tuple(count // known if part == -1 else part for part in asked)
    if math.prod(filled) != count:
        raise MeshError(f"dcn_mesh_dims product {known} must equal {count}; got {asked}. {remedy}")
    if any(size % part for size, part in zip(shape, filled, strict=True)):
        raise MeshError(f"dcn_mesh_dims {filled} do not divide the axes of mesh {label}. {remedy}")
    return filled


def _inside(shape: tuple[int, ...], label: str, devices: list[DeviceInfo], split: bool) -> np.ndarray:
    """The ids of one granule's devices, laid along its torus where it has one."""
    try:
        placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=split)
    except (NotImplementedError, ValueError, AssertionError) as error:
        hint = "" if split else " allow_split_physical_axes=True lets one axis of the torus serve several of the mesh."
        why = str(error).rstrip(".")
        raise MeshError(f"mesh {label}: its devices cannot be laid out as {shape}: {why}.{hint}") from error
    return np.vectorize(lambda device: device.id, otypes=[int])(placed)
