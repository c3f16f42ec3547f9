"""Meshes of devices: from sizes or a line of text, over one process or many, one slice or many."""

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardrules.core.axes import mesh_text
from shardrules.core.errors import MeshError, MeshWarning, suggest
from shardrules.mesh.axis_types import AxisTypes, normalize_axis_types
from shardrules.mesh.layout import DeviceInfo, Layout, lay_out, layout_of, outer_shapes
from shardrules.mesh.shape import integers, read_axes, resolve_sizes

_NETWORKS = {"tpu": ("ICI", "DCN"), "gpu": ("NVLink", "Ethernet or InfiniBand")}

DEFAULT_AXIS_DIMS = (1, -1, 1, 1, 1)
"""The sizes of a mesh that is not specified, as in eformer: all devices on the second axis."""

DEFAULT_AXIS_NAMES = ("dp", "fsdp", "ep", "tp", "sp")
"""The names that go with `DEFAULT_AXIS_DIMS`."""

FAST_AXES = ("tp", "tensor", "tensor_parallel", "model", "mp")
"""The axes that need a fast network: their collectives are in every layer, and nothing runs meanwhile."""


def create_mesh(
    axis_dims: Sequence[int] | str | AbstractMesh = DEFAULT_AXIS_DIMS,
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
    """Returns a mesh of exactly these sizes, with every device once.

    Slices, or processes where there is one slice, are joined by a slow network. Slices go to the first axis whose size
    they divide, and over several axes where they divide none. Processes fill the axes from the first one on: each axis
    takes as many of them as it can. Inside them, devices follow their torus.

    **Arguments:**

    - `axis_dims`: the size of each axis, one of which may be -1 for the remaining devices; or sizes and names as text,
        `"data:4,model:-1"`; or a mesh without devices, as `mesh_shape` and `load_rules` give.
    - `axis_names`: a name for each size. The default sizes have default names, and a text has its own.
    - `dcn_mesh_dims`: how many slices (or processes) each axis spans; one of them may be -1.
    - `should_sort_granules_by_key`: order slices and processes by index rather than by their first device.
    - `allow_split_physical_axes`: let one axis of a torus serve several axes of the mesh.
    - `backend`: whose devices: `"cpu"`, `"gpu"` or `"tpu"`; by default JAX's default.
    - `use_jax`: leave the order of the devices to `jax.make_mesh`. This is for devices that one fast network joins:
        those of one process, or one torus.
    - `axis_types`: `"auto"`, `"explicit"` or `"manual"`, for all axes or for each; by default Auto.
    - `devices`: the devices to use, by default all of the backend's. An array or a nested list in the shape of the mesh
        is used as it is. A flat list in the order of the backend, by ids or by processes and ids, such as
        `jax.devices()[:4]`, is laid out like all devices; a list in any other order is used as it is.
    - `fast_axes`: the name, or the names, of axes that should not cross the slow network.

    **Returns:**

    A `jax.sharding.Mesh`. Equal meshes are the same object.

    **Raises:**

    `MeshError` when the devices do not form such a mesh, `AxisTypeError` when `axis_types` has another type.

    A `MeshWarning` reports a fast axis that crosses the slow network.

    ```python
    mesh = sr.create_mesh("data:2,model:-1")
    assert dict(mesh.shape) == {"data": 2, "model": 4}
    assert sr.create_mesh((2, -1), ("data", "model")) is mesh
    assert sr.create_mesh(sr.mesh_shape("data:2,model:4")) is mesh
    ```
    """
    fast_axes = (fast_axes,) if isinstance(fast_axes, str) else tuple(fast_axes)
    if isinstance(axis_dims, AbstractMesh):
        axis_types = axis_dims.axis_types if axis_types is None else axis_types
        # A mesh without devices goes the way of its text, and is checked like one.
        axis_dims = mesh_text(axis_dims)
    names, requested = _axes(axis_dims, axis_names)
    array = _as_array(_backend_devices(backend) if devices is None else devices)
    if devices is not None and backend is not None:
        raise MeshError("create_mesh takes devices or a backend, not both: the devices belong to a backend already")
    flat = array.ravel().tolist()
    infos = [DeviceInfo.of(device) for device in flat]
    # A layout speaks of ids, so that it can be computed, and tested, without devices.
    by_id = {info.id: device for info, device in zip(infos, flat, strict=True)}
    if len(by_id) < len(flat):
        raise MeshError(f"devices has duplicates: {len(flat)} devices, only {len(by_id)} different")
    if devices is None:
        sizes = _backend_sizes(requested, names, infos, backend)
    else:
        source = "devices" if array.ndim == 1 else "np.ravel(devices)"
        sizes = resolve_sizes(requested, names, len(flat), source=source, placed=_is_placed_by_user(infos))
    types = normalize_axis_types(axis_types, names)
    # Devices that the user put in their places stay there: options of a layout have nothing to decide.
    if devices is not None and _is_in_place(array, isinstance(devices, np.ndarray), sizes, infos):
        for option, is_passed in (("dcn_mesh_dims", dcn_mesh_dims is not None), ("use_jax", use_jax)):
            if is_passed:
                raise MeshError(
                    f"{option} cannot be combined with devices in the shape of the mesh or in a custom order, which "
                    "already fix where each device goes. A list in the order of jax.devices() is laid out"
                )
        layout = layout_of(infos, sizes)
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
        # The layout is computed all the same: it says whether one fast network joins the devices.
        if layout.granule is not None or dcn_mesh_dims is not None:
            raise MeshError(
                "use_jax=True needs devices of one slice and one process, or the processes of one torus, and no "
                "dcn_mesh_dims: jax.make_mesh supports nothing else"
            )
        return jax.make_mesh(sizes, names, axis_types=types, devices=flat)
    in_place = np.empty(sizes, dtype=object)
    for position, device_id in np.ndenumerate(layout.ids):
        in_place[position] = by_id[int(device_id)]
    for text in _slow_axes(names, sizes, layout, infos, fast_axes):
        warnings.warn(text, MeshWarning, stacklevel=_caller_level())
    return Mesh(in_place, names, axis_types=types)


def _caller_level() -> int:
    """The `stacklevel` of the first line outside of this module, where the mesh can be changed."""
    frame, level = sys._getframe(1), 1
    # A context is entered by way of contextlib.
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, contextlib.__file__):
        frame, level = frame.f_back, level + 1
    return level


