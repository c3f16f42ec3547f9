"""The step of a model that an optimizer of optax trains."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax

from plan_models.experts import constrain_as_moments


def optax_step(
    loss: Callable[[Any, Any], jax.Array],
    optimizer: optax.GradientTransformation,
    params: Any,
    name: str = "momentum",
) -> tuple[Callable[[Any, Any], Any], dict[str, Any]]:
    """Returns a step that lowers a loss, and its state as shapes.

    `params` are shapes, of which all are trained. Under its usual name the state of the optimizer is placed as moments
    are; under another, only what optax calls `mu` and `nu`.
    """

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, moments = optimizer.update(constrain_as_moments(gradients), state[name], state["params"])
        params = constrain_as_moments(optax.apply_updates(state["params"], updates))
        return {"params": params, name: moments}, value

    return step, {"params": params, name: jax.eval_shape(optimizer.init, params)}


def module_step(
    make: Callable[[jax.Array], Any],
    loss: Callable[[Any, Any], jax.Array],
    optimizer: optax.GradientTransformation,
) -> tuple[Callable[[Any, Any], Any], dict[str, Any]]:
    """Returns the same for a module of Equinox in float32, which `make` builds from a key."""

    def start(key: jax.Array) -> dict[str, Any]:
        model = make(key)
        return {"model": model, "momentum": optimizer.init(eqx.filter(model, eqx.is_inexact_array))}

    def step(state: Any, batch: Any) -> Any:
        value, gradients = eqx.filter_value_and_grad(loss)(state["model"], batch)
        params, static = eqx.partition(state["model"], eqx.is_inexact_array)
        updates, momentum = optimizer.update(constrain_as_moments(gradients), state["momentum"], params)
        params = constrain_as_moments(optax.apply_updates(params, updates))
        return {"model": eqx.combine(params, static), "momentum": momentum}, value

    return step, eqx.filter_eval_shape(start, jax.random.key(0))
