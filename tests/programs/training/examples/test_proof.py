"""Facts of each array of a loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardrules.programs.jaxprs.inline import flattened
from shardrules.programs.training.examples.facts import EACH_ROUND, Fact
from shardrules.programs.training.examples.pairs import Counts, Pair
from shardrules.programs.training.examples.proof import BodyFacts, read_examples

COUNTS = Counts(8, 2, 2)
WEIGHT = Fact("shared", is_trained=True, is_whole=True)
ROWS = Fact("examples", 0, from_batch=True, is_whole=True, is_own=True)


def facts_of(fn: Callable[..., Any]) -> BodyFacts:
    """The facts of a function of a weight and of rows, four wide."""
    whole, trace = (
        flattened(jax.make_jaxpr(fn)(jnp.ones((4, 4)), jnp.ones((rows, 4)))) for rows in (COUNTS.whole, COUNTS.trace)
    )
    return read_examples(Pair.of(whole, trace, COUNTS), (WEIGHT, ROWS), COUNTS)


@pytest.mark.parametrize(
    ("fn", "form", "dim"),
    [
        (lambda w, x: x @ w, "examples", 0),
        (lambda w, x: (x @ w).T, "examples", 1),
        (lambda w, x: (x @ w).reshape(-1), "examples", 0),
        (lambda w, x: (x @ w)[None], "examples", 1),
        (lambda w, x: lax.map(lambda row: w @ row, x), "examples", 0),
        (lambda w, x: lax.scan(lambda h, row: (h + w[0, 0] * row.sum(), None), 0.0, x)[0], "sum", EACH_ROUND),
        (lambda w, x: (x @ w).T @ x, "sum", EACH_ROUND),
        (lambda w, x: jnp.zeros((4, 4)).at[jnp.arange(len(x)) % 4].add(x @ w), "sum", EACH_ROUND),
        (lambda w, x: 0.5 * jnp.mean(x @ w) - jnp.sum(x * w[0]), "sum", EACH_ROUND),
        (lambda w, x: jnp.sum(x @ w) / jnp.sum(x > 0), "sum", EACH_ROUND),
        (lambda w, x: jnp.sum(x @ w) + 1, "result", EACH_ROUND),
        (lambda w, x: jnp.exp(jnp.sum(x @ w)), "result", EACH_ROUND),
        (lambda w, x: jnp.sum(w), "shared", EACH_ROUND),
        (lambda w, x: jnp.sort(x, 0), "examples", 0),
        (lambda w, x: jnp.sum(x) * jnp.max(x), "shared", EACH_ROUND),
        (lambda w, x: (x @ w)[jnp.arange(len(x)), jnp.argmax(x, 1)], "examples", 0),
        (lambda w, x: (x @ w).at[jnp.arange(len(x)), 0].set(1.0), "examples", 0),
        (lambda w, x: lax.cond(w[0, 0] > 0, lambda: x @ w, lambda: x), "examples", 0),
    ],
)
def test_arrays_have_these_forms(fn: Callable[..., Any], form: str, dim: int | None) -> None:
    (fact,) = facts_of(fn).outputs
    assert (fact.form, fact.dim) == (form, dim), fact.reason


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda w, x: (x @ w) @ (x @ w).T, "several examples at once"),
        (lambda w, x: jnp.cumsum(x @ w, 0), "several examples at once"),
        (lambda w, x: (x @ w)[::-1], "several examples at once"),
        (lambda w, x: (x @ w)[jnp.arange(len(x)) - 1], "several examples at once"),
        (lambda w, x: jnp.max(x @ w, 0), "is not a sum"),
        (lambda w, x: x @ w - jnp.mean(x @ w, 0), "uses a sum over the examples for single examples"),
        (lambda w, x: jnp.zeros(4).at[x[:, 0].astype(int)].max((x @ w)[:, 0]), "is not a sum"),
        (lambda w, x: jnp.ones((4, 4)).at[jnp.arange(len(x)) % 4].add(x @ w), "to what is not zero"),
        (lambda w, x: lax.scan(lambda h, row: (jnp.tanh(h + w @ row), None), w[0], x)[0], "from example to example"),
        (lambda w, x: lax.scan(lambda h, row: (h * 2.0, w @ row * h), 1.0, x)[1], "from example to example"),
        (lambda w, x: lax.scan(lambda h, row: (2 * h + w[0] @ row, None), 0.0, x)[0], "from example to example"),
        (lambda w, x: lax.scan(lambda h, row: (w[0] @ row - h, None), 0.0, x)[0], "from example to example"),
        (lambda w, x: lax.map(lambda row: jnp.sum(x @ w) * row, x), "reads all examples for each"),
        (
            lambda w, x: lax.while_loop(lambda h: jnp.max(h) < 9, lambda h: h + 1, x @ w),
            "number of rounds depends on several examples",
        ),
        (lambda w, x: lax.cond(jnp.sum(x @ w) > 0, lambda: x, lambda: x @ w), "uses a result of the whole batch"),
        (lambda w, x: jax.checkpoint(lambda h: jnp.log(jnp.sum(h)) * h)(x @ w), "uses a "),
        (lambda w, x: lax.ragged_dot(x @ w, w[None], jnp.array([len(x)])), "has groups of rows of all examples"),
    ],
)
def test_what_uses_several_examples_is_refused(fn: Callable[..., Any], reason: str) -> None:
    (fact,) = facts_of(fn).outputs
    assert fact.form == "refused"
    assert reason in fact.reason
    assert "test_proof.py:" in fact.reason


def test_values_of_other_shapes_in_a_part_are_slices_of_the_whole() -> None:
    def fn(w: Any, x: Any) -> Any:
        noise = jax.random.normal(jax.random.key(0), x.shape)
        return jnp.broadcast_to(w[0], x.shape) * (x @ w), noise

    body = facts_of(fn)
    repeated, bits = (
        next(body.facts[step.outvars[0]] for step in body.pair.whole.eqns if step.primitive.name == name)
        for name in ("broadcast_in_dim", "random_bits")
    )
    assert bits.form == "examples"
    assert (bits.is_whole, bits.is_own) == (True, False)
    assert repeated.is_own
