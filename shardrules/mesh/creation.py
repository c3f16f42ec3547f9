"""Meshes of devices: from sizes or a line of text, over one process or many, one slice or many."""

import contextlib
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from shardrules.core.errors import AxisTypeError, MeshError, MeshWarning, SpecError, suggest
from shardrules.mesh.layout import DeviceInfo, Layout, lay_out, layout_of, outer_shapes
from shardrules.mesh.shape import integers, read_axes, resolve_sizes

AxisTypes: TypeAlias = AxisType | str | Sequence[AxisType | str] | None
"""The type of every axis, or of each: `AxisType.Explicit`, `"explicit"`, `("auto", "explicit")`; `None` is Auto."""

DEFAULT_AXIS_DIMS = (1, -1, 1, 1, 1)
"""The sizes of a mesh that nobody said anything about: all devices on the second axis."""

DEFAULT_AXIS_NAMES = ("dp", "fsdp", "ep", "tp", "sp")
"""The names that go with `DEFAULT_AXIS_DIMS`."""

FAST_AXES = ("tp", "tensor", "tensor_parallel", "model", "mp")
"""The axes that need a fast network: their collectives are in every layer, and nothing runs meanwhile."""

_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Manual}
_NETWORKS = {"tpu": ("ICI", "DCN"), "gpu": ("NVLink", "Ethernet or InfiniBand")}


def create_mesh(
    axis_dims: Sequence[int] | str = DEFAULT_AXIS_DIMS,
    axis_names: Sequence[str] | None = None,
    dcn_mesh_dims: Sequence[int] | None = None,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = True,
    backend: str | None = None,
    use_jax: bool = False,
    axis_types: AxisTypes = None,
    *,
    devices: Sequence[Any] | np.ndarray | None = None,
    fast_axes: str | Sequence[str] = FAST_AXES,
) -> Mesh:
    """Returns a mesh of exactly the sizes asked for, with every device once.

    Slices, or processes where there is one slice, are joined by a slow network. Slices go to the first axis that they
    divide, and over several axes where they divide none. Processes fill the axes from the first one on: each takes as
    many of them as it can, and the next one what is left. Inside them, devices follow their torus.

    **Arguments:**

    - `axis_dims`: the size of each axis, one of them perhaps -1 for what is left; or all of it as text,
        `"data:4,model:-1"`.
    - `axis_names`: a name for each size. Left out, the default sizes have their own, and so has a text.
    - `dcn_mesh_dims`: how many slices (or processes) each axis spans; one of them may be -1.
    - `should_sort_granules_by_key`: take slices and processes by number rather than in the order of the devices.
    - `allow_split_physical_axes`: let one axis of a torus serve several axes of the mesh.
    - `backend`: whose devices: `"cpu"`, `"gpu"` or `"tpu"`. JAX's default when left out.
    - `use_jax`: leave the order of the devices to `jax.make_mesh`. It is for devices that one fast network joins: those
        of one process, or one torus.
    - `axis_types`: `"auto"`, `"explicit"` or `"manual"`, for all axes or for each. Auto when left out.
    - `devices`: the devices to use, all of the backend's by default. An array or a nested list of the mesh's own shape
        is taken as it stands. A flat list in the order of the backend, by ids or by processes and ids, such as
        `jax.devices()[:4]`, is laid out like all of them; any other order is one of your own, and is kept.
    - `fast_axes`: the name, or the names, of axes that should not cross the slow network.

    **Returns:**

    A `jax.sharding.Mesh`. Equal meshes are one object.

    **Raises:**

    `MeshError` when there is no such mesh, `AxisTypeError` when `axis_types` is something else.

    A `MeshWarning` tells of a fast axis that crosses the slow network.

    ```python
    mesh = sr.create_mesh("data:2,model:-1")
    assert dict(mesh.shape) == {"data": 2, "model": 4}
    assert sr.create_mesh((2, -1), ("data", "model")) is mesh
    ```
    """
    mesh, slow = _build(
        axis_dims,
        axis_names,
        dcn_mesh_dims,
        should_sort_granules_by_key=should_sort_granules_by_key,
        allow_split_physical_axes=allow_split_physical_axes,
        backend=backend,
        use_jax=use_jax,
        axis_types=axis_types,
        devices=devices,
        fast_axes=fast_axes,
    )
    _warn(slow)
    return mesh


