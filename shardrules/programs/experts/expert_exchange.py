"""`expert_exchange`: tokens to their experts and back, in the way that a plan chooses or a user names."""

import operator
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp

from shardrules.core.axes import axis_argument
from shardrules.programs.experts.checks import EXCHANGES, NEED_CAPACITY, check_arguments
from shardrules.programs.experts.regions import experts_region
from shardrules.programs.experts.routing import as_indices, group_counts
from shardrules.programs.experts.splits import first_rows, split_experts, split_tokens, tokens_for_sum
from shardrules.programs.experts.stacked import inner_dims, unstack
from shardrules.programs.regions.declaration import Axes


@final
class ExpertLoad(NamedTuple):
    """The number of tokens for each expert."""

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
    inner: Any = None,
) -> tuple[jax.Array, ExpertLoad]:
    """Sends each token to its experts and returns the weighted sum of what they make of it.

    All ways compute the same, on any mesh: results, gradients and which tokens are dropped do not depend on it. What
    each of them sends is on the page "Experts".

    **Arguments:**

    - `tokens`: [..., width].
    - `routes`: [..., choices], which experts each token goes to, as integers. One that is negative, or past the
        last expert, goes to none, and is counted nowhere.
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
    - `inner`: the dims along which a plan may split each expert, too: a pytree with a dim for each array of `experts`,
        `None` for one that is whole, such as `{"up": 2, "down": 1}`. These dims are split together, and what `experts`
        returns for their shards has to be a part of a sum. By default each expert is whole.

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
    axes = axis_argument("expert_exchange", axis)
    tokens, routes, weights = (jnp.asarray(operand) for operand in (tokens, routes, weights))
    capacity = _as_int(capacity)
    check_arguments(tokens, routes, weights, experts, axes, how, capacity, inner)
    lead = tokens.shape[:-1]
    stacked, params = unstack(experts)
    count = len(params[0])
    operands = _without_empty_dims(tokens, as_indices(routes, count), weights)
    load = _load(operands[1], count, capacity)
    hows = _ways(how, capacity, bool(axes), tokens.ndim)
    dims = inner_dims(inner, len(params))
    region = experts_region(hows, tokens.ndim - 1, tuple(param.ndim for param in params), dims, capacity is not None)
    if axes:
        # The axes come in the order of the mesh, in whatever order they were named.
        axes = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in axes)
        params, free_count = split_experts(params, axes, dims), tokens.ndim - (1 if capacity is None else 2)
        if hows == ("sum",):
            operands = tokens_for_sum(operands, axes, free_count)
        else:
            region, operands = region.over(axes), split_tokens(operands, axes, free_count)
    results = region(*operands, jnp.arange(count, dtype=jnp.int32), *params, experts=stacked, capacity=capacity)
    results = first_rows(results, len(tokens))
    return (results[tuple(map(slice, lead))] if 0 in lead else results), load


def _as_int(capacity: Any) -> Any:
    """Integers of any library as Python's; other values are left to the check."""
    if capacity is None or isinstance(capacity, bool):
        return capacity
    try:
        return operator.index(capacity)
    except TypeError:
        return capacity


def _without_empty_dims(tokens: jax.Array, routes: jax.Array, weights: jax.Array) -> list[jax.Array]:
    """The arrays as they are, or with a token or a choice of no expert added if there are no tokens or no choices."""
    missing = [int(size == 0) for size in routes.shape]
    if not any(missing):
        return [tokens, routes, weights]
    widths = [(0, size) for size in missing]
    return [
        jnp.pad(tokens, [*widths[:-1], (0, 0)]),
        jnp.pad(routes, widths, constant_values=-1),
        jnp.pad(weights, widths),
    ]


def _ways(how: str | None, capacity: int | None, has_axis: bool, ndim: int) -> Axes:
    """The possible ways; one of them runs."""
    if how is not None:
        return (how,)
    is_divided = ndim > (2 if capacity is not None else 1)
    possible = tuple(name for name in EXCHANGES if capacity is not None or name not in NEED_CAPACITY)
    # If an axis is named, experts are exchanged along it if they can be.
    return (*(possible if is_divided else ()), *(() if has_axis and is_divided else ("sum",)))


def _load(routes: jax.Array, expert_count: int, capacity: int | None) -> ExpertLoad:
    counts = group_counts(routes, expert_count)
    dropped = jnp.zeros_like(counts) if capacity is None else jnp.maximum(counts - capacity, 0)
    over = tuple(range(counts.ndim - 1))
    return ExpertLoad(counts.sum(over), dropped.sum(over))
