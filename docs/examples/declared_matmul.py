"""A matmul written in Pallas, with its derivative, declared: split over rows, columns, and what it sums over.

Blocks of 128 by 128 run on TPUs and, in Triton, on GPUs; on CPUs Pallas interprets them. The result lacks `k`, of which
shards return parts of a sum.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec as P

import shardrules as sr

BLOCK = 128
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"interpret": True},
    "gpu": {"compiler_params": triton.CompilerParams()},
    "tpu": {},
}


def kernel(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
    def add(index: Any, total: Array) -> Array:
        k = pl.ds(pl.multiple_of(index * BLOCK, BLOCK), BLOCK)
        return total + jnp.dot(x_ref[:, k], y_ref[k, :], preferred_element_type=jnp.float32)

    total = jax.lax.fori_loop(0, x_ref.shape[1] // BLOCK, add, jnp.zeros(out_ref.shape, jnp.float32))
    out_ref[...] = total.astype(out_ref.dtype)


def product(x: Array, y: Array, target: str) -> Array:
    (m, k), n = x.shape, y.shape[1]
    if m % BLOCK or k % BLOCK or n % BLOCK:  # a plan then takes another split
        raise sr.errors.SplitError(f"the dims of shards {x.shape} and {y.shape} must be multiples of {BLOCK}")
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(m // BLOCK, n // BLOCK),
        in_specs=[pl.BlockSpec((BLOCK, k), lambda i, j: (i, 0)), pl.BlockSpec((k, BLOCK), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j: (i, j)),
        cost_estimate=pl.CostEstimate(flops=2 * m * k * n, bytes_accessed=0, transcendentals=0),
        **OPTIONS[target],
    )(x, y)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Array, y: Array, target: str) -> Array:
    return product(x, y, target)


def forward(x: Array, y: Array, target: str) -> tuple[Array, tuple[Array, Array]]:
    return product(x, y, target), (x, y)


def backward(target: str, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, y = saved
    return product(gradient, y.T, target), product(x.T, gradient, target)


matmul.defvjp(forward, backward)


@sr.region("m k, k n -> m n", split="m k n")
def sharded_matmul(x: Array, y: Array, *, target: str) -> Array:
    return matmul(x, y, target)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = sr.create_mesh("data:4,model:2")

    def gradients(x: Array, up: Array, down: Array, multiply: Callable[[Array, Array], Array]) -> tuple[Array, ...]:
        def loss(up: Array, down: Array) -> Array:
            return (multiply(jax.nn.relu(multiply(x, up)), down) ** 2).mean()

        return jax.grad(loss, argnums=(0, 1))(up, down)

    step = jax.jit(functools.partial(gradients, multiply=functools.partial(sharded_matmul, target="cpu")))
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (1024, 256), (256, 512), (512, 256)
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    specs = P("data"), P(None, "model"), P("model")
    placed = [sr.filter_shard(array, spec, mesh) for array, spec in zip(arrays, specs, strict=True)]
    report = sr.audit(step, *placed, mesh=mesh)
    print("sent:", *((collective.kind, collective.axes) for collective in report.collectives))
    expected = jax.jit(functools.partial(gradients, multiply=jnp.matmul))(*arrays)
    print("differs by:", max(float(abs(a - b).max()) for a, b in zip(step(*placed), expected, strict=True)))


if __name__ == "__main__":
    main()