def _backend_devices(backend: str | None) -> Sequence[Any]:
    devices = jax.devices(backend)
    announced = os.environ.get("MEGASCALE_NUM_SLICES", "1")
    actual = len(dict.fromkeys(DeviceInfo.of(device).slice_index for device in devices))
    # CPU devices have no slices: MEGASCALE_NUM_SLICES counts the slices of accelerators.
    if backend != "cpu" and announced.isdecimal() and int(announced) > 1 and actual != int(announced):
        raise MeshError(
            f"MEGASCALE_NUM_SLICES is {announced}, but the {len(devices)} devices are of {actual} slice(s), so no "
            "layout can distinguish the slices. Unset it, or start the job so that its devices have their slice_index"
        )
    return devices


def _backend_sizes(
    requested: tuple[int, ...], names: tuple[str, ...], infos: Sequence[DeviceInfo], backend: str | None
) -> tuple[int, ...]:
    source = f"jax.devices({'' if backend is None else repr(backend)})"
    try:
        return resolve_sizes(requested, names, len(infos), source=source, placed=_is_placed_by_user(infos))
    except MeshError as error:
        # The remedy helps on CPUs alone, and only if there are too few of them.
        least = math.prod(size for size in requested if size != -1)
        if not infos or infos[0].platform != "cpu" or least <= len(infos):
            raise
        raise MeshError(
            f"{error}. To have {least} CPU devices, call jax.config.update('jax_num_cpu_devices', {least}) before "
            "anything else of JAX; mesh_shape makes a mesh without devices, which is enough to plan and to audit"
        ) from None


