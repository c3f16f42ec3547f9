"""The larger arrays that share their order of dims with smaller ones."""

import jax
import jax.numpy as jnp
import pytest

from shardrules.programs.compilers.broadcasts import Broadcasts
from shardrules.programs.traced.program import TracedProgram, read_jaxpr

BATCH, LENGTH, WIDTH = 8, 16, 32
LARGER = BATCH * LENGTH * WIDTH * 4


def traced(fn: object, *shapes: tuple[int, ...]) -> TracedProgram:
    assert callable(fn)
    return read_jaxpr(jax.make_jaxpr(fn)(*(jnp.ones(shape) for shape in shapes)))


def test_what_is_added_to_each_example_is_broadcast() -> None:
    program = traced(lambda p, x: jnp.sin(x + p.astype(jnp.float32)), (LENGTH, WIDTH), (BATCH, LENGTH, WIDTH))
    assert [Broadcasts(program).larger_bytes(array) for array in program.arguments] == [LARGER, 0]


def test_gradients_of_what_is_broadcast_are_sums_of_it() -> None:
    def loss(p: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x + p))

    program = traced(jax.grad(loss), (LENGTH, WIDTH), (BATCH, LENGTH, WIDTH))
    (gradient,) = program.operations[-1].operands
    assert gradient is not None
    assert Broadcasts(program).larger_bytes(gradient) == LARGER


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda w, x: x @ w, (WIDTH, WIDTH)),  # matmuls read either order
        (lambda table, x: table[jnp.int32(x[..., 0])], (WIDTH, WIDTH)),
        (lambda bias, x: x + bias, (WIDTH,)),  # one dim has one order
    ],
)
def test_no_order_is_shared(fn: object, shape: tuple[int, ...]) -> None:
    program = traced(fn, shape, (BATCH, LENGTH, WIDTH))
    assert Broadcasts(program).larger_bytes(program.arguments[0]) == 0
