"""What collectives take: by hand, by tables, and what has to hold for all of them."""

from typing import Any

import attrs
import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.compiled.collectives import Collective, find_collectives
from shardrules.programs.compiled.flow import Times
from shardrules.programs.costs.collective import (
    CollectiveCost,
    Group,
    collective_cost,
)
from shardrules.programs.costs.tasks import collective_seconds, compiled_cost
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.machine.measured import KINDS
from shardrules.programs.machine.targets import Target
from tests.programs.examples import array, mesh_on, program_of

H100, V5E, V5P = (sr.Hardware.named(name) for name in ("cuda:h100", "tpu:v5e", "tpu:v5p"))
ROUND = Hardware(
    "round figures",
    {"bf16": 1000.0},
    10**9,
    memory_bytes_per_second=100.0,
    link_bytes_per_second=10.0,
    link_latency_seconds=0.1,
    network_bytes_per_second=1.0,
    network_latency_seconds=0.5,
    devices_per_host=8,
)


def peaks(sheet: Hardware) -> Hardware:
    """A sheet of peaks alone."""
    return attrs.evolve(sheet, link_fractions=(), network_fraction=1, collective_times=(), collective_launch_seconds=0)


def collective(kind: str, size: int, wire: int, **more: Any) -> Collective:
    return Collective(kind, ("data",), ("data",), size, (), wire, wire, Times(1), "main", "c", **more)


@pytest.mark.parametrize(
    ("collective", "sending", "waiting"),
    [
        (collective("all-gather", 8, 70), 7.0, 7 * 0.1),
        (collective("reduce-scatter", 8, 70), 7.0, 7 * 0.1),
        (collective("all-to-all", 8, 70), 7.0, 7 * 0.1),
        (collective("all-reduce", 8, 140), 14.0, 14 * 0.1),
        (collective("collective-permute", 8, 70), 7.0, 0.1),
        (collective("all-gather", 1, 0), 0.0, 0.0),
        # On two hosts the eight network shares of each carry the ring's bytes, which all go over the links too.
        (collective("all-gather", 16, 160), max(16.0, 160 / 8), 14 * 0.1 + 0.5),
        (collective("all-reduce", 16, 1600), max(160.0, 1600 / 8), 28 * 0.1 + 2 * 0.5),
        (collective("all-gather", 32, 1600), max(160.0, 1600 / 16), 30 * 0.1 + 0.5),
        # With one device on each, all goes over its own share.
        (collective("all-gather", 2, 70), 70.0, 0.5),
        (collective("collective-permute", 16, 70), 70.0, 0.5),
        # 8 of the 15 parts that are sent go to the other host.
        (collective("all-to-all", 16, 150), 80.0, 14 * 0.1 + 0.5),
    ],
)
def test_a_collective_sends_and_waits(collective: Collective, sending: float, waiting: float) -> None:
    hosts = 2 if collective.group_size > 8 or (collective.kind, collective.group_size) == ("all-gather", 2) else 1
    collective = attrs.evolve(collective, host_count=hosts)
    assert collective_seconds(collective, ROUND) == pytest.approx(sending + waiting)
    assert collective_seconds(attrs.evolve(collective, times=Times(12)), ROUND) == pytest.approx(
        12 * (sending + waiting)
    )


@pytest.mark.parametrize(
    ("dims", "share", "hops"),
    [(0, 1.0, 3 * 4 ** (1 / 3) / 2), (1, 1 / 3, 2), (2, 2 / 3, 2), (3, 1.0, 3 * 4 ** (1 / 3) / 2)],
    ids=["unknown", "one", "two", "three"],
)
def test_a_group_has_the_links_along_which_it_lies(dims: int, share: float, hops: float) -> None:
    gather = collective("all-gather", 4, 600, torus_dims=dims)
    torus = attrs.evolve(ROUND, torus_dims=3)
    assert collective_seconds(gather, torus) == pytest.approx(60 / share + hops * 0.1)
    assert collective_seconds(gather, ROUND) == pytest.approx(60.3), "a switch joins all to all"
    flat = attrs.evolve(ROUND, torus_dims=2)  # a chip of two devices, or a group that is not on this hardware
    assert collective_seconds(gather, flat) == pytest.approx(60 / min(1.0, (dims or 2) / 2) + 2 * 0.1)


def test_one_device_on_each_host_uses_no_links() -> None:
    fast = attrs.evolve(ROUND, network_bytes_per_second=100.0)
    gather = collective("all-gather", 2, 700, host_count=2)
    assert collective_seconds(gather, fast) == pytest.approx(7 + 0.5)
    assert collective_seconds(attrs.evolve(gather, group_size=4), fast) == pytest.approx(70 + 0.5 + 2 * 0.1)


