"""The time of collectives: from measured times, or from rings over links and network.

Inside a host or a slice the devices of a group form rings over their links: on a torus in both directions along every
dimension that they span, elsewhere through a switch. Over several hosts a ring enters and leaves each host once, over
the network shares of all its members there, and all of its bytes go over the links too.
"""

import math
from bisect import bisect_right
from typing import TypeAlias, final

import attrs

from shardrules.programs.costs.memory import traffic_seconds
from shardrules.programs.machine.hardware import Hardware, fraction
from shardrules.programs.machine.measured import CollectiveTimes

_Protocols: TypeAlias = tuple[tuple[float, float, float], ...]

_RINGS: _Protocols = ((1.0, 1.0, 1.0), (0.56, 0.29, 0.92), (0.32, 0.19, 0.25))
"""The protocols of rings: fractions of a step's latency over links and over the network, and of the bandwidth.

NCCL's are called Simple, LL128 and LL. Their steps take 3.4, 1.9 and 1.1 microseconds over NVLink, and 14, 4 and 2.7
over a network: https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc.
"""
_TREES: _Protocols = ((1.18, 1.0, 0.9), (0.37, 0.61, 0.83), (0.32, 0.36, 0.24))
"""The same for trees, in which all-reduces have fewer steps: of 4, 1.25 and 1.1 microseconds over NVLink, and of 14,
8.5 and 5 over a network."""

_SIBLINGS = {"ragged-all-to-all": "all-to-all", "collective-broadcast": "all-gather"}
"""Kinds that send as another one does, so that figures of that one serve."""


@final
@attrs.frozen
class Group:
    """The devices that a collective joins, and how they are connected.

    ```python
    from shardrules.programs.costs.collective import Group

    assert Group(16, host_count=2).per_host == 8
    ```
    """

    size: int
    host_count: int = 1
    """The number of hosts, or slices of TPUs, that it spans."""
    torus_dims: int = 0
    """Along how many dimensions of the torus its devices differ; 0 if that is unknown: all of them."""
    open_dims: int = 0
    """The number of these dimensions that are lines: they do not close to a ring."""
    chip_devices: int = 1
    """The number of its devices that share a chip, and the links of that chip."""

    @property
    def per_host(self) -> float:
        """The number of its devices on a host or a slice."""
        return self.size / self.host_count


