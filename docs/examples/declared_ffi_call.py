"""A call of a library, declared: LAPACK's Cholesky factors of a batch of matrices, on the devices that have them.

Nobody but its author knows what a call through `jax.ffi` computes. A target of your own, which
`jax.ffi.register_ffi_target` names, is declared in the same way.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import solve_triangular
from jax.sharding import PartitionSpec as P
from jaxlib import lapack

import shardrules as sr


def call(matrices: Array) -> Array:
    target = lapack.prepare_lapack_call("potrf_ffi", matrices.dtype)
    results = jax.ShapeDtypeStruct(matrices.shape, matrices.dtype), jax.ShapeDtypeStruct(matrices.shape[:-2], np.int32)
    # LAPACK stores columns, so that its upper triangle is the lower one here.
    factors, status = jax.ffi.ffi_call(target, results)(matrices, uplo=np.uint8(ord("U")))
    return jnp.where(status[:, None, None] == 0, jnp.tril(factors), jnp.nan)


@jax.custom_vjp
def factor(matrices: Array) -> Array:
    return call(matrices)


def forward(matrices: Array) -> tuple[Array, Array]:
    factors = call(matrices)
    return factors, factors


def backward(factors: Array, gradient: Array) -> tuple[Array]:
    lower = jnp.tril(factors.mT @ gradient)
    lower = lower - jnp.tril(jnp.triu(lower)) / 2
    solve = jax.vmap(lambda matrix, right: solve_triangular(matrix, right, lower=True, trans="T"))
    inner = solve(factors, solve(factors, lower.mT).mT)
    return ((inner + inner.mT) / 2,)


factor.defvjp(forward, backward)


@sr.region(
    "batch rows columns -> batch rows columns",
    split="batch",
    cost=lambda matrices: matrices.size * matrices.shape[-1] / 3,
)
def cholesky(matrices: Array) -> Array:
    return factor(matrices)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = sr.create_mesh("data:8")

    def loss(matrices: Array) -> Array:
        return (cholesky(matrices) ** 3).sum()

    x = jax.random.normal(jax.random.key(0), (64, 16, 16))
    matrices = x @ x.mT + jnp.eye(16)
    placed = sr.filter_shard(matrices, P("data"), mesh)
    step = jax.jit(jax.grad(loss))
    report = sr.audit(step, placed, mesh=mesh)
    print("sent:", *((collective.kind, collective.axes) for collective in report.collectives))
    expected = jax.jit(jax.grad(lambda matrices: (jnp.linalg.cholesky(matrices) ** 3).sum()))(matrices)
    print("differs by:", float(abs(step(placed) - expected).max() / abs(expected).max()))


if __name__ == "__main__":
    main()