def test_between_slices_uses_the_network_without_a_target() -> None:
    reduce = collective("all-reduce", 2, 70, between_slices=True)
    assert collective_seconds(reduce, ROUND) == pytest.approx(70 + 2 * 0.5)
    assert collective_seconds(attrs.evolve(reduce, host_count=2), ROUND) == pytest.approx(70 + 2 * 0.5)


@given(
    kind=st.sampled_from(KINDS),
    members=st.integers(1, 8),
    hosts=st.integers(1, 8),
    wire=st.integers(0, 10**12),
    dims=st.integers(0, 3),
    count=st.integers(1, 100),
    hardware=st.sampled_from([H100, V5E, V5P, ROUND]),
)
def test_laws_of_collectives(
    kind: str, members: int, hosts: int, wire: int, dims: int, count: int, hardware: Hardware
) -> None:
    sample = collective(kind, members * hosts, wire, host_count=hosts, torus_dims=dims)
    seconds = collective_seconds(sample, hardware)
    assert seconds >= 0
    assert (seconds == 0) == (members * hosts == 1)
    slack = 1 + 1e-9
    assert seconds <= collective_seconds(attrs.evolve(sample, wire_bytes=wire + 1000), hardware) * slack
    assert count * seconds == pytest.approx(collective_seconds(attrs.evolve(sample, times=Times(count)), hardware))
    for figure in ("link_bytes_per_second", "network_bytes_per_second"):
        faster = attrs.evolve(hardware, **{figure: 2 * getattr(hardware, figure)})
        assert seconds / 2 / slack <= collective_seconds(sample, faster) <= seconds * slack
    if hosts == 1 and members > 1:
        spread = attrs.evolve(sample, host_count=members)
        assert collective_seconds(spread, hardware) * slack >= seconds
    if dims:
        more_links = compiled_cost(attrs.evolve(sample, torus_dims=dims + 1), hardware)
        assert more_links.link_seconds <= compiled_cost(sample, hardware).link_seconds * slack


