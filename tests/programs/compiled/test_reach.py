"""How far groups reach on small made-up machines and on real targets; each set of groups is read once."""

import pytest
from jax.sharding import AxisType, Mesh

import shardrules as sr
from shardrules.programs.compiled import reach
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.program import read_program
from shardrules.programs.compiled.reach import Topology
from shardrules.programs.compiled.replica_groups import Span, span
from shardrules.programs.compiled.slices import Slices
from shardrules.programs.machine.targets import Target
from tests.programs.examples import mesh_on

HOSTS = Topology((0, 0, 0, 1, 1, 1), ((),) * 6)
TORUS = Topology((0,) * 8, tuple((x, y, z) for x in range(2) for y in range(2) for z in range(2)))


@pytest.mark.parametrize(
    ("groups", "hosts"),
    [
        ((), 1),
        (((0,), (3,)), 1),
        (((0, 1, 2), (3, 4, 5)), 1),
        (((0, 3), (1, 4), (2, 5)), 2),
        (((0, 1), (2, 3), (4, 5)), 2),
        (((0, 1, 2, 3), (4, 5)), 2),
    ],
)
def test_hosts_of_a_group(groups: tuple[tuple[int, ...], ...], hosts: int) -> None:
    assert HOSTS.host_count(groups) == hosts
    assert HOSTS.torus_dims(groups) == 0


@pytest.mark.parametrize(
    ("groups", "dims"),
    [
        ((), 0),
        (((0,),), 0),
        (((0, 1), (2, 3)), 1),
        (((0, 2), (1, 5)), 1),
        (((0, 3),), 2),
        (((0, 1, 2, 3), (4, 5, 6, 7)), 2),
        (((0, 1), (0, 7)), 3),
        ((tuple(range(8)),), 3),
    ],
)
def test_torus_dims_of_a_group(groups: tuple[tuple[int, ...], ...], dims: int) -> None:
    assert TORUS.torus_dims(groups) == dims
    assert TORUS.host_count(groups) == 1


LINE = Topology((0,) * 8, tuple((x, 0, 0) for x in range(8)), (8, 0, 4))
"""Eight chips along the first dimension of a torus, which closes to a ring; the second one does not."""


@pytest.mark.parametrize(
    ("topology", "groups", "count"),
    [
        (LINE, (tuple(range(8)),), 0),
        (LINE, ((0, 1, 2, 3), (4, 5, 6, 7)), 1),
        (LINE, ((0, 2, 4, 6), (1, 3, 5, 7)), 1),
        (LINE, ((0,),), 0),
        (LINE, (), 0),
        (Topology((0,) * 4, ((0, 0), (0, 1), (1, 0), (1, 1)), (2, 0)), ((0, 1, 2, 3),), 1),
        (Topology((0,) * 4, ((0, 0), (0, 1), (1, 0), (1, 1)), (0, 0)), ((0, 1, 2, 3),), 2),
        (HOSTS, ((0, 1, 2),), 0),
    ],
)
def test_dims_that_do_not_close_to_a_ring(topology: Topology, groups: tuple[tuple[int, ...], ...], count: int) -> None:
    assert topology.open_dims(groups) == count


RING = Topology((0,) * 8, tuple((x, y) for x in range(4) for y in range(2)), (4, 0))
"""Four chips in a ring along the first dimension, and two in a line along the second."""


@pytest.mark.parametrize(
    ("pairs", "ways"),
    [
        (tuple((x, (x + 2) % 8) for x in range(8)), (1, None)),
        (tuple(((x + 2) % 8, x) for x in range(8)), (-1, None)),
        (((0, 2), (2, 4)), (1, None)),
        (((6, 0),), (1, None)),
        (((0, 4), (4, 0)), (0, None)),
        (((0, 2), (6, 4)), (0, None)),
        (((0, 1), (2, 3)), (None, 1)),
        (((0, 1), (1, 0)), (None, 0)),
        (((0, 7),), (-1, 1)),
        # A ring through a plane goes up along both, and returns to its begin.
        (tuple((x, (x + 1) % 8) for x in range(8)), (1, 0)),
    ],
    ids=["around", "back", "a part", "over the edge", "halves", "towards", "line", "swap", "diagonal", "plane"],
)
def test_ways_of_permutes_around_a_ring(pairs: tuple[tuple[int, int], ...], ways: tuple[int | None, ...]) -> None:
    along = RING.torus_along(pairs)
    assert {dim: RING.torus_way(pairs, dim) for dim in along} == {
        dim: way for dim, way in enumerate(ways) if way is not None
    }


