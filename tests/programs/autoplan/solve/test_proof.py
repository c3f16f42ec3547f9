"""The bound on memory that is behind `DoesNotFitError`, worked out by hand, and compared with compiled programs."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.autoplan.solve.proof import MemoryBound, memory_bound, prime_sizes, split_bytes
from shardrules.programs.traced.program import read_jaxpr

LAYERS, ROWS, WIDTH = 6, 2**10, 64
WEIGHTS, BATCH = (LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)
W_BYTES, X_BYTES = 4 * LAYERS * WIDTH * WIDTH, 4 * ROWS * WIDTH


def bound_of(
    fn: Callable[..., Any],
    *shapes: tuple[int, ...],
    mesh: str = "x:4",
    pins: Mapping[int, P] | None = None,
    hardware: str = "cuda:h100",
) -> MemoryBound:
    program = read_jaxpr(jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]))
    paths = [f"argument{index}" for index in range(len(shapes))]
    return memory_bound(program, dict(sr.mesh_shape(mesh).shape), sr.Hardware.named(hardware), paths, pins or {})


def scanned(w: Any, x: Any) -> Any:
    def body(h: Any, layer: Any) -> tuple[Any, None]:
        return jnp.sin(h @ layer), None

    return jnp.sum(jax.lax.scan(body, x, w)[0])


def trained(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(scanned)(w, x)


def test_arguments_count_at_their_finest_split() -> None:
    bound = bound_of(lambda w, x: jnp.sum(x @ w), (64, 6), (3, 64), mesh="x:4,y:2")
    # 64 is split eight ways, 6 in two by the smaller axis, and 3 not at all.
    assert bound.nbytes == 4 * (64 * 6 // 8 + 3 * 64 // 8)
    assert [array.name for array in bound.arrays] == ["argument0", "argument1"]
    assert bound_of(lambda w: jnp.sum(w), (6, 3), mesh="x:4,y:2").nbytes == 4 * 6 * 3 // 2


def test_no_mesh_splits_finer_than_one_of_primes() -> None:
    assert prime_sizes(1) == {}
    assert list(prime_sizes(24).values()) == [2, 2, 2, 3]
    model = jax.ShapeDtypeStruct((6, 5), jnp.float32), jax.ShapeDtypeStruct((7,), jnp.float32), 1.0
    assert split_bytes(model, prime_sizes(24)) == 4 * (5 + 7)
    for mesh in ("x:24", "x:12,y:2", "x:6,y:4", "x:8,y:3", "x:2,y:3,z:4"):
        assert split_bytes(model, dict(sr.mesh_shape(mesh).shape)) >= 4 * (5 + 7)
    assert split_bytes(jax.ShapeDtypeStruct((2**14, 5**6, 4), jnp.int8), prime_sizes(10**9)) == 2**16 * 5**6 // (
        2**9 * 5**6
    )


def test_pinned_arguments_count_as_pinned() -> None:
    assert bound_of(lambda w: jnp.sum(w), (64, 64), pins={0: P()}).nbytes == 4 * 64 * 64
    assert bound_of(lambda w: jnp.sum(w), (64, 64), pins={0: P(None, "x")}).nbytes == 64 * 64


def test_arguments_that_nothing_computes_with_do_not_count() -> None:
    bound = bound_of(lambda w, x, y: (jnp.sum(w), x), (64, 64), (4096, 64), (4096, 64))
    assert [array.name for array in bound.arrays] == ["argument0"]


def test_results_count_unless_an_argument_may_have_their_size() -> None:
    assert bound_of(lambda x: 2 * x, (64, 64)).nbytes == 64 * 64
    grown = bound_of(lambda x: jnp.concatenate([x, 2 * x, 3 * x]), (64, 64))
    assert grown.nbytes == 64 * 64 + 3 * 64 * 64
    assert grown.arrays[0].name == "result 0"
    # A piece of an array four times as large, in four pieces, is as large as this one whole.
    assert bound_of(lambda x: x[:16] * 2, (64, 64)).nbytes == 64 * 64


def test_what_loops_stack_counts_with_what_is_read_later() -> None:
    bound = bound_of(trained, WEIGHTS, BATCH)
    # One stack for the derivative, one for what goes round, which is also what the derivative is computed from.
    stacks = 2 * LAYERS * X_BYTES // 4
    assert bound.nbytes == stacks + W_BYTES // 4
    assert "loop at" in bound.operation
    assert "test_proof.py" in bound.operation
    assert bound.arrays[0].name == f"float32[{LAYERS}, {ROWS}, {WIDTH}], stacked"
    # The compiler for TPUs may keep such values in half as many bytes.
    assert bound_of(trained, WEIGHTS, BATCH, hardware="tpu:v5e").nbytes == max(
        stacks // 2 + W_BYTES // 4, W_BYTES // 4 + X_BYTES // 4
    )


def gated(w: Any, x: Any) -> Any:
    def body(h: Any, layer: Any) -> tuple[Any, None]:
        gate = h @ layer
        return jax.nn.silu(gate) * jax.nn.sigmoid(gate), None

    return jnp.sum(jax.lax.scan(body, x, w)[0])


def normed_twice(w: Any, x: Any) -> Any:
    def norm(h: Any) -> Any:
        return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)

    return jnp.sum(jax.lax.scan(lambda h, layer: (jax.nn.silu(norm(h) @ layer) * (norm(h) @ layer), None), x, w)[0])


def stacked_alike(w: Any, x: Any) -> Any:
    def body(h: Any, layer: Any) -> tuple[Any, Any]:
        return jnp.sin(h @ layer), (h, h * 1.0, h + 0, h * h, h**2, jnp.sin(h), jnp.sin(h))

    return sum(map(jnp.sum, jax.tree.leaves(jax.lax.scan(body, x, w))))


def written_out(w: Any, x: Any) -> Any:
    def body(h: Any, layer: Any) -> tuple[Any, Any]:
        return (h := jnp.tanh(h @ layer)), h

    return jnp.sum(jax.lax.scan(body, x, w, unroll=True)[1][3])


def test_equal_stacks_count_once() -> None:
    stack = LAYERS * X_BYTES // 4
    # One of what the matmul gives, and one of what goes round.
    assert bound_of(jax.grad(gated), WEIGHTS, BATCH).nbytes == 2 * stack + W_BYTES // 4
    assert bound_of(stacked_alike, WEIGHTS, BATCH).nbytes == stack


def test_loops_that_are_written_out_stack_nothing() -> None:
    assert bound_of(written_out, WEIGHTS, BATCH).nbytes == (W_BYTES + X_BYTES) // 4


def test_short_loops_stack_nothing_for_certain() -> None:
    assert bound_of(trained, (2, WIDTH, WIDTH), BATCH).nbytes == 4 * (2 * WIDTH * WIDTH + ROWS * WIDTH) // 4


def test_stacks_that_are_returned_may_be_written_over_arguments() -> None:
    def collected(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, rows: (h, jnp.sin(rows @ h)), w, x)[1]

    bound = bound_of(collected, (WIDTH, WIDTH), (LAYERS, *BATCH))
    assert [array.name for array in bound.arrays] == ["argument1", "argument0"]


def kept_in_bfloat16(w: Any, x: Any) -> Any:
    def body(h: Any, layer: Any) -> tuple[Any, Any]:
        h = jnp.sin(h @ layer)
        return h, h.astype(jnp.bfloat16).astype(jnp.float32)

    return jnp.sum(jax.lax.scan(body, x, w)[1] ** 2)


def test_converted_values_do_not_count() -> None:
    assert "stacked" not in str(bound_of(kept_in_bfloat16, WEIGHTS, BATCH).arrays)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn",
    [
        *(scanned, trained, kept_in_bfloat16, stacked_alike, written_out),
        *map(jax.grad, (scanned, kept_in_bfloat16, gated, normed_twice, written_out)),
    ],
)
@pytest.mark.parametrize("specs", [(P(), P("x")), (P(None, "x"), P()), (P(None, None, "x"), P("x")), (P("x"), P())])
def test_no_compiled_program_is_below_the_bound(fn: Callable[..., Any], specs: tuple[P, P]) -> None:
    mesh = sr.create_mesh("x:8")
    shapes = ((8, WIDTH, WIDTH), BATCH)
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    memory = jax.jit(fn, donate_argnums=0).lower(*structs).compile().memory_analysis()
    assert memory is not None
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert bound_of(fn, *shapes, mesh="x:8").nbytes <= peak - memory.alias_size_in_bytes
