"""Copies of operands of dots, on functions that were compiled for GPUs to see it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.programs.compiled.flops import find_matmuls
from shardrules.programs.compiled.kernels import find_kernels
from shardrules.programs.compiled.program import read_program
from shardrules.programs.compilers.fusion import FusedProgram
from shardrules.programs.compilers.operand_copies import OperandCopies
from shardrules.programs.traced.program import read_jaxpr
from tests.programs.examples import CUDA, mesh_on

B, T, H, D, R = 4, 256, 8, 64, 4


def copied(fn: Callable[..., Any], *shapes: tuple[int, ...], split: dict[int, int] | None = None) -> int:
    """The bytes that copies of operands move, on devices with each size divided by that in `split`."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program = read_jaxpr(jax.make_jaxpr(fn)(*arrays))
    copies, total = OperandCopies(FusedProgram.of(program)), 0
    for op_index, operation in enumerate(program.operations):
        if operation.name == "dot_general":
            shapes_here = [program.arrays[operand].shape for operand in operation.operands if operand is not None]
            sizes = [[size // (split or {}).get(size, 1) for size in shape] for shape in shapes_here]
            total += int(copies.nbytes(op_index, [np.array([row]) for row in sizes])[0])
    return total


def einsum(equation: str) -> Callable[..., Any]:
    return lambda *arrays: jnp.einsum(equation, *arrays)


CASES = [
    # Equation, shapes, and the operands that are copied.
    ("bgrd,btgd->bgrt", ((B, H, R, D), (B, T, H, D)), [1]),
    ("bgrd,bgtd->bgrt", ((B, H, R, D), (B, H, T, D)), []),
    ("bgrd,tbgd->bgrt", ((B, H, R, D), (T, B, H, D)), []),
    ("bgrt,btgd->bgrd", ((B, H, R, T), (B, T, H, D)), [1]),
    ("bqhd,bkhd->bhqk", ((B, T, H, D), (B, T, H, D)), [0, 1]),
    ("bqhd,bkhd->bhqk", ((B, T, 1, D), (B, T, 1, D)), []),
    ("bqhd,bkhd->bhqk", ((1, T, H, D), (1, T, H, D)), []),
    ("gecd,edf->gecf", ((2, H, T, D), (H, D, R)), [0]),
    ("egcd,edf->egcf", ((H, 2, T, D), (H, D, R)), []),
    ("bsd,sbe->de", ((B, T, D), (T, B, R)), [1]),
    ("bhse,hed->bsd", ((B, H, T, D), (H, D, R)), [0]),
    ("td,fd->tf", ((T, D), (R, D)), []),
    ("bhd,bthd->bht", ((B, H, D), (B, T, H, D)), []),  # no matmul
]


@pytest.mark.parametrize(("equation", "shapes", "operands"), CASES)
def test_operands_in_another_order_are_copied(
    equation: str, shapes: tuple[tuple[int, ...], ...], operands: list[int]
) -> None:
    expected = sum(2 * 2 * int(np.prod(shapes[operand])) for operand in operands)
    assert copied(einsum(equation), *shapes) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("equation", "shapes", "operands"), [CASES[index] for index in (0, 3, 5, 7, 9, 10)])
def test_compilers_copy_these_operands(equation: str, shapes: tuple[tuple[int, ...], ...], operands: list[int]) -> None:
    whole = NamedSharding(mesh_on(CUDA, "data:8"), PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole) for shape in shapes]
    text = jax.jit(einsum(equation), out_shardings=whole).lower(*arrays).compile().as_text()
    program = read_program(text or "")
    moved = [
        kernel.read_bytes
        for kernel in find_kernels(program, find_matmuls(program))
        if kernel.name.startswith("wrapped_transpose")
    ]
    assert moved == [2 * int(np.prod(shapes[operand])) for operand in operands]


def test_one_head_or_one_row_on_a_device_needs_no_copy() -> None:
    keys = einsum("bgrd,btgd->bgrt"), (B, H, R, D), (B, T, H, D)
    assert copied(*keys, split={H: 2}) == 2 * 2 * B * T * H * D // 2
    assert copied(*keys, split={H: H}) == 0
    assert copied(einsum("bqhd,bkhd->bhqk"), (B, T, H, D), (B, T, H, D), split={B: B}) == 0


def test_kernels_write_what_dots_take() -> None:
    """Results of elementwise kernels are written in the order of the dot; what a matmul gives is not."""
    shapes = (B, T, H, D), (B, T, H, D)
    assert copied(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", jnp.tanh(q), jnp.exp(k)), *shapes) == 0

    def projected(x: Any, w: Any) -> Any:
        heads = (x @ w).reshape(B, T, H, D)
        return jnp.einsum("bqhd,bkhd->bhqk", heads, heads)

    assert copied(projected, (B, T, D), (D, H * D)) > 0


def test_equal_copies_are_made_once() -> None:
    once = einsum("bqhd,bkhd->bhqk")

    def twice(q: Any, k: Any) -> Any:
        return once(q, k) + once(2 * q, k)

    shapes = (B, T, H, D), (B, T, H, D)
    assert copied(twice, *shapes) == copied(once, *shapes)


def test_updated_caches_are_copied_back() -> None:
    def step(q: Any, cache: Any, key: Any) -> Any:
        cache = jax.lax.dynamic_update_slice_in_dim(cache, key, 3, 1)
        return jnp.einsum("bgrd,btgd->bgrt", q, cache), cache

    shapes = (B, H, R, D), (B, T, H, D), (B, 1, H, D)
    assert copied(step, *shapes) == 3 * copied(einsum("bgrd,btgd->bgrt"), *shapes[:2])
    # One head is still a dim of the batch: the lengths, which are not summed over, go to the end.
    assert copied(step, *shapes, split={H: H}) == copied(step, *shapes) // H
