"""What communicating and computing cost on a mesh: the figures of a hardware sheet, less what no program reaches."""

import math
from typing import Any, Literal, TypeAlias, final, get_args

import attrs
import numpy as np
from jax.sharding import Mesh

from shardrules.analysis.costs.collective import Group, collective_cost
from shardrules.analysis.machine.hardware import Hardware
from shardrules.core.axes import AnyMesh, mesh_sizes

CollectiveKind: TypeAlias = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"]
"""The collectives that a change of layout may need."""

COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
"""All of them, in the order of the tables over them."""

_PROBE_BYTES = 10**9
"""The bytes of a collective whose time gives the seconds per byte: so many that latency hardly counts."""

_GPU_SHEETS = {"A100": "cuda:a100", "H100": "cuda:h100", "H200": "cuda:h200", "B200": "cuda:b200"}
_TPU_SHEETS = {
    "TPU v2": "tpu:v2",
    "TPU v3": "tpu:v3",
    "TPU v4": "tpu:v4",
    "TPU v5 lite": "tpu:v5e",
    "TPU v5e": "tpu:v5e",
    "TPU v5": "tpu:v5p",
    "TPU v5p": "tpu:v5p",
    "TPU v6 lite": "tpu:v6e",
    "TPU v6e": "tpu:v6e",
    "TPU7x": "tpu:v7x",
}
"""Sheets by what JAX calls the devices: a part of the name for GPUs, all of it for TPUs."""


@final
@attrs.frozen
class Assumptions:
    """What the cost model assumes. No hardware reaches its peaks; these are the usual fractions of them.

    **Arguments:**

    - `compute`: the fraction of the peak FLOPs that large matmuls reach.
    - `memory`: the fraction of the memory bandwidth.
    - `links`: the fraction of the bandwidth of links and network.
    - `launch_seconds`: what starting a collective takes, besides its latency.
    - `combined_bytes`: compilers combine collectives that send fewer bytes, which then share their fixed costs.
    - `temporaries`: how much more memory intermediate results take than if operations ran one by one.

    ```python
    assert sr.Assumptions(compute=0.4).links == 0.8
    ```
    """

    # Doubling one of the first three halves the modelled time of what it is about. Plans depend on their ratios: more
    # `compute` makes communication relatively expensive, so plans communicate less and compute or store more twice.
    compute: float = 0.5
    memory: float = 0.8
    links: float = 0.8
    # The time between two kernels on a GPU. More of it makes plans with few large collectives better.
    launch_seconds: float = 5e-6
    # The order of magnitude of XLA's own thresholds. With half as much, more small collectives pay their latency alone.
    combined_bytes: int = 8 * 2**20
    # Compilers order, pad and overlap operations in their own ways. With a lower factor plans fill more of the memory,
    # and some do not fit when they are compiled.
    temporaries: float = 1.4


@final
@attrs.frozen(eq=False)
class Rates:
    """What a collective costs over each group of axes, indexed by a bit mask of the axes."""

    per_byte: np.ndarray  # seconds for each byte that a device sends
    fixed: np.ndarray  # seconds for a collective of any size


@final
@attrs.frozen(eq=False)
class Machine:
    """The mesh that is planned for: its axes of more than one device, and what communicating along them costs.

    ```python
    from shardrules.planning.graph.machine import Machine

    machine = Machine.of(sr.mesh_shape("data:4,model:2"), sr.Hardware.named("cuda:h100"))
    assert machine.sizes == (4, 2)
    ```
    """

    mesh: AnyMesh
    hardware: Hardware
    assumptions: Assumptions
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    rates: dict[str, Rates]

    @classmethod
    def of(cls, mesh: AnyMesh, hardware: Hardware | None = None, assumptions: Assumptions | None = None) -> "Machine":
        """Reads a mesh; `hardware` is by default the sheet of its devices."""
        sheet = hardware_of(mesh) if hardware is None else hardware
        assumptions = Assumptions() if assumptions is None else assumptions
        sizes = {axis: size for axis, size in mesh_sizes(mesh).items() if size > 1}
        axes = tuple(sizes)
        groups = [_device_group(mesh, axes, mask, sheet) for mask in range(1 << len(axes))]
        rates = {kind: _collective_rates(kind, groups, sheet, assumptions) for kind in COLLECTIVE_KINDS}
        return cls(mesh, sheet, assumptions, axes, tuple(sizes.values()), rates)

    def flops_per_second(self, dtype: Any) -> float:
        """How fast a device multiplies arrays of a dtype."""
        return self.hardware.flops_per_second(dtype) * self.assumptions.compute

    @property
    def memory_bytes_per_second(self) -> float:
        """How fast a device reads and writes its memory."""
        return self.hardware.memory_bytes_per_second * self.assumptions.memory


