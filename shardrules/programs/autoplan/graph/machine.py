"""The cost of communication on a mesh, by the same model as in audits, and the traits of its compilers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, final, get_args

import attrs
import numpy as np
from jax.sharding import Mesh

from shardrules.core.axes import AnyMesh, mesh_sizes
from shardrules.programs.compilers.compiler import Compiler, compiler_of
from shardrules.programs.costs.collective import Group, collective_cost
from shardrules.programs.costs.slowest import slowest_of
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.machine.kinds import sheet_name

CollectiveKind: TypeAlias = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"]
"""The collectives that a change of layout may need."""

COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
"""All of them, in the order of the tables over them."""

_PROBE_BYTES = 10**8
"""The bytes of a collective whose time gives the seconds per byte. Tables of measured collectives are steeper below."""


@final
@attrs.frozen
class Assumptions:
    """The cost model's assumptions about compilers. The rates of hardware are in its sheet.

    **Arguments:**

    - `combined_bytes`: compilers combine collectives that send fewer bytes, which then share their fixed costs.
    - `temporaries`: how much more memory intermediate results take than they have bytes: gaps between them. `None` is
        the likeliest of what is known of the compiler.
    - `hidden`: the fraction of the time of collectives that compilers hide behind computing, where there is a matmul
        that does not wait for them.

    ```python
    assert sr.Assumptions(temporaries=1.2).combined_bytes == 2**23
    ```
    """

    # The order of magnitude of XLA's own thresholds. With half as much, more small collectives pay their latency alone.
    combined_bytes: int = 8 * 2**20
    temporaries: float | None = None
    # XLA for GPUs hides between a quarter and three quarters in the models of the benchmark. Layouts do not depend on
    # it, but which of several meshes and recipes is best for a training does.
    hidden: float = 0.5


@final
@attrs.frozen(eq=False)
class Rates:
    """The cost of a collective over each group of axes, indexed by a bit mask of the axes."""

    per_byte: np.ndarray  # seconds for each byte that a device sends
    fixed: np.ndarray  # seconds for a collective of any size


@final
@attrs.frozen(eq=False)
class Machine:
    """The mesh that is planned for: its axes of more than one device, and what communicating along them costs."""

    mesh: AnyMesh
    hardware: Hardware
    assumptions: Assumptions
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    rates: Mapping[str, Rates]
    compiler: Compiler

    @property
    def temporaries(self) -> float:
        """The memory that intermediate results are expected to take, over their bytes."""
        assumed = self.assumptions.temporaries
        return self.compiler.gaps[1] if assumed is None else assumed

    @classmethod
    def of(cls, mesh: AnyMesh, hardware: Hardware | None = None, assumptions: Assumptions | None = None) -> "Machine":
        sheet = slowest_of(hardware_of(mesh) if hardware is None else hardware, mesh.size)
        assumptions = Assumptions() if assumptions is None else assumptions
        sizes = {axis: size for axis, size in mesh_sizes(mesh).items() if size > 1}
        axes = tuple(sizes)
        groups = [_device_group(mesh, axes, mask, sheet) for mask in range(1 << len(axes))]
        cubes = [_is_cube(mesh, axes, mask) for mask in range(1 << len(axes))]
        rates = {kind: _collective_rates(kind, groups, cubes, sheet) for kind in COLLECTIVE_KINDS}
        return cls(mesh, sheet, assumptions, axes, tuple(sizes.values()), rates, compiler_of(sheet))


def hardware_of(mesh: AnyMesh) -> Hardware:
    """The sheet of a mesh's devices; the H100 sheet where it has no devices, or devices without a sheet."""
    return Hardware.named(_sheet_name(mesh) or "cuda:h100")


def has_sheet(mesh: AnyMesh) -> bool:
    """There is a sheet for the devices of a mesh, so that `hardware_of` need not guess."""
    return _sheet_name(mesh) is not None


def _sheet_name(mesh: AnyMesh) -> str | None:
    if not isinstance(mesh, Mesh):
        return None
    device = mesh.devices.flat[0]
    return sheet_name(device.platform, device.device_kind)