def _is_placed_by_user(infos: Sequence[DeviceInfo]) -> bool:
    """A part of a torus, or of several slices, may have no layout: only the user can say where each device goes."""
    slices = dict.fromkeys(info.slice_index for info in infos)
    return len(slices) > 1 or any(info.platform == "tpu" for info in infos)


def _as_array(devices: Any) -> np.ndarray:
    """The devices as an array, in the shape in which they were passed."""
    try:
        array = np.asarray(devices if isinstance(devices, np.ndarray) else list(devices), dtype=object)
    except (TypeError, ValueError) as error:  # not iterable, or rows of different lengths
        raise MeshError(
            f"devices must be a list of devices, or an array of them in the shape of the mesh: {error}"
        ) from error
    if not array.ndim:
        raise MeshError(
            f"devices must be a list of devices, or an array of them in the shape of the mesh; got {devices!r}"
        )
    return array


def _is_in_place(devices: np.ndarray, is_array: bool, sizes: tuple[int, ...], infos: list[DeviceInfo]) -> bool:
    """Returns whether the devices were passed in their positions, rather than as the ones to use."""
    if devices.ndim == 1:
        # TPUs are listed process by process, where ids go row by row through the whole torus.
        ids, keys = [info.id for info in infos], [(info.process_index, info.id) for info in infos]
        return (is_array and devices.shape == sizes) or (ids != sorted(ids) and keys != sorted(keys))
    if devices.shape != sizes:
        raise MeshError(
            f"devices has shape {devices.shape} and the mesh {sizes}. Devices in the shape of the mesh are used as "
            "they are; np.ravel(devices) makes a list to lay out"
        )
    return True


