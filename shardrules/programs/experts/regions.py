"""The ways to bring tokens and experts together, as regions: plans choose among them."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from shardrules.programs.experts.shards import Shard, by_all_to_all, by_dense, by_ragged, by_ring, by_sum
from shardrules.programs.experts.stacked import StackedExperts
from shardrules.programs.regions.region import RegionFunction, alternatives, region

_FUNCTIONS = {"all_to_all": by_all_to_all, "ragged": by_ragged, "ring": by_ring, "dense": by_dense, "sum": by_sum}


@functools.cache
def experts_region(
    hows: Sequence[str], lead_count: int, param_ndims: Sequence[int], inner: Sequence[int | None], has_capacity: bool
) -> Any:
    """One of these ways, for tokens with so many dims in front and for arrays of experts with so many dims.

    With a capacity, the tokens of one group compete for slots, and stay together: only groups can be split. Where the
    `inner` dims of arrays are split, an expert returns a part of a sum, and so does all that follows.
    """
    lead = [f"t{dim}" for dim in range(lead_count)]
    params = [
        " ".join(["e", *("h" if dim == inner[index] else f"p{index}d{dim}" for dim in range(1, ndim))])
        for index, ndim in enumerate(param_ndims)
    ]
    tokens = " ".join(lead)
    rule = f"{tokens} d, {tokens} k, {tokens} k, e, {', '.join(params)} -> {tokens} o"
    free = lead[:-1] if has_capacity else lead
    summed = ["h"] if any(inner) else []
    # Every way but `sum` splits tokens, which takes a dim that may be split.
    regions = [_region(how, rule, free, summed) for how in hows if how == "sum" or free]
    return regions[0] if len(regions) == 1 else alternatives(*regions)


def _region(how: str, rule: str, free: Sequence[str], summed: Sequence[str]) -> RegionFunction:
    function = _FUNCTIONS[how]

    def on_shards(
        *operands: jax.Array,
        axis_name: tuple[str, ...] | None = None,
        experts: StackedExperts,
        capacity: int | None,
    ) -> jax.Array:
        results = function(Shard.of(operands, axis_name, experts, capacity))
        return results.reshape(*operands[0].shape[:-1], -1)

    on_shards.__name__ = f"experts_by_{how}"
    splits = " ".join((*free, *summed))
    if how == "sum":
        return region(rule, split=f"{splits} e")(on_shards)
    return region(rule, split=splits, exchange=f"{free[0]} e")(on_shards)