def test_only_permutes_go_one_way() -> None:
    topology = Topology((0,) * 4, tuple((x, 0) for x in range(4)), (4, 0))
    lines = "".join(
        f"  %p{shift} = f32[8]{{0}} collective-permute(%x), channel_id={shift}, source_target_pairs="
        f"{{{','.join(f'{{{device},{(device + shift) % 4}}}' for device in range(4))}}}\n"
        for shift in (1, 3, 2)
    )
    program = read_program(
        "HloModule m, num_partitions=4\n\nENTRY %e (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n"
        f"{lines}  ROOT %g = f32[32]{{0}} all-gather(%x), channel_id=9, replica_groups=[1,4]<=[4], "
        "use_global_device_ids=true, dimensions={0}\n}\n"
    )
    reader = reach.GroupReader(program, {"x": 4}, Slices.of(None, 4), topology)
    kinds = {"p1": "collective-permute", "p3": "collective-permute", "p2": "collective-permute", "g": "all-gather"}
    by_name = program.find(program.entry).by_name
    ways = {name: reader.read(kind, by_name[name]).torus_ways for name, kind in kinds.items()}
    assert ways == {"p1": (1,), "p3": (-1,), "p2": (0,), "g": ()}


def test_devices_of_a_chip() -> None:
    chips = Topology((0,) * 4 + (1,) * 4, ((0, 0), (0, 0), (0, 1), (0, 1)) * 2, (0, 0))
    assert chips.chip_devices(((0, 1, 2, 3),)) == 2
    assert chips.chip_devices(((0, 2), (1, 3))) == 1
    assert chips.chip_devices(((0, 4), (1, 5))) == 1, "chips of two slices have the same position"
    assert HOSTS.chip_devices(((0, 1, 2),)) == 1
    assert chips.chip_devices(()) == 1


@pytest.mark.slow
def test_hosts_follow_devices_not_positions() -> None:
    """A mesh may alternate between the devices of two hosts."""
    target = Target.parse("cuda:h100:16")
    devices = mesh_on(str(target), "data:16").devices
    mixed = Mesh(devices.reshape(2, 8).T.reshape(16), ("data",), axis_types=(AxisType.Auto,))
    assert Topology.of(mixed, target).granules == (0, 1) * 8
    assert Topology.of(target.mesh(mixed), target).host_count(((0, 1),)) == 2


@pytest.mark.slow
def test_tpus_have_coords_in_their_torus() -> None:
    target = Target.parse("tpu:v5e:4x4")
    topology = Topology.of(mesh_on(str(target), "data:4,model:4"), target)
    assert sorted(topology.coords) == [(x, y, 0) for x in range(4) for y in range(4)]
    assert topology.granules == (0,) * 16


def program_of_many(devices: int, count: int) -> str:
    lines = "".join(
        f"  %r{i} = f32[1024]{{0}} all-reduce(%x), channel_id={i}, "
        f"replica_groups=[{devices // 8},8]<=[{devices}], use_global_device_ids=true, to_apply=%add\n"
        f"  %p{i} = f32[1024]{{0}} collective-permute(%x), channel_id={count + i}, "
        f"source_target_pairs={{{','.join(f'{{{device},{(device + 8) % devices}}}' for device in range(devices))}}}\n"
        for i in range(count)
    )
    return (
        f"HloModule m, num_partitions={devices}\n\nENTRY %e (x: f32[1024]) -> f32[1024] {{\n"
        f"  %x = f32[1024]{{0}} parameter(0)\n{lines}}}\n"
    )


@pytest.mark.slow
def test_each_set_of_groups_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.parse("cuda:h100:256")
    mesh = mesh_on(str(target), "data:32,model:8")
    program = read_program(program_of_many(256, 300))
    spans: list[Span] = []
    monkeypatch.setattr(reach, "span", lambda *args: spans.append(span(*args)) or spans[-1])
    collectives = find_collectives(program, mesh, target)
    assert len(collectives) == 600
    assert len(spans) == 2  # one for the all-reduces, one for the permutes
    assert {(collective.kind, collective.axes, collective.host_count) for collective in collectives} == {
        ("all-reduce", ("model",), 1),
        ("collective-permute", ("data",), 2),
    }


def test_without_mesh_and_target_reach_is_unknown() -> None:
    program = read_program(program_of_many(8, 1))
    for mesh, target in ((None, None), (None, Target.parse("cpu")), (sr.mesh_shape("data:8"), None)):
        assert {
            (collective.host_count, collective.torus_dims) for collective in find_collectives(program, mesh, target)
        } == {(1, 0)}
