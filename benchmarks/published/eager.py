"""Operations as PyTorch runs them one by one: a kernel forward, and few backward, which keep its inputs only."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def kernel(function: Callable[..., Any], *operands: Any) -> Any:
    """An operation for each element as one kernel, and its gradients as another."""

    @jax.custom_vjp
    def run(*operands: Any) -> Any:
        return _fence(function(*operands))

    def backward(operands: tuple[Any, ...], gradient: Any) -> Any:
        return _fence(jax.vjp(function, *operands)[1](gradient))

    run.defvjp(lambda *operands: (run(*operands), operands), backward)
    return run(*operands)


@jax.custom_vjp
def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    """A layer norm. The backward pass has the mean and the scale of each row."""
    return _normed(x, weight, bias)[0]


def _normed(x: Any, weight: Any, bias: Any) -> tuple[Any, tuple[Any, ...]]:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) - mean * mean + 1e-5)
    mean, scale = _fence((mean, scale))
    y = ((wide - mean) * scale).astype(x.dtype) * weight + bias
    return _fence(y), (x, weight, mean, scale)


def _norm_backward(saved: tuple[Any, ...], gradient: Any) -> tuple[Any, Any, Any]:
    x, weight, mean, scale = saved
    y, wide = (x.astype(jnp.float32) - mean) * scale, gradient.astype(jnp.float32)
    inner = wide * weight
    means = _fence((jnp.mean(inner, -1, keepdims=True), jnp.mean(inner * y, -1, keepdims=True)))
    of_x = _fence(((inner - means[0] - y * means[1]) * scale).astype(x.dtype))
    rows = tuple(range(x.ndim - 1))
    of_weights = _fence((jnp.sum(wide * y, rows).astype(weight.dtype), jnp.sum(wide, rows).astype(weight.dtype)))
    return of_x, *of_weights


layer_norm.defvjp(_normed, _norm_backward)


def _fence(x: Any) -> Any:
    return jax.lax.optimization_barrier(x)
