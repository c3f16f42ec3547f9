"""Collectives beside closed forms on every target, and rare collectives as XLA prints them."""

import inspect
import re
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import MeshError, TargetError
from shardrules.programs.compiled.collectives import (
    Collective,
    Total,
    find_collectives,
    totals_by_axes,
    totals_by_kind,
)
from shardrules.programs.compiled.flow import Times
from shardrules.programs.compiled.program import read_program
from shardrules.programs.machine.measured import KINDS
from shardrules.programs.machine.targets import Target
from tests.programs import examples
from tests.programs.examples import (
    CLOSED_FORMS,
    CPU,
    CUDA,
    LAYERS,
    TARGETS,
    TPU,
    ClosedForm,
    Moved,
    array,
    arrays_moved,
    expected,
    mesh_on,
    program_of,
    put,
    ring_bytes,
    text_of,
)

MESH = sr.mesh_shape("data:4,model:2")
ids = pytest.mark.parametrize("case", CLOSED_FORMS, ids=lambda case: case.name)


def collectives_of(case: ClosedForm, target: str) -> tuple[Collective, ...]:
    return find_collectives(read_program(text_of(case.name, target)), sr.mesh_shape(case.axes))


def wire_bytes(collectives: tuple[Collective, ...]) -> int:
    return sum(collective.total_wire_bytes for collective in collectives)


@pytest.mark.parametrize("target", [CPU, CUDA])
@ids
def test_closed_forms(case: ClosedForm, target: str) -> None:
    collectives = collectives_of(case, target)
    moved = case.on_cpu if target == CPU else case.moved
    assert arrays_moved(collectives) == expected(moved)
    assert wire_bytes(collectives) == ring_bytes(moved, case.axes)
    assert not any(collective.times.unknown or collective.times.conditional for collective in collectives)


@pytest.mark.parametrize("target", TARGETS)
def test_loops_multiply_and_combined_arrays_are_listed(target: str) -> None:
    (case,) = [form for form in CLOSED_FORMS if form.name == "scanned"]
    collectives = collectives_of(case, target)
    gathers = [collective for collective in collectives if collective.kind == "all-gather"]
    assert {collective.times for collective in gathers} == {Times(LAYERS)}
    assert sum(len(collective.arrays) for collective in gathers) == 4
    moved = sorted(path for collective in gathers for path in collective.arguments)
    assert moved == ["layers['down']"] * 2 + ["layers['up']"] * 2


@pytest.mark.parametrize("target", TARGETS)
@ids
def test_every_collective_has_a_line_of_python(case: ClosedForm, target: str) -> None:
    lines, first = inspect.getsourcelines(case.build)
    for collective in collectives_of(case, target):
        assert collective.source == collective.stack[0]
        assert collective.stack[0].file == examples.__file__
        assert any(first <= source.line < first + len(lines) for source in collective.stack)
        assert collective.op_name


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
"""Kind, axes, devices in a group, and the bytes that a device sends for each byte of its shard."""


@pytest.mark.parametrize("target", TARGETS)
def test_every_kind(target: str) -> None:
    mesh = mesh_on(target, "data:4,model:2")
    spec = P("data", "model")
    mapped = jax.shard_map(every_kind, mesh=mesh, in_specs=spec, out_specs=(spec,) * 8, check_vma=False)
    collectives = find_collectives(program_of(mapped, array(mesh, (64, 2048), *spec)), mesh)
    shard_bytes = 16 * 1024 * 4
    measured = {
        (collective.kind, collective.axes, collective.group_size, collective.wire_bytes / shard_bytes)
        for collective in collectives
    }
    expected_kinds = set(EVERY)
    if target == TPU:  # combines both reductions into one all-reduce, and slices the result
        expected_kinds -= {("all-reduce", ("data",), 4, 6 / 4), ("reduce-scatter", ("data",), 4, 3 / 4)}
        expected_kinds |= {("all-reduce", ("data",), 4, 2 * 3 * 2 / 4)}
    assert measured == expected_kinds
    assert {path for collective in collectives for path in collective.arguments} == {"x"}
    assert all(collective.times == Times(1) for collective in collectives)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "bits", "widened"), [(jnp.int4, 4, 8), (jnp.bool_, 8, 8), (jnp.bfloat16, 16, 32)])
def test_small_dtypes(dtype: Any, bits: int, widened: int, target: str) -> None:
    mesh = mesh_on(target, "data:8")
    program = program_of(lambda x: put(mesh, x[::-1]), array(mesh, (64, 128), "data", dtype=dtype))
    (collective,) = find_collectives(program, mesh)
    # The compiler for CPUs widens them.
    assert collective.payload_bytes == 64 * 128 * (widened if target == CPU else bits) // 8
    assert collective.wire_bytes == collective.payload_bytes * 7 // 8


