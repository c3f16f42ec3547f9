"""Kernels whose log-sum-exp has no derivative, beside the same kernel without it."""

import functools
import math
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp

from shardrules.core.callables import name_of
from shardrules.core.errors import ConfigTypeError
from shardrules.programs.attention.kernels import KERNELS, MASKED, Kernel, plain_kernel


@final
@attrs.frozen
class PairedKernel:
    """A kernel that returns the output, which has derivatives, and one that returns the log-sum-exp, too."""

    attend: Kernel
    attend_with_log_sum_exp: Kernel

    @property
    def __name__(self) -> str:
        return name_of(self.attend_with_log_sum_exp)

    def __call__(self, q: Any, k: Any, v: Any, *, is_causal: bool, q_segment_ids: Any, kv_segment_ids: Any) -> Any:
        return _attend(self, is_causal, q, k, v, q_segment_ids, kv_segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(pair: PairedKernel, is_causal: bool, q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any) -> Any:
    return pair.attend_with_log_sum_exp(q, k, v, is_causal=is_causal, q_segment_ids=q_ids, kv_segment_ids=kv_ids)


def _forward(pair: PairedKernel, is_causal: bool, *operands: Any) -> tuple[Any, Any]:
    results: Any = _attend(pair, is_causal, *operands)
    return results, (operands, results[1])


def _backward(pair: PairedKernel, is_causal: bool, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    (q, k, v, q_ids, kv_ids), log_sum_exp = saved
    out_cotangent, cotangent = cotangents

    def attend(q: Any, k: Any, v: Any) -> Any:
        return pair.attend(q, k, v, is_causal=is_causal, q_segment_ids=q_ids, kv_segment_ids=kv_ids)

    q_gradient, k_gradient, v_gradient = jax.vjp(attend, q, k, v)[1](out_cotangent)
    # A log-sum-exp changes with its scores by the weights of attention. Sums with these weights over keys are the
    # output with keys for values, and over queries the gradient of values.
    weight = jnp.where(log_sum_exp <= MASKED, 0, cotangent)[..., None] / math.sqrt(q.shape[3])
    mean_keys, gradients_of = jax.vjp(lambda values: attend(q, k, values), k)
    (queries,) = gradients_of((weight * q).astype(mean_keys.dtype))
    q_gradient += jnp.where(weight == 0, 0, weight * mean_keys).astype(q.dtype)
    return q_gradient, k_gradient + queries, v_gradient, None, None


_attend.defvjp(_forward, _backward)


def as_kernel(kernel: Any) -> Kernel:
    """The function of what a user passes as `kernel`."""
    if kernel is None:
        return plain_kernel
    if isinstance(kernel, str) and kernel in KERNELS:
        return KERNELS[kernel]
    if callable(kernel):
        return kernel
    if isinstance(kernel, tuple | list) and len(kernel) == 2 and all(map(callable, kernel)):
        return PairedKernel(*kernel)
    raise ConfigTypeError(
        f'sharded_attention: kernel must be a function, a pair of them, "xla", "cudnn" or None; got {kernel!r:.60}'
    )