def _warn(texts: Sequence[str], stacklevel: int = 3) -> None:
    """Tells the caller of a public function, which is where a mesh can be changed."""
    for text in texts:
        warnings.warn(text, MeshWarning, stacklevel=stacklevel)


def _build(
    axis_dims: Sequence[int] | str,
    axis_names: Sequence[str] | None,
    dcn_mesh_dims: Sequence[int] | None = None,
    *,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = True,
    backend: str | None = None,
    use_jax: bool = False,
    axis_types: AxisTypes = None,
    devices: Sequence[Any] | np.ndarray | None = None,
    fast_axes: str | Sequence[str] = FAST_AXES,
) -> tuple[Mesh, list[str]]:
    """The mesh of `create_mesh`, and what there is to warn of."""
    names, asked = _axes(axis_dims, axis_names)
    if devices is not None and backend is not None:
        raise MeshError("create_mesh takes devices or a backend, not both: the devices say which backend they are of")
    own = devices is not None
    if devices is None:
        devices = jax.devices(backend)
        if backend != "cpu":  # CPU devices never know of slices, and what was told is of others
            _check_slices(devices)
    given = _given(devices)
    listed = "devices" if given.ndim == 1 else "np.ravel(devices)"
    source = listed if own else f"jax.devices({'' if backend is None else repr(backend)})"
    flat = given.ravel().tolist()
    infos = [DeviceInfo.of(device) for device in flat]
    by_id = {info.id: device for info, device in zip(infos, flat, strict=True)}
    if len(by_id) < len(flat):
        raise MeshError(f"devices holds {len(flat)} devices and only {len(by_id)} different ones")
    slices = dict.fromkeys(info.slice_index for info in infos)
    # A part of a torus, or of several slices, may have no layout: there each device is put in its place.
    placed = len(slices) > 1 or (bool(infos) and infos[0].platform == "tpu")
    sizes = resolve_sizes(asked, names, len(flat), source=source, placed=placed)
    types = normalize_axis_types(axis_types, names)
    if own and _says_where(given, isinstance(devices, np.ndarray), sizes, infos):
        for said, what in ((dcn_mesh_dims is not None, "dcn_mesh_dims"), (use_jax, "use_jax")):
            if said:
                raise MeshError(
                    f"devices in the shape of the mesh, or in an order of their own, say where each one goes: {what} "
                    "cannot say so too. A list in the order of jax.devices() is laid out"
                )
        described = np.empty(len(infos), dtype=object)
        described[:] = infos
        layout = layout_of(described.reshape(sizes))
    else:
        layout = lay_out(
            sizes,
            names,
            infos,
            dcn_mesh_dims=dcn_mesh_dims,
            should_sort_granules_by_key=should_sort_granules_by_key,
            allow_split_physical_axes=allow_split_physical_axes,
        )
    if use_jax:
        if layout.granule is not None or dcn_mesh_dims is not None:
            raise MeshError(
                "use_jax=True is for one slice and one process, or the processes of one torus, and without "
                "dcn_mesh_dims: jax.make_mesh knows no more"
            )
        return jax.make_mesh(sizes, names, axis_types=types, devices=flat), []
    standing = np.empty(sizes, dtype=object)
    for place, number in np.ndenumerate(layout.ids):
        standing[place] = by_id[int(number)]
    return Mesh(standing, names, axis_types=types), list(_slow_axes(names, sizes, layout, infos, fast_axes))


def _given(devices: Any) -> np.ndarray:
    """The devices as an array, in the shape in which they were given."""
    try:
        found = np.asarray(devices if isinstance(devices, np.ndarray) else list(devices), dtype=object)
    except (TypeError, ValueError) as error:  # not to be iterated, or rows of different lengths
        raise MeshError(
            f"devices is a list of devices, or an array of them in the shape of the mesh: {error}"
        ) from error
    if not found.ndim:
        raise MeshError(f"devices is a list of devices, or an array of them in the shape of the mesh; got {devices!r}")
    return found


