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


def rms_norm(x: Any, weight: Any) -> Any:
    """An RMS norm, written out in float32."""
    wide = _fence(x.astype(jnp.float32))
    mean = _fence(jnp.mean(_fence(wide * wide), -1, keepdims=True))
    y = _fence(wide * _fence(jax.lax.rsqrt(mean + 1e-5)))
    return _fence(_fence(y.astype(x.dtype)) * weight)


def rotary(x: Any) -> Any:
    """Rotated positions of (batch, length, heads, head_dim), written out: both halves of a head change places."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / (10_000 ** (jnp.arange(half) / half))
    sin, cos = (
        jnp.concatenate([part, part], -1)[None, :, None].astype(x.dtype) for part in (jnp.sin(angles), jnp.cos(angles))
    )
    swapped = _fence(jnp.concatenate([_fence(-x[..., half:]), x[..., :half]], -1))
    return _fence(_fence(x * cos) + _fence(swapped * sin))


@jax.custom_vjp
def dropout(x: Any) -> Any:
    """An eighth of the elements set to zero: a kernel that writes which, too. The choice is the same in each step."""
    return _dropped(x)[0]


def _dropped(x: Any) -> tuple[Any, Any]:
    kept = jax.lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1) * jnp.uint32(2654435761) >> 29 != 0
    return _fence((jnp.where(kept, x * 1.125, 0).astype(x.dtype), kept))


def _dropout_backward(kept: Any, gradient: Any) -> tuple[Any]:
    return (_fence(jnp.where(kept, gradient * 1.125, 0).astype(gradient.dtype)),)


dropout.defvjp(_dropped, _dropout_backward)


@jax.custom_vjp
def cross_entropy(logits: Any, targets: Any) -> Any:
    """Cross entropy as `torch.nn.functional.cross_entropy` computes it, in the dtype of the logits.

    The backward pass writes gradients of the logarithms of all probabilities, of which one in a row is not zero.
    """
    return _entropies(logits, targets)[0]


def log_softmax(x: Any) -> Any:
    """The logarithms of probabilities: a kernel that reads a row for its maximum, its sum, and the result."""
    wide = x.astype(jnp.float32)
    most = _fence(jnp.max(wide, -1, keepdims=True))
    total = _fence(jnp.log(jnp.sum(jnp.exp(wide - most), -1, keepdims=True)))
    return _fence((wide - most - total).astype(x.dtype))


def _entropies(logits: Any, targets: Any) -> tuple[Any, tuple[Any, Any]]:
    logs = log_softmax(logits)
    return -jnp.take_along_axis(logs, targets[..., None], -1)[..., 0].astype(jnp.float32), (logs, targets)


def _entropy_backward(saved: tuple[Any, Any], gradient: Any) -> tuple[Any, None]:
    logs, targets = saved
    picked = jax.nn.one_hot(targets, logs.shape[-1], dtype=logs.dtype)
    of_logs = _fence(-picked * gradient[..., None].astype(logs.dtype))
    total = _fence(jnp.sum(of_logs.astype(jnp.float32), -1, keepdims=True))
    of_logits = of_logs.astype(jnp.float32) - jnp.exp(logs.astype(jnp.float32)) * total
    return _fence(of_logits.astype(logs.dtype)), None


cross_entropy.defvjp(_entropies, _entropy_backward)


def _fence(x: Any) -> Any:
    return jax.lax.optimization_barrier(x)
