"""Kinds of steps that differ in how they learn or serve: distillation, policies, other optimizers, sampling."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from plan_models.experts import constrain_as_moments


def optax_step(
    optimizer: optax.GradientTransformation, loss: Callable[[Any, Any], jax.Array], params: Any
) -> tuple[Callable[[Any, Any], Any], dict[str, Any]]:
    """Returns a step that lowers a loss by an optimizer of optax, and its state as shapes."""

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, moments = optimizer.update(constrain_as_moments(gradients), state["optimizer"], state["params"])
        params = constrain_as_moments(optax.apply_updates(state["params"], updates))
        return {"params": params, "optimizer": moments}, value

    return step, {"params": params, "optimizer": jax.eval_shape(optimizer.init, params)}
