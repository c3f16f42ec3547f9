"""Collectives against closed forms on every target, and the rare forms as XLA prints them."""

import inspect
import re
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.analysis.machine.targets import Target
from shardrules.analysis.program.collectives import (
    KINDS,
    Collective,
    Total,
    find_collectives,
    totals_by_axes,
    totals_by_kind,
)
from shardrules.analysis.program.flow import Times
from shardrules.analysis.program.program import read_program
from shardrules.core.errors import MeshError, TargetError
from tests.analysis import programs
from tests.analysis.programs import (
    CLOSED,
    CPU,
    CUDA,
    LAYERS,
    STEPS,
    TARGETS,
    TPU,
    Closed,
    Moved,
    array,
    arrays_moved,
    compiled,
    expected,
    mesh_on,
    program_of,
    put,
    ring_bytes,
    text_of,
)

MESH = sr.mesh_shape("data:4,model:2")
ids = pytest.mark.parametrize("case", CLOSED, ids=lambda case: case.name)


def of(case: Closed, target: str) -> tuple[Collective, ...]:
    return find_collectives(read_program(text_of(case.name, target)), sr.mesh_shape(case.axes))


def wire_bytes(collectives: tuple[Collective, ...]) -> int:
    return sum(one.total_wire_bytes for one in collectives)


@pytest.mark.parametrize("target", [CPU, CUDA])
@ids
def test_closed_forms(case: Closed, target: str) -> None:
    collectives = of(case, target)
    moved = case.on_cpu if target == CPU else case.moved
    assert arrays_moved(collectives) == expected(moved)
    assert wire_bytes(collectives) == ring_bytes(moved, case.axes)
    assert not any(one.times.unknown or one.times.conditional for one in collectives)


@ids
def test_closed_forms_within_what_the_compiler_for_tpus_chooses(case: Closed) -> None:
    """It may gather float32 weights as the bfloat16 that it multiplies, and reduce without scattering."""
    collectives = of(case, TPU)
    halved = [one for one in case.moved if one.kind == "all-gather"]
    least = ring_bytes(case.moved, case.axes) - ring_bytes(tuple(halved), case.axes) // 2
    assert least <= wire_bytes(collectives) <= ring_bytes(case.on_cpu, case.axes)
    assert {one.axes for one in collectives} == {one.axes for one in case.moved}
    assert {one.kind for one in collectives} <= {one.kind for one in (*case.moved, *case.on_cpu)}


@pytest.mark.parametrize("target", TARGETS)
def test_loops_are_counted_and_combined_arrays_kept(target: str) -> None:
    (closed,) = [case for case in CLOSED if case.name == "scanned"]
    collectives = of(closed, target)
    gathers = [one for one in collectives if one.kind == "all-gather"]
    assert {one.times for one in gathers} == {Times(LAYERS)}
    assert sum(len(one.arrays) for one in gathers) == 4
    moved = sorted(path for one in gathers for path in one.arguments)
    assert moved == ["layers['down']"] * 2 + ["layers['up']"] * 2


@pytest.mark.parametrize("target", TARGETS)
@ids
def test_everything_has_its_line_of_python(case: Closed, target: str) -> None:
    lines, first = inspect.getsourcelines(case.build)
    for one in of(case, target):
        assert one.source == one.stack[0]
        assert one.stack[0].file == programs.__file__
        assert any(first <= each.line < first + len(lines) for each in one.stack)
        assert one.op_name


def test_gradient_accumulation_reduces_in_the_loop_or_after_it() -> None:
    """What a CPU's compiler leaves in the loop, others take out of it: the report has to show which."""
    gradient = [one for one in of(CLOSED[-1], CPU) if one.payload_bytes > 4]
    assert [one.times.count for one in gradient] == [STEPS]
    gradient = [one for one in of(CLOSED[-1], CUDA) if one.payload_bytes > 4]
    assert [one.times.count for one in gradient] == [1]


def every_kind(x: Any) -> Any:
    return (
        lax.psum(x, "data"),
        lax.all_gather(x, "model", tiled=True),
        lax.psum_scatter(x, "data", tiled=True),
        lax.ppermute(x, "model", [(0, 1), (1, 0)]),
        lax.all_to_all(x, "data", 0, 0, tiled=True),
        lax.psum(x, ("data", "model")),
        lax.ppermute(x, "data", [(0, 1), (1, 2), (2, 3)]),
        lax.ppermute(x, ("data", "model"), [(0, 3)]),
    )


