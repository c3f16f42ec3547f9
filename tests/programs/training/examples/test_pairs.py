"""Programs for two numbers of examples."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardrules.core.errors import MicrobatchError
from shardrules.programs.training.examples.pairs import Counts, Pair, equal_literals, part_params


def pair_of(fn: Any, counts: Counts) -> Pair:
    whole, trace = (jax.make_jaxpr(fn)(jnp.ones((size, 4))) for size in (counts.whole, counts.trace))
    return Pair.of(whole, trace, counts)


def test_sizes_of_a_part_are_scaled_from_those_of_a_trace() -> None:
    pair = pair_of(lambda x: jnp.broadcast_to(x.reshape(-1), (3, x.size)), Counts(8, 1, 2))
    (reshape, broadcast), (small_reshape, small_broadcast) = pair.whole.eqns, pair.trace.eqns
    counts = Counts(8, 1, 2)
    assert part_params(reshape, small_reshape, counts)["new_sizes"] == (4,)
    assert part_params(broadcast, small_broadcast, counts)["shape"] == (3, 4)


def test_a_mean_divides_by_another_constant() -> None:
    pair = pair_of(jnp.mean, Counts(8, 2, 2))
    assert [
        equal_literals(first.invars, second.invars)
        for first, second in zip(pair.whole.eqns, pair.trace.eqns, strict=True)
    ] == [True, False]


def test_other_equations_are_refused_with_both_lines() -> None:
    with pytest.raises(MicrobatchError, match=r"for 8 and for 2 examples differ: the first has sin .*second has cos"):
        pair_of(lambda x: jnp.sin(x) if len(x) > 2 else jnp.cos(x), Counts(8, 2, 2))
    with pytest.raises(MicrobatchError, match="only one of them has exp"):
        pair_of(lambda x: jnp.exp(jnp.sin(x)) if len(x) > 2 else jnp.sin(x), Counts(8, 2, 2))


def test_other_parameters_are_kept_as_differences() -> None:
    assert not pair_of(lambda x: x**2, Counts(8, 2, 2)).differences
    (difference,) = pair_of(lambda x: x ** len(x), Counts(8, 2, 2)).differences.values()
    assert "y of integer_pow" in difference
