"""What compilers write for functions of activation and for gradients of norms."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardrules.programs.autoplan.traced.fusion import FusedProgram
from shardrules.programs.autoplan.traced.program import read_jaxpr

# How many arrays beside the two of matmuls are kept for the gradient, as compiled for H100s by jax 0.10.2.
ACTIVATIONS = {
    "gelu": (jax.nn.gelu, jnp.bfloat16, 1),
    "exact gelu": (lambda x: jax.nn.gelu(x, approximate=False), jnp.bfloat16, 1),
    "mish": (jax.nn.mish, jnp.bfloat16, 2),
    "silu": (jax.nn.silu, jnp.bfloat16, 0),
    "elu": (jax.nn.elu, jnp.bfloat16, 0),
    "gelu of float32": (jax.nn.gelu, jnp.float32, 0),
    "gelu in float32": (lambda x: jax.nn.gelu(x.astype(jnp.float32)).astype(x.dtype), jnp.bfloat16, 1),
}


def written(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The names of the operations that write arrays as large as the first argument."""
    program = read_jaxpr(jax.make_jaxpr(fn)(*args))
    fused = FusedProgram.of(program)
    return [
        operation.name
        for op_index, operation in enumerate(program.operations)
        for result in operation.results
        if fused.writes(op_index, result) and program.arrays[result].shape == args[0].shape
    ]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_long_series_are_kept_where_they_are_computed_from_bfloat16(name: str) -> None:
    activation, dtype, count = ACTIVATIONS[name]

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(activation(x @ w) @ w)

    x, w = jax.ShapeDtypeStruct((256, 64), dtype), jax.ShapeDtypeStruct((64, 64), dtype)
    names = written(jax.grad(loss, argnums=(0, 1)), x, w)
    assert sum(each in ("tanh", "erfc", "erf", "log1p") for each in names) == count


@pytest.mark.parametrize(("axes", "count"), [((1, 2), 1), ((0, 1, 2), 0), ((3,), 0)])
def test_products_of_two_arrays_are_written_before_some_sums(axes: tuple[int, ...], count: int) -> None:
    """Those that norms of images add up for each image; those of batches and rows are computed in kernels that add."""

    def norm(x: Any, y: Any) -> Any:
        z = x - x.mean(axes, keepdims=True)
        return jnp.sum(jnp.sin(z * jax.lax.rsqrt((z * z).mean(axes, keepdims=True))) * y)

    x = jax.ShapeDtypeStruct((4, 8, 8, 128), jnp.float32)
    program = read_jaxpr(jax.make_jaxpr(jax.grad(norm))(x, x))
    fused = FusedProgram.of(program)
    assert len(fused.gradients.products) == count
    columns = 4 * 128
    assert {*fused.gradients.products.values()} == ({columns // 2} if count else set())
    assert not fused.gradients.products.keys() & fused.with_many_columns.written


def test_long_chains_of_products_are_walked_once() -> None:
    """Each step reads the one before twice: walks that forget where they were would take 2 to the power of 60 steps."""

    def loss(x: Any, scale: Any) -> Any:
        for _ in range(60):
            scale = scale * (2 - x[0, 0] * scale)
        return jnp.mean((x * scale) ** 2)

    shapes = jax.ShapeDtypeStruct((256, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.bfloat16)
    assert written(loss, *shapes) == []
