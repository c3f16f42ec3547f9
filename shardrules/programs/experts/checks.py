"""The checks of the arguments of `expert_exchange`."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from shardrules.core.errors import ConfigError
from shardrules.programs.experts.stacked import check_signature, expert_count, inner_problems, stacking_problems

EXCHANGES = ("all_to_all", "ragged", "ring", "dense")
"""The ways in which devices exchange tokens or experts, the best without a plan first."""

NEED_CAPACITY = ("all_to_all", "dense")


def check_arguments(
    tokens: Any,
    routes: Any,
    weights: Any,
    experts: Any,
    axes: tuple[str, ...],
    how: str | None,
    capacity: int | None,
    inner: Any,
) -> None:
    """Raises an error that lists everything that is wrong."""
    problems = [
        *_array_problems(tokens, routes, weights, capacity),
        *(stacking_problems(experts) or inner_problems(inner, experts)),
        *_way_problems(tokens, how, bool(axes), capacity),
    ]
    problems += _axis_problems(axes, expert_count(experts))
    if problems:
        raise ConfigError(f"expert_exchange: {'; '.join(problems)}")
    check_signature(experts, capacity is not None)


def _array_problems(tokens: Any, routes: Any, weights: Any, capacity: int | None) -> Iterator[str]:
    layout = "[tokens, width]" if capacity is None else "[groups, tokens, width]"
    if tokens.ndim < 2:
        yield f"tokens must be {layout}, got shape {tokens.shape}"
    if not jnp.issubdtype(routes.dtype, jnp.integer):
        yield f"routes must be indices of experts, got {routes.dtype}"
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        yield f"weights must be floats, got {weights.dtype}"
    if routes.shape != weights.shape or routes.shape[:-1] != tokens.shape[:-1]:
        yield (
            "routes and weights must have a row for each token: got tokens "
            f"{tokens.shape}, routes {routes.shape}, weights {weights.shape}"
        )


def _way_problems(tokens: Any, how: str | None, has_axis: bool, capacity: int | None) -> Iterator[str]:
    names = (*EXCHANGES, "sum")
    if how is not None and how not in names:
        yield f"unknown how {how!r}; choose one of {', '.join(map(repr, names))}"
    if capacity is not None and (not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1):
        yield f"capacity must be a whole number of at least 1, got {capacity!r}"
    if how in NEED_CAPACITY and capacity is None:
        yield f'how={how!r} has slots for tokens: pass capacity=, or how="ragged"'
    # "sum" keeps tokens whole on every device; every other way splits them by groups.
    if capacity is not None and tokens.ndim == 2 and (how or "sum") != "sum":
        yield (
            f"tokens {tokens.shape} are one group, which competes for the capacity of each expert and cannot be split: "
            "reshape tokens, routes and weights to [groups, tokens of a group, ...]"
        )


def _axis_problems(axes: tuple[str, ...], count: int | None) -> Iterator[str]:
    if not axes:
        return
    mesh = jax.sharding.get_abstract_mesh()
    if len({*axes}) < len(axes):
        yield f"axis={axes} has a mesh axis twice"
    unknown = [name for name in axes if name not in mesh.axis_names]
    if mesh.empty:
        yield f"axis={axes} needs a mesh; call it under jax.set_mesh(mesh)"
    elif unknown:
        yield f"unknown axis {', '.join(map(repr, unknown))}; the mesh has {mesh.axis_names}"
    elif AxisType.Manual in mesh.axis_types:
        yield f"axis={axes} cannot be split inside a jax.shard_map; call expert_exchange outside of it"
    elif count is not None and count % math.prod(mesh.shape[name] for name in axes):
        sizes = " x ".join(str(mesh.shape[name]) for name in axes)
        yield f"{count} experts cannot be split evenly over {axes} of size {sizes}"
