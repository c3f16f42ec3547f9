"""LoRA: a matmul has a product of two narrow matrices beside its weight, and only these are trained."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from published.eager import dropout

_NARROW, _WIDE = "_lora_a", "_lora_b"
_CONTRACTED = {"out": 2}
"""The dims of a weight that its matmul sums over, where it is not the first alone."""


def adapter_shapes(shapes: dict[str, tuple[int, ...]], rank: int) -> dict[str, tuple[tuple[int, ...], P]]:
    """The narrow matrices of all weights but those of norms."""
    adapters = {}
    for name, shape in shapes.items():
        if not name.startswith("norm"):
            dims = _CONTRACTED.get(name, 1)
            adapters[name + _NARROW] = (*shape[:dims], rank), P()
            adapters[name + _WIDE] = (rank, *shape[dims:]), P()
    return adapters


def adapted(equation: str, x: Any, weights: dict[str, Any], name: str, drops: bool) -> Any:
    """A matmul with its adapter, kernel by kernel as PyTorch runs them. `drops` is for the adapter's result."""
    fence = jax.lax.optimization_barrier
    operands, result = equation.split("->")
    of_x, of_weight = operands.split(",")
    kept = "".join(dim for dim in of_weight if dim not in of_x)
    summed, batch = (of_weight.removesuffix(kept), result.removesuffix(kept))
    x = fence(x)
    y = fence(jnp.einsum(equation, x, weights[name]))
    narrow = fence(jnp.einsum(f"{of_x},{summed}r->{batch}r", x, weights[name + _NARROW]))
    wide = fence(jnp.einsum(f"{batch}r,r{kept}->{result}", narrow, weights[name + _WIDE]))
    return fence(y + (dropout(wide) if drops else wide))


def parted(weights: dict[str, Any]) -> tuple[Any, Any]:
    """The weights that are trained, and all others."""
    layers = weights["layers"]
    trained = [{name: layer[name] for name in layer if _is_adapter(name)} for layer in layers]
    frozen = [{name: layer[name] for name in layer if not _is_adapter(name)} for layer in layers]
    return {"layers": trained}, weights | {"layers": frozen}


def merged(trained: Any, frozen: Any) -> dict[str, Any]:
    """Weights as they were before `parted`."""
    layers = zip(frozen["layers"], trained["layers"], strict=True)
    return frozen | {"layers": [first | second for first, second in layers]}


def _is_adapter(name: str) -> bool:
    return name.endswith((_NARROW, _WIDE))