def hardware_of(mesh: AnyMesh) -> Hardware:
    """The sheet of a mesh's devices; the H100 sheet where it has no devices, or devices without a sheet.

    ```python
    from shardrules.planning.graph.machine import hardware_of

    assert hardware_of(sr.create_mesh("data:8")).name == "CPU (nominal)"
    assert "H100" in hardware_of(sr.mesh_shape("data:8")).name
    ```
    """
    return Hardware.named(_sheet_name(mesh) or "cuda:h100")


def has_sheet(mesh: AnyMesh) -> bool:
    """Whether there is a sheet for the devices of a mesh, so that `hardware_of` need not guess."""
    return _sheet_name(mesh) is not None


def _sheet_name(mesh: AnyMesh) -> str | None:
    if not isinstance(mesh, Mesh):
        return None
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return "cpu"
    if device.platform == "tpu":
        return _TPU_SHEETS.get(device.device_kind)
    return next((sheet for name, sheet in _GPU_SHEETS.items() if name in device.device_kind), None)


@final
@attrs.frozen
class _DeviceGroup:
    """The devices that a collective over some axes joins."""

    size: int
    host_count: int
    torus_dims: int


def _device_group(mesh: AnyMesh, axes: tuple[str, ...], mask: int, sheet: Hardware) -> _DeviceGroup:
    """The group of the first device along the axes of a bit mask: the other groups of a mesh look the same."""
    group_axes = [axis for index, axis in enumerate(axes) if mask >> index & 1]
    sizes = mesh_sizes(mesh)
    first_group = tuple(slice(None) if axis in group_axes else 0 for axis in sizes)
    positions = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    group = positions[first_group].ravel()
    if not isinstance(mesh, Mesh):
        # Without devices: hosts are filled in the order of the mesh.
        per_host = sheet.devices_per_host or positions.size
        return _DeviceGroup(len(group), len(dict.fromkeys(int(position) // per_host for position in group)), 0)
    devices = mesh.devices.ravel()
    host_count = len(dict.fromkeys(_host(devices[position]) for position in group))
    torus_dims = 0
    if sheet.torus_dims and devices[0].platform == "tpu":
        # A ring has links of its own along every dim of the torus in which its devices differ.
        coords = np.array([devices[position].coords for position in group])
        torus_dims = int((coords != coords[0]).any(axis=0).sum())
    return _DeviceGroup(len(group), host_count, torus_dims)


def _host(device: Any) -> Any:
    """What joins devices by links: a host of GPUs, a slice of TPUs."""
    if device.platform == "tpu":
        return getattr(device, "slice_index", 0)
    return device.process_index


def _collective_rates(
    kind: CollectiveKind, groups: list[_DeviceGroup], sheet: Hardware, assumptions: Assumptions
) -> Rates:
    per_byte, fixed = np.zeros(len(groups)), np.zeros(len(groups))
    for mask, group in enumerate(groups):
        if group.size > 1:
            per_byte[mask] = _seconds_per_byte(kind, group, sheet) / assumptions.links
            fixed[mask] = _latency(kind, group, sheet) + assumptions.launch_seconds
    return Rates(per_byte, fixed)


def _seconds_per_byte(kind: CollectiveKind, group: _DeviceGroup, sheet: Hardware) -> float:
    """What sending a byte takes, apart from latency: the model of an audit, for many bytes."""
    hosts = min(2, group.host_count) if kind == "collective-permute" else group.host_count
    cost = collective_cost(kind, _PROBE_BYTES, Group(group.size, hosts, group.torus_dims), sheet)
    return max(cost.link_seconds, cost.network_seconds) / _PROBE_BYTES


def _latency(kind: CollectiveKind, group: _DeviceGroup, sheet: Hardware) -> float:
    """What a collective takes however little it sends: for small amounts trees are faster than rings.

    A tree has a step inside hosts or slices for each doubling of the devices there, and one between them for each
    doubling of their count.
    """
    if kind == "collective-permute":
        return sheet.network_latency_seconds if group.host_count > 1 else sheet.link_latency_seconds
    link_steps = math.ceil(math.log2(math.ceil(group.size / group.host_count)))
    network_steps = math.ceil(math.log2(group.host_count))
    rounds = 2 if kind == "all-reduce" else 1  # up the tree and down again
    return rounds * (link_steps * sheet.link_latency_seconds + network_steps * sheet.network_latency_seconds)
