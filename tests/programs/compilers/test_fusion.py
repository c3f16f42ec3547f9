"""Operations that read and write memory, on functions whose fusions are obvious."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardrules.programs.compilers.compiler import GpuCompiler
from shardrules.programs.compilers.fusion import FusedProgram
from shardrules.programs.traced.program import TracedProgram, read_jaxpr

X, W = jnp.ones((8, 16)), jnp.ones((16, 16))


def read(fn: Callable[..., Any], *args: Any) -> TracedProgram:
    return read_jaxpr(jax.make_jaxpr(fn)(*args))


def reading(program: TracedProgram) -> dict[str, int]:
    """The number of kernels that read something at each operation, by its name."""
    counts = FusedProgram.of(program, GpuCompiler()).read_counts
    return {program.operations[op_index].name: count for (op_index, _), count in counts.items() if count}


def writing(program: TracedProgram) -> list[str]:
    fusion = FusedProgram.of(program, GpuCompiler())
    return [
        operation.name
        for op_index, operation in enumerate(program.operations)
        if any(fusion.writes(op_index, result) for result in operation.results)
    ]


def test_elementwise_operations_are_fused_into_chains() -> None:
    """Only what the matmul reads is written, and what is returned."""
    program = read(lambda x, w: jnp.tanh(jnp.exp(jnp.sin(x) @ w)), X, W)
    assert reading(program) == {"sin": 1, "dot_general": 1, "exp": 1}
    assert writing(program) == ["sin", "dot_general", "tanh"]


def test_operations_that_look_elsewhere_are_not_fused() -> None:
    program = read(lambda x: jnp.sin(lax.cumsum(jnp.cos(x), axis=1)), X)
    assert writing(program) == ["cos", "cumsum", "sin"]


def test_a_result_is_computed_again_however_late_it_is_used() -> None:
    def fn(x: Any) -> Any:
        kept = y = jnp.exp(x)
        for _ in range(100):
            y = jnp.sin(y)
        return y + kept

    assert writing(read(fn, X)) == ["add"]


def test_each_kernel_reads_what_it_computes_from() -> None:
    """A chain in two kernels reads its start in both, and a kernel reads nothing twice."""
    program = read(lambda x, w: (jnp.exp(x) @ w, jnp.exp(x) * 2 + x), X, W)
    assert [
        count for (_, operand), count in FusedProgram.of(program, GpuCompiler()).read_counts.items() if not operand
    ][:2] == [1, 1]
    twice = read(lambda x, w: (lambda y: (y @ w, jnp.cumsum(y + 1, 0)))(jnp.exp(x)), X, W)
    assert writing(twice)[:2] == ["exp", "dot_general"]


def test_views_take_no_memory() -> None:
    program = read(lambda x, w: (jnp.tanh(x).T.reshape(16, 2, 4).reshape(16, 8)).T @ w, X, W)
    assert writing(program) == ["tanh", "dot_general"]


def test_only_what_leaves_a_loop_is_written_at_its_edges() -> None:
    program = read(lambda x: lax.scan(lambda x, _: (jnp.sin(x), x), x, length=3), X)
    assert [name for name in writing(program) if name in ("enter", "leave")] == ["leave"]


def test_what_is_computed_again_keeps_what_it_starts_from() -> None:
    """Compilers do not look behind the start of a checkpoint: they would keep what it was meant to drop."""

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jax.checkpoint(lambda y: jnp.tanh(y @ w) @ w)(jnp.exp(x) + 1) ** 2)

    program = read(jax.grad(loss), X, W)
    kept = [program.operations[program.producers[array]].name for array in program.kept if array in program.producers]
    assert "add" in kept
    assert all(array in FusedProgram.of(program, GpuCompiler()).written for array in program.kept)


def test_a_softmax_reads_its_rows_once() -> None:
    def bytes_read(fn: Any, *shape: int) -> int:
        program = read(fn, jnp.ones(shape, jnp.bfloat16), jnp.ones((shape[-1], 4), jnp.bfloat16))
        fusion = FusedProgram.of(program, GpuCompiler())
        size = 2 * shape[0] * shape[1]
        return sum(fusion.read_bytes(*key) for key in fusion.read_counts) // size

    def softmax(x: Any, w: Any) -> Any:
        return jax.nn.softmax(x.astype(jnp.float32), -1).astype(x.dtype) @ w

    assert bytes_read(softmax, 64, 1024) == 2  # by the softmax, and its result by the matmul
    assert bytes_read(softmax, 8, 2**15) == 4  # such rows are read again for each reduction


def test_rows_that_a_kernel_has_on_chip_are_written_where_only_an_element_of_each_is_used() -> None:
    def loss(x: Any, at: Any) -> Any:
        return jnp.take_along_axis(jax.nn.log_softmax(x), at, -1).sum()

    def writes_rows(shape: tuple[int, int]) -> bool:
        program = read(loss, jnp.ones(shape), jnp.zeros((shape[0], 1), int))
        written = FusedProgram.of(program, GpuCompiler()).written - {*program.arguments}
        return any(program.arrays[array].shape == shape for array in written)

    assert writes_rows((64, 1024))
    assert not writes_rows((8, 2**15))  # such rows are not on chip


def test_an_optimizer_is_one_kernel_for_each_parameter() -> None:
    def step(p: Any, m: Any, g: Any) -> Any:
        m = 0.9 * m + 0.1 * g
        return p - m, m

    program = read(step, X, X, X)
    assert len(FusedProgram.of(program, GpuCompiler()).kernels) == 1
    assert reading(program) == {"mul": 1, "sub": 1}


def test_updates_touch_only_what_they_change() -> None:
    cache, new = jnp.ones((1024, 16)), jnp.ones((1, 16))
    program = read(lambda cache, new: lax.dynamic_update_slice_in_dim(cache, new, 3, 0), cache, new)
    fusion, (op_index,) = (
        FusedProgram.of(program, GpuCompiler()),
        [op_index for op_index, operation in enumerate(program.operations) if operation.name == "dynamic_update_slice"],
    )
    assert fusion.written_bytes(op_index, 0) == new.nbytes
    table = read(lambda table, rows: table[rows], jnp.ones((1000, 16)), jnp.arange(4))
    (gather,) = [index for index, operation in enumerate(table.operations) if operation.name == "gather"]
    assert FusedProgram.of(table, GpuCompiler()).read_bytes(gather, 0) == 4 * 16 * 4


def test_reductions_of_single_elements_are_no_kernels() -> None:
    def norm(x: jax.Array) -> jax.Array:
        return x - jnp.mean(x, (1, 3), keepdims=True)

    x = jnp.ones((8, 4, 2, 4))
    program = read_jaxpr(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(norm(x) ** 3)))(x))
    ends = [program.operations[op_index] for op_index in FusedProgram.of(program, GpuCompiler()).kernels]
    sizes = [operation.equation.invars[0].aval.size for operation in ends if operation.name == "reduce_sum"]
    assert sizes
    assert min(sizes) == x.size


def test_long_chains_of_products_are_walked_once() -> None:
    """Each step reads the one before twice: walks that forget where they were would take 2 to the power of 60 steps."""

    def loss(x: Any, scale: Any) -> Any:
        for _ in range(60):
            scale = scale * (2 - x[0, 0] * scale)
        return jnp.mean((x * scale) ** 2)

    program = read(loss, jax.ShapeDtypeStruct((256, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.bfloat16))
    assert not any(
        program.arrays[array].shape == (256, 64) for array in FusedProgram.of(program, GpuCompiler()).written - {0}
    )


def test_what_a_kernel_would_compute_at_many_places_is_written() -> None:
    """Each round takes what was before at two places, so that a kernel of four rounds would compute it at 16."""

    def rounds(count: int) -> list[str]:
        def fn(x: Any) -> Any:
            x = jnp.sin(x)
            for _ in range(count):
                x = x[:, 1:] * x[:, :-1]
            return x

        return writing(read(fn, X))

    assert rounds(3) == ["mul"]
    assert rounds(4) == ["sin", "mul"]
