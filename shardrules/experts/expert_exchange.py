"""`expert_exchange`: tokens to their experts and back, in the way that a plan chooses or a user names."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from shardrules.experts.checks import EXCHANGES, NEED_CAPACITY, check_arguments
from shardrules.experts.regions import experts_region
from shardrules.experts.routing import group_counts
from shardrules.experts.stacked import unstack

Axes: TypeAlias = tuple[str, ...]


@final
class ExpertLoad(NamedTuple):
    """How many tokens go to each expert."""

    routed: jax.Array
    """[experts]: how many choices of tokens were of each expert."""
    dropped: jax.Array
    """[experts]: how many of these were more than the capacity, and left out."""


def expert_exchange(
    tokens: jax.Array,
    routes: jax.Array,
    weights: jax.Array,
    experts: Any,
    *,
    axis: str | Axes | None = None,
    how: str | None = None,
    capacity: int | None = None,
) -> tuple[jax.Array, ExpertLoad]:
    """Sends each token to its experts and returns the weighted sum of what they make of it.

    All ways compute the same, on any mesh: results, gradients and which tokens are dropped do not depend on it. What
    each of them sends is on the page "Experts".

    **Arguments:**

    - `tokens`: [..., width].
    - `routes`: [..., choices], which experts each token goes to, as integers. A negative one goes to none.
    - `weights`: [..., choices], by which the results of the experts are multiplied.
    - `experts`: a callable pytree, such as a module or `jax.tree_util.Partial(function, arrays)`, whose arrays are
        stacked along their first dim, by expert. Without a capacity it is called with rows that are sorted by expert
        and the sizes of the groups, as `jax.lax.ragged_dot` takes them: `experts(rows, group_sizes)`. With a capacity
        it is the function of one expert, `experts(rows)`, and mapped over them; rows without a token are zeros.
    - `axis`: the mesh axis, or several, over which experts are split. By default the plan says, or the shardings of
        the arrays.
    - `how`: `"all_to_all"`, `"ragged"`, `"ring"`, `"dense"` or `"sum"`; by default the plan chooses.
    - `capacity`: how many tokens of each group an expert takes: more are dropped, first choices last. `tokens` are
        [..., groups, tokens of a group, width] then, and groups are what devices share. By default no token is dropped.

    **Returns:**

    The results, [..., width], and an `ExpertLoad`.

    **Raises:**

    `ConfigError` with everything that is wrong.

    ```python
    def mlp(params, rows, group_sizes):
        hidden = jax.nn.gelu(jax.lax.ragged_dot(rows, params["up"], group_sizes))
        return jax.lax.ragged_dot(hidden, params["down"], group_sizes)

    params = {"up": jnp.ones((8, 4, 16)), "down": jnp.ones((8, 16, 4))}
    routes = jnp.array([[0, 3], [3, 7]])
    results, load = sr.expert_exchange(
        jnp.ones((2, 4)), routes, jnp.full((2, 2), 0.5), jax.tree_util.Partial(mlp, params)
    )
    assert results.shape == (2, 4) and load.routed.tolist() == [1, 0, 0, 2, 0, 0, 0, 1]
    ```
    """
    axes = () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    check_arguments(tokens, routes, weights, experts, axes, how, capacity)
    stacked, params = unstack(experts)
    count = len(params[0])
    load = _load(routes, count, capacity)
    hows = _ways(how, capacity, bool(axes), tokens.ndim)
    region = experts_region(hows, tokens.ndim - 1, tuple(param.ndim for param in params), capacity is not None)
    operands = [tokens, routes, weights]
    if axes:
        region = region if hows == ("sum",) else region.over(axes)
        params = [_split_first(param, axes) for param in params]
        if hows != ("sum",):
            operands = _split_tokens(operands, axes)
    results = region(*operands, jnp.arange(count, dtype=routes.dtype), *params, experts=stacked, capacity=capacity)
    return _first_rows(results, len(tokens)), load


def _ways(how: str | None, capacity: int | None, has_axis: bool, ndim: int) -> Axes:
    """The ways that are possible, of which one runs."""
    if how is not None:
        return (how,)
    is_divided = ndim > (2 if capacity is not None else 1)
    possible = tuple(name for name in EXCHANGES if capacity is not None or name not in NEED_CAPACITY)
    # Where an axis is named, experts are exchanged along it if they can be.
    return (*(possible if is_divided else ()), *(() if has_axis and is_divided else ("sum",)))


def _load(routes: jax.Array, expert_count: int, capacity: int | None) -> ExpertLoad:
    groups = routes.reshape(1, -1, routes.shape[-1]) if capacity is None else routes
    if groups.ndim == 2:
        groups = groups[None]
    counts = group_counts(groups, expert_count)
    dropped = jnp.zeros_like(counts) if capacity is None else jnp.maximum(counts - capacity, 0)
    over = tuple(range(counts.ndim - 1))
    return ExpertLoad(counts.sum(over), dropped.sum(over))


def _split_first(array: jax.Array, axes: Axes) -> jax.Array:
    """Splits the first dim over these axes."""
    return _constrained(array, PartitionSpec(axes, *[PartitionSpec.UNCONSTRAINED] * (array.ndim - 1)))


def _split_tokens(operands: Sequence[jax.Array], axes: Axes) -> list[jax.Array]:
    """Splits the first dim over these axes besides those that split the tokens, filled up to what they divide."""
    mesh = jax.sharding.get_abstract_mesh()
    missing = -len(operands[0]) % math.prod(mesh.shape[name] for name in axes)
    if missing:
        operands = [
            jnp.pad(_whole_first(operand), [(0, missing), *[(0, 0)] * (operand.ndim - 1)], constant_values=fill)
            for operand, fill in zip(operands, (0, -1, 0), strict=True)  # what is filled in goes to no expert
        ]
    if AxisType.Explicit not in mesh.axis_types:
        return [*operands]  # the axes that split experts split tokens, too
    entry = (*tuple(jax.typeof(operands[0]).sharding.spec), None)[0]
    names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    ordered = tuple(name for name in mesh.axis_names if name in (*axes, *names))
    return [_split_first(operand, ordered) for operand in operands]


def _first_rows(array: jax.Array, count: int) -> jax.Array:
    return array if len(array) == count else _whole_first(array)[:count]


def _whole_first(array: jax.Array) -> jax.Array:
    """Gathers the first dim on an Explicit mesh: of what is split nothing can be cut off."""
    return _split_first(array, ()) if AxisType.Explicit in jax.typeof(array).sharding.mesh.axis_types else array


def _constrained(array: jax.Array, spec: PartitionSpec) -> jax.Array:
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return jax.lax.with_sharding_constraint(array, spec)
    before = (*tuple(jax.typeof(array).sharding.spec), *[None] * array.ndim)
    entries = zip(tuple(spec), before[: array.ndim], strict=True)
    return jax.reshard(
        array, PartitionSpec(*(old if new is PartitionSpec.UNCONSTRAINED else new for new, old in entries))
    )
