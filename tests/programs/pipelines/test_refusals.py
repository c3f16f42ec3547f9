"""Calls of a pipeline that cannot be: the error says which function or argument, and what to do."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules.core.errors import ConfigError

PARAMS, X = 0.1 * jnp.ones((8, 4, 4)), jnp.ones((16, 4))
ARRAYS = [jnp.ones((4, 4))] * 8
UNEQUAL = [{"w": jnp.ones((4, 4))}] * 7 + [{"w": jnp.ones((4, 4)), "b": jnp.ones(4)}]


@pytest.fixture(autouse=True, params=["stage:4,data:2", "stage:1,data:8"])
def mesh(request: pytest.FixtureRequest) -> Any:
    mesh = sr.create_mesh(request.param)
    with jax.set_mesh(mesh):
        yield mesh


def layer(params: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ (params["w"] if isinstance(params, dict) else params))


def loss(params: Any, y: Any, targets: Any) -> Any:
    return jnp.mean((y - targets) ** 2)


def pipelined(layer: Any = layer, **functions: Any) -> Any:
    return sr.pipeline(layer, axis="stage", microbatches=4, **functions)


@pytest.mark.parametrize(
    ("functions", "args", "message"),
    [
        ({}, (UNEQUAL, X), r"layers is a list of 8 that are not equal: layer 0 .*, and layer 7 has float32\[4\]"),
        ({}, (ARRAYS, X), "layers is a list of 8 arrays, each with the layers first; stack layers"),
        ({"last": loss}, (PARAMS, X), "last gets no targets, since the call has none; call it as"),
        ({"last": lambda p, y, t: jnp.mean(y * p - t)}, (PARAMS, X, X), "last gets no parameters, .*no last=; call"),
        ({"first": lambda p, x: x @ p}, (PARAMS, X), "first raised TypeError: .*; first gets no parameters"),
    ],
)
def test_functions_that_raise_for_want_of_something_are_explained(functions: Any, args: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"pipeline: .*{message}"):
        pipelined(**functions)(*args)


def test_other_errors_of_functions_are_the_users() -> None:
    with pytest.raises(ZeroDivisionError, match="mine"):
        pipelined(lambda params, x: (_ for _ in ()).throw(ZeroDivisionError("mine")))(PARAMS, X)


def test_targets_may_be_missing_where_the_loss_reads_none() -> None:
    value = pipelined(last=lambda params, y, targets: jnp.mean(y))(PARAMS, X)
    assert value.shape == ()


@pytest.mark.parametrize("options", [{"cut": 3}, {"cut": "ab"}, {"batch": 3}])
def test_arguments_of_wrong_types_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match=r"cut must be numbers of layers|a mesh axis must be a name"):
        pipelined(**options)


def of_layer(scale: Any) -> Any:
    return jnp.sum(pipelined(lambda params, x: x + jnp.tanh(x @ params) * scale)(PARAMS, X))


def of_first(scale: Any) -> Any:
    return jnp.sum(pipelined(first=lambda params, x: x * scale)(PARAMS, X))


def of_last(scale: Any) -> Any:
    return pipelined(last=lambda params, y, targets: jnp.mean(y * scale))(PARAMS, X)


@pytest.mark.parametrize("function", [of_layer, of_first, of_last])
@pytest.mark.parametrize(
    "gradient",
    [
        jax.grad,
        lambda function: jax.jit(jax.grad(function)),
        lambda function: jax.grad(jax.jit(function)),
        lambda function: jax.grad(jax.checkpoint(function)),
    ],
)
def test_gradients_of_what_functions_close_over_are_refused_in_stages(function: Any, gradient: Any, mesh: Any) -> None:
    scale = jnp.ones(4)
    if mesh.shape["stage"] == 1:  # without stages JAX differentiates the functions as they are
        assert gradient(function)(scale).shape == (4,)
        return
    name = function.__name__.removeprefix("of_")
    with pytest.raises(ConfigError, match=rf"pipeline: {name} closes over float32\[4\] that a gradient is taken of"):
        gradient(function)(scale)


@pytest.mark.parametrize("function", [of_layer, of_first, of_last])
def test_functions_may_close_over_other_arrays(function: Any) -> None:
    scale = 0.5 * jnp.ones(4)
    expected = function(scale)
    assert jnp.allclose(jax.jit(function)(scale), expected)
    assert jnp.allclose(jax.vmap(function)(jnp.stack([scale, scale])), expected)
    gradient = jax.jit(jax.grad(lambda x, scale: jnp.sum(pipelined(lambda p, x: x @ p * scale)(PARAMS, x))))
    assert gradient(X, scale).shape == X.shape