def _device_group(mesh: AnyMesh, axes: tuple[str, ...], mask: int, sheet: Hardware) -> Group:
    """The group of the first device along the axes of a bit mask: the other groups of a mesh look the same."""
    if not isinstance(mesh, Mesh):
        sizes = mesh_sizes(mesh)
        group_axes = [axis for index, axis in enumerate(axes) if mask >> index & 1]
        per_host = sheet.devices_per_host or math.prod(sizes.values())
        return Group(math.prod(sizes[axis] for axis in group_axes), _host_count(sizes, group_axes, per_host))
    group, devices = _first_group(mesh, axes, mask), mesh.devices.ravel()
    host_count = len(dict.fromkeys(_host(devices[position]) for position in group))
    torus_dims, chip_devices = 0, 1
    if sheet.torus_dims and devices[0].platform == "tpu":
        # A ring has links of its own along every dim of the torus in which its devices differ.
        coords = _coords(mesh, group)
        torus_dims = int((coords != coords[0]).any(axis=0).sum())
        chip_devices = len(group) // len(np.unique(coords, axis=0)) // host_count or 1
    return Group(len(group), host_count, torus_dims, chip_devices=chip_devices)


def _host_count(sizes: Mapping[str, int], group_axes: Sequence[str], per_host: int) -> int:
    """The number of hosts of the first device's group along some axes, if hosts are filled in the order of the mesh.

    Not every device is looked at: a cluster may have a billion.
    """
    count, stride, positions = 1, 1, [0]
    first_axis = next((axis for axis in sizes if axis in group_axes), None)
    for axis, size in reversed([*sizes.items()]):
        if axis in group_axes:
            # After so many steps along the axis, what lies on each host repeats on others.
            period = math.lcm(stride, per_host) // stride
            rounds, rest = divmod(size, period)
            if rest and axis == first_axis:
                whole, last = (_hosts(positions, stride, steps, per_host) for steps in (period, rest))
                return count * (rounds * whole + last)
            steps = size if rest else period
            count *= size // steps
            positions = [step * stride + position for step in range(steps) for position in positions]
        stride *= size
    return count * _hosts(positions, 0, 1, per_host)


def _hosts(positions: Sequence[int], stride: int, steps: int, per_host: int) -> int:
    """The number of hosts of devices at these positions, and at as many steps from them."""
    return len({(step * stride + position) // per_host for step in range(steps) for position in positions})


def _first_group(mesh: Mesh, axes: tuple[str, ...], mask: int) -> list[int]:
    group_axes = [axis for index, axis in enumerate(axes) if mask >> index & 1]
    sizes = mesh_sizes(mesh)
    first_group = tuple(slice(None) if axis in group_axes else 0 for axis in sizes)
    return np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))[first_group].ravel().tolist()


def _coords(mesh: Mesh, group: Sequence[int]) -> np.ndarray:
    devices: Any = mesh.devices.ravel()
    return np.array([devices[position].coords for position in group])


def _is_cube(mesh: AnyMesh, axes: tuple[str, ...], mask: int) -> bool:
    """A group has rings along three dims of a torus of TPUs."""
    if not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform != "tpu":
        return False
    lengths = [len(np.unique(column)) for column in _coords(mesh, _first_group(mesh, axes, mask)).T]
    # Along three rings libtpu gathers and scatters by all-reduces of whole arrays: compiled for slices of 4x4x4 and
    # 4x4x8 v5p, but not along 2x4x4 or two dims of a cube.
    return len(lengths) == 3 and min(lengths) >= 4


def _host(device: Any) -> Any:
    """The part of the machine that links join: a host of GPUs, a slice of TPUs."""
    if device.platform == "tpu":
        return getattr(device, "slice_index", 0)
    return device.process_index


def _collective_rates(kind: CollectiveKind, groups: list[Group], cubes: list[bool], sheet: Hardware) -> Rates:
    """The cost of a collective over each group: the model of an audit, at two sizes."""
    per_byte, fixed = np.zeros(len(groups)), np.zeros(len(groups))
    for mask, group in enumerate(groups):
        if group.size > 1:
            # In an all-reduce a device sends twice as much.
            is_reduced = cubes[mask] and group.host_count == 1 and kind in ("all-gather", "reduce-scatter")
            compiled, nbytes = ("all-reduce", 2 * _PROBE_BYTES) if is_reduced else (kind, _PROBE_BYTES)
            fixed[mask] = collective_cost(compiled, 0, group, sheet).seconds
            per_byte[mask] = (collective_cost(compiled, nbytes, group, sheet).seconds - fixed[mask]) / _PROBE_BYTES
    return Rates(per_byte, fixed)
