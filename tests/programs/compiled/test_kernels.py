"""Kernels of real programs beside closed forms and XLA's own counts, and rare forms as XLA prints them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardrules.programs.compiled.flops import find_matmuls, total_flops
from shardrules.programs.compiled.flow import Times
from shardrules.programs.compiled.kernels import Kernel, find_kernels
from shardrules.programs.compiled.program import CompiledProgram, read_program
from tests.programs.examples import (
    CLOSED_FORMS,
    CPU,
    LAYERS,
    TARGETS,
    TPU,
    ClosedForm,
    array,
    compiled,
    mesh_on,
    text_of,
)
from tests.quick import USUAL_KERNELS

on_all = pytest.mark.parametrize("target", TARGETS)
INDEX = 4  # bytes of an index


def kernels_of(program: CompiledProgram) -> tuple[Kernel, ...]:
    return find_kernels(program, find_matmuls(program))


def kernels(
    target: str, fn: Callable[..., Any], *shapes: tuple[int, ...] | Any, donate: tuple[int, ...] = (), **options: Any
) -> tuple[Kernel, ...]:
    """The kernels of a function on one device of a target. A shape means float32, an array has its own dtype."""
    mesh = mesh_on(target, "data:8")
    args = [array(mesh, arg) if isinstance(arg, tuple) else array(mesh, arg.shape, dtype=arg.dtype) for arg in shapes]
    lowered = jax.jit(fn, donate_argnums=donate).lower(*args)
    if target == CPU:
        options = USUAL_KERNELS | options
    return kernels_of(read_program(str(lowered.compile(compiler_options=options or None).as_text())))


def looped(kernels: tuple[Kernel, ...]) -> list[Kernel]:
    return [kernel for kernel in kernels if kernel.times.count == LAYERS]


def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def total(kernels: tuple[Kernel, ...]) -> int:
    return sum(kernel.total_bytes for kernel in kernels)


@on_all
def test_a_matmul_reads_its_operands_and_writes_its_result(target: str) -> None:
    (kernel,) = kernels(target, lambda a, b: a @ b, (2048, 1024), (1024, 4096))
    assert (kernel.read_bytes, kernel.written_bytes) == ((2048 + 4096) * 1024 * 4, 2048 * 4096 * 4)
    assert kernel.flops == ((("f32", "default"), 2 * 2048 * 1024 * 4096),)
    assert (kernel.times, kernel.total_flops) == (Times(1), 2 * 2048 * 1024 * 4096)
    assert kernel.op_name.endswith("dot_general")
    assert kernel.stack[0].file == __file__


@on_all
@pytest.mark.parametrize(
    ("fn", "size"), [(lambda a: a @ a.T, 2048), (lambda x: jnp.tanh(x * 2 + 1) * x, 1024)], ids=["matmul", "chain"]
)
def test_an_array_that_is_used_twice_is_read_once(fn: Callable[..., Any], size: int, target: str) -> None:
    (kernel,) = kernels(target, fn, (size, size))
    assert (kernel.read_bytes, kernel.written_bytes) == (size * size * 4, size * size * 4)


def repeat(layers: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]


@on_all
def test_each_round_of_a_loop_reads_one_layer(target: str) -> None:
    layers, x = (LAYERS, 512, 512), (32, 512)
    all_kernels = looped(kernels(target, repeat, layers, x))
    layer = 512 * 512 * (2 if target == TPU else 4)  # cast to bfloat16 before the loop
    assert layer <= max(kernel.read_bytes for kernel in all_kernels) <= layer + 32 * 512 * 4 + INDEX
    slices = [kernel.read_bytes for kernel in all_kernels if kernel.written_bytes == layer]
    assert slices == ([] if target == TPU else [layer + INDEX])  # the matmul itself slices
    assert sum(kernel.total_flops for kernel in all_kernels) == LAYERS * 2 * 32 * 512 * 512


@on_all
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_round_of_a_loop_writes_one_result(dtype: Any, target: str) -> None:
    """CPUs cannot compute in bfloat16: they convert the whole stack around the update, which changes nothing else."""

    def collect(x: Any) -> Any:
        return lax.scan(lambda x, _: (x * 2, x + 1), x, None, length=LAYERS)[1]

    row = 256 * 256 * jnp.dtype(dtype).itemsize
    all_kernels = looped(kernels(target, collect, abstract((256, 256), dtype)))
    (update,) = [kernel for kernel in all_kernels if kernel.read_bytes == row + INDEX]
    assert update.written_bytes == row
    assert max(kernel.read_bytes + kernel.written_bytes for kernel in all_kernels) == 2 * row + INDEX


@on_all
def test_an_update_in_place_writes_only_the_update(target: str) -> None:
    def put(cache: Any, row: Any, start: Any) -> Any:
        return lax.dynamic_update_slice(cache, row, (start, 0))

    row, args = 128 * 4, ((4096, 128), (1, 128), abstract((), jnp.int32))
    *_, kernel = kernels(target, put, *args, donate=(0,))
    assert kernel.written_bytes == row
    assert row + INDEX <= kernel.read_bytes <= row + 2 * INDEX
    copying = total(kernels(target, put, *args)) - total(kernels(target, put, *args, donate=(0,)))
    assert copying == 2 * 4096 * 128 * 4, "an argument that is not donated is copied first"


@on_all
def test_an_embedding_reads_only_the_selected_rows(target: str) -> None:
    all_kernels = kernels(target, lambda table, rows: table[rows], (50_000, 256), abstract((64,), jnp.int32))
    rows, indices = 64 * 256 * 4, (1024 if target == TPU else 64) * INDEX
    assert (all_kernels[-1].read_bytes, all_kernels[-1].written_bytes) == (rows + indices, rows)
    assert total(all_kernels) < 3 * rows


@on_all
def test_a_scatter_reads_and_writes_only_the_selected_rows(target: str) -> None:
    rows = (50_000, 256), abstract((64,), jnp.int32), (64, 256)
    all_kernels = kernels(target, lambda table, start, more: table.at[start].add(more), *rows, donate=(0,))
    update, indices = 64 * 256 * 4, (128 if target == TPU else 64) * INDEX
    assert (all_kernels[-1].read_bytes, all_kernels[-1].written_bytes) == (2 * update + indices, update)


@on_all
def test_a_slice_reads_only_the_slice(target: str) -> None:
    x = (1024, 1024)
    half = 512 * 1024 * 4
    all_kernels = kernels(target, lambda x: jnp.sin(x[:512]), x)
    assert total(all_kernels) == 2 * half
    all_kernels = kernels(target, lambda x: x[:512] * x[512:], x)
    assert total(all_kernels) == 3 * half


@on_all
def test_every_branch_has_its_kernels(target: str) -> None:
    def choose(p: Any, x: Any) -> Any:
        return lax.cond(p, lambda x: jnp.sin(x), lambda x: x @ x, x)

    all_kernels = kernels(target, choose, abstract((), jnp.bool_), (2048, 2048))
    inside = [kernel for kernel in all_kernels if kernel.times == Times(1, conditional=True)]
    matrix = 2048 * 2048 * 4
    assert [(kernel.read_bytes, kernel.written_bytes) for kernel in inside] == [(matrix, matrix)] * 2
    assert sorted(kernel.total_flops for kernel in inside) == [0, 2 * 2048**3]


@pytest.mark.slow
def test_tpu_prefetches_count_where_they_are_used() -> None:
    text = text_of("column then row", TPU)
    assert "copy-start" in text
    (kernel,) = kernels_of(read_program(text))
    (case,) = [form for form in CLOSED_FORMS if form.name == "column then row"]
    _, args, _ = case.build(mesh_on(TPU, case.axes))
    up, down, x = (math.prod(argument.sharding.shard_shape(argument.shape)) * 4 for argument in args)
    # Both weights have a dim of 128, which is a tile; the input and the result have 64 of one.
    assert (kernel.read_bytes, kernel.written_bytes) == (up + down + 2 * x, 2 * x)


@on_all
@pytest.mark.parametrize("case", CLOSED_FORMS, ids=lambda case: case.name)
def test_every_matmul_is_in_one_kernel(case: ClosedForm, target: str) -> None:
    program = read_program(text_of(case.name, target))
    matmuls = find_matmuls(program)
    assert sum(kernel.total_flops for kernel in find_kernels(program, matmuls)) == total_flops(matmuls) == case.flops


@on_all
@pytest.mark.parametrize("case", CLOSED_FORMS, ids=lambda case: case.name)
def test_collectives_are_not_kernels(case: ClosedForm, target: str) -> None:
    """TPUs fuse a collective with what starts, ends or slices it: such a fusion moves nothing through memory."""
    all_kernels = kernels_of(read_program(text_of(case.name, target)))
    assert all_kernels
    for kernel in all_kernels:
        assert not kernel.name.startswith(("all-", "reduce-scatter", "async-collective", "collective"))
        assert kernel.read_bytes or kernel.written_bytes


LOOP_FREE = [case for case in CLOSED_FORMS if case.name not in ("scanned", "accumulated")]


@pytest.mark.parametrize("case", LOOP_FREE, ids=lambda case: case.name)
def test_bytes_agree_with_xla(case: ClosedForm) -> None:
    """XLA counts the operands and results of a collective, too. The remaining difference is scalars.

    XLA counts the body of a loop once, so these programs have no loops. On a CPU it also counts the whole table that a
    fusion gathers from or scatters to, and the whole bfloat16 stack that is converted to update a row. On a TPU it
    counts padded tiles, and every prefetch on top.
    """
    fn, args, out = case.build(mesh_on(CPU, case.axes))
    executable = compiled(fn, *args, out=out, **USUAL_KERNELS)
    program = read_program(executable.as_text())
    wire = sum(
        instruction.nbytes + sum(operand.nbytes for operand in computation.operand_types(instruction))
        for computation, instruction in program.walk()
        if instruction.op in ("all-reduce", "all-gather")
    )
    assert wire
    assert total(kernels_of(program)) + wire == pytest.approx(executable.cost_analysis()["bytes accessed"], rel=1e-4)


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
def test_bytes_agree_with_xla_on_one_device(fn: Callable[..., Any]) -> None:
    executable = compiled(fn, jnp.ones((256, 256)), **USUAL_KERNELS)
    assert total(kernels_of(read_program(executable.as_text()))) == pytest.approx(
        executable.cost_analysis()["bytes accessed"], rel=0.02
    )


# What XLA prints on other machines, with other flags or in other versions.


def only(entry: str, before: str = "") -> Kernel:
    text = (
        f"HloModule m\n\n{before}ENTRY %e (x: f32[64,8], i: s32[]) -> f32[64,8] {{\n"
        f"  %x = f32[64,8]{{1,0}} parameter(0)\n  %i = s32[] parameter(1)\n{entry}}}\n"
    )
    (kernel,) = kernels_of(read_program(text))
    return kernel


def moved(kernel: Kernel) -> tuple[int, int]:
    return kernel.read_bytes, kernel.written_bytes


X, ROW = 64 * 8 * 4, 8 * 4


def fused(lines: str) -> str:
    """A fusion of an array and an index, with a zero and a row."""
    body = "".join(f"  {line.strip()}\n" for part in lines.splitlines() for line in part.split("; "))
    return (
        "%f (p: f32[64,8], j: s32[]) -> f32[64,8] {\n  %p = f32[64,8] parameter(0)\n  %j = s32[] parameter(1)\n"
        f"  %z = s32[] constant(0)\n  %u = f32[1,8] constant({{...}})\n{body}}}\n\n"
    )


CALL = "  ROOT %r = f32[64,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%f\n"


def test_asynchronous_kernels() -> None:
    wrapped = (
        "%w (p: f32[64,8]) -> f32[64,8] {\n  %p = f32[64,8]{1,0} parameter(0)\n"
        "  ROOT %n = f32[64,8]{1,0} sine(%p)\n}\n\n"
    )
    kernel = only(
        "  %s = ((f32[64,8]{1,0}), f32[64,8]{1,0}, u32[]) async-start(%x), calls=%w\n"
        "  ROOT %d = f32[64,8]{1,0} async-done(%s), calls=%w\n",
        wrapped,
    )
    assert (kernel.name, kernel.computation, kernel.op, moved(kernel)) == ("n", "w", "sine", (X, X))
    kernel = only("  ROOT %c = f32[64,8]{1,0} call(%x), to_apply=%w\n", wrapped)
    assert (kernel.name, moved(kernel)) == ("n", (X, X))
    kernel = only(
        '  %s = ((f32[64,8]{1,0}), f32[64,8]{1,0}, u32[]) custom-call-start(%x), custom_call_target="mine"\n'
        "  ROOT %d = f32[64,8]{1,0} custom-call-done(%s)\n"
    )
    assert (kernel.name, kernel.op, moved(kernel)) == ("s", "mine", (X, X))


def test_only_libraries_have_scratch_memory() -> None:
    results = "(f32[64,8]{1,0}, s8[1024]{0})"
    kernel = only(f'  ROOT %c = {results} custom-call(%x), custom_call_target="__cublas$gemm"\n')
    assert moved(kernel) == (X, X)
    kernel = only(f'  ROOT %c = {results} custom-call(%x), custom_call_target="mine"\n')
    assert moved(kernel) == (X, X + 1024)


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("ROOT %a = f32[64,8] add(%p, %p)", (X, X)),
        # Two rows, through a conversion.
        (
            """%b = bf16[64,8] convert(%p); %s = bf16[2,8] dynamic-slice(%b, %j, %z), dynamic_slice_sizes={2,8}
               ROOT %t = bf16[8,2] transpose(%s), dimensions={1,0}""",
            (2 * ROW + 4, 2 * 8 * 2),
        ),
        # Rows, and then all.
        (
            """%s = f32[1,8] dynamic-slice(%p, %j, %z), dynamic_slice_sizes={1,8}
               %b = f32[64,8] broadcast(%s), dimensions={0,1}; ROOT %a = f32[64,8] add(%p, %b)""",
            (X + 4, X),
        ),
        # Of what is computed of an array the elements that are used.
        (
            """%n = f32[64,8] negate(%p); %e = f32[64,8] exponential(%n); %c = s32[2,1] broadcast(%j), dimensions={}
               ROOT %g = f32[2,8] gather(%e, %c), offset_dims={1}, slice_sizes={1,8}""",
            (2 * ROW + 4, 2 * ROW),
        ),
        # More rows than the array has.
        (
            """%c = s32[100,1] broadcast(%j), dimensions={}
               ROOT %g = f32[100,8] gather(%p, %c), offset_dims={1}, slice_sizes={1,8}""",
            (X + 4, 100 * ROW),
        ),
        # Two updates of one array in place.
        (
            """%d = f32[64,8] dynamic-update-slice(%p, %u, %j, %z)
               ROOT %e = f32[64,8] dynamic-update-slice(%d, %u, %z, %z)""",
            (4, 2 * ROW),
        ),
        # An update of an array that is then read.
        ("%d = f32[64,8] dynamic-update-slice(%p, %u, %j, %z); ROOT %n = f32[64,8] negate(%d)", (X + 4, X)),
        # An update of a copy.
        ("%c = f32[64,8]{0,1} copy(%p); ROOT %d = f32[64,8] dynamic-update-slice(%c, %u, %j, %z)", (X + 4, X)),
        # An update of an array from inside the fusion.
        (
            """%o = f32[] constant(0); %b = f32[128,8] broadcast(%o), dimensions={}
               ROOT %d = f32[128,8] dynamic-update-slice(%b, %p, %j, %z)""",
            (X + 4, 2 * X),
        ),
        # Narrowing a dtype loses bits, so the array is not returned unchanged.
        (
            """%b = bf16[64,8] convert(%p); %v = bf16[1,8] constant({...})
               %d = bf16[64,8] dynamic-update-slice(%b, %v, %j, %z); ROOT %c = f32[64,8] convert(%d)""",
            (X + 4, X),
        ),
        # Nor is it when it is returned in a wider dtype.
        (
            """%v = f64[1,8] constant({...}); %b = f64[64,8] convert(%p)
               ROOT %d = f64[64,8] dynamic-update-slice(%b, %v, %j, %z)""",
            (X + 4, 2 * X),
        ),
        # Of what is padded the elements that are used.
        (
            """%o = f32[] constant(0); %w = f32[66,8] pad(%p, %o), padding=1_1x0_0
               ROOT %s = f32[1,8] dynamic-slice(%w, %j, %z), dynamic_slice_sizes={1,8}""",
            (ROW + 4, ROW),
        ),
        ("%o = f32[] constant(0); ROOT %w = f32[66,8] pad(%p, %o), padding=1_1x0_0", (X, X + 2 * ROW)),
        # A rounded update.
        (
            """%n = f32[1,8] reduce-precision(%u), exponent_bits=8, mantissa_bits=7
               ROOT %d = f32[64,8] dynamic-update-slice(%p, %n, %j, %z)""",
            (4, ROW),
        ),
        # Several results, one updated in place.
        (
            """%s = f32[1,8] dynamic-slice(%p, %j, %z), dynamic_slice_sizes={1,8}; %n = f32[1,8] negate(%s)
               %d = f32[64,8] dynamic-update-slice(%p, %n, %j, %z); ROOT %t = (f32[64,8], f32[1,8]) tuple(%d, %n)""",
            (ROW + 4, 2 * ROW),
        ),
    ],
)
def test_fusions_move_only_what_they_need(inside: str, expected: tuple[int, int]) -> None:
    assert moved(only(CALL, fused(inside))) == expected


def test_fusions_in_fusions_are_one_kernel() -> None:
    inner = (
        "%g (q: f32[64,8], k: s32[]) -> f32[1,8] {\n  %q = f32[64,8]{1,0} parameter(0)\n  %k = s32[] parameter(1)\n"
        "  %o = s32[] constant(0)\n"
        "  ROOT %s = f32[1,8]{1,0} dynamic-slice(%q, %k, %o), dynamic_slice_sizes={1,8}\n}\n\n"
        "%h (q2: f32[64,8], u2: f32[1,8], k2: s32[]) -> f32[64,8] {\n  %q2 = f32[64,8]{1,0} parameter(0)\n"
        "  %u2 = f32[1,8]{1,0} parameter(1)\n  %k2 = s32[] parameter(2)\n  %o2 = s32[] constant(0)\n"
        "  ROOT %d2 = f32[64,8]{1,0} dynamic-update-slice(%q2, %u2, %k2, %o2)\n}\n\n"
    )
    outer = (
        "%b = f32[64,8] bitcast(%p); %s1 = f32[1,8] fusion(%b, %j), kind=kLoop, calls=%g; "
        "%n = f32[1,8] negate(%s1); ROOT %w = f32[64,8] fusion(%b, %n, %j), kind=kLoop, calls=%h"
    )
    assert moved(only(CALL, inner + fused(outer))) == (ROW + 4, ROW)


@pytest.mark.parametrize(
    ("aliasing", "expected"),
    [
        (", output_to_operand_aliasing={{}: (0, {})}", (4, ROW)),
        # In other memory than its operand it is a copy.
        ("", (X + 4, X)),
    ],
)
def test_updates_of_arrays_in_other_tiles_move_only_the_update(aliasing: str, expected: tuple[int, int]) -> None:
    """As the compiler for TPUs writes them: the array is copied into other tiles, without leaving its memory."""
    inner = (
        "%g (q: f32[64,8]) -> f32[64,8] {\n  %q = f32[64,8]{1,0:T(16,128)} parameter(0)\n"
        "  ROOT %c = f32[64,8]{1,0:T(8,128)} copy(%q)\n}\n\n"
    )
    outer = (
        f"%b = f32[64,8] fusion(%p), kind=kLoop{aliasing}, calls=%g; "
        "ROOT %d = f32[64,8] dynamic-update-slice(%b, %u, %j, %z)"
    )
    assert moved(only(CALL, inner + fused(outer))) == expected


def test_a_collective_inside_a_fusion_is_not_counted() -> None:
    """The operands and results of the collective pass through the fusion unchanged."""
    inside = (
        "%f (p: f32[64,8], g: f32[8,8]) -> (f32[64,8], f32[8,8], f32[64,8]) {\n"
        "  %p = f32[64,8]{1,0} parameter(0)\n  %g = f32[8,8]{1,0} parameter(1)\n"
        "  %a = f32[64,8]{1,0} all-gather(%g), channel_id=1, replica_groups={{0}}, dimensions={0}\n"
        "  %n = f32[64,8]{1,0} negate(%p)\n"
        "  ROOT %t = (f32[64,8]{1,0}, f32[8,8]{1,0}, f32[64,8]{1,0}) tuple(%n, %g, %a)\n}\n\n"
    )
    small = "  %y = f32[8,8]{1,0} constant({...})\n"
    kernel = only(
        f"{small}  ROOT %r = (f32[64,8], f32[8,8], f32[64,8]) fusion(%x, %y), kind=kCustom, calls=%f\n", inside
    )
    assert moved(kernel) == (X, X)


@pytest.mark.parametrize(
    ("entry", "read", "written"),
    [
        ("  ROOT %s = f32[1,8] dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,8}\n", 8 * 4 + 4, 8 * 4),
        ("  ROOT %s = f32[32,8] slice(%x), slice={[0:32], [0:8]}\n", X // 2, X // 2),
        ("  %u = f32[1,8] constant({...})\n  ROOT %s = f32[64,8] dynamic-update-slice(%x, %u, %i, %i)\n", 36, 32),
        ("  %b = f32[8,64] bitcast(%x)\n  ROOT %s = f32[64,64] dot(%x, %b), lhs_contracting_dims={1}\n", X, 8 * X),
        ("  ROOT %s = f32[64,8] broadcast(%i), dimensions={}\n", 4, X),
        # Two arrays in one scatter.
        (
            (
                "  %u = f32[1,8] constant({...})\n  %y = f32[64,8] constant({...})\n"
                "  ROOT %s = (f32[64,8], f32[64,8]) scatter(%x, %y, %i, %u, %u), "
                "update_window_dims={0,1}, to_apply=%add\n"
            ),
            3 * 8 * 4 + 4,
            2 * 8 * 4,
        ),
    ],
)
def test_instructions_outside_fusions(entry: str, read: int, written: int) -> None:
    assert moved(only(entry)) == (read, written)


def test_instructions_that_move_nothing_are_not_kernels() -> None:
    text = (
        "HloModule m\n\nENTRY %e (x: f32[64,8]) -> f32[64,8] {\n  %x = f32[64,8]{1,0} parameter(0)\n"
        '  %b = f32[64,8]{1,0} custom-call(), custom_call_target="AllocateBuffer"\n  %p = u32[] partition-id()\n'
        '  %a = u32[] custom-call(%x), custom_call_target="PrepareAsyncCallStart"\n'
        "  %s = (f32[64,8]{1,0:S(1)}, f32[64,8]{1,0}, u32[]) copy-start(%x)\n"
        "  %d = f32[64,8]{1,0:S(1)} copy-done(%s)\n  %k = token[] after-all()\n"
        "  %o = (f32[64,8]{1,0}, token[]) tuple(%d, %k)\n  ROOT %r = f32[64,8]{1,0} get-tuple-element(%o), index=0\n}\n"
    )
    assert kernels_of(read_program(text)) == ()


def test_results_of_scalar_kernels_are_scalars() -> None:
    text = (
        "HloModule m\n\nENTRY %e (i: s32[], x: f32[8]) -> f32[8] {\n  %i = s32[] parameter(0)\n"
        "  %x = f32[8]{0} parameter(1)\n  %n = s32[] add(%i, %i)\n"
        '  %c = s32[] custom-call(%x), custom_call_target="tpu_custom_call"\n  ROOT %y = f32[8]{0} add(%x, %x)\n}\n'
    )
    assert [kernel.is_scalar for kernel in kernels_of(read_program(text))] == [True, False, False]


def test_chains_of_products_are_read_once() -> None:
    """Each value is used twice in the next: there are 2^40 ways through them."""

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(40):
            x = x * jnp.tanh(x)
        return x

    program = read_program(str(jax.jit(chain).lower(jnp.ones((64, 128))).compile().as_text()))
    kernels = find_kernels(program, ())
    assert {kernel.read_bytes for kernel in kernels} == {64 * 128 * 4}


def test_conditions_of_loops_with_known_rounds_are_no_kernels() -> None:
    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 9, lambda _, y: jnp.sin(y) @ y, x)).lower(jnp.ones((64, 64)))
    text = str(looped.compile().as_text())
    program = read_program(text)
    (loop,) = [instruction for _, instruction in program.walk() if instruction.op == "while"]
    assert "known_trip_count" in loop.backend_config
    condition = loop.references("condition")[0]
    assert condition not in {kernel.computation for kernel in find_kernels(program, ())}
    unknown = read_program(text.replace("known_trip_count", "some_count"))
    assert condition in {kernel.computation for kernel in find_kernels(unknown, ())}