@final
@attrs.frozen
class CollectiveCost:
    """The cost of one run of a collective on a device: the time that it occupies links and network, and the time that
    it waits.

    Links and network work at the same time, on different parts of the data.
    """

    link_seconds: float = 0.0
    network_seconds: float = 0.0
    latency_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The time that it takes alone, from its start to its end."""
        return max(self.link_seconds, self.network_seconds) + self.latency_seconds


def collective_cost(kind: str, wire_bytes: float, group: Group, hardware: Hardware) -> CollectiveCost:
    """The cost of a collective, compiled or planned, in which each device sends `wire_bytes`.

    These are the bytes of a ring of all devices: (n - 1) / n of what is gathered, scattered or exchanged, twice that
    for an all-reduce, and all of what a permute sends.

    ```python
    from shardrules.programs.costs.collective import Group, collective_cost

    h100 = sr.Hardware.named("cuda:h100")
    inside, across = (collective_cost("all-gather", 7 * 2**27, Group(8, hosts), h100) for hosts in (1, 8))
    assert inside.network_seconds == 0 and across.network_seconds > across.link_seconds
    ```
    """
    if group.size < 2:
        return CollectiveCost()
    tables = [] if hardware.torus_dims else _tables(kind, hardware)
    if tables and group.host_count == 1:
        return _measured(tables, wire_bytes, group.size, hardware)
    link_bytes, network_bytes = _sent_bytes(kind, wire_bytes, group)
    if hardware.torus_dims:
        link_seconds = _torus_seconds(kind, link_bytes, group, hardware)
    else:
        link_seconds = link_bytes / (hardware.link_bytes_per_second * _link_fraction(kind, hardware))
    network_seconds = network_bytes / (hardware.network_bytes_per_second * hardware.network_fraction)
    cost = _with_latency(kind, link_seconds, network_seconds, group, hardware)
    # What a group inside a host takes, one over several hosts takes too: the rest is waiting.
    least = _measured(tables, wire_bytes, group.size, hardware) if tables else CollectiveCost()
    waiting = max(cost.latency_seconds, least.latency_seconds, least.seconds - cost.seconds + cost.latency_seconds)
    return attrs.evolve(cost, latency_seconds=waiting)


def _with_latency(
    kind: str, link_seconds: float, network_seconds: float, group: Group, hardware: Hardware
) -> CollectiveCost:
    """Adds what steps wait for, in the protocol that takes the least time."""
    costs = []
    for (link_steps, network_steps), protocols in _algorithms(kind, group, hardware):
        for link_part, network_part, bandwidth in protocols:
            waiting = (
                link_steps * hardware.link_latency_seconds * link_part
                + network_steps * hardware.network_latency_seconds * network_part
            )
            costs.append(
                CollectiveCost(
                    link_seconds / bandwidth, network_seconds / bandwidth, waiting + hardware.collective_launch_seconds
                )
            )
    return min(costs, key=lambda cost: cost.seconds)


def _algorithms(kind: str, group: Group, hardware: Hardware) -> list[tuple[tuple[float, float], _Protocols]]:
    """The numbers of messages over links, and over the network, that wait for each other in each algorithm, and its
    protocols."""
    size, host_count = group.size, group.host_count
    if kind == "collective-permute":
        return [((0, 1) if host_count > 1 else (1, 0), _RINGS[:1])]
    # A ring of n devices has n - 1 steps, an all-reduce twice as many.
    rounds = 2 if kind == "all-reduce" else 1
    if hardware.torus_dims:
        # Rings go in both directions along each dimension, one dimension after the other.
        dims = _dims(group, hardware)
        length = (group.per_host / group.chip_devices) ** (1 / dims)
        hops = group.open_dims * (length - 1) + (dims - group.open_dims) * length / 2
        return [((rounds * max(1.0, hops), rounds * (host_count - 1)), _RINGS[:1])]
    ring = ((rounds * (size - host_count), rounds * (host_count - 1)), _RINGS)
    if kind != "all-reduce":
        return [ring]
    # A tree over the hosts, with a chain in each, goes up and down again.
    return [ring, ((rounds * (group.per_host - 1), rounds * math.ceil(math.log2(host_count))), _TREES)]


def _sent_bytes(kind: str, wire_bytes: float, group: Group) -> tuple[float, float]:
    """The bytes that a device sends over its links, and the bytes that its share of the network carries."""
    if group.host_count == 1:
        return wire_bytes, 0.0
    if kind == "collective-permute":
        return 0.0, wire_bytes
    if kind.endswith("all-to-all"):
        # Of the other `size - 1` devices, `size - per_host` are on other hosts, and each gets an equal part.
        outside = wire_bytes * (group.size - group.per_host) / (group.size - 1)
        return wire_bytes - outside, outside
    # The ring's bytes leave a host once, over the network shares of all its members.
    return wire_bytes if group.per_host > 1 else 0.0, wire_bytes / group.per_host


def _torus_seconds(kind: str, wire_bytes: float, group: Group, hardware: Hardware) -> float:
    """The time that bytes occupy the links of a torus."""
    if group.chip_devices > 1 and not group.torus_dims:
        # Inside a chip, through its memory: what a device sends is read, and what it gets is written.
        return traffic_seconds(2 * wire_bytes, hardware)
    dims = _dims(group, hardware)
    # Each dimension has two links in each direction; at the ends of a line one of them leads nowhere.
    link = hardware.link_bytes_per_second * _link_fraction(kind, hardware) / (2 * hardware.torus_dims)
    if kind == "collective-permute":
        return wire_bytes / link  # to one neighbour
    if group.chip_devices > 1:
        # What the devices of a chip have from each other does not go over links, and the rest arrives once for both.
        per_host = group.per_host
        wire_bytes *= (per_host - group.chip_devices) / max(1.0, per_host - 1) / group.chip_devices
    rate = link * (2 * dims - min(group.open_dims, dims))
    if kind.endswith("all-to-all"):
        # Data goes a quarter of the way around a ring on average, and occupies the links of each hop.
        length = (group.per_host / group.chip_devices) ** (1 / dims)
        wire_bytes *= max(1.0, length / 4 * group.per_host / max(1.0, group.per_host - 1))
    return wire_bytes / rate


def _dims(group: Group, hardware: Hardware) -> int:
    """Along how many dimensions of the hardware's torus a group lies; all if that is unknown."""
    return min(group.torus_dims or hardware.torus_dims, hardware.torus_dims)


