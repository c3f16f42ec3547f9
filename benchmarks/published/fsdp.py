"""PyTorch's FSDP: the weights of a layer are gathered together, and their gradients reduced as one vector.

What it copies besides is in PyTorch. FSDP of PyTorch 2.1, torch/distributed/fsdp: gradients are joined into the vector
that weights are views of, cast to the dtype of the reduction, and divided before and after it, each by a kernel of its
own. `fully_shard` of PyTorch 2.4 and later, torch/distributed/fsdp/_fully_shard: weights are copied into a vector that
is gathered, and out of it; gradients are copied and cast by one kernel, and averaged by the reduction itself.
"""

from collections.abc import Callable
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp

Fence = Callable[[Any], Any]

_GATHERS = ("all_gather", "reshape")
"""What makes whole weights of shards, and views of them."""

_COPIES = ("concatenate", "slice")
"""What `fully_shard` copies them with."""


def with_strategy(policy: Callable[..., Any], strategy: str) -> Callable[..., Any]:
    """A policy that keeps whole weights for the backward pass only where the strategy does."""
    dropped = {"FULL_SHARD": _GATHERS, "fully_shard": (*_GATHERS, *_COPIES)}.get(strategy, ())

    def keeps(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
        if dropped:
            return primitive.name not in dropped and policy(primitive, *arguments, **parameters)
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


@final
@attrs.frozen
class Unit:
    """Weights that `fully_shard` gathers together."""

    shards: dict[str, Any]
    """A device's parts of them, all of them vectors."""

    totals: dict[str, Any] | None
    """The sums of whole gradients of earlier batches. The gradient of these are the sums with those of this batch."""

    reduces: bool = attrs.field(metadata={"static": True})
    """The gradients of shards are the reduced sums."""

    @classmethod
    def of(cls, shards: Any, totals: Any, reduces: bool) -> Any:
        """The units of groups of weights."""
        if totals is None:
            return jax.tree.map(lambda group: cls(group, None, reduces), shards, is_leaf=_is_group)
        return jax.tree.map(lambda group, sums: cls(group, sums, reduces), shards, totals, is_leaf=_is_group)

    @staticmethod
    def is_one(node: Any) -> bool:
        """A node of a tree is a unit."""
        return isinstance(node, Unit)


jax.tree_util.register_dataclass(Unit, ["shards", "totals"], ["reduces"])


def _is_group(node: Any) -> bool:
    """A dict of vectors, not of groups."""
    return isinstance(node, dict) and not any(isinstance(value, (dict, list)) for value in node.values())


def grouped(weights: dict[str, Any]) -> dict[str, Any]:
    """Weights with those outside of layers together."""
    root = {name: weight for name, weight in weights.items() if name != "layers"}
    return {"root": root, "layers": weights["layers"]}


def ungrouped(groups: dict[str, Any]) -> dict[str, Any]:
    """Weights as they were before `grouped`."""
    return groups["root"] | {"layers": groups["layers"]}


def fully_gathered(unit: Unit, reduce_dtype: str) -> dict[str, Any]:
    """The whole weights of a unit in bfloat16, as vectors. Gradients are averaged over all devices."""
    shards, totals, reduces = unit.shards, unit.totals, unit.reduces
    fence, sizes = jax.lax.optimization_barrier, {name: shard.size for name, shard in shards.items()}
    ends = [sum(list(sizes.values())[: index + 1]) for index in range(len(sizes))]

    def forward(shards: dict[str, Any], _: Any) -> dict[str, Any]:
        joined = jnp.concatenate([shard.astype(jnp.bfloat16) for shard in shards.values()])
        whole = jax.lax.all_gather(joined, "fsdp")
        return {name: whole[:, end - sizes[name] : end].reshape(-1) for name, end in zip(sizes, ends, strict=True)}

    def backward(saved: tuple[Any, Any], gradients: dict[str, Any]) -> tuple[Any, Any]:
        shards, totals = saved
        if totals is not None:
            gradients = {name: fence(totals[name] + gradient) for name, gradient in fence(gradients).items()}
        if not reduces:
            return jax.tree.map(jnp.zeros_like, shards), gradients
        count = jax.lax.axis_size("fsdp")
        rows = [gradient.reshape(count, -1) for gradient in fence(gradients).values()]
        joined = fence(jnp.concatenate(rows, 1).astype(reduce_dtype))
        part = jax.lax.pmean(fence(jax.lax.psum_scatter(joined, "fsdp")), "data") / count
        parts = jnp.split(fence(part.astype(shards[next(iter(sizes))].dtype)), ends[:-1])
        return dict(zip(sizes, parts, strict=True)), jax.tree.map(jnp.zeros_like, totals)

    gather = jax.custom_vjp(forward)
    # Not `gather` again, whose call would hide the primitives from policies.
    gather.defvjp(lambda *operands: (forward(*operands), operands), backward)
    return gather(shards, totals)


def _divisor(count: int) -> int:
    """What FSDP divides by before it reduces: about the root of the number of devices."""
    divisor = 1
    while count % divisor == 0 and count / divisor > divisor:
        divisor *= 2
    return divisor