EVERY = {
    ("all-reduce", ("data",), 4, 3 * 2 / 4),
    ("all-gather", ("model",), 2, 2 / 2),
    ("reduce-scatter", ("data",), 4, 3 / 4),
    ("all-to-all", ("data",), 4, 3 / 4),
    ("all-reduce", ("data", "model"), 8, 2 * 7 / 8),
    ("collective-permute", ("model",), 2, 1),
    ("collective-permute", ("data",), 4, 1),
    ("collective-permute", ("data", "model"), 8, 1),
}
"""Kind, axes, devices together, and what a device sends for each byte that it holds."""


@pytest.mark.parametrize("target", TARGETS)
def test_every_kind(target: str) -> None:
    mesh = mesh_on(target, "data:4,model:2")
    spec = P("data", "model")
    mapped = jax.shard_map(every_kind, mesh=mesh, in_specs=spec, out_specs=(spec,) * 8, check_vma=False)
    collectives = find_collectives(program_of(mapped, array(mesh, (64, 2048), *spec)), mesh)
    held = 16 * 1024 * 4
    found = {(one.kind, one.axes, one.group_size, one.wire_bytes / held) for one in collectives}
    if target == TPU:  # which has no reduce-scatter of its own: it reduces both in one, and cuts
        both = ("all-reduce", ("data",), 4, 2 * 3 * 2 / 4)
        assert found == EVERY - {("all-reduce", ("data",), 4, 6 / 4), ("reduce-scatter", ("data",), 4, 3 / 4)} | {both}
    else:
        assert found == EVERY
    assert {path for one in collectives for path in one.arguments} == {"x"}
    assert all(one.times == Times(1) for one in collectives)


@pytest.mark.parametrize("target", TARGETS)
def test_a_part_of_an_axis(target: str) -> None:
    mesh = mesh_on(target, "data:8")
    program = program_of(lambda x: x.reshape(2, 4, 64).sum(1), array(mesh, (8, 64), "data"))
    found = {
        (one.kind, one.axes, one.crossed, one.group_size, one.axes_text) for one in find_collectives(program, mesh)
    }
    assert found == {
        ("all-reduce", None, ("data",), 4, "part of data"),
        ("all-gather", None, ("data",), 2, "part of data"),
    }


@pytest.mark.parametrize("target", TARGETS)
def test_resharding_from_one_axis_to_the_other(target: str) -> None:
    mesh = mesh_on(target, "data:4,model:2")
    turned = compiled(lambda x: put(mesh, jnp.sin(x), "model", "data"), array(mesh, (64, 1024), "data", "model"))
    collectives = find_collectives(read_program(turned.as_text()), mesh)
    assert {one.kind for one in collectives} == {"all-to-all", "collective-permute"}
    assert {one.crossed for one in collectives} == {("data",), ("data", "model")}


@pytest.mark.parametrize("target", TARGETS)
def test_branches_are_marked(target: str) -> None:
    mesh = mesh_on(target, "data:8")
    args = array(mesh, (), dtype=bool), array(mesh, (64, 128), "data"), array(mesh, (128, 128))
    both = compiled(lambda p, x, w: lax.cond(p, lambda: jnp.sum(x @ w), lambda: jnp.sum(jnp.sin(x))), *args)
    collectives = find_collectives(read_program(both.as_text()), mesh)
    assert [(one.kind, one.times) for one in collectives] == [("all-reduce", Times(1, conditional=True))] * 2


@pytest.mark.parametrize("target", TARGETS)
def test_in_the_condition_of_a_loop_without_an_end(target: str) -> None:
    mesh = mesh_on(target, "data:8")
    loop = compiled(lambda x: lax.while_loop(lambda x: x.sum() < 9, jnp.exp, x), array(mesh, (64, 128), "data"))
    (one,) = find_collectives(read_program(loop.as_text()), mesh)
    assert (one.kind, one.times) == ("all-reduce", Times(1, unknown=True))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "bits"), [(jnp.int4, 4), (jnp.bool_, 8), (jnp.bfloat16, 16)])
def test_small_types(dtype: Any, bits: int, target: str) -> None:
    mesh = mesh_on(target, "data:8")
    turned = compiled(lambda x: put(mesh, x[::-1]), array(mesh, (64, 128), "data", dtype=dtype))
    (one,) = find_collectives(read_program(turned.as_text()), mesh)
    widened = {4: 8, 8: 8, 16: 32}  # CPUs' compiler does
    assert one.payload_bytes == 64 * 128 * (widened[bits] if target == CPU else bits) // 8
    assert one.wire_bytes == one.payload_bytes * 7 // 8


