"""What communication and computation cost on a mesh: the figures of a sheet, made less by what nothing reaches."""

import math
from typing import Any, Literal, TypeAlias, final, get_args

import attrs
import numpy as np
from jax.sharding import Mesh

from shardrules.analysis.audits.roofline import collective_seconds
from shardrules.analysis.machine.hardware import Hardware
from shardrules.analysis.program.collectives import Collective
from shardrules.analysis.program.flow import Times
from shardrules.core.axes import AnyMesh, mesh_sizes

CollectiveKind: TypeAlias = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"]
"""The collectives that a plan may need."""

COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
"""All of them, in the order in which tables have them."""

_PROBE = 10**9
_GPU_NAMES = {"A100": "cuda:a100", "H100": "cuda:h100", "H200": "cuda:h200", "B200": "cuda:b200"}
_TPU_NAMES = {
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


@final
@attrs.frozen
class Assumptions:
    """What the cost model takes for granted. Hardware reaches its peaks nowhere; these are usual parts of them.

    **Arguments:**

    - `compute`: the part of the peak FLOPs that large matmuls reach.
    - `memory`: the part of the bandwidth of memory.
    - `links`: the part of the bandwidth of links and network.
    - `launch_seconds`: what it takes to start a collective, beside its latency.
    - `combined_bytes`: compilers combine collectives that send fewer bytes, which then share what each takes at least.
    - `temporaries`: how much more room intermediate results take than they would if operations ran one by one.

    ```python
    from shardrules.planning.graph.machine import Assumptions

    assert Assumptions(compute=0.4).links == 0.8
    ```
    """

    compute: float = 0.5
    memory: float = 0.8
    links: float = 0.8
    launch_seconds: float = 5e-6
    combined_bytes: int = 8 * 2**20
    temporaries: float = 1.4


@final
@attrs.frozen(eq=False)
class Rates:
    """What a collective costs over each group of axes. A group is a number that has a bit for each axis.

    **Arguments:**

    - `per_byte`: seconds for each byte that a device sends.
    - `fixed`: seconds however small it is.
    """

    per_byte: np.ndarray
    fixed: np.ndarray


@final
@attrs.frozen(eq=False)
class Machine:
    """The mesh that is planned for, as the planner sees it.

    **Arguments:**

    - `mesh`: the mesh.
    - `hardware`: what its devices can do.
    - `assumptions`: how much of that is reached.
    - `axes`, `sizes`: the axes that split anything, in the order of the mesh.
    - `rates`: what each kind of collective costs.

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
        """Reads a mesh.

        **Arguments:**

        - `mesh`: the mesh; its axes of size 1 split nothing and are left out.
        - `hardware`: what its devices can do; otherwise the sheet of the devices that the mesh is on, and that of H100s
            for a mesh without devices.
        - `assumptions`: how much of that is reached.

        **Returns:**

        A `Machine`.
        """
        sheet = hardware_of(mesh) if hardware is None else hardware
        taken = Assumptions() if assumptions is None else assumptions
        named = [(name, size) for name, size in mesh_sizes(mesh).items() if size > 1]
        axes, sizes = tuple(name for name, _ in named), tuple(size for _, size in named)
        groups = [_group(mesh, axes, mask, sheet) for mask in range(1 << len(axes))]
        rates = {kind: _rates(kind, groups, sheet, taken) for kind in COLLECTIVE_KINDS}
        return cls(mesh, sheet, taken, axes, sizes, rates)

    def flops_per_second(self, dtype: Any) -> float:
        """How fast products of a dtype are made.

        **Arguments:**

        - `dtype`: the dtype.

        **Returns:**

        Operations per second.
        """
        return self.hardware.flops_per_second(dtype) * self.assumptions.compute

    @property
    def memory_rate(self) -> float:
        """How many bytes per second a device reads and writes."""
        return self.hardware.memory_bytes_per_second * self.assumptions.memory


def hardware_of(mesh: AnyMesh) -> Hardware:
    """Returns the sheet of the devices that a mesh is on.

    **Arguments:**

    - `mesh`: the mesh.

    **Returns:**

    Their sheet; that of H100s where the mesh has no devices, or ones that are not known.

    ```python
    from shardrules.planning.graph.machine import hardware_of

    assert hardware_of(sr.create_mesh("data:8")).name == "CPU (nominal)"
    assert "H100" in hardware_of(sr.mesh_shape("data:8")).name
    ```
    """
    return Hardware.named(_sheet(mesh) or "cuda:h100")


def has_sheet(mesh: AnyMesh) -> bool:
    """Whether a mesh is on devices that there is a sheet for.

    **Arguments:**

    - `mesh`: the mesh.

    **Returns:**

    Whether `hardware_of` need not guess.
    """
    return _sheet(mesh) is not None


def _sheet(mesh: AnyMesh) -> str | None:
    if not isinstance(mesh, Mesh):
        return None
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return "cpu"
    if device.platform == "tpu":
        return _TPU_NAMES.get(device.device_kind)
    return next((sheet for name, sheet in _GPU_NAMES.items() if name in device.device_kind), None)


@final
@attrs.frozen
class _Group:
    """The devices that a collective over some axes joins, on the machine."""

    size: int
    host_count: int
    torus_dims: int


def _group(mesh: AnyMesh, axes: tuple[str, ...], mask: int, sheet: Hardware) -> _Group:
    """The group of the first device: meshes are laid out alike everywhere."""
    chosen = [name for number, name in enumerate(axes) if mask >> number & 1]
    sizes = mesh_sizes(mesh)
    where = tuple(slice(None) if name in chosen else 0 for name in sizes)
    numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    group = numbers[where].ravel()
    if isinstance(mesh, Mesh):
        devices = mesh.devices.ravel()
        hosts = len(dict.fromkeys(_host(devices[number]) for number in group))
        dims = 0
        if sheet.torus_dims and devices[0].platform == "tpu":
            places = np.array([devices[number].coords for number in group])
            dims = int((places != places[0]).any(axis=0).sum())
        return _Group(len(group), hosts, dims)
    per_host = sheet.devices_per_host or len(numbers.ravel())
    return _Group(len(group), len(dict.fromkeys(int(number) // per_host for number in group)), 0)


def _host(device: Any) -> Any:
    """What joins devices by links: a host of GPUs, a slice of TPUs."""
    if device.platform == "tpu":
        return getattr(device, "slice_index", 0)
    return device.process_index


def _rates(kind: CollectiveKind, groups: list[_Group], sheet: Hardware, assumptions: Assumptions) -> Rates:
    fixed, slopes = [], []
    for group in groups:
        if group.size < 2:
            fixed.append(0.0)
            slopes.append(0.0)
            continue
        slopes.append(_per_byte(kind, group, sheet) / assumptions.links)
        fixed.append(_waiting(kind, group, sheet) + assumptions.launch_seconds)
    return Rates(np.array(slopes), np.array(fixed))


def _per_byte(kind: CollectiveKind, group: _Group, sheet: Hardware) -> float:
    """What it takes to send a byte, beyond waiting."""
    hosts = min(2, group.host_count) if kind == "collective-permute" else group.host_count
    empty = Collective(
        kind, (), (), group.size, (), 0, 0, Times(1), "", "", host_count=hosts, torus_dims=group.torus_dims
    )
    full = attrs.evolve(empty, wire_bytes=_PROBE)
    return (collective_seconds(full, sheet) - collective_seconds(empty, sheet)) / _PROBE


def _waiting(kind: CollectiveKind, group: _Group, sheet: Hardware) -> float:
    """What it takes however little is sent: a step inside hosts or slices for each doubling of the devices there, and
    one between them for each doubling of these, since for little trees are quicker than rings."""
    if kind == "collective-permute":
        return sheet.network_latency_seconds if group.host_count > 1 else sheet.link_latency_seconds
    near = math.ceil(math.log2(math.ceil(group.size / group.host_count)))
    far = math.ceil(math.log2(group.host_count))
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * (near * sheet.link_latency_seconds + far * sheet.network_latency_seconds)
