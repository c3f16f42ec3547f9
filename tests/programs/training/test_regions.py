"""Regions in microbatches: what a declaration says of the dim of the examples is what a loss is split by."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardrules as sr
from shardrules.core.errors import MicrobatchError
from shardrules.programs.training.loss import trace_loss
from shardrules.programs.training.microbatches import accumulated
from tests.programs.training.checks import assert_close, operands

EXAMPLES, WIDTH, EXPERTS = 8, 4, 6

W, X = jnp.arange(1.0, 5.0) / 4, jnp.sin(jnp.arange(EXAMPLES * WIDTH * 1.0)).reshape(EXAMPLES, WIDTH)


def assert_same(loss: Any, model: Any, batch: Any, parts: Any = ((2, 1), (8, 1), (2, 2))) -> None:
    """Compares loss and gradients by microbatches with those of the whole batch."""
    trace = trace_loss(loss, model, batch)
    expected = jax.value_and_grad(loss)(model, batch)
    for each in parts:
        value, _, gradients = accumulated(trace, *each)(*operands(trace, model, batch))
        assert_close((value, gradients), expected, 1e-4)


@sr.region("rows dim, dim -> rows dim", split="rows")
def scaled(x: Any, w: Any) -> Any:
    return jnp.tanh(x * jnp.roll(x, 1, -1)) * w


@sr.region("rows dim, dim -> rows dim", split="rows", cost=lambda x, w: 3 * x.size)
def with_cost(x: Any, w: Any) -> Any:
    return jnp.tanh(x * jnp.roll(x, 1, -1)) * w


@sr.region("rows dim, dim -> dim", split="rows dim")
def total(x: Any, w: Any) -> Any:
    return jnp.sin(x * w).sum(0)


@sr.region("rows dim, dim -> dim, rows", split="rows")
def total_and_each(x: Any, w: Any) -> Any:
    return (jnp.sin(x) * w).sum(0), (x * w).sum(1)


@sr.region("rows dim, dim -> rows dim", split="rows", exchange="dim")
def softmax_of_rows(x: Any, w: Any, *, axis_name: Any) -> Any:
    terms = jnp.exp(x * w)
    sums = terms.sum(1, keepdims=True)
    return terms / (jax.lax.psum(sums, axis_name) if axis_name else sums)


@sr.region("rows dim, dim -> rows dim", split="dim", exchange="rows")
def softmax_over_rows(x: Any, w: Any, *, axis_name: Any) -> Any:
    terms = jnp.exp(x * w)
    sums = terms.sum(0, keepdims=True)
    return terms / (jax.lax.psum(sums, axis_name) if axis_name else sums)


@sr.region("rows dim, dim -> dim", split="dim", exchange="rows")
def total_by_exchange(x: Any, w: Any, *, axis_name: Any) -> Any:
    del axis_name
    return jnp.sin(x * w).sum(0)


@sr.region("rows dim, dim -> dim", whole="rows dim")
def largest(x: Any, w: Any) -> Any:
    return (x * w).max(0)


@sr.region("dim, dim -> dim", split="dim")
def product(x: Any, w: Any) -> Any:
    return jnp.sin(x) * w


LOSSES = {
    "rows": lambda w, x: jnp.mean(scaled(x, w) ** 2),
    "rows, with a cost": lambda w, x: jnp.mean(with_cost(x, w) ** 2),
    "a sum": lambda w, x: jnp.sum(total(x, w)) / len(x),
    "a sum and rows": lambda w, x: jnp.sum(total_and_each(x, w)[0]) / len(x) + jnp.mean(total_and_each(x, w)[1] ** 2),
    "an exchange of another dim": lambda w, x: jnp.mean(softmax_of_rows(x, w) ** 2),
    "alternatives": lambda w, x: jnp.mean(sr.alternatives(scaled, with_cost)(x, w) ** 2),
    "mapped": lambda w, x: jnp.mean(jax.vmap(product, (0, None))(x, w) ** 2),
    "mapped over rows": lambda w, x: jnp.mean(jax.vmap(scaled, (0, None))(x.reshape(-1, 1, WIDTH), w) ** 2),
    "in a loop": lambda w, x: jnp.mean(jax.lax.scan(lambda x, w: (scaled(x, w), None), x, jnp.stack([w, w]))[0] ** 2),
    "in a checkpoint": lambda w, x: jnp.mean(jax.checkpoint(lambda x: scaled(x, w))(x) ** 2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_letters_that_may_be_split_are_computed_by_parts(name: str) -> None:
    assert_same(LOSSES[name], W, X)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (lambda w, x: jnp.mean(largest(x, w)), "largest"),
        (lambda w, x: jnp.mean(softmax_over_rows(x, w) ** 2), "softmax_over_rows"),
        (lambda w, x: jnp.mean(total_by_exchange(x, w)), "total_by_exchange"),
    ],
)
def test_letters_that_are_whole_or_exchanged_need_the_batch(loss: Any, name: str) -> None:
    with pytest.raises(MicrobatchError, match=f"region '{name}' computes with several examples at once"):
        accumulated(trace_loss(loss, W, X), 2)
    plan = sr.plan_training(loss, W, optax.sgd(0.1), X, cluster="cuda:h100:2")
    (finding,) = [finding for finding in plan.report.findings if finding.code == "whole-batch"]
    assert f"region '{name}'" in finding.message


def test_plans_of_regions_have_no_finding_of_the_batch() -> None:
    plan = sr.plan_training(LOSSES["rows"], W, optax.sgd(0.1), X, cluster="cuda:h100:2")
    assert "whole-batch" not in [finding.code for finding in plan.report.findings]


def in_groups(params: Any, rows: Any, sizes: Any) -> Any:
    return jax.lax.ragged_dot(jnp.tanh(jax.lax.ragged_dot(rows, params["up"], sizes)), params["down"], sizes)


def one_by_one(params: Any, rows: Any) -> Any:
    return jnp.tanh(rows @ params["up"]) @ params["down"]


def experts() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "router": jax.random.normal(keys[0], (WIDTH, EXPERTS)),
        "up": jax.random.normal(keys[1], (EXPERTS, WIDTH, 8)),
        "down": jax.random.normal(keys[2], (EXPERTS, 8, WIDTH)),
    }


def mixture(model: Any, tokens: Any, **options: Any) -> Any:
    weights, routes = jax.lax.top_k(jax.nn.softmax(tokens @ model["router"]), 2)
    function = in_groups if options.get("capacity") is None else one_by_one
    params = jax.tree_util.Partial(function, {"up": model["up"], "down": model["down"]})
    return sr.expert_exchange(tokens, routes, weights, params, **options)


TOKENS = jax.random.normal(jax.random.key(1), (EXAMPLES, 3, WIDTH))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"capacity": 1}, {"how": "ring"}, {"how": "sum"}, {"capacity": 2, "how": "dense"}, {"inner": True}],
    ids=str,
)
def test_mixtures_of_experts_are_computed_by_parts(options: Any) -> None:
    if "inner" in options:
        options = {"inner": {"up": 2, "down": 1}}

    def loss(model: Any, tokens: Any) -> Any:
        return jnp.mean((tokens + mixture(model, tokens, **options)[0]) ** 2)

    assert_same(loss, experts(), TOKENS)


def test_tokens_of_all_examples_may_be_in_one_dim() -> None:
    def loss(model: Any, tokens: Any) -> Any:
        flat = tokens.reshape(-1, WIDTH)
        return jnp.mean((flat + mixture(model, flat)[0]) ** 2)

    assert_same(loss, experts(), TOKENS)


def test_tokens_that_compete_for_a_capacity_stay_together() -> None:
    def loss(model: Any, tokens: Any) -> Any:
        return jnp.mean(mixture(model, tokens.reshape(-1, WIDTH), capacity=2)[0] ** 2)

    with pytest.raises(MicrobatchError, match="region 'experts_by_sum' computes with several examples at once"):
        accumulated(trace_loss(loss, experts(), TOKENS), 2)


def test_groups_of_several_examples_stay_together() -> None:
    def loss(model: Any, tokens: Any) -> Any:
        return jnp.mean(mixture(model, tokens.reshape(-1, 6, WIDTH), capacity=2)[0] ** 2)

    assert_same(loss, experts(), TOKENS, ((2, 1), (4, 1), (2, 2)))


GIVEN_THE_COUNT: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "a number": lambda sums, count: sums / count,
    "an array": lambda sums, count: sums / jnp.asarray(count),
    "a closed array": lambda sums, count: sums / np.full(4, count, np.float32),
    "ones": lambda sums, count: sums / jnp.ones(count).sum(),
    "positions": lambda sums, count: sums * jnp.sum(jnp.arange(count)),
    "rounds": lambda sums, count: jax.lax.fori_loop(0, count, lambda _, sums: 1.1 * sums, sums),
    "a scan": lambda sums, count: jax.lax.scan(lambda sums, _: (1.1 * sums, None), sums, None, length=count)[0],
    "another program": lambda sums, count: jnp.sin(sums) if count > 4 else jnp.cos(sums),
}


@pytest.mark.parametrize("name", GIVEN_THE_COUNT)
def test_regions_that_are_given_how_many_examples_there_are_have_no_microbatches(name: str) -> None:
    @sr.region("rows dim, dim -> dim", split="rows")
    def pool(x: Any, w: Any, *, count: int) -> Any:
        return GIVEN_THE_COUNT[name](jnp.sin(x * w).sum(0), count)

    x, w = jnp.linspace(0.1, 1, 32).reshape(8, 4), jnp.ones(4)
    with pytest.raises(MicrobatchError, match="depends on how many examples there are"):
        accumulated(trace_loss(lambda w, x: pool(x, w, count=len(x)).sum(), w, x), 2)


def test_regions_that_are_given_a_constant_have_microbatches() -> None:
    @sr.region("rows dim, dim -> dim", split="rows")
    def pool(x: Any, w: Any, *, count: int) -> Any:
        return jnp.sin(x * w).sum(0) / count + 0 * jnp.ones(len(x)).sum()

    x, w = jnp.linspace(0.1, 1, 32).reshape(8, 4), jnp.ones(4)
    assert_same(lambda w, x: pool(x, w, count=8).sum(), w, x, ((2, 1), (4, 1)))


def test_balance_over_the_batch_needs_the_batch() -> None:
    def loss(model: Any, tokens: Any) -> Any:
        results, load = mixture(model, tokens)
        return jnp.mean(results**2) + jnp.sum((load.routed / load.routed.sum()) ** 2)

    with pytest.raises(MicrobatchError, match="losses that balance the load of experts can do so within examples"):
        accumulated(trace_loss(loss, experts(), TOKENS), 2)


def test_stages_compute_as_the_whole_batch() -> None:
    def loss(model: Any, tokens: Any) -> Any:
        def layer(x: Any, params: Any) -> tuple[Any, None]:
            return x + mixture(params, x, capacity=2)[0], None

        return jnp.mean(jax.lax.scan(layer, tokens, model)[0] ** 2)

    model = jax.tree.map(lambda array: 0.3 * jnp.stack([array] * 4), experts())
    trace = trace_loss(loss, model, TOKENS)
    value, _, gradients = jax.jit(accumulated(trace, 4, stages=2))(*operands(trace, model, TOKENS))
    assert_close((value, gradients), jax.value_and_grad(loss)(model, TOKENS), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "capacity"), [({"microbatches": 4}, 2), ({"microbatches": 4, "stages": 2}, None)], ids=str
)
def test_planned_mixtures_train_as_written(options: Any, capacity: int | None) -> None:
    def layer(x: Any, params: Any) -> Any:
        return x + mixture(params, scaled(x.reshape(-1, WIDTH), params["scale"]).reshape(x.shape), capacity=capacity)[0]

    def loss(model: Any, tokens: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, params: (layer(x, params), None), tokens, model)
        return jnp.mean((x - jnp.sin(tokens)) ** 2)

    def make() -> Any:
        layer_params = {**experts(), "scale": jnp.ones(WIDTH)}
        return jax.tree.map(lambda array: 0.3 * jnp.stack([array] * 4), layer_params)

    optimizer, tokens = optax.sgd(0.1), jnp.tile(TOKENS, (4, 1, 1))
    plan = sr.plan_training(loss, make(), optimizer, tokens, cluster=jax.devices()[:2], time_limit=300, **options)
    model, state = plan.init(make)()
    expected = make()
    for _ in range(2):
        model, state, value, _ = plan.step(model, state, tokens)
        expected_value, gradient = jax.value_and_grad(loss)(expected, tokens)
        expected = jax.tree.map(lambda array, change: array - 0.1 * change, expected, gradient)
        np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    assert_close(model, expected, 1e-4)
