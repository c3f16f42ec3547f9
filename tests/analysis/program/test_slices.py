"""What goes between TPU slices, each of which has a program of its own."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.analysis.program.collectives import Collective, find_collectives
from shardrules.analysis.program.program import read_program
from shardrules.analysis.program.slices import Slices, kind_between_slices
from shardrules.analysis.program.text import read_instruction
from shardrules.core.errors import MeshError, ProgramTextError
from tests.analysis.programs import LAYERS, array, compiled, data_parallel, mesh_on, program_of, put, scanned

TWO = "tpu:v5e:2x2:2"
SLICES = Slices(((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 3, 2), (4, 5, 7, 6)))


def of(build: object, axes: str) -> tuple[Collective, ...]:
    mesh = mesh_on(TWO, axes)
    fn, args, out = build(mesh)  # pyright: ignore[reportCallIssue]
    return find_collectives(read_program(compiled(fn, *args, out=out).as_text()), mesh)


def test_an_axis_that_goes_from_slice_to_slice() -> None:
    """Weights split over the slices: each is gathered over the network, each gradient reduced."""
    collectives = of(scanned, "data:2,model:4")
    over = [one for one in collectives if one.between_slices]
    assert {one.axes for one in over} == {("data",)}
    assert {one.axes for one in collectives if not one.between_slices} == {("model",)}
    assert {one.kind for one in over} <= {"all-gather", "reduce-scatter", "all-reduce"}
    assert sum(one.times.count for one in over if one.kind == "all-gather") == 4 * LAYERS
    gathered = {(one.payload_bytes, one.wire_bytes) for one in over if one.kind == "all-gather"}
    assert gathered == {(64 * 256, 64 * 256 // 2)}  # float32, a quarter of a matrix


def test_an_axis_in_part_inside_a_slice() -> None:
    """The gradient is scattered inside each slice, reduced between them, gathered inside: none is the whole axis."""
    collectives = of(data_parallel, "data:8")
    large = [one for one in collectives if one.payload_bytes > 1024]
    assert {one.axes_text for one in large} == {"part of data"}
    between = [one for one in large if one.between_slices]
    assert [(one.kind, one.group_size) for one in between] == [("all-reduce", 2)]
    assert {one.kind for one in large if not one.between_slices} >= {"all-gather"}


def test_neighbours_and_everybody() -> None:
    mesh = mesh_on(TWO, "data:8")
    ring = [(at, (at + 1) % 8) for at in range(8)]
    split = P("data")
    shift = jax.shard_map(lambda x: lax.ppermute(x, "data", ring), mesh=mesh, in_specs=split, out_specs=split)
    args = array(mesh, (64, 1024), "data")
    found = find_collectives(program_of(shift, args), mesh)
    assert {(one.kind, one.axes, one.wire_bytes) for one in found} == {("collective-permute", ("data",), 8 * 4096)}
    assert [one.between_slices for one in found].count(True) == 1
    turned = find_collectives(program_of(lambda x: put(mesh, jnp.sin(x), None, "data"), args), mesh)
    everybody = [(one.kind, one.axes, one.group_size, one.wire_bytes) for one in turned if one.between_slices]
    assert everybody == [("all-to-all", ("data",), 8, 8 * 4096 * 7 // 8)]


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
def test_targets(target: str, groups: tuple[tuple[int, ...], ...]) -> None:
    one, _ = read_instruction(send(target), {})
    assert kind_between_slices(one) == "all-reduce"
    assert SLICES.groups_between(one) == groups


@pytest.mark.parametrize("target", ['"{1,3}x{0:3}"', '"{1,2}x{0:4}"', "{{100000,300000}}", '"{a}x{b}"'])
def test_slices_and_chips_that_are_not_there(target: str) -> None:
    one, _ = read_instruction(send(target), {})
    with pytest.raises(ProgramTextError, match=r"s goes between slices .*, but the mesh has 2 slices of 4 chips"):
        SLICES.groups_between(one)


def test_a_transfer_of_another_type_is_no_collective() -> None:
    assert kind_between_slices(read_instruction(send('"{1}x{0}"', "SOMETHING_NEW"), {})[0]) == ""
    assert kind_between_slices(read_instruction(send('"{1}x{0}"').replace(" send(", " recv("), {})[0]) == ""


def test_meshes() -> None:
    assert Slices.of(None, 2) == Slices(((0, 1),), ((0, 1),))
    assert Slices.of(sr.create_mesh("data:8"), 8).partitions == (tuple(range(8)),)
    for mesh in (sr.create_mesh("data:8"), sr.mesh_shape("data:8")):
        with pytest.raises(MeshError, match="mesh data:8 has 8 devices, but the program was compiled for 4"):
            Slices.of(mesh, 4)