def test_one_device_along_an_axis_moves_nothing() -> None:
    mesh = sr.create_mesh("data:8,one:1")
    mapped = jax.shard_map(lambda x: lax.psum(x, "one"), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    program = program_of(mapped, array(mesh, (8, 4), "data"))
    assert wire_bytes(find_collectives(program, mesh)) == 0


def test_without_a_mesh_there_are_groups_and_no_axes() -> None:
    program = read_program(text_of("column then row", CPU))
    (one,) = find_collectives(program)
    assert (one.axes, one.crossed, one.group_size, one.axes_text) == (None, (), 2, "groups of 2")


@pytest.mark.parametrize("text", ["data:4", "data:16"])
def test_the_wrong_mesh_is_refused(text: str) -> None:
    with pytest.raises(MeshError, match=f"mesh {text} has {text[5:]} devices, but the program was compiled for 8"):
        find_collectives(read_program(text_of("column then row", CPU)), sr.mesh_shape(text))


HOSTS, TORUS, TWO_SLICES = "cuda:h100:16", "tpu:v5e:4x4", "tpu:v5e:2x2:2"


def reaching(fn: Any, target: str, text: str, spec: P) -> tuple[Collective, ...]:
    mesh = mesh_on(target, text)
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = program_of(mapped, array(mesh, (64, 2048), *spec))
    found = find_collectives(program, mesh, Target.parse(target))
    if target != TWO_SLICES:  # whose abstract mesh does not tell of slices
        assert find_collectives(program, mesh.abstract_mesh, Target.parse(target)) == found
        plain = tuple(attrs.evolve(one, host_count=1, torus_dims=0) for one in found)
        assert find_collectives(program, mesh) == plain
    return found


def test_groups_on_two_hosts() -> None:
    def every(x: Any) -> Any:
        x = lax.psum(x, "data") + lax.pmax(x, "model") + lax.pmin(x, ("data", "model"))
        x = lax.ppermute(x, "data", [(0, 1), (1, 2), (2, 3), (3, 0)])
        return lax.ppermute(jnp.sin(x), "model", [(0, 1), (1, 2), (2, 3), (3, 0)])

    found = reaching(every, HOSTS, "data:4,model:4", P("data", "model"))
    spans = {(one.kind, one.axes): (one.host_count, one.torus_dims) for one in found}
    assert spans == {
        ("all-reduce", ("data",)): (2, 0),
        ("all-reduce", ("model",)): (1, 0),
        ("all-reduce", ("data", "model")): (2, 0),
        ("collective-permute", ("data",)): (2, 0),
        ("collective-permute", ("model",)): (1, 0),
    }


def test_a_permute_that_stays_on_its_host() -> None:
    (one,) = reaching(lambda x: lax.ppermute(x, "data", [(0, 1), (2, 3)]), HOSTS, "data:4,model:4", P("data", "model"))
    assert (one.axes, one.group_size, one.host_count) == (("data",), 4, 1)


def test_dimensions_of_a_torus() -> None:
    def every(x: Any) -> Any:
        return lax.psum(x, "data") + lax.pmax(x, "model") + lax.pmin(x, ("data", "model"))

    found = reaching(every, TORUS, "data:4,model:4", P("data", "model"))
    assert {one.axes: (one.host_count, one.torus_dims) for one in found} == {
        ("data",): (1, 1),
        ("model",): (1, 1),
        ("data", "model"): (1, 2),
    }
    (one,) = reaching(lambda x: lax.psum(x, "data"), TORUS, "data:16", P("data"))
    assert (one.group_size, one.torus_dims) == (16, 2)


def test_groups_on_two_slices() -> None:
    found = reaching(lambda x: lax.psum(x, ("data", "model")), TWO_SLICES, "data:4,model:2", P("data", "model"))
    across = [one for one in found if one.between_slices]
    assert across
    assert {(one.host_count, one.torus_dims) for one in across} == {(2, 0)}
    inside = [one for one in found if not one.between_slices]
    assert inside
    assert {one.host_count for one in inside} == {1}
    assert max(one.torus_dims for one in inside) == 2


def test_on_one_machine_nothing_reaches_far() -> None:
    program = read_program(text_of("scanned", CPU))
    found = find_collectives(program, sr.mesh_shape("data:4,model:2"), Target.parse("cpu"))
    assert found == of(CLOSED[5], CPU)
    assert {(one.host_count, one.torus_dims) for one in found} == {(1, 0)}
    assert find_collectives(program, None, Target.parse("cpu:4")) == find_collectives(program)


def test_a_target_of_another_size_is_refused() -> None:
    program = read_program(text_of("scanned", CPU))
    with pytest.raises(TargetError, match="mesh 'data:4,model:2' has 8 devices, but target cpu:4 has 4"):
        find_collectives(program, sr.mesh_shape("data:4,model:2"), Target.parse("cpu:4"))


def test_totals() -> None:
    (closed,) = [case for case in CLOSED if case.name == "scanned"]
    collectives = of(closed, CPU)
    matrix, row = 64 * 256 * 4 // 2, 16 * 64 * 4 // 4
    by_kind = totals_by_kind(collectives)
    gathers = Total(4, 4 * LAYERS, 4 * LAYERS * matrix, 4 * LAYERS * matrix * 3 // 4)
    assert by_kind["all-gather"] == gathers
    assert list(by_kind) == ["all-reduce", "all-gather"]  # the dearest first: each costs twice as much
    by_axes = totals_by_axes(collectives)
    assert by_axes["model"] == Total(2, 2 * LAYERS, 2 * LAYERS * row, 2 * LAYERS * row)
    assert sum(one.wire_bytes for one in by_axes.values()) == wire_bytes(collectives)
    assert totals_by_axes(()) == {}


# Forms that need another machine, flag or version to come about, as XLA prints them.

HEADER = "HloModule m, num_partitions=8\n\n"


def only(entry: str, before: str = "") -> Collective:
    text = f"{HEADER}{before}ENTRY %e (x: f32[16,8]) -> f32[16,8] {{\n  %x = f32[16,8]{{1,0}} parameter(0)\n{entry}}}\n"
    (one,) = find_collectives(read_program(text), MESH)
    return one


def test_an_asynchronous_wrapper() -> None:
    one = only(
        "  %s = ((f32[16,8]{1,0}), f32[4,8]{1,0}, u32[]) async-start(%x), calls=%wrapped\n"
        "  ROOT %d = f32[4,8]{1,0} async-done(%s), calls=%wrapped\n",
        "%wrapped (p: f32[16,8]) -> f32[4,8] {\n  %p = f32[16,8]{1,0} parameter(0)\n"
        "  ROOT %r = f32[4,8]{1,0} reduce-scatter(%p), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), "
        "use_global_device_ids=true, dimensions={0}, to_apply=%add\n}\n\n",
    )
    assert (one.kind, one.axes, one.payload_bytes, one.wire_bytes) == ("reduce-scatter", ("data",), 512, 384)


def test_starts_of_several_arrays() -> None:
    one = only(
        "  %s = ((f32[16,8]{1,0}, f32[16,8]{1,0}), (f32[32,8]{1,0}, f32[32,8]{1,0}), u32[]{:S(2)}) "
        "all-gather-start(%x, %x), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}, "
        "use_global_device_ids=true\n"
        "  ROOT %d = (f32[32,8]{1,0}, f32[32,8]{1,0}) all-gather-done(%s)\n"
    )
    assert [one.shape for one in one.arrays] == [(32, 8), (32, 8)]
    assert (one.axes, one.payload_bytes, one.wire_bytes) == (("model",), 2048, 1024)


def test_a_fused_reduce_scatter_of_a_tpu() -> None:
    """An all-reduce of which each device keeps a part, in one fusion, is what its name says; beside it, it is not."""
    inside = (
        "%all-reduce-scatter.1 (p: f32[16,8], i: s32[]) -> f32[4,8] {\n  %p = f32[16,8]{1,0} parameter(0)\n"
        "  %i = s32[] parameter(1)\n  %z = s32[] constant(0)\n"
        "  %r = f32[16,8]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, "
        "use_global_device_ids=true, to_apply=%add\n"
        "  ROOT %k = f32[4,8]{1,0} dynamic-slice(%r, %i, %z), dynamic_slice_sizes={4,8}USE\n}\n\n"
    )
    call = "  ROOT %f = f32[4,8]{1,0} fusion(%x, %x), kind=kCustom, calls=%all-reduce-scatter.1\n"
    one = only(call, inside.replace("USE", ""))
    assert (one.kind, one.wire_bytes, [part.shape for part in one.arrays]) == ("reduce-scatter", 384, [(4, 8)])
    one = only(call, inside.replace("USE", "\n  %other = f32[16,8]{1,0} negate(%r)"))
    assert (one.kind, one.wire_bytes, [part.shape for part in one.arrays]) == ("all-reduce", 768, [(16, 8)])


def chain(name: str, after: str) -> str:
    return (
        f"%{name} (p.{name}: f32[16,8]) -> f32[64,8] {{\n  %p.{name} = f32[16,8]{{1,0}} parameter(0)\n"
        f"  %g.{name} = f32[64,8]{{1,0}} all-gather(%p.{name}), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), "
        'dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, '
        'backend_config={"async_collective_fusion_config":{"flag_start":"2"}}\n'
        f"  ROOT %r.{name} = f32[64,8]{{1,0}} {after}\n}}\n\n"
    )


def test_a_collective_that_a_tpu_prints_in_each_fusion_that_it_runs_beside() -> None:
    calls = "".join(f"  %f{i} = f32[64,8]{{1,0}} fusion(%x), kind=kCustom, calls=%{n}\n" for i, n in enumerate("abc"))
    start = chain("a", 'custom-call(%g.a), custom_call_target="AsyncCollectiveStart"')
    beside, end = chain("b", "negate(%g.b)"), chain("c", 'custom-call(%g.c), custom_call_target="AsyncCollectiveDone"')
    assert only(calls, start + beside + end).name == "g.a"
    # No start is printed where a loop's last round has begun it: still it is there once.
    assert only(calls, start.replace("AsyncCollectiveStart", "?") + beside + end).name == "g.a"


def test_sends_and_receives_of_a_gpu() -> None:
    pairs = '"{{0,2},{2,4},{4,6},{1,3},{3,5},{5,7}}"'
    one = only(
        "  %t = token[] after-all()\n"
        "  %s = (f32[16,8]{1,0}, u32[], token[]) send(%x, %t), channel_id=1, "
        f"frontend_attributes={{_xla_send_recv_source_target_pairs={pairs}}}\n"
        "  ROOT %d = token[] send-done(%s), channel_id=1\n"
    )
    assert (one.kind, one.axes, one.payload_bytes, one.wire_bytes) == ("collective-permute", ("data",), 512, 512)
    assert one.arguments == ("",)


def test_a_send_to_the_host_is_no_collective() -> None:
    text = (
        f"{HEADER}ENTRY %e (x: f32[4]) -> token[] {{\n  %x = f32[4]{{0}} parameter(0)\n  %t = token[] after-all()\n"
        "  %s = (f32[4]{0}, u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true\n"
        "  ROOT %d = token[] send-done(%s), channel_id=1, is_host_transfer=true\n}\n"
    )
    assert find_collectives(read_program(text), MESH) == ()


@pytest.mark.parametrize(
    ("kind", "attributes", "wire"),
    [
        ("collective-broadcast", "replica_groups={{0,2,4,6},{1,3,5,7}}", 384),
        ("ragged-all-to-all", "replica_groups={{0,2,4,6},{1,3,5,7}}", 384),
        ("collective-permute", "source_target_pairs={{0,0},{1,1}}", 0),
        ("collective-permute", "source_target_pairs={{0,0},{0,2}}", 512),
    ],
)
def test_rare_kinds(kind: str, attributes: str, wire: int) -> None:
    more = ", %x, %x, %x, %x, %x" if kind.startswith("ragged") else ""
    one = only(f"  ROOT %c = f32[16,8]{{1,0}} {kind}(%x{more}), channel_id=1, {attributes}\n")
    assert (one.kind, one.payload_bytes, one.wire_bytes) == (kind, 512, wire)
    assert one.axes == (("data",) if wire else ())
    assert len(one.arguments) == 1


def test_what_does_not_divide_is_rounded_up() -> None:
    one = only(
        "  %b = bf16[3]{0} bitcast-convert(%x)\n"
        "  ROOT %c = bf16[3]{0} all-reduce(%b), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, "
        "use_global_device_ids=true, to_apply=%add\n"
    )
    assert (one.payload_bytes, one.wire_bytes) == (6, 11)  # 10.5


def test_every_kind_is_tried_here() -> None:
    text = inspect.getsource(inspect.getmodule(test_every_kind_is_tried_here) or programs)
    assert [kind for kind in KINDS if not re.search(rf'"{kind}"', text)] == []


def test_fused_arguments_keep_their_names() -> None:
    mesh = sr.create_mesh("data:8")
    weights = {"w": array(mesh, (64, 128), "data"), "v": array(mesh, (64, 128), "data")}
    out = jax.tree.map(lambda _: NamedSharding(mesh, P()), weights)
    program = program_of(lambda w: w, weights, out=out)
    found = sorted(path for one in find_collectives(program, mesh) for path in one.arguments)
    assert found == ["w['v']", "w['w']"]


def test_a_closed_form_can_fail() -> None:
    (closed,) = [case for case in CLOSED if case.name == "attention"]
    assert arrays_moved(of(closed, CPU)) != expected((*closed.on_cpu, Moved("all-gather", ("model",), 4)))
