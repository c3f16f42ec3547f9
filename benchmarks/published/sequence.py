"""Tensor parallelism with sequence parallelism, as PyTorch's `parallelize_module` runs it.

Between matmuls a device has its part of each sequence. Sequences are gathered in front of matmuls that split their
results, and results that are sums of parts are scattered again. PyTorch's collectives are for the first dim, and copies
bring sequences from it and to it. All functions run inside `shard_map`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Product = Callable[[Any, Any], Any]
"""A matmul of activations and a weight."""


def columns(product: Product, x: Any, weights: tuple[Any, ...]) -> tuple[Any, ...]:
    """Matmuls that split their results, of sequences that are gathered once. Each scatters its part of the gradient."""

    def forward(x: Any, weights: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        whole = _gathered(x)
        return tuple(product(whole, weight) for weight in weights), (whole, weights)

    def backward(saved: tuple[Any, ...], gradients: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        whole, weights = saved
        of_x, of_weights, left = [], [], list(gradients)
        for index, weight in enumerate(weights):
            (of_whole,) = jax.vjp(lambda x, weight=weight: product(x, weight), whole)[1](left[index])
            part, whole, *left = _after(_scattered(of_whole), whole, *left)
            of_weights += jax.vjp(lambda weight, x=whole: product(x, weight), weight)[1](left[index])
            of_x.append(part)
        return sum(of_x[1:], of_x[0]), tuple(of_weights)

    run = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    run.defvjp(forward, backward)
    return run(x, weights)


def row(product: Product, x: Any, weight: Any) -> Any:
    """A matmul whose results are sums of the devices' parts."""

    def backward(saved: tuple[Any, Any], gradient: Any) -> tuple[Any, Any]:
        gradient, x, weight = _after(gradient, *saved)
        return jax.vjp(product, x, weight)[1](_gathered(gradient))

    run = jax.custom_vjp(lambda x, weight: _scattered(product(x, weight)))
    run.defvjp(lambda x, weight: (_scattered(product(x, weight)), (x, weight)), backward)
    return run(x, weight)


def part_of(x: Any, dim: int = 1) -> Any:
    """A device's part of an array that all of them have. Its gradient is gathered."""
    run = jax.custom_vjp(lambda x: _part(x, dim))
    run.defvjp(lambda x: (_part(x, dim), None), lambda _, gradient: (_gathered(gradient, dim),))
    return run(x)


def whole_of(x: Any, dim: int) -> Any:
    """An array that all devices have, of their parts. Each keeps its part of the gradient."""
    run = jax.custom_vjp(lambda x: _gathered(x, dim))
    run.defvjp(lambda x: (_gathered(x, dim), None), lambda _, gradient: (_part(gradient, dim),))
    return run(x)


def shared(weight: Any) -> Any:
    """A weight that all devices have, each for its part of the sequences: gradients are added up."""
    run = jax.custom_vjp(lambda weight: weight)
    run.defvjp(lambda weight: (weight, None), lambda _, gradient: (jax.lax.psum(gradient, "tensor"),))
    return run(weight)


def _gathered(x: Any, dim: int = 1) -> Any:
    whole = jnp.moveaxis(jax.lax.all_gather(x, "tensor"), 0, dim)
    return _in_rows(whole.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :]))


def _scattered(x: Any) -> Any:
    parts = _in_rows(x).reshape(x.shape[0], jax.lax.axis_size("tensor"), -1, *x.shape[2:])
    return jax.lax.psum_scatter(jnp.moveaxis(parts, 1, 0), "tensor")


def _in_rows(x: Any) -> Any:
    """The same array, as a matrix of contiguous rows in memory: XLA could do without the copy."""
    return _after(x.reshape(-1, x.shape[-1]))[0].reshape(x.shape)


def _part(x: Any, dim: int) -> Any:
    size = x.shape[dim] // jax.lax.axis_size("tensor")
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("tensor") * size, size, dim)


def _after(*arrays: Any) -> tuple[Any, ...]:
    """The same arrays, none of which anything uses before all of them are there."""
    return jax.lax.optimization_barrier(arrays)
