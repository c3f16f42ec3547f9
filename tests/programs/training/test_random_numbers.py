"""Random numbers in microbatches: those that the whole batch draws, by every sampler of JAX and every kind of key."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardrules.core.errors import MicrobatchError
from shardrules.programs.training.loss import trace_loss
from shardrules.programs.training.microbatches import accumulated
from tests.programs.training.checks import assert_close, operands

EXAMPLES = 8

Draw = Callable[[Any, tuple[int, ...]], Any]
"""From a key and a shape to random numbers, at least one for each element of the shape."""

VALUES: dict[str, Any] = (
    {"a": 1.5, "alpha": jnp.array([0.5, 1.5]), "b": 2.0, "concentration": 1.5, "cov": jnp.eye(2), "d": 2, "df": 3.0}
    | {"dfden": 4.0, "dfnum": 3.0, "lam": 3.0, "left": 0.0, "loc": 0.0, "logits": jnp.array([0.1, 0.5]), "lower": -1.0}
    | {"maxval": 9, "mean": 1.0, "minval": 0, "mode": 0.5, "n": 3, "p": 0.3, "right": 1.0, "scale": 1.5, "upper": 1.5}
)
"""Arguments of samplers besides a key and a shape, by the names of their parameters."""

DRAWS: dict[str, Draw] = {
    "choice": lambda key, shape: jax.random.choice(key, 5, shape),
    "clone": lambda key, shape: jax.random.normal(jax.random.clone(key), shape),
    "fold_in": lambda key, shape: jax.random.normal(jax.random.fold_in(key, 3), shape),
    "multinomial": lambda key, shape: jax.random.multinomial(key, 5.0, jnp.array([0.4, 0.6]), shape=(*shape, 2)),
    "multivariate_normal": lambda key, shape: jax.random.multivariate_normal(key, jnp.ones(2), VALUES["cov"], shape),
    "permutation": lambda key, shape: jax.random.permutation(key, math.prod(shape or (5,))),
    "split": lambda key, shape: jax.random.normal(jax.random.split(key)[1], shape),
}
"""Samplers that take other arguments than most."""

FROM_EACH_KEY: dict[str, Draw] = {
    "split for each example": lambda key, shape: jax.vmap(jax.random.normal)(jax.random.split(key, shape)),
    "fold_in of each example": lambda key, shape: jax.vmap(
        lambda index: jax.random.gamma(jax.random.fold_in(key, index), 2.0)
    )(jnp.arange(math.prod(shape))),
}
"""Numbers by a key for each example, made from one key."""

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def samplers() -> dict[str, Draw]:
    """Every public function of `jax.random` that takes a key and supports those of the implementation in force."""
    functions = {name: function for name, function in vars(jax.random).items() if not name.startswith("_")}
    functions = {name: function for name, function in functions.items() if "key" in _parameters(function)}
    draws = {name: DRAWS.get(name) or _draw(function) for name, function in functions.items()}
    return {name: draw for name, draw in draws.items() if _is_supported(draw)}


def _parameters(function: Any) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a module, or a primitive
        return {}


def _draw(function: Any) -> Draw:
    parameters = _parameters(function).values()
    required = [each.name for each in parameters if each.default is each.empty and each.name not in ("key", "shape")]
    return lambda key, shape: function(key, shape=shape, **{name: VALUES[name] for name in required})


def _is_supported(draw: Draw) -> bool:
    try:
        jax.eval_shape(lambda: draw(jax.random.key(0), (2,)))
    except NotImplementedError:
        return False
    return True


def assert_same(
    numbers: Callable[[Any, Any], dict[str, Any]], keys: Any, key_dim: int | None, parts: Sequence[tuple[int, int]]
) -> None:
    """Compares what a loss computes from random numbers of a batch with what it computes in microbatches."""

    def loss(w: Any, batch: Any) -> Any:
        products = batch["x"] @ w
        drawn = {
            name: array.astype(jnp.float32).reshape(len(products), -1).sum(1) * products
            for name, array in numbers(batch["keys"], products.shape).items()
        }
        return sum(jnp.mean(array**2) for array in drawn.values()), drawn

    w, x = jnp.arange(1.0, 4.0), jnp.linspace(-1.0, 1.0, EXAMPLES * 3).reshape(EXAMPLES, 3)
    batch = {"keys": keys, "x": x}
    trace = trace_loss(loss, w, batch, has_aux=True, example_dims={"keys": key_dim, "x": 0})
    arrays = operands(trace, w, batch)
    expected_loss, expected, (expected_gradient,) = _run(accumulated(trace), arrays)
    for each in parts:
        value, aux, (gradient,) = _run(accumulated(trace, *each), arrays)
        different = [
            name
            for name, array, other in zip(trace.aux_names, aux, expected, strict=True)
            if not np.allclose(array, other, rtol=1e-4, atol=1e-5)
        ]
        assert different == []
        np.testing.assert_allclose(value, expected_loss, rtol=1e-4)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-3)


def _run(function: Any, arrays: Any) -> Any:
    return jax.jit(function, compiler_options=QUICK)(*arrays)


def make_key(impl: str, is_typed: bool) -> Any:
    return jax.random.key(1, impl=impl) if is_typed else jax.random.PRNGKey(1, impl=impl)


def check_one_key(impl: str, is_typed: bool, parts: Sequence[tuple[int, int]]) -> None:
    with jax.default_prng_impl(impl):
        draws = {**samplers(), **FROM_EACH_KEY}
        assert {"beta", "binomial", "choice", "dirichlet", "gamma", "normal", "permutation", "t"} <= draws.keys()
        key = make_key(impl, is_typed)
        assert_same(lambda key, shape: {name: draw(key, shape) for name, draw in draws.items()}, key, None, parts)


def check_own_keys(impl: str, is_typed: bool, parts: Sequence[tuple[int, int]]) -> None:
    with jax.default_prng_impl(impl):
        draws, keys = samplers(), jax.random.split(make_key(impl, is_typed), EXAMPLES)

        def numbers(keys: Any, shape: tuple[int, ...]) -> dict[str, Any]:
            del shape
            return {name: jax.vmap(lambda key, draw=draw: draw(key, ()))(keys) for name, draw in draws.items()}

        assert_same(numbers, keys, 0, parts)


def test_microbatches_have_the_random_numbers_of_the_batch() -> None:
    check_one_key("threefry2x32", True, [(2, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("is_typed", [True, False], ids=["typed", "raw"])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("check", [check_one_key, check_own_keys])
def test_keys_of_all_kinds_draw_for_the_whole_batch(check: Any, impl: str, is_typed: bool) -> None:
    check(impl, is_typed, [(4, 1), (2, 2)])


def test_trained_noise_of_one_key_is_refused() -> None:
    """Its derivative goes through the number that is drawn, at a position in the whole batch."""

    def loss(w: Any, batch: Any) -> Any:
        return jnp.mean(jax.random.gamma(batch["key"], jnp.exp(batch["x"] @ w)))

    w, batch = jnp.ones(3), {"key": jax.random.key(0), "x": jnp.ones((EXAMPLES, 3))}
    with pytest.raises(MicrobatchError, match="random_gamma computes with several examples at once"):
        accumulated(trace_loss(loss, w, batch), 2)


def test_trained_noise_of_own_keys_is_that_of_the_batch() -> None:
    def loss(w: Any, batch: Any) -> Any:
        return jnp.mean(jax.vmap(jax.random.gamma)(batch["key"], jnp.exp(batch["x"] @ w)))

    w, x = jnp.ones(3), jnp.linspace(-1.0, 1.0, EXAMPLES * 3).reshape(EXAMPLES, 3)
    batch = {"key": jax.random.split(jax.random.key(0), EXAMPLES), "x": x}
    trace = trace_loss(loss, w, batch)
    value, _, (gradient,) = accumulated(trace, 4)(*operands(trace, w, batch))
    assert_close((value, gradient), jax.value_and_grad(loss)(w, batch), 1e-4)


def test_noise_in_checkpoints_and_loops_is_that_of_the_batch() -> None:
    @jax.checkpoint
    def layer(x: jax.Array, key: jax.Array) -> jax.Array:
        return x * jax.random.gamma(key, 2.0, x.shape) + jax.random.t(key, 5.0, x.shape[:1])[:, None]

    def loss(w: Any, batch: Any) -> Any:
        keys = jax.random.split(batch["key"], 2)
        x, _ = jax.lax.scan(lambda x, key: (layer(x, key), None), batch["x"] * w, keys)
        return jnp.mean(x**2)

    w, x = jnp.ones(3), jnp.linspace(-1.0, 1.0, EXAMPLES * 3).reshape(EXAMPLES, 3)
    batch = {"key": jax.random.key(0), "x": x}
    trace = trace_loss(loss, w, batch)
    for parts in ((4, 1), (2, 2)):
        value, _, (gradient,) = jax.jit(accumulated(trace, *parts))(*operands(trace, w, batch))
        assert_close((value, gradient), jax.value_and_grad(loss)(w, batch), 1e-4)