@pytest.mark.parametrize("target", TARGETS)
def test_groups_may_be_part_of_an_axis(target: str) -> None:
    mesh = mesh_on(target, "data:8")
    program = program_of(lambda x: x.reshape(2, 4, 64).sum(1), array(mesh, (8, 64), "data"))
    measured = {
        (collective.kind, collective.axes, collective.crossed, collective.group_size, collective.axes_text)
        for collective in find_collectives(program, mesh)
    }
    assert measured == {
        ("all-reduce", None, ("data",), 4, "part of data"),
        ("all-gather", None, ("data",), 2, "part of data"),
    }


def test_axes_of_size_1_move_nothing() -> None:
    mesh = sr.create_mesh("data:8,one:1")
    mapped = jax.shard_map(lambda x: lax.psum(x, "one"), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    program = program_of(mapped, array(mesh, (8, 4), "data"))
    assert wire_bytes(find_collectives(program, mesh)) == 0


def test_without_a_mesh_axes_are_unknown() -> None:
    program = read_program(text_of("column then row", CPU))
    (collective,) = find_collectives(program)
    assert (collective.axes, collective.crossed, collective.group_size, collective.axes_text) == (
        None,
        (),
        2,
        "groups of 2",
    )


@pytest.mark.parametrize("text", ["data:4", "data:16"])
def test_a_mesh_of_another_size_raises(text: str) -> None:
    with pytest.raises(MeshError, match=f"mesh {text} has {text[5:]} devices, but the program was compiled for 8"):
        find_collectives(read_program(text_of("column then row", CPU)), sr.mesh_shape(text))


HOSTS, TORUS, TWO_SLICES = "cuda:h100:16", "tpu:v5e:4x4", "tpu:v5e:2x2:2"


def reaching(fn: Any, target: str, text: str, spec: P) -> tuple[Collective, ...]:
    mesh = mesh_on(target, text)
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = program_of(mapped, array(mesh, (64, 2048), *spec))
    collectives = find_collectives(program, mesh, Target.parse(target))
    if target != TWO_SLICES:  # an abstract mesh has no slices
        assert find_collectives(program, mesh.abstract_mesh, Target.parse(target)) == collectives
        fields = ("host_count", "torus_dims", "open_dims", "chip_devices", "torus_along", "torus_ways")
        nowhere: dict[str, Any] = {name: attrs.fields_dict(Collective)[name].default for name in fields}
        plain = tuple(attrs.evolve(collective, **nowhere) for collective in collectives)
        assert find_collectives(program, mesh) == plain
    return collectives


@pytest.mark.slow
def test_groups_across_hosts() -> None:
    def every(x: Any) -> Any:
        x = lax.psum(x, "data") + lax.pmax(x, "model") + lax.pmin(x, ("data", "model"))
        x = lax.ppermute(x, "data", [(0, 1), (1, 2), (2, 3), (3, 0)])
        return lax.ppermute(jnp.sin(x), "model", [(0, 1), (1, 2), (2, 3), (3, 0)])

    collectives = reaching(every, HOSTS, "data:4,model:4", P("data", "model"))
    spans = {
        (collective.kind, collective.axes): (collective.host_count, collective.torus_dims) for collective in collectives
    }
    assert spans == {
        ("all-reduce", ("data",)): (2, 0),
        ("all-reduce", ("model",)): (1, 0),
        ("all-reduce", ("data", "model")): (2, 0),
        ("collective-permute", ("data",)): (2, 0),
        ("collective-permute", ("model",)): (1, 0),
    }


@pytest.mark.slow
def test_groups_along_a_torus() -> None:
    def every(x: Any) -> Any:
        return lax.psum(x, "data") + lax.pmax(x, "model") + lax.pmin(x, ("data", "model"))

    collectives = reaching(every, TORUS, "data:4,model:4", P("data", "model"))
    assert {collective.axes: (collective.host_count, collective.torus_dims) for collective in collectives} == {
        ("data",): (1, 1),
        ("model",): (1, 1),
        ("data", "model"): (1, 2),
    }
    (collective,) = reaching(lambda x: lax.psum(x, "data"), TORUS, "data:16", P("data"))
    assert (collective.group_size, collective.torus_dims) == (16, 2)


@pytest.mark.slow
def test_groups_across_slices() -> None:
    collectives = reaching(lambda x: lax.psum(x, ("data", "model")), TWO_SLICES, "data:4,model:2", P("data", "model"))
    between = [collective for collective in collectives if collective.between_slices]
    assert between
    assert {(collective.host_count, collective.torus_dims) for collective in between} == {(2, 0)}
    inside = [collective for collective in collectives if not collective.between_slices]
    assert inside
    assert {collective.host_count for collective in inside} == {1}
    assert max(collective.torus_dims for collective in inside) == 2


def test_cpu_targets_have_one_host_and_no_torus() -> None:
    program = read_program(text_of("scanned", CPU))
    collectives = find_collectives(program, sr.mesh_shape("data:4,model:2"), Target.parse("cpu"))
    assert collectives == collectives_of(CLOSED_FORMS[5], CPU)
    assert {(collective.host_count, collective.torus_dims) for collective in collectives} == {(1, 0)}
    assert find_collectives(program, None, Target.parse("cpu:4")) == find_collectives(program)


def test_a_target_of_another_size_raises() -> None:
    program = read_program(text_of("scanned", CPU))
    with pytest.raises(TargetError, match="mesh 'data:4,model:2' has 8 devices, but target cpu:4 has 4"):
        find_collectives(program, sr.mesh_shape("data:4,model:2"), Target.parse("cpu:4"))


def test_totals_by_kind_and_by_axes() -> None:
    (case,) = [form for form in CLOSED_FORMS if form.name == "scanned"]
    collectives = collectives_of(case, CPU)
    matrix, row = 64 * 256 * 4 // 2, 16 * 64 * 4 // 4
    by_kind = totals_by_kind(collectives)
    gathers = Total(4, 4 * LAYERS, 4 * LAYERS * matrix, 4 * LAYERS * matrix * 3 // 4)
    assert by_kind["all-gather"] == gathers
    assert list(by_kind) == ["all-reduce", "all-gather"]  # the most expensive first: an all-reduce sends twice as much
    by_axes = totals_by_axes(collectives)
    assert by_axes["model"] == Total(2, 2 * LAYERS, 2 * LAYERS * row, 2 * LAYERS * row)
    assert sum(total.wire_bytes for total in by_axes.values()) == wire_bytes(collectives)
    assert totals_by_axes(()) == {}


# What XLA prints on other machines, with other flags or in other versions.

HEADER = "HloModule m, num_partitions=8\n\n"


def only(entry: str, before: str = "") -> Collective:
    text = f"{HEADER}{before}ENTRY %e (x: f32[16,8]) -> f32[16,8] {{\n  %x = f32[16,8]{{1,0}} parameter(0)\n{entry}}}\n"
    (collective,) = find_collectives(read_program(text), MESH)
    return collective


def test_async_wrappers() -> None:
    collective = only(
        "  %s = ((f32[16,8]{1,0}), f32[4,8]{1,0}, u32[]) async-start(%x), calls=%wrapped\n"
        "  ROOT %d = f32[4,8]{1,0} async-done(%s), calls=%wrapped\n",
        "%wrapped (p: f32[16,8]) -> f32[4,8] {\n  %p = f32[16,8]{1,0} parameter(0)\n"
        "  ROOT %r = f32[4,8]{1,0} reduce-scatter(%p), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), "
        "use_global_device_ids=true, dimensions={0}, to_apply=%add\n}\n\n",
    )
    assert (collective.kind, collective.axes, collective.payload_bytes, collective.wire_bytes) == (
        "reduce-scatter",
        ("data",),
        512,
        384,
    )


def test_starts_of_combined_arrays() -> None:
    collective = only(
        "  %s = ((f32[16,8]{1,0}, f32[16,8]{1,0}), (f32[32,8]{1,0}, f32[32,8]{1,0}), u32[]{:S(2)}) "
        "all-gather-start(%x, %x), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}, "
        "use_global_device_ids=true\n"
        "  ROOT %d = (f32[32,8]{1,0}, f32[32,8]{1,0}) all-gather-done(%s)\n"
    )
    assert [array.shape for array in collective.arrays] == [(32, 8), (32, 8)]
    assert (collective.axes, collective.payload_bytes, collective.wire_bytes) == (("model",), 2048, 1024)


def test_an_all_reduce_fused_with_a_slice_is_a_reduce_scatter() -> None:
    """Only if nothing else uses the result of the all-reduce."""
    inside = (
        "%all-reduce-scatter.1 (p: f32[16,8], i: s32[]) -> f32[4,8] {\n  %p = f32[16,8]{1,0} parameter(0)\n"
        "  %i = s32[] parameter(1)\n  %z = s32[] constant(0)\n"
        "  %r = f32[16,8]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, "
        "use_global_device_ids=true, to_apply=%add\n"
        "  ROOT %k = f32[4,8]{1,0} dynamic-slice(%r, %i, %z), dynamic_slice_sizes={4,8}USE\n}\n\n"
    )
    call = "  ROOT %f = f32[4,8]{1,0} fusion(%x, %x), kind=kCustom, calls=%all-reduce-scatter.1\n"
    collective = only(call, inside.replace("USE", ""))
    assert (collective.kind, collective.wire_bytes, [part.shape for part in collective.arrays]) == (
        "reduce-scatter",
        384,
        [(4, 8)],
    )
    collective = only(call, inside.replace("USE", "\n  %other = f32[16,8]{1,0} negate(%r)"))
    assert (collective.kind, collective.wire_bytes, [part.shape for part in collective.arrays]) == (
        "all-reduce",
        768,
        [(16, 8)],
    )


def chain(name: str, after: str) -> str:
    return (
        f"%{name} (p.{name}: f32[16,8]) -> f32[64,8] {{\n  %p.{name} = f32[16,8]{{1,0}} parameter(0)\n"
        f"  %g.{name} = f32[64,8]{{1,0}} all-gather(%p.{name}), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), "
        'dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, '
        'backend_config={"async_collective_fusion_config":{"flag_start":"2"}}\n'
        f"  ROOT %r.{name} = f32[64,8]{{1,0}} {after}\n}}\n\n"
    )


def test_copies_in_the_fusions_beside_a_collective_count_once() -> None:
    calls = "".join(f"  %f{i} = f32[64,8]{{1,0}} fusion(%x), kind=kCustom, calls=%{n}\n" for i, n in enumerate("abc"))
    start = chain("a", 'custom-call(%g.a), custom_call_target="AsyncCollectiveStart"')
    beside, end = chain("b", "negate(%g.b)"), chain("c", 'custom-call(%g.c), custom_call_target="AsyncCollectiveDone"')
    assert only(calls, start + beside + end).name == "g.a"
    # Where the last round of a loop starts it, no start is printed. It still counts once.
    assert only(calls, start.replace("AsyncCollectiveStart", "?") + beside + end).name == "g.a"


def test_a_permute_written_as_send_and_recv() -> None:
    pairs = '"{{0,2},{2,4},{4,6},{1,3},{3,5},{5,7}}"'
    collective = only(
        "  %t = token[] after-all()\n"
        "  %s = (f32[16,8]{1,0}, u32[], token[]) send(%x, %t), channel_id=1, "
        f"frontend_attributes={{_xla_send_recv_source_target_pairs={pairs}}}\n"
        "  ROOT %d = token[] send-done(%s), channel_id=1\n"
    )
    assert (collective.kind, collective.axes, collective.payload_bytes, collective.wire_bytes) == (
        "collective-permute",
        ("data",),
        512,
        512,
    )
    assert collective.arguments == ("",)


def test_sends_to_the_host_are_not_collectives() -> None:
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
    collective = only(f"  ROOT %c = f32[16,8]{{1,0}} {kind}(%x{more}), channel_id=1, {attributes}\n")
    assert (collective.kind, collective.payload_bytes, collective.wire_bytes) == (kind, 512, wire)
    assert collective.axes == (("data",) if wire else ())
    assert len(collective.arguments) == 1


def test_a_ragged_all_to_all_sends_no_more_than_the_smaller_buffer_holds() -> None:
    collective = only(
        "  ROOT %c = f32[8,8]{1,0} ragged-all-to-all(%x, %x, %x, %x, %x, %x), channel_id=1, "
        "replica_groups={{0,2,4,6},{1,3,5,7}}\n"
    )
    assert (collective.payload_bytes, collective.wire_bytes) == (256, 192)


def test_wire_bytes_are_rounded_up() -> None:
    collective = only(
        "  %b = bf16[3]{0} bitcast-convert(%x)\n"
        "  ROOT %c = bf16[3]{0} all-reduce(%b), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, "
        "use_global_device_ids=true, to_apply=%add\n"
    )
    assert (collective.payload_bytes, collective.wire_bytes) == (6, 11)  # 10.5


def test_every_kind_is_tested_here() -> None:
    text = inspect.getsource(inspect.getmodule(test_every_kind_is_tested_here) or examples)
    assert [kind for kind in KINDS if not re.search(rf'"{kind}"', text)] == []


def test_a_wrong_closed_form_is_detected() -> None:
    (case,) = [form for form in CLOSED_FORMS if form.name == "attention"]
    assert arrays_moved(collectives_of(case, CPU)) != expected((*case.on_cpu, Moved("all-gather", ("model",), 4)))
