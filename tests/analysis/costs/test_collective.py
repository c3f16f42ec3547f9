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
from shardrules.analysis.costs.collective import collective_seconds, compiled_cost
from shardrules.analysis.machine.hardware import Hardware
from shardrules.analysis.machine.measured import KINDS
from shardrules.analysis.machine.targets import Target
from shardrules.analysis.program.collectives import Collective, find_collectives
from shardrules.analysis.program.flow import Times
from tests.analysis.programs import array, mesh_on, program_of

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
    steps = 28 * 3.4e-6 + 2 * 14e-6
    assert two == pytest.approx(2 * PART * 15 / 16 / (8 * 50e9) / 0.92 + 0.56 * steps, rel=1e-3)
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
