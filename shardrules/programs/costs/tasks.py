"""The work of a program beside its kernels: collectives and copies, with the time and the resources that each takes."""

from typing import Literal, TypeAlias, final

import attrs

from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.kernels import Kernel
from shardrules.programs.compiled.text import HOST_MEMORY, ArrayType, Computation, Instruction
from shardrules.programs.compiled.traffic import result_types
from shardrules.programs.costs.collective import CollectiveCost, Group, collective_cost
from shardrules.programs.costs.memory import host_seconds, traffic_seconds
from shardrules.programs.machine.hardware import Hardware

COMPUTE = "compute"
"""The resource that runs kernels, one after the other."""

NETWORK, LINKS, COPIES = "network", "links", "copies"
TO_HOST, FROM_HOST = "to host", "from host"
OTHER_STREAM = "other stream"

TaskKind: TypeAlias = Literal["compute", "communication", "copy"]


@final
@attrs.frozen
class BackgroundTask:
    """A collective or a copy. It starts when all of its resources are free, and takes them until it ends."""

    name: str
    line: str
    kind: TaskKind
    resources: tuple[str, ...]
    seconds: float


def collective_seconds(collective: Collective, hardware: Hardware) -> float:
    """The time of all runs of a compiled collective in one call of the program. A single device takes no time.

    ```python
    from shardrules.programs.costs.tasks import collective_seconds
    from shardrules.programs.compiled.collectives import Collective
    from shardrules.programs.compiled.flow import Times

    h100 = sr.Hardware.named("cuda:h100")
    wire = 7 * 2**27
    inside = Collective("all-gather", ("data",), ("data",), 8, (), 2**30, wire, Times(3), "main", "all-gather.1")
    assert 3 * wire / 450e9 < collective_seconds(inside, h100) < 3 * wire / 300e9
    ```
    """
    return compiled_cost(collective, hardware).seconds * collective.times.count


def group_of(collective: Collective) -> Group:
    """The devices that a compiled collective joins."""
    host_count = collective.host_count
    # Without a target, hosts are known only of collectives between slices.
    if collective.between_slices and host_count == 1:
        host_count = collective.group_size
    return Group(
        collective.group_size, host_count, collective.torus_dims, collective.open_dims, collective.chip_devices
    )


def compiled_cost(collective: Collective, hardware: Hardware) -> CollectiveCost:
    """The cost of each run of a compiled collective."""
    return collective_cost(collective.kind, collective.wire_bytes, group_of(collective), hardware)


def collective_task(collective: Collective, line: str, hardware: Hardware) -> BackgroundTask:
    """Returns one run of a collective."""
    resources, cost = collective_resources(collective, hardware), compiled_cost(collective, hardware)
    return BackgroundTask(collective.name, line, "communication", resources, cost.seconds)


def collective_resources(collective: Collective, hardware: Hardware) -> tuple[str, ...]:
    """Returns what a collective takes: the links of each dimension of a torus that its groups span, and the network.

    Links up and down a dimension are two resources: each link carries data both ways at once. Permutes that go around a
    ring in opposite directions, as a compiler for TPUs writes a collective fused with matmuls, take one each.

    A switch, or a torus where the position of the groups is unknown, counts as one resource: its collectives run one
    after the other.
    """
    group = group_of(collective)
    size, hosts = group.size, group.host_count
    if size < 2:
        return ()
    # A group with one device on each host has no links inside; a permute between hosts counts as if all pairs were.
    if hosts > 1 and (hosts == size or collective.kind == "collective-permute"):
        return (NETWORK,)
    links = _torus_links(collective, hardware) if hardware.torus_dims else (LINKS,)
    return links if hosts == 1 else (*links, NETWORK)


def _torus_links(collective: Collective, hardware: Hardware) -> tuple[str, ...]:
    dims = collective.torus_along or tuple(range(hardware.torus_dims))
    ways = collective.torus_ways or (0,) * len(dims)
    return tuple(
        f"{LINKS} {'xyz'[dim] if dim < 3 else dim}{sign}"
        for dim, way in zip(dims, ways, strict=True)
        for sign, other_way in (("+", -1), ("-", 1))
        # A permute that goes one way leaves the links of the other way free.
        if way != other_way
    )


def copy_task(computation: Computation, start: Instruction, line: str, hardware: Hardware) -> BackgroundTask:
    """Returns one run of a copy that begins at `start`.

    Copies of one kind run one after the other. A copy inside the memory of a device reads and writes it; a copy to the
    memory beside the cores does one of both.
    """
    moved = start.operands[1 if start.op == "dynamic-update-slice-start" else 0]
    source = computation.by_name[moved].types[:1]
    results = result_types(computation, start)[:1]
    size = sum(result.nbytes for result in results)
    if start.op == "dynamic-update-slice-start":
        size = sum(array.nbytes for array in source)
    return BackgroundTask(start.name, line, "copy", *_copy_cost(source, results, size, hardware))


def host_copy(kernel: Kernel, line: str, hardware: Hardware) -> BackgroundTask | None:
    """Returns the copy that a kernel is which only moves an array from or to the host; `None` for any other kernel."""
    if not kernel.is_host_copy:
        return None
    fetched, sent = kernel.host_bytes
    resource = TO_HOST if sent >= fetched else FROM_HOST
    return BackgroundTask(kernel.name, line, "copy", (resource,), host_seconds(max(fetched, sent), hardware))


def _copy_cost(
    sources: tuple[ArrayType, ...], results: tuple[ArrayType, ...], size: int, hardware: Hardware
) -> tuple[tuple[str, ...], float]:
    source, result = (types[0].memory_space if types else 0 for types in (sources, results))
    if HOST_MEMORY in (source, result) and source != result:
        resource = TO_HOST if result == HOST_MEMORY else FROM_HOST
        return (resource,), host_seconds(size, hardware)
    # Memory space 0 is the main memory of the device; the others are on the chip, where bandwidth is no limit.
    touches = (source == 0) + (result == 0)
    return (COPIES,), traffic_seconds(touches * size, hardware)
