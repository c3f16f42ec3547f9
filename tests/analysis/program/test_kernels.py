"""Kernels of real programs against closed forms and XLA's own count, and the rare forms as XLA prints them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardrules.analysis.program.flops import find_matmuls, total_flops
from shardrules.analysis.program.flow import Times
from shardrules.analysis.program.kernels import Kernel, find_kernels
from shardrules.analysis.program.program import CompiledProgram, read_program
from tests.analysis import programs
from tests.analysis.programs import (
    CLOSED,
    CPU,
    CUDA,
    LAYERS,
    TARGETS,
    TPU,
    Closed,
    array,
    compiled,
    mesh_on,
    text_of,
)

on_all = pytest.mark.parametrize("target", TARGETS)
INDEX = 4  # bytes of a number that says where


def of(program: CompiledProgram) -> tuple[Kernel, ...]:
    return find_kernels(program, find_matmuls(program))


def kernels(
    target: str, fn: Callable[..., Any], *shapes: tuple[int, ...] | Any, donate: tuple[int, ...] = (), **options: Any
) -> tuple[Kernel, ...]:
    """The kernels of a function on one device of a target: a shape is that of float32, an array has its own dtype."""
    mesh = mesh_on(target, "data:8")
    args = [array(mesh, one) if isinstance(one, tuple) else array(mesh, one.shape, dtype=one.dtype) for one in shapes]
    lowered = jax.jit(fn, donate_argnums=donate).lower(*args)
    return of(read_program(str(lowered.compile(compiler_options=options or None).as_text())))


def looped(found: tuple[Kernel, ...]) -> list[Kernel]:
    return [one for one in found if one.times.count == LAYERS]


def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def total(found: tuple[Kernel, ...]) -> int:
    return sum(one.total_bytes for one in found)


@on_all
def test_a_matmul_reads_its_operands_and_writes_its_result(target: str) -> None:
    (one,) = kernels(target, lambda a, b: a @ b, (2048, 1024), (1024, 4096))
    assert (one.read_bytes, one.written_bytes) == ((2048 + 4096) * 1024 * 4, 2048 * 4096 * 4)
    assert one.flops == ((("f32", "default"), 2 * 2048 * 1024 * 4096),)
    assert (one.times, one.total_flops) == (Times(1), 2 * 2048 * 1024 * 4096)
    assert one.op_name.endswith("dot_general")
    assert one.stack[0].file == __file__


@on_all
def test_an_array_that_is_taken_twice_is_read_once(target: str) -> None:
    (one,) = kernels(target, lambda a: a @ a.T, (2048, 2048))
    assert (one.read_bytes, one.written_bytes) == (2048 * 2048 * 4, 2048 * 2048 * 4)


@on_all
def test_a_fused_chain_reads_what_goes_in_and_writes_what_comes_out(target: str) -> None:
    (one,) = kernels(target, lambda x: jnp.tanh(x * 2 + 1) * x, (1024, 1024))
    assert (one.read_bytes, one.written_bytes, one.flops) == (1024 * 1024 * 4, 1024 * 1024 * 4, ())


def repeat(layers: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]


@on_all
def test_each_round_of_a_loop_reads_one_of_the_stacked_layers(target: str) -> None:
    layers, x = (LAYERS, 512, 512), (32, 512)
    found = looped(kernels(target, repeat, layers, x))
    layer = 512 * 512 * (2 if target == TPU else 4)  # which casts them all to bfloat16 before
    assert layer <= max(one.read_bytes for one in found) <= layer + 32 * 512 * 4 + INDEX
    slices = [one.read_bytes for one in found if one.written_bytes == layer]
    assert slices == ([] if target == TPU else [layer + INDEX])  # which slices inside the matmul
    assert sum(one.total_flops for one in found) == LAYERS * 2 * 32 * 512 * 512


@on_all
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_round_of_a_loop_writes_one_of_the_stacked_results(dtype: Any, target: str) -> None:
    """CPUs have no bfloat16: they convert all of the stack to update a row of it, which leaves the rest as it was."""

    def collect(x: Any) -> Any:
        return lax.scan(lambda x, _: (x * 2, x + 1), x, None, length=LAYERS)[1]

    row = 256 * 256 * jnp.dtype(dtype).itemsize
    found = looped(kernels(target, collect, abstract((256, 256), dtype)))
    (update,) = [one for one in found if one.read_bytes == row + INDEX]
    assert update.written_bytes == row
    assert max(one.read_bytes + one.written_bytes for one in found) == 2 * row + INDEX


@on_all
def test_an_update_in_place_moves_only_the_update(target: str) -> None:
    def put(cache: Any, row: Any, at: Any) -> Any:
        return lax.dynamic_update_slice(cache, row, (at, 0))

    row, args = 128 * 4, ((4096, 128), (1, 128), abstract((), jnp.int32))
    *_, one = kernels(target, put, *args, donate=(0,))
    assert one.written_bytes == row
    assert row + INDEX <= one.read_bytes <= row + 2 * INDEX
    copying = total(kernels(target, put, *args)) - total(kernels(target, put, *args, donate=(0,)))
    assert copying == 2 * 4096 * 128 * 4, "an argument that is kept is copied first"


@on_all
def test_an_embedding_reads_only_its_rows(target: str) -> None:
    found = kernels(target, lambda table, rows: table[rows], (50_000, 256), abstract((64,), jnp.int32))
    rows, indices = 64 * 256 * 4, (1024 if target == TPU else 64) * INDEX
    assert (found[-1].read_bytes, found[-1].written_bytes) == (rows + indices, rows)
    assert total(found) < 3 * rows


@on_all
def test_a_scatter_reads_and_writes_only_its_rows(target: str) -> None:
    rows = (50_000, 256), abstract((64,), jnp.int32), (64, 256)
    found = kernels(target, lambda table, at, more: table.at[at].add(more), *rows, donate=(0,))
    update = 64 * 256 * 4
    assert (found[-1].read_bytes, found[-1].written_bytes) == (2 * update + 64 * INDEX, update)


@on_all
def test_halves_of_an_array(target: str) -> None:
    x = (1024, 1024)
    half = 512 * 1024 * 4
    found = kernels(target, lambda x: jnp.sin(x[:512]), x)
    assert total(found) == 2 * half
    found = kernels(target, lambda x: x[:512] * x[512:], x)
    assert total(found) == 3 * half


@on_all
def test_branches(target: str) -> None:
    def choose(p: Any, x: Any) -> Any:
        return lax.cond(p, lambda x: jnp.sin(x), lambda x: x @ x, x)

    found = kernels(target, choose, abstract((), jnp.bool_), (2048, 2048))
    inside = [one for one in found if one.times == Times(1, conditional=True)]
    matrix = 2048 * 2048 * 4
    assert [(one.read_bytes, one.written_bytes) for one in inside] == [(matrix, matrix)] * 2
    assert sorted(one.total_flops for one in inside) == [0, 2 * 2048**3]


def test_the_memory_that_a_library_works_in_is_no_traffic() -> None:
    found = kernels(CUDA, lambda a, b: a @ b, (2048, 2048), (2048, 2048), xla_gpu_enable_triton_gemm=False)
    (one,) = found
    assert one.op.startswith("__cublas")
    assert (one.read_bytes, one.written_bytes) == (2 * 2048 * 2048 * 4, 2048 * 2048 * 4)


def test_prefetches_of_a_tpu_are_counted_where_they_are_used() -> None:
    text = text_of("column then row", TPU)
    assert "copy-start" in text
    (one,) = of(read_program(text))
    (closed,) = [case for case in CLOSED if case.name == "column then row"]
    _, args, _ = closed.build(mesh_on(TPU, closed.axes))
    up, down, x = (jnp.prod(jnp.array(each.sharding.shard_shape(each.shape))) * 4 for each in args)
    assert (one.read_bytes, one.written_bytes) == (up + down + x, x)


@on_all
@pytest.mark.parametrize("case", CLOSED, ids=lambda case: case.name)
def test_every_matmul_is_in_one_kernel(case: Closed, target: str) -> None:
    program = read_program(text_of(case.name, target))
    matmuls = find_matmuls(program)
    assert sum(one.total_flops for one in find_kernels(program, matmuls)) == total_flops(matmuls) == case.flops


@on_all
@pytest.mark.parametrize("case", CLOSED, ids=lambda case: case.name)
def test_no_collective_is_a_kernel(case: Closed, target: str) -> None:
    """TPUs fuse one with what begins, ends or cuts it; these move nothing but what is on the wire."""
    found = of(read_program(text_of(case.name, target)))
    assert found
    for one in found:
        assert not one.name.startswith(("all-", "reduce-scatter", "async-collective", "collective"))
        assert one.read_bytes or one.written_bytes


LOOP_FREE = [case for case in CLOSED if case.name not in ("scanned", "accumulated")]


@pytest.mark.parametrize("case", LOOP_FREE, ids=lambda case: case.name)
def test_against_xla(case: Closed) -> None:
    """XLA counts a collective as what it takes and gives. What is left are scalars that it counts in other places.

    It counts the body of a loop once, so this goes for programs without loops. Others on which we differ: it counts all
    of a table that a fusion on a CPU gathers from or scatters to, and all of a stack of bfloat16 that is converted for
    the update of a row. On a TPU its bytes are those of padded tiles, and those of each prefetch come on top.
    """
    fn, args, out = case.build(mesh_on(CPU, case.axes))
    made = compiled(fn, *args, out=out)
    program = read_program(made.as_text())
    wire = sum(
        one.nbytes + sum(each.nbytes for each in computation.operand_types(one))
        for computation, one in program.walk()
        if one.op in ("all-reduce", "all-gather")
    )
    assert wire
    assert total(of(program)) + wire == pytest.approx(made.cost_analysis()["bytes accessed"], rel=1e-4)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.nn.softmax(x @ x),
        lambda x: jnp.sort(x, -1).sum(0),
        lambda x: jax.grad(lambda x: jnp.sum(jax.nn.gelu(x @ x) ** 2))(x),
        lambda x: jnp.concatenate([x, jnp.sin(x)], 1)[:, ::2],
        lambda x: lax.dynamic_slice(x, (3, 0), (17, 256)) @ x,
        lambda x: jnp.cumsum(jax.nn.standardize(x), 0),
    ],
)
def test_against_xla_on_one_device(fn: Callable[..., Any]) -> None:
    made = compiled(fn, jnp.ones((256, 256)))
    assert total(of(read_program(made.as_text()))) == pytest.approx(made.cost_analysis()["bytes accessed"], rel=0.02)


# Forms that need another machine, flag or version to come about, as XLA prints them.


def only(entry: str, before: str = "") -> Kernel:
    text = (
        f"HloModule m\n\n{before}ENTRY %e (x: f32[64,8], i: s32[]) -> f32[64,8] {{\n"
        f"  %x = f32[64,8]{{1,0}} parameter(0)\n  %i = s32[] parameter(1)\n{entry}}}\n"
    )
    (one,) = of(read_program(text))
    return one


def moved(one: Kernel) -> tuple[int, int]:
    return one.read_bytes, one.written_bytes


X = 64 * 8 * 4
FUSED = (
    "%f (p: f32[64,8], j: s32[]) -> f32[64,8] {{\n"
    "  %p = f32[64,8]{{1,0}} parameter(0)\n  %j = s32[] parameter(1)\n{}}}\n\n"
)
CALL = "  ROOT %r = f32[64,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%f\n"


def test_an_asynchronous_kernel() -> None:
    wrapped = (
        "%w (p: f32[64,8]) -> f32[64,8] {\n  %p = f32[64,8]{1,0} parameter(0)\n"
        "  ROOT %n = f32[64,8]{1,0} sine(%p)\n}\n\n"
    )
    one = only(
        "  %s = ((f32[64,8]{1,0}), f32[64,8]{1,0}, u32[]) async-start(%x), calls=%w\n"
        "  ROOT %d = f32[64,8]{1,0} async-done(%s), calls=%w\n",
        wrapped,
    )
    assert (one.name, one.computation, one.op, moved(one)) == ("n", "w", "sine", (X, X))
    one = only("  ROOT %c = f32[64,8]{1,0} call(%x), to_apply=%w\n", wrapped)
    assert (one.name, moved(one)) == ("n", (X, X))
    one = only(
        '  %s = ((f32[64,8]{1,0}), f32[64,8]{1,0}, u32[]) custom-call-start(%x), custom_call_target="mine"\n'
        "  ROOT %d = f32[64,8]{1,0} custom-call-done(%s)\n"
    )
    assert (one.name, one.op, moved(one)) == ("s", "mine", (X, X))


def test_a_library_that_returns_a_small_result_last() -> None:
    results = "(f32[64,8]{1,0}, s8[1024]{0})"
    one = only(f'  ROOT %c = {results} custom-call(%x), custom_call_target="__cublas$gemm"\n')
    assert moved(one) == (X, X)
    one = only(f'  ROOT %c = {results} custom-call(%x), custom_call_target="mine"\n')
    assert moved(one) == (X, X + 1024)


@pytest.mark.parametrize(
    ("inside", "read", "written"),
    [
        ("  ROOT %a = f32[64,8]{1,0} add(%p, %p)\n", X, X),
        # Two rows, through a conversion.
        (
            (
                "  %b = bf16[64,8]{1,0} convert(%p)\n  %z = s32[] constant(0)\n"
                "  %s = bf16[2,8]{1,0} dynamic-slice(%b, %j, %z), dynamic_slice_sizes={2,8}\n"
                "  ROOT %t = bf16[8,2]{1,0} transpose(%s), dimensions={1,0}\n"
            ),
            2 * 8 * 4 + 4,
            2 * 8 * 2,
        ),
        # Rows, and then all.
        (
            (
                "  %z = s32[] constant(0)\n  %s = f32[1,8]{1,0} dynamic-slice(%p, %j, %z), dynamic_slice_sizes={1,8}\n"
                "  %b = f32[64,8]{1,0} broadcast(%s), dimensions={0,1}\n  ROOT %a = f32[64,8]{1,0} add(%p, %b)\n"
            ),
            X + 4,
            X,
        ),
        # More rows than there are.
        (
            (
                "  %c = s32[100,1]{1,0} broadcast(%j), dimensions={}\n"
                "  ROOT %g = f32[100,8]{1,0} gather(%p, %c), offset_dims={1}, slice_sizes={1,8}\n"
            ),
            X + 4,
            100 * 8 * 4,
        ),
        # Two updates of one array in its place.
        (
            (
                "  %z = s32[] constant(0)\n  %u = f32[1,8]{1,0} constant({...})\n"
                "  %d = f32[64,8]{1,0} dynamic-update-slice(%p, %u, %j, %z)\n"
                "  ROOT %e = f32[64,8]{1,0} dynamic-update-slice(%d, %u, %z, %z)\n"
            ),
            4,
            2 * 8 * 4,
        ),
        # An update of what is read all the same.
        (
            (
                "  %z = s32[] constant(0)\n  %u = f32[1,8]{1,0} constant({...})\n"
                "  %d = f32[64,8]{1,0} dynamic-update-slice(%p, %u, %j, %z)\n  ROOT %n = f32[64,8]{1,0} negate(%d)\n"
            ),
            X + 4,
            X,
        ),
        # An update of a copy.
        (
            (
                "  %z = s32[] constant(0)\n  %u = f32[1,8]{1,0} constant({...})\n  %c = f32[64,8]{0,1} copy(%p)\n"
                "  ROOT %d = f32[64,8]{0,1} dynamic-update-slice(%c, %u, %j, %z)\n"
            ),
            X + 4,
            X,
        ),
        # An update of what was made inside.
        (
            (
                "  %z = s32[] constant(0)\n  %o = f32[] constant(0)\n"
                "  %b = f32[128,8]{1,0} broadcast(%o), dimensions={}\n"
                "  ROOT %d = f32[128,8]{1,0} dynamic-update-slice(%b, %p, %j, %z)\n"
            ),
            X + 4,
            2 * X,
        ),
        # A type that was narrowed does not come out as it was.
        (
            (
                "  %b = bf16[64,8]{1,0} convert(%p)\n  %z = s32[] constant(0)\n  %u = bf16[1,8]{1,0} constant({...})\n"
                "  %d = bf16[64,8]{1,0} dynamic-update-slice(%b, %u, %j, %z)\n  ROOT %c = f32[64,8]{1,0} convert(%d)\n"
            ),
            X + 4,
            X,
        ),
        # Neither does one that was widened.
        (
            (
                "  %z = s32[] constant(0)\n  %u = f64[1,8]{1,0} constant({...})\n  %b = f64[64,8]{1,0} convert(%p)\n"
                "  ROOT %d = f64[64,8]{1,0} dynamic-update-slice(%b, %u, %j, %z)\n"
            ),
            X + 4,
            2 * X,
        ),
        # Several results, one of them in its place.
        (
            (
                "  %z = s32[] constant(0)\n  %s = f32[1,8]{1,0} dynamic-slice(%p, %j, %z), dynamic_slice_sizes={1,8}\n"
                "  %n = f32[1,8]{1,0} negate(%s)\n  %d = f32[64,8]{1,0} dynamic-update-slice(%p, %n, %j, %z)\n"
                "  ROOT %t = (f32[64,8]{1,0}, f32[1,8]{1,0}) tuple(%d, %n)\n"
            ),
            8 * 4 + 4,
            2 * 8 * 4,
        ),
    ],
)
def test_fusions(inside: str, read: int, written: int) -> None:
    assert moved(only(CALL, FUSED.format(inside))) == (read, written)


def test_fusions_in_fusions() -> None:
    inner = (
        "%g (q: f32[64,8], k: s32[]) -> f32[1,8] {\n  %q = f32[64,8]{1,0} parameter(0)\n  %k = s32[] parameter(1)\n"
        "  %o = s32[] constant(0)\n"
        "  ROOT %s = f32[1,8]{1,0} dynamic-slice(%q, %k, %o), dynamic_slice_sizes={1,8}\n}\n\n"
        "%h (q2: f32[64,8], u2: f32[1,8], k2: s32[]) -> f32[64,8] {\n  %q2 = f32[64,8]{1,0} parameter(0)\n"
        "  %u2 = f32[1,8]{1,0} parameter(1)\n  %k2 = s32[] parameter(2)\n  %o2 = s32[] constant(0)\n"
        "  ROOT %d2 = f32[64,8]{1,0} dynamic-update-slice(%q2, %u2, %k2, %o2)\n}\n\n"
    )
    outer = (
        "  %b = f32[64,8]{1,0} bitcast(%p)\n  %s1 = f32[1,8]{1,0} fusion(%b, %j), kind=kLoop, calls=%g\n"
        "  %n = f32[1,8]{1,0} negate(%s1)\n"
        "  ROOT %w = f32[64,8]{1,0} fusion(%b, %n, %j), kind=kLoop, calls=%h\n"
    )
    assert moved(only(CALL, inner + FUSED.format(outer))) == (8 * 4 + 4, 8 * 4)


def test_a_matmul_beside_a_collective_of_a_tpu() -> None:
    """What the collective takes and gives passes through the fusion untouched."""
    inside = (
        "%f (p: f32[64,8], g: f32[8,8]) -> (f32[64,8], f32[8,8], f32[64,8]) {\n"
        "  %p = f32[64,8]{1,0} parameter(0)\n  %g = f32[8,8]{1,0} parameter(1)\n"
        "  %a = f32[64,8]{1,0} all-gather(%g), channel_id=1, replica_groups={{0}}, dimensions={0}\n"
        "  %n = f32[64,8]{1,0} negate(%p)\n"
        "  ROOT %t = (f32[64,8]{1,0}, f32[8,8]{1,0}, f32[64,8]{1,0}) tuple(%n, %g, %a)\n}\n\n"
    )
    small = "  %y = f32[8,8]{1,0} constant({...})\n"
    one = only(f"{small}  ROOT %r = (f32[64,8], f32[8,8], f32[64,8]) fusion(%x, %y), kind=kCustom, calls=%f\n", inside)
    assert moved(one) == (X, X)


@pytest.mark.parametrize(
    ("entry", "read", "written"),
    [
        ("  ROOT %s = f32[1,8] dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,8}\n", 8 * 4 + 4, 8 * 4),
        ("  ROOT %s = f32[32,8] slice(%x), slice={[0:32], [0:8]}\n", X // 2, X // 2),
        ("  %u = f32[1,8] constant({...})\n  ROOT %s = f32[64,8] dynamic-update-slice(%x, %u, %i, %i)\n", 36, 32),
        ("  %b = f32[8,64] bitcast(%x)\n  ROOT %s = f32[64,64] dot(%x, %b), lhs_contracting_dims={1}\n", X, 8 * X),
        ("  ROOT %s = f32[64,8] broadcast(%i), dimensions={}\n", 4, X),
        # Two arrays at once.
        (
            (
                "  %u = f32[1,8] constant({...})\n  %y = f32[64,8] constant({...})\n"
                "  ROOT %s = (f32[64,8], f32[64,8]) scatter(%x, %y, %i, %u, %u), to_apply=%add\n"
            ),
            3 * 8 * 4 + 4,
            2 * 8 * 4,
        ),
    ],
)
def test_bare_instructions(entry: str, read: int, written: int) -> None:
    assert moved(only(entry)) == (read, written)


def test_what_moves_nothing_is_no_kernel() -> None:
    text = (
        "HloModule m\n\nENTRY %e (x: f32[64,8]) -> f32[64,8] {\n  %x = f32[64,8]{1,0} parameter(0)\n"
        '  %b = f32[64,8]{1,0} custom-call(), custom_call_target="AllocateBuffer"\n  %p = u32[] partition-id()\n'
        "  %s = (f32[64,8]{1,0:S(1)}, f32[64,8]{1,0}, u32[]) copy-start(%x)\n"
        "  %d = f32[64,8]{1,0:S(1)} copy-done(%s)\n  %k = token[] after-all()\n"
        "  %o = (f32[64,8]{1,0}, token[]) tuple(%d, %k)\n  ROOT %r = f32[64,8]{1,0} get-tuple-element(%o), index=0\n}\n"
    )
    assert of(read_program(text)) == ()


def test_lines_of_python_behind_kernels() -> None:
    for one in of(read_program(text_of("scanned", CPU))):
        if one.flops:
            assert one.stack[0].file == programs.__file__
            assert "dot_general" in one.op_name