def _says_where(given: np.ndarray, is_array: bool, sizes: tuple[int, ...], infos: list[DeviceInfo]) -> bool:
    """Whether devices were given in their places, rather than as the ones to use."""
    if given.ndim == 1:
        # TPUs are listed process by process, where ids go row by row through the whole torus.
        ids, listed = [info.id for info in infos], [(info.process_index, info.id) for info in infos]
        return (is_array and given.shape == sizes) or (ids != sorted(ids) and listed != sorted(listed))
    if given.shape != sizes:
        raise MeshError(
            f"devices has the shape {given.shape} and the mesh {sizes}. In the shape of the mesh devices are taken as "
            "they stand; np.ravel(devices) gives them as a list"
        )
    return True


def _axes(axis_dims: Sequence[int] | str, axis_names: Sequence[str] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if isinstance(axis_names, str):
        axis_names = (axis_names,)
    if axis_names is not None and (isinstance(axis_names, set | frozenset) or not isinstance(axis_names, Iterable)):
        raise MeshError(f"axis_names is a tuple of names, got {axis_names!r}")
    if isinstance(axis_dims, str):
        try:
            names, sizes = read_axes(axis_dims, least=-1)
        except SpecError as error:
            raise MeshError(str(error)) from error
        if axis_names is not None and tuple(axis_names) != names:
            raise MeshError(f"{axis_dims!r} names its axes itself, and axis_names are others: {tuple(axis_names)}")
        return names, sizes
    sizes = integers(axis_dims, "axis_dims")
    if axis_names is None:
        if len(sizes) != len(DEFAULT_AXIS_NAMES):
            raise MeshError(
                f"axis_dims {sizes} need axis_names: only {len(DEFAULT_AXIS_NAMES)} sizes have names of their own"
            )
        return DEFAULT_AXIS_NAMES, sizes
    return tuple(axis_names), sizes


def _check_slices(devices: Sequence[Any]) -> None:
    """Refuses a job that was told of more slices than its devices know of."""
    told = os.environ.get("MEGASCALE_NUM_SLICES", "1")
    known = len(dict.fromkeys(DeviceInfo.of(device).slice_index for device in devices))
    if told.isdecimal() and int(told) > 1 and known != int(told):
        raise MeshError(
            f"MEGASCALE_NUM_SLICES is {told}, and the {len(devices)} devices are of {known} slice(s): no layout can "
            "tell the slices apart. Unset it, or start the job so that its devices carry their slice_index"
        )


def _slow_axes(
    names: Sequence[str],
    sizes: Sequence[int],
    layout: Layout,
    infos: Sequence[DeviceInfo],
    fast_axes: str | Sequence[str],
) -> Iterator[str]:
    """A text for each fast axis that crosses the slow network."""
    processes = dict.fromkeys(info.process_index for info in infos)
    if layout.granule is None or (layout.granule == "process" and len(processes) == len(infos)):
        return  # where each process holds one device, processes tell nothing about the network
    fast, slow = _NETWORKS.get(infos[0].platform, ("shared memory", "the network between hosts"))
    granules = "slices" if layout.granule == "slice" else "processes"
    for name, size, spans in zip(names, sizes, layout.outer, strict=True):
        if spans > 1 and name in ((fast_axes,) if isinstance(fast_axes, str) else fast_axes):
            yield (
                f"mesh axis {name!r} of size {size} spans {spans} {granules}: what it sends in every layer goes over "
                f"{slow} (slow) instead of {fast} (fast). Put an axis in front of it that they divide, or give "
                "dcn_mesh_dims"
            )


def normalize_axis_types(axis_types: AxisTypes, axis_names: Sequence[str]) -> tuple[AxisType, ...]:
    """Returns the type of each axis.

    **Arguments:**

    - `axis_types`: one for all axes, or one for each; `None` is Auto.
    - `axis_names`: the axes.

    **Returns:**

    A tuple with one `AxisType` for each axis.

    **Raises:**

    `MeshError` for a name that is none or for another number of types, `AxisTypeError` for anything else.

    ```python
    assert normalize_axis_types(" Explicit", ("a", "b")) == (AxisType.Explicit,) * 2
    ```
    """
    if axis_types is None:
        return (AxisType.Auto,) * len(axis_names)
    given = axis_types if isinstance(axis_types, list | tuple) else (axis_types,)
    found = tuple(_axis_type(one) for one in given)
    if len(found) == 1:
        return found * len(axis_names)
    if len(found) != len(axis_names):
        raise MeshError(
            f"axis_types length must match axis_names length. Got {len(found)} types for {len(axis_names)} axis names"
        )
    return found


def _axis_type(given: Any) -> AxisType:
    if isinstance(given, AxisType):
        return given
    if not isinstance(given, str):
        raise AxisTypeError(f"axis_types are names or values of AxisType, got {given!r} of type {type(given).__name__}")
    name = given.strip().lower()
    if name not in _TYPES:
        raise MeshError(
            f"axis_types must be one of {', '.join(map(repr, _TYPES))} or AxisType, got {given!r}"
            f"{suggest(name, _TYPES)}"
        )
    return _TYPES[name]


def create_device_mesh(
    config_mesh: Sequence[tuple[str, int]], *, allow_split_physical_axes: bool = False, axis_types: AxisTypes = None
) -> Mesh:
    """Returns a mesh from pairs of name and size, as configuration files write them.

    **Arguments:**

    - `config_mesh`: `[("data", -1), ("model", 4)]`, the most major axis first.
    - `allow_split_physical_axes`: let one axis of a torus serve several axes of the mesh.
    - `axis_types`: as in `create_mesh`.

    **Returns:**

    A `Mesh`; see `create_mesh`.

    **Raises:**

    `MeshError` for what is no list of such pairs; else as `create_mesh`.

    ```python
    assert dict(sr.meshes.create_device_mesh([("data", -1), ("model", 4)]).shape) == {"data": 2, "model": 4}
    ```
    """
    try:
        names, sizes = tuple(name for name, _ in config_mesh), tuple(size for _, size in config_mesh)
    except (TypeError, ValueError):
        raise MeshError(
            f"config_mesh is a list of pairs such as [('data', -1), ('model', 4)], got {config_mesh!r}"
        ) from None
    mesh, slow = _build(sizes, names, allow_split_physical_axes=allow_split_physical_axes, axis_types=axis_types)
    _warn(slow)
    return mesh


def parse_mesh_from_string(axis_dims: str, names: Sequence[str]) -> Mesh:
    """Returns the mesh that a text describes, after checking it against the names that a program knows.

    **Arguments:**

    - `axis_dims`: `"dp:2,tp:-1"`, in the order of the axes, or `"2,-1"`, in the order of `names`. A name is taken to
        the letter, blanks included; `create_mesh` reads texts more freely.
    - `names`: the names, each of which must be used.

    **Returns:**

    A `Mesh`; see `create_mesh`.

    **Raises:**

    `MeshError` when the text has another form, or the names are others.

    ```python
    assert parse_mesh_from_string("tp:4,dp:2", ["dp", "tp"]).axis_names == ("tp", "dp")
    ```
    """
    if not isinstance(axis_dims, str):
        raise MeshError(f"axis_dims is a text such as 'dp:2,tp:-1', got {axis_dims!r}")
    pairs = [part.rpartition(":") for part in axis_dims.split(",")]
    used = [name for name, _, _ in pairs] if ":" in axis_dims else list(names)
    for name in used:
        if name not in names:
            raise MeshError(
                f"{axis_dims!r}: Axis name {name!r} not found in provided names {list(names)}{suggest(name, names)}"
            )
    try:
        sizes = [int(size) for _, _, size in pairs]
    except ValueError as error:
        raise MeshError(f"{axis_dims!r}: a size is an integer; write it as 'dp:2,tp:4' or '2,4'") from error
    unused = [name for name in names if name not in used]
    if unused:
        raise MeshError(f"Not all axis names were used in {axis_dims!r}: {', '.join(map(repr, unused))} left over")
    if len(sizes) != len(names):
        raise MeshError(
            f"Number of dimensions and names must match: {axis_dims!r} has {len(sizes)}, names are {list(names)}"
        )
    mesh, slow = _build(sizes, used)
    _warn(slow)
    return mesh


def create_cpu_mesh(
    axis_dims: Sequence[int] | str = DEFAULT_AXIS_DIMS, axis_names: Sequence[str] | None = None
) -> Mesh:
    """Returns a mesh of CPU devices, whatever else the machine has. Slices that a job was told of do not count here.

    **Arguments:**

    - `axis_dims`, `axis_names`: as in `create_mesh`.

    **Returns:**

    A `Mesh`.

    ```python
    assert sr.meshes.create_cpu_mesh("data:-1").devices.flat[0].platform == "cpu"
    ```
    """
    mesh, slow = _build(axis_dims, axis_names, backend="cpu")
    _warn(slow)
    return mesh


@contextlib.contextmanager
def force_cpu() -> Iterator[Any]:
    """Puts what is computed inside on the first CPU device, where nothing else says where.

    **Returns:**

    A context manager that gives the device.

    ```python
    with sr.meshes.force_cpu() as cpu:
        assert jnp.ones(2).devices() == {cpu}
    ```
    """
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        yield cpu


@contextlib.contextmanager
def cpu_context(
    axis_dims: Sequence[int] | str = DEFAULT_AXIS_DIMS, axis_names: Sequence[str] | None = None
) -> Iterator[Mesh]:
    """Sets a mesh of CPU devices and `force_cpu`, for the time of a `with` block.

    **Arguments:**

    - `axis_dims`, `axis_names`: as in `create_mesh`.

    **Returns:**

    A context manager that gives the mesh.

    ```python
    with sr.meshes.cpu_context("data:8") as mesh:
        assert sr.current_mesh() is mesh
    ```
    """
    mesh, slow = _build(axis_dims, axis_names, backend="cpu")
    _warn(slow, stacklevel=4)  # contextlib stands between this generator and the caller
    with force_cpu(), jax.set_mesh(mesh):
        yield mesh


def calculate_host_mesh_shape(
    global_mesh_shape: Sequence[int], total_devices: int | None = None, num_processes: int | None = None
) -> tuple[int, ...]:
    """Returns the part of a mesh that each process holds where processes are spread over it from the first axis on.

    So `create_mesh` spreads them, unless devices stand in a torus or in slices, which a mesh follows instead, or
    `dcn_mesh_dims` says otherwise. `mesh.local_mesh` tells of a mesh that is there.

    **Arguments:**

    - `global_mesh_shape`: the sizes of the mesh.
    - `total_devices`: how many devices one process has; what this one has by default.
    - `num_processes`: how many processes there are; those of this job by default.

    **Returns:**

    A shape that divides the mesh's and holds `total_devices`: the first axes are split over processes first.

    **Raises:**

    `MeshError` when the mesh and the devices differ in number.

    ```python
    assert sr.meshes.calculate_host_mesh_shape((3, 4), 6, 2) == (3, 2)
    ```
    """
    local = jax.local_device_count() if total_devices is None else total_devices
    processes = jax.process_count() if num_processes is None else num_processes
    shape = tuple(global_mesh_shape)
    size = math.prod(shape)
    if min((local, processes, *shape)) < 1 or size != local * processes:
        raise MeshError(
            f"Mesh size {size} doesn't match available devices {local * processes} ({local} in each of {processes} "
            f"processes): mesh shape {shape}"
        )
    outer = next(outer_shapes(shape, processes))  # the number of processes divides the size: its primes find an axis
    return tuple(whole // part for whole, part in zip(shape, outer, strict=True))