def summed(target: str, text: str, axes: Any, spec: P) -> float:
    """The seconds to add up 64 MiB on each device along axes of a mesh, at peak rates."""
    mesh = mesh_on(target, text)
    mapped = jax.shard_map(lambda x: lax.psum(x, axes), mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
    program = program_of(mapped, array(mesh, (mesh.size * 2**12, 2**12), spec[0]))
    collectives = find_collectives(program, mesh, Target.parse(target))
    hardware = peaks(Target.parse(target).hardware)
    return sum(collective_seconds(collective, hardware) for collective in collectives)


PART = 2**26


@pytest.mark.slow
def test_on_one_host_and_on_two() -> None:
    single = summed("cuda:h100:8", "data:8", "data", P("data"))
    assert single == pytest.approx(2 * PART * 7 / 8 / 450e9 + 14 * 3.4e-6, rel=1e-3)
    two = summed("cuda:h100:16", "data:16", "data", P("data"))
    # A protocol with shorter steps, and less bandwidth.
    steps = 28 * 3.4e-6 * 0.56 + 2 * 14e-6 * 0.29
    assert two == pytest.approx(2 * PART * 15 / 16 / (8 * 50e9) / 0.92 + steps, rel=1e-3)
    across = summed("cuda:h100:16", "data:2,model:8", "data", P(("data", "model")))
    assert across == pytest.approx(PART / 50e9 + 2 * 14e-6, rel=1e-3)
    inside = summed("cuda:h100:16", "data:2,model:8", "model", P(("data", "model")))
    assert inside == pytest.approx(single)


@pytest.mark.slow
def test_torus_dimensions_add_bandwidth() -> None:
    along_row = summed("tpu:v5e:4x4", "data:4,model:4", "data", P(("data", "model")))
    assert along_row == pytest.approx(2 * PART * 3 / 4 / 50e9 + 6e-6, rel=1e-3), "a line has one link each way"
    two = summed("tpu:v5e:4x4", "data:16", "data", P("data"))
    assert two == pytest.approx(2 * PART * 15 / 16 / 100e9 + 12e-6, rel=1e-3)


@pytest.mark.slow
def test_between_two_slices() -> None:
    inside = summed("tpu:v5e:2x2:2", "data:2,model:4", "model", P(("data", "model")))
    assert inside == pytest.approx(2 * PART * 3 / 4 / 100e9 + 4e-6, rel=1e-3)
    across = summed("tpu:v5e:2x2:2", "data:2,model:4", "data", P(("data", "model")))
    assert across == pytest.approx(PART / 3.125e9 + 2 * 10e-6, rel=1e-3)
    # Each slice sums for itself, every chip a quarter, and shares that with its like in the other slice.
    both = summed("tpu:v5e:2x2:2", "data:8", "data", P("data"))
    assert both == pytest.approx(2 * PART * 3 / 4 / 100e9 + PART / 4 / 3.125e9 + 24e-6, rel=0.01)


# ---- what is split, and where it comes from ----

TABLES = [
    {
        "kind": kind,
        "group_size": size,
        "payload_bytes": (10, 100, 1000),
        "seconds": times,
        "link_bytes_per_second": 10.0,
    }
    for kind, size, times in (
        ("all-gather", 2, (1.0, 8.0, 80.0)),
        ("all-gather", 8, (2.0, 12.0, 120.0)),
        ("all-to-all", 8, (3.0, 20.0, 200.0)),
    )
]
MEASURED = attrs.evolve(ROUND, collective_times=TABLES)


def gathered(payload: float, size: int, hardware: Hardware = MEASURED, kind: str = "all-gather") -> CollectiveCost:
    return collective_cost(kind, payload * (size - 1) / size, Group(size), hardware)


def test_tables_hold_at_their_sizes_and_between() -> None:
    assert gathered(100, 8).seconds == pytest.approx(12)
    assert gathered(1000, 2).seconds == pytest.approx(80)
    assert gathered(1, 8).seconds == pytest.approx(2), "small ones only wait"
    assert gathered(10_000, 8).seconds == pytest.approx(1200), "large ones at the bandwidth of the largest"
    assert gathered(100 * 10**0.5, 8).seconds == pytest.approx((12 * 120) ** 0.5)


def test_waiting_is_what_the_smallest_takes() -> None:
    cost = gathered(1000, 8)
    assert (cost.latency_seconds, cost.network_seconds) == (2, 0)
    assert cost.link_seconds == pytest.approx(118)


def test_groups_between_those_that_were_measured() -> None:
    low, high = (collective_cost("all-gather", 400, Group(size), MEASURED).seconds for size in (2, 8))
    assert collective_cost("all-gather", 400, Group(4), MEASURED).seconds == pytest.approx((low + high) / 2)
    assert high < collective_cost("all-gather", 400, Group(6), MEASURED).seconds < (low + high) / 2


def test_larger_groups_wait_longer() -> None:
    costs = [collective_cost("all-gather", 400, Group(size), MEASURED) for size in (8, 16, 32)]
    assert costs[0].link_seconds == costs[1].link_seconds == costs[2].link_seconds
    assert [cost.latency_seconds for cost in costs] == pytest.approx([2, 2.5, 3])


def test_kinds_without_a_table_use_their_like_or_rings() -> None:
    ragged = collective_cost("ragged-all-to-all", 87.5, Group(8), MEASURED)
    assert ragged == collective_cost("all-to-all", 87.5, Group(8), MEASURED)
    assert ragged.seconds == pytest.approx(20)
    assert collective_cost("collective-broadcast", 87.5, Group(8), MEASURED).seconds == pytest.approx(12)
    assert collective_cost("all-reduce", 875, Group(8), MEASURED) == collective_cost("all-reduce", 875, Group(8), ROUND)


def test_tables_scale_with_the_links() -> None:
    fast = attrs.evolve(MEASURED, link_bytes_per_second=20.0)
    assert gathered(1000, 8, fast).latency_seconds == gathered(1000, 8).latency_seconds
    assert gathered(1000, 8, fast).link_seconds == pytest.approx(gathered(1000, 8).link_seconds / 2)
    slow = attrs.evolve(MEASURED, link_bytes_per_second=0.001)
    assert gathered(4, 8, slow).seconds >= 3.5 / 0.001, "bytes below the smallest size take their time too"


def test_fractions_of_links_by_kind() -> None:
    reached = attrs.evolve(ROUND, link_fractions={"all-gather": 0.5, "all": 0.8}, network_fraction=0.25)
    assert gathered(1600, 8, reached).link_seconds == pytest.approx(1400 / 5)
    assert gathered(1600, 8, reached, "reduce-scatter").link_seconds == pytest.approx(1400 / 8)
    across = collective_cost("all-gather", 1600, Group(16, host_count=2), reached)
    assert across.link_seconds == pytest.approx(1600 / 5)
    assert across.network_seconds == pytest.approx(1600 / 8 / 0.25)
    assert across.seconds == across.network_seconds + across.latency_seconds


def test_launches_come_once() -> None:
    launched = attrs.evolve(ROUND, collective_launch_seconds=3.0)
    for group in (Group(8), Group(16, host_count=2)):
        plain, cost = (collective_cost("all-gather", 1000, group, sheet) for sheet in (ROUND, launched))
        assert cost.seconds == pytest.approx(plain.seconds + 3)
    assert collective_cost("all-gather", 0, Group(1), launched).seconds == 0


def test_small_collectives_take_short_steps() -> None:
    """A protocol of shorter steps and less bandwidth serves small ones, and trees serve small all-reduces."""
    latency = [collective_cost("all-gather", size, Group(64), ROUND).latency_seconds for size in (1, 10**6)]
    assert latency[0] < latency[1] == pytest.approx(63 * 0.1)
    many = Group(64, host_count=8)
    ring = 2 * (56 * 0.1 * 0.32 + 7 * 0.5 * 0.19)
    assert collective_cost("all-reduce", 0, many, ROUND).latency_seconds < ring


# ---- tori ----

TORUS = attrs.evolve(ROUND, link_bytes_per_second=60.0, torus_dims=3)  # 10 bytes a second for each of six links


@pytest.mark.parametrize(
    ("group", "rate", "hops"),
    [
        (Group(8, torus_dims=1), 20, 4),
        (Group(8, torus_dims=1, open_dims=1), 10, 7),
        (Group(16, torus_dims=2), 40, 4),
        (Group(16, torus_dims=2, open_dims=1), 30, 5),
        (Group(16, torus_dims=2, open_dims=2), 20, 6),
        (Group(64, torus_dims=3), 60, 6),
    ],
)
def test_rings_go_both_ways_along_each_dimension(group: Group, rate: float, hops: float) -> None:
    for kind, rounds in (("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 2)):
        cost = collective_cost(kind, 600, group, TORUS)
        assert cost.link_seconds == pytest.approx(600 / rate)
        assert cost.latency_seconds == pytest.approx(rounds * hops * 0.1)


@pytest.mark.parametrize(("size", "factor"), [(2, 1.0), (4, 4 / 3), (8, 16 / 7), (16, 64 / 15)])
def test_exchanges_pass_through_the_chips_between(size: int, factor: float) -> None:
    """The array of a device, `size / (size - 1)` times what it sends, goes a quarter of the ring on average."""
    cost = collective_cost("all-to-all", 600, Group(size, torus_dims=1), TORUS)
    assert cost.link_seconds == pytest.approx(600 * factor / 20)
    assert collective_cost("ragged-all-to-all", 600, Group(size, torus_dims=1), TORUS) == cost


@pytest.mark.parametrize("name", ["cuda:h100", "cuda:b200", "cuda:a100"])
@pytest.mark.parametrize("kind", KINDS)
def test_several_hosts_are_never_faster_than_one(name: str, kind: str) -> None:
    hardware = sr.Hardware.named(name)
    for power in range(10, 32):
        payload, rounds = 2**power, 2 if kind == "all-reduce" else 1
        inside, across = (
            collective_cost(kind, rounds * payload * (size - 1) / size, Group(size, hosts), hardware).seconds
            for size, hosts in ((8, 1), (16, 2))
        )
        assert across >= inside


def test_a_permute_has_one_link() -> None:
    cost = collective_cost("collective-permute", 600, Group(8, torus_dims=1), TORUS)
    assert (cost.link_seconds, cost.latency_seconds) == pytest.approx((60, 0.1))
    assert collective_cost("collective-permute", 600, Group(8, torus_dims=3), TORUS).link_seconds == 60


def test_devices_of_a_chip_share_what_arrives() -> None:
    apart = collective_cost("all-gather", 700, Group(8, torus_dims=2, chip_devices=1), TORUS)
    together = collective_cost("all-gather", 700, Group(8, torus_dims=2, chip_devices=2), TORUS)
    # Six of seven parts come from other chips, once for both devices.
    assert together.link_seconds == pytest.approx(apart.link_seconds * 6 / 7 / 2)


@pytest.mark.parametrize("kind", ["all-gather", "all-reduce", "all-to-all", "collective-permute"])
def test_inside_a_chip_bytes_go_through_memory(kind: str) -> None:
    """Each device reads what it sends and writes what it gets, at 100 bytes a second."""
    assert collective_cost(kind, 700, Group(2, chip_devices=2), TORUS).link_seconds == pytest.approx(2 * 700 / 100)
    apart = collective_cost(kind, 700, Group(4, torus_dims=1, chip_devices=2), TORUS)
    assert apart.link_seconds != pytest.approx(2 * 700 / 100)


def test_slices_are_joined_by_the_network() -> None:
    cost = collective_cost("all-gather", 640, Group(32, host_count=2, torus_dims=2), TORUS)
    assert cost.link_seconds == pytest.approx(640 / 40)
    assert cost.network_seconds == pytest.approx(640 / 16)
    between = collective_cost("all-reduce", 640, Group(2, host_count=2), TORUS)
    assert (between.link_seconds, between.network_seconds) == (0, 640)
