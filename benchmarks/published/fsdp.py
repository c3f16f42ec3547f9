"""PyTorch's FSDP: the weights of a layer are gathered together, and their gradients reduced as one vector.

What it copies besides is in PyTorch 2.1, torch/distributed/fsdp: gradients are joined into the vector that weights are
views of, cast to the dtype of the reduction, and divided before and after it, each by a kernel of its own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Fence = Callable[[Any], Any]

_GATHERS = ("all_gather", "reshape")
"""What makes whole weights of shards, and views of them."""


def with_strategy(policy: Callable[..., Any], strategy: str) -> Callable[..., Any]:
    """A policy that keeps whole weights for the backward pass only where the strategy does."""

    def keeps(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
        if strategy == "FULL_SHARD":
            return primitive.name not in _GATHERS and policy(primitive, *arguments, **parameters)
        return primitive.name in _GATHERS[:1] or policy(primitive, *arguments, **parameters)

    return keeps


def gathered(shards: dict[str, Any], reduce_dtype: str, fence: Fence) -> dict[str, Any]:
    """The whole weights of a unit in bfloat16 from a device's parts of them, all of them vectors.

    Gradients are averaged over all devices, in `reduce_dtype`.
    """

    def forward(shards: dict[str, Any]) -> dict[str, Any]:
        parts = {name: fence(shard.astype(jnp.bfloat16)) for name, shard in shards.items()}
        return jax.lax.all_gather(parts, "fsdp", tiled=True)

    def backward(_: None, gradients: dict[str, Any]) -> tuple[dict[str, Any]]:
        count = jax.lax.axis_size("fsdp")
        before = _divisor(count)
        rows = {name: gradient.reshape(count, -1) for name, gradient in gradients.items()}
        joined = fence(jnp.concatenate(list(rows.values()), 1))
        total = fence(fence(joined.astype(reduce_dtype)) / before)
        part = fence(jax.lax.psum_scatter(total, "fsdp"))
        part = fence(jax.lax.pmean(part, "data") / (count / before)).astype(jnp.float32)
        sizes = [row.shape[1] for row in rows.values()]
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes) - 1)]
        return (dict(zip(rows, jnp.split(part, ends), strict=True)),)

    gather = jax.custom_vjp(forward)
    # Not `gather` again, whose call would hide the primitives from policies.
    gather.defvjp(lambda shards: (forward(shards), None), backward)
    return gather(shards)


def _divisor(count: int) -> int:
    """What FSDP divides by before it reduces: about the root of the number of devices."""
    divisor = 1
    while count % divisor == 0 and count / divisor > divisor:
        divisor *= 2
    return divisor
