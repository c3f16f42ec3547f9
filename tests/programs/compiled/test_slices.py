"""Collectives between TPU slices, each of which runs a program of its own."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import MeshError, ProgramTextError
from shardrules.programs.compiled.collectives import Collective, find_collectives
from shardrules.programs.compiled.program import read_program
from shardrules.programs.compiled.slices import Slices, kind_between_slices
from shardrules.programs.compiled.text import read_instruction
from tests.programs.examples import LAYERS, array, compiled, data_parallel, mesh_on, program_of, put, scanned

TWO = "tpu:v5e:2x2:2"
SLICES = Slices(((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 3, 2), (4, 5, 7, 6)))


def collectives_of(build: object, axes: str) -> tuple[Collective, ...]:
    mesh = mesh_on(TWO, axes)
    fn, args, out = build(mesh)  # pyright: ignore[reportCallIssue]
    return find_collectives(read_program(compiled(fn, *args, out=out).as_text()), mesh)


@pytest.mark.slow
def test_an_axis_across_slices() -> None:
    """Weights split over slices are gathered over the network, and their gradients reduced over it."""
    collectives = collectives_of(scanned, "data:2,model:4")
    between = [collective for collective in collectives if collective.between_slices]
    assert {collective.axes for collective in between} == {("data",)}
    assert {collective.axes for collective in collectives if not collective.between_slices} == {("model",)}
    assert {collective.kind for collective in between} <= {"all-gather", "reduce-scatter", "all-reduce"}
    assert sum(collective.times.count for collective in between if collective.kind == "all-gather") == 4 * LAYERS
    gathered = {
        (collective.payload_bytes, collective.wire_bytes) for collective in between if collective.kind == "all-gather"
    }
    assert gathered == {(64 * 256, 64 * 256 // 2)}  # float32, a quarter of a matrix


@pytest.mark.slow
def test_an_axis_partly_inside_a_slice() -> None:
    """A gradient is scattered inside slices, reduced between them, gathered inside: always along part of the axis."""
    collectives = collectives_of(data_parallel, "data:8")
    large = [collective for collective in collectives if collective.payload_bytes > 1024]
    assert {collective.axes_text for collective in large} == {"part of data"}
    between = [collective for collective in large if collective.between_slices]
    assert [(collective.kind, collective.group_size) for collective in between] == [("all-reduce", 2)]
    assert {collective.kind for collective in large if not collective.between_slices} >= {"all-gather"}


@pytest.mark.slow
def test_permutes_and_all_to_alls_across_slices() -> None:
    mesh = mesh_on(TWO, "data:8")
    ring = [(device, (device + 1) % 8) for device in range(8)]
    split = P("data")
    shift = jax.shard_map(lambda x: lax.ppermute(x, "data", ring), mesh=mesh, in_specs=split, out_specs=split)
    args = array(mesh, (64, 1024), "data")
    collectives = find_collectives(program_of(shift, args), mesh)
    assert {(collective.kind, collective.axes, collective.wire_bytes) for collective in collectives} == {
        ("collective-permute", ("data",), 8 * 4096)
    }
    assert [collective.between_slices for collective in collectives].count(True) == 1
    turned = find_collectives(program_of(lambda x: put(mesh, jnp.sin(x), None, "data"), args), mesh)
    exchanges = [
        (collective.kind, collective.axes, collective.group_size, collective.wire_bytes)
        for collective in turned
        if collective.between_slices
    ]
    assert exchanges == [("all-to-all", ("data",), 8, 8 * 4096 * 7 // 8)]


def send(target: str, kind: str = "ALL_REDUCE") -> str:
    fields = f"_xla_megascale_target={target},_xla_megascale_transfer_type={kind!r}".replace("'", '"')
    return f"%s = (f32[8], u32[], token[]) send(%x, %t), channel_id=1, frontend_attributes={{{fields}}}"


@pytest.mark.parametrize(
    ("target", "groups"),
    [
        ('"{1,2}x{0:3}"', ((0, 4), (1, 5), (3, 7), (2, 6))),
        ('"{2}x{1}"', ((5,),)),
        ("{{100000,100001,200003}}", ((0, 1, 6),)),
        ("{{100000,100001},{200000,200001}}", ((0, 1), (4, 5))),
        ("{{100002->200000},{200002->100000}}", ((3, 4), (7, 0))),
    ],
)
def test_transfer_targets_are_read(target: str, groups: tuple[tuple[int, ...], ...]) -> None:
    instruction, _ = read_instruction(send(target), {})
    assert kind_between_slices(instruction) == "all-reduce"
    assert SLICES.groups_between(instruction) == groups


@pytest.mark.parametrize("target", ['"{1,3}x{0:3}"', '"{1,2}x{0:4}"', "{{100000,300000}}", '"{a}x{b}"'])
def test_unknown_slices_and_chips_raise(target: str) -> None:
    instruction, _ = read_instruction(send(target), {})
    with pytest.raises(ProgramTextError, match=r"s goes between slices .*, but the mesh has 2 slices of 4 chips"):
        SLICES.groups_between(instruction)


def test_other_transfers_are_not_collectives() -> None:
    assert kind_between_slices(read_instruction(send('"{1}x{0}"', "SOMETHING_NEW"), {})[0]) == ""
    assert kind_between_slices(read_instruction(send('"{1}x{0}"').replace(" send(", " recv("), {})[0]) == ""


def test_slices_of_a_mesh() -> None:
    assert Slices.of(None, 2) == Slices(((0, 1),), ((0, 1),))
    assert Slices.of(sr.create_mesh("data:8"), 8).partitions == (tuple(range(8)),)
    for mesh in (sr.create_mesh("data:8"), sr.mesh_shape("data:8")):
        with pytest.raises(MeshError, match="mesh data:8 has 8 devices, but the program was compiled for 4"):
            Slices.of(mesh, 4)