def _axes(axis_dims: Sequence[int] | str, axis_names: Sequence[str] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if isinstance(axis_names, str):
        axis_names = (axis_names,)
    # A set of names has another order in each process, and so would the mesh.
    if axis_names is not None and (isinstance(axis_names, set | frozenset) or not isinstance(axis_names, Iterable)):
        raise MeshError(f"axis_names must be a tuple of names, got {axis_names!r}")
    if isinstance(axis_dims, str):
        names, sizes = read_axes(axis_dims, least=-1)
        if axis_names is not None and tuple(axis_names) != names:
            raise MeshError(f"{axis_dims!r} already names its axes, but axis_names is {tuple(axis_names)}")
        return names, sizes
    sizes = integers(axis_dims, "axis_dims")
    if axis_names is None:
        if len(sizes) != len(DEFAULT_AXIS_NAMES):
            raise MeshError(
                f"axis_dims {sizes} needs axis_names: only {len(DEFAULT_AXIS_NAMES)} sizes have default names"
            )
        return DEFAULT_AXIS_NAMES, sizes
    return tuple(axis_names), sizes


def _slow_axes(
    names: Sequence[str],
    sizes: Sequence[int],
    layout: Layout,
    infos: Sequence[DeviceInfo],
    fast_axes: Sequence[str],
) -> Iterator[str]:
    """A warning for each fast axis that crosses the slow network."""
    processes = dict.fromkeys(info.process_index for info in infos)
    # Processes of one device each say nothing about the network: eight of them may share one host.
    if layout.granule is None or (layout.granule == "process" and len(processes) == len(infos)):
        return
    fast, slow = _NETWORKS.get(infos[0].platform, ("shared memory", "the network between hosts"))
    granules = "slices" if layout.granule == "slice" else "processes"
    for name, size, spans in zip(names, sizes, layout.outer, strict=True):
        if spans > 1 and name in fast_axes:
            yield (
                f"mesh axis {name!r} of size {size} spans {spans} {granules}: its collectives in every layer go over "
                f"{slow} (slow) instead of {fast} (fast). Put an axis before it that the {granules} divide, or pass "
                "dcn_mesh_dims"
            )


def create_device_mesh(
    config_mesh: Sequence[tuple[str, int]], *, allow_split_physical_axes: bool = False, axis_types: AxisTypes = None
) -> Mesh:
    """Returns a mesh from pairs of name and size, as configuration files have them; options as in `create_mesh`.

    ```python
    assert dict(sr.meshes.create_device_mesh([("data", -1), ("model", 4)]).shape) == {"data": 2, "model": 4}
    ```
    """
    try:
        names, sizes = tuple(name for name, _ in config_mesh), tuple(size for _, size in config_mesh)
    except (TypeError, ValueError):
        raise MeshError(
            f"config_mesh must be a list of pairs such as [('data', -1), ('model', 4)], got {config_mesh!r}"
        ) from None
    return create_mesh(sizes, names, allow_split_physical_axes=allow_split_physical_axes, axis_types=axis_types)


def parse_mesh_from_string(axis_dims: str, names: Sequence[str]) -> Mesh:
    """Returns the mesh that a text describes, after checking that it uses each of the names a program has.

    `axis_dims` is `"dp:2,tp:-1"`, in the order of the axes, or `"2,-1"`, in the order of `names`. Blanks are ignored.

    ```python
    assert sr.meshes.parse_mesh_from_string("tp:4,dp:2", ["dp", "tp"]).axis_names == ("tp", "dp")
    ```
    """
    if not isinstance(axis_dims, str):
        raise MeshError(f"axis_dims must be a string such as 'dp:2,tp:-1', got {axis_dims!r}")
    # `rpartition` leaves the name empty where a part is only a size, so both forms are read alike.
    pairs = [part.rpartition(":") for part in axis_dims.split(",")]
    names = [name.strip() for name in names]
    used = [name.strip() for name, _, _ in pairs] if ":" in axis_dims else list(names)
    for name in used:
        if name not in names:
            raise MeshError(
                f"{axis_dims!r}: Axis name {name!r} not found in provided names {list(names)}{suggest(name, names)}"
            )
    try:
        sizes = integers([int(size) for _, _, size in pairs], "the sizes")
    except ValueError as error:  # also MeshError, and numbers of more digits than Python reads
        raise MeshError(f"{axis_dims!r:.200}: a size must be an integer; write it as 'dp:2,tp:4' or '2,4'") from error
    unused = [name for name in names if name not in used]
    if unused:
        raise MeshError(f"Not all axis names were used in {axis_dims!r}: {', '.join(map(repr, unused))} left over")
    if len(sizes) != len(names):
        raise MeshError(
            f"Number of dimensions and names must match: {axis_dims!r} has {len(sizes)}, names are {list(names)}"
        )
    return create_mesh(sizes, used)


def create_cpu_mesh(
    axis_dims: Sequence[int] | str = DEFAULT_AXIS_DIMS, axis_names: Sequence[str] | None = None
) -> Mesh:
    """Returns a mesh of CPU devices, whatever other devices the machine has, and whatever slices the job has.

    ```python
    assert sr.meshes.create_cpu_mesh("data:-1").devices.flat[0].platform == "cpu"
    ```
    """
    return create_mesh(axis_dims, axis_names, backend="cpu")


@contextlib.contextmanager
def force_cpu() -> Iterator[Any]:
    """A context in which computations run on the first CPU device, unless their inputs are on another; it gives that.

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
    """A context with `force_cpu` and a mesh of CPU devices in force, which it gives.

    ```python
    with sr.meshes.cpu_context("data:8") as mesh:
        assert sr.meshes.current_mesh() is mesh
    ```
    """
    mesh = create_cpu_mesh(axis_dims, axis_names)
    with force_cpu(), jax.set_mesh(mesh):
        yield mesh


def calculate_host_mesh_shape(
    global_mesh_shape: Sequence[int], total_devices: int | None = None, num_processes: int | None = None
) -> tuple[int, ...]:
    """Returns the part of a mesh that each process holds if processes are spread over it from the first axis on.

    `create_mesh` spreads them so, unless devices are in a torus or in slices, or `dcn_mesh_dims` is passed. By default,
    `total_devices` is how many devices this process has and `num_processes` how many processes the job has. For an
    existing mesh use `mesh.local_mesh`.

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
