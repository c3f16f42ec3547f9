"""Derivatives of regions: the backward pass of a region is a region, of its operands and the cotangents.

What the forward pass computes is computed again there, on shards that may be others: what a function keeps for its
backward pass has no declaration. Compilers share it with the forward pass where nothing stands between the two.
"""

from collections.abc import Sequence
from typing import Any, final

import attrs
import jax
from jax.sharding import NamedSharding
from jax.tree_util import register_static

from shardrules.core.jax_state import lines_of_caller
from shardrules.programs.regions.function import BackwardPass, ShardFunction
from shardrules.programs.regions.primitive import call_region


def differentiable(function: ShardFunction, operands: Sequence[Any]) -> list[Any]:
    """Runs a region whose backward pass is a region."""
    lines = lines_of_caller()  # JAX calls the function later, from lines of its own

    @jax.custom_vjp
    def call(*operands: Any) -> list[Any]:
        with lines:
            return call_region(function, operands)

    def forward(*operands: Any) -> tuple[list[Any], Any]:
        # Here, where the settings of JAX are the call's.
        return call(*operands), (_Static(function.backward(operands)), operands)

    def backward(saved: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        backward_pass, operands = saved[0].value, saved[1]
        smooth = [cotangents[index] for index in backward_pass.smooth]
        gradients = iter(differentiable(backward_pass.function, [*operands, *smooth]))
        return tuple(
            _as_split(next(gradients), jax.typeof(operand).sharding) if index in backward_pass.trained else None
            for index, operand in enumerate(operands)
        )

    call.defvjp(forward, backward)
    return call(*operands)


@register_static
@final
@attrs.frozen
class _Static:
    """Non-arrays that pass from the forward to the backward pass."""

    value: BackwardPass


def _as_split(gradient: Any, sharding: NamedSharding) -> Any:
    """On an Explicit mesh, splits a gradient as its operand: what is whole there can be sliced."""
    is_same = sharding.mesh.empty or jax.typeof(gradient).sharding.spec == sharding.spec
    return gradient if is_same else jax.reshard(gradient, sharding)
