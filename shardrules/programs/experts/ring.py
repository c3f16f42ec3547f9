"""Experts go round the devices, and tokens stay: no device ever holds more than two devices' experts.

The backward pass sends the experts round again, and with them their gradients, which come home in the last step.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
from jax import lax

Params: TypeAlias = list[jax.Array]


@final
@attrs.frozen
class Visit:
    """The work of a device with the experts that visit it; `tables` says which rows are theirs."""

    take: Callable[[Any, jax.Array, jax.Array], jax.Array]
    """From tables, rows and the device whose experts visit to the rows of these."""
    put: Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
    """Adds their rows, the last operand, to all rows: the transpose of `take`."""
    apply: Callable[[Any, Params, jax.Array, jax.Array], jax.Array]
    """From tables, experts, rows of theirs and their device to what they make of them."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def go_round(visit: Visit, axis_name: tuple[str, ...], tables: Any, params: Params, rows: jax.Array) -> jax.Array:
    """The results of all experts for rows."""
    devices, index = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def meet(params: Params, results: jax.Array, step: Any) -> jax.Array:
        device = (index + step) % devices
        return visit.put(tables, results, device, visit.apply(tables, params, visit.take(tables, rows, device), device))

    def body(carry: tuple[Params, jax.Array], step: jax.Array) -> tuple[tuple[Params, jax.Array], None]:
        params, results = carry
        return (_next(params, axis_name), meet(params, results, step)), None

    device = jnp.zeros((), index.dtype)
    block = jax.eval_shape(lambda: visit.apply(tables, params, visit.take(tables, rows, device), device))
    results = jnp.zeros((len(rows), *block.shape[1:]), block.dtype)
    (params, results), _ = lax.scan(body, (params, results), jnp.arange(devices - 1, dtype=index.dtype))
    return meet(params, results, devices - 1)


def _forward(visit: Visit, axis_name: tuple[str, ...], tables: Any, params: Params, rows: jax.Array) -> tuple:
    return go_round(visit, axis_name, tables, params, rows), (tables, params, rows)


def _backward(visit: Visit, axis_name: tuple[str, ...], saved: tuple, gradient: jax.Array) -> tuple:
    tables, params, rows = saved
    devices, index = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def meet(params: Params, totals: Params, row_gradients: jax.Array, step: Any) -> tuple[Params, jax.Array]:
        device = (index + step) % devices
        block = visit.take(tables, rows, device)

        def apply(trained: Params, block: jax.Array) -> jax.Array:
            return visit.apply(tables, _with_trained(params, trained), block, device)

        _, gradients_of = jax.vjp(apply, _trained(params), block)
        of_params, of_block = gradients_of(visit.take(tables, gradient, device))
        return jax.tree.map(jnp.add, totals, of_params), visit.put(tables, row_gradients, device, of_block)

    def body(carry: tuple[Params, Params, jax.Array], step: jax.Array) -> tuple[tuple[Params, Params, jax.Array], None]:
        params, totals, row_gradients = carry
        totals, row_gradients = meet(params, totals, row_gradients, step)
        return (_next(params, axis_name), _next(totals, axis_name), row_gradients), None

    # A device's own experts are the last that it meets: then their gradients are at home.
    visitors, totals = _next(params, axis_name), [jnp.zeros_like(param) for param in _trained(params)]
    steps = jnp.arange(1, devices - 1, dtype=index.dtype)
    (visitors, totals, row_gradients), _ = lax.scan(body, (visitors, totals, jnp.zeros_like(rows)), steps)
    totals, row_gradients = meet(visitors, totals, row_gradients, devices - 1)
    totals, row_gradients = meet(params, _next(totals, axis_name), row_gradients, 0)
    arrays = iter(totals)
    return None, [next(arrays) if _is_trained(param) else None for param in params], row_gradients


go_round.defvjp(_forward, _backward)


def _is_trained(param: jax.Array) -> bool:
    return jnp.issubdtype(param.dtype, jnp.inexact)


def _trained(params: Params) -> Params:
    """The parameters that have gradients: integers have none."""
    return [param for param in params if _is_trained(param)]


def _with_trained(params: Params, trained: Params) -> Params:
    """All parameters, with these for those that have gradients."""
    arrays = iter(trained)
    return [next(arrays) if _is_trained(param) else param for param in params]


def _next(params: Params, axis_name: tuple[str, ...]) -> Params:
    """The experts of the device after each: all go one device back."""
    devices = lax.axis_size(axis_name)
    pairs = [(device, (device - 1) % devices) for device in range(devices)]
    return [lax.ppermute(param, axis_name, pairs) for param in params]