def _link_fraction(kind: str, hardware: Hardware) -> float:
    return fraction(hardware.link_fractions, kind, _SIBLINGS.get(kind, kind))


def _tables(kind: str, hardware: Hardware) -> list[CollectiveTimes]:
    """The tables of a kind by group size, or else the tables of the kind that sends in the same way."""
    for name in (kind, _SIBLINGS.get(kind, kind)):
        tables = [table for table in hardware.collective_times if table.kind == name]
        if tables:
            return sorted(tables, key=lambda table: table.group_size)
    return []


def _measured(tables: list[CollectiveTimes], wire_bytes: float, size: int, hardware: Hardware) -> CollectiveCost:
    """Interpolates between the groups that were measured; outside of them only the waiting grows."""
    low = [table for table in tables if table.group_size <= size][-1:] or tables[:1]
    high = [table for table in tables if table.group_size >= size][:1] or tables[-1:]
    waiting, sending = zip(*(_table_times(table, wire_bytes, hardware) for table in (*low, *high)), strict=True)
    first, last = low[0].group_size, high[0].group_size
    # Groups are mostly measured at doubled sizes, which are evenly spaced in the logarithm.
    part = math.log(size / first) / math.log(last / first) if last > first else 0.0
    latency = waiting[0] + part * (waiting[1] - waiting[0])
    if size > tables[-1].group_size and len(tables) > 1:
        before = tables[-2]
        slope = (tables[-1].seconds[0] - before.seconds[0]) / math.log(tables[-1].group_size / before.group_size)
        # A larger group never waits less, whatever noise says.
        latency += max(0.0, slope) * math.log(size / tables[-1].group_size)
    return CollectiveCost(sending[0] + part * (sending[1] - sending[0]), 0.0, latency)


def _table_times(table: CollectiveTimes, wire_bytes: float, hardware: Hardware) -> tuple[float, float]:
    """The latency and the sending time of a collective, by the table of one size of group."""
    size = table.group_size
    per_payload = {"all-reduce": 2 * (size - 1) / size, "collective-permute": 1.0}.get(table.kind, (size - 1) / size)
    payload, sizes, seconds = wire_bytes / per_payload, table.payload_bytes, table.seconds
    latency = seconds[0]
    index = bisect_right(sizes, payload)
    if index == 0:
        total = latency
    elif index == len(sizes):
        # Beyond the largest size the rate is that of the largest.
        total = seconds[-1] * payload / sizes[-1]
    else:
        # Between two sizes the time follows a power of the bytes: a straight line in logarithms.
        part = math.log(payload / sizes[index - 1]) / math.log(sizes[index] / sizes[index - 1])
        total = seconds[index - 1] * (seconds[index] / seconds[index - 1]) ** part
    # Up to the smallest size that was measured all is waiting. More than that is sending, faster over faster links: as
    # fast as they are, or as what was measured where switches add up for them.
    scale = hardware.link_bytes_per_second / table.link_bytes_per_second
    rate = scale * max(table.link_bytes_per_second, sizes[-1] * per_payload / seconds[-1])
    return latency, max(0.0, (total - latency) / scale, wire_bytes / rate - latency)
