"""Kinds of train steps of flows: a coupling flow of flowjax, with no constraints inside."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import paramax
from flowjax.bijections import RationalQuadraticSpline
from flowjax.distributions import Normal
from flowjax.flows import coupling_flow
from flowjax.train.losses import MaximumLikelihoodLoss

from plan_models.experts import constrain
from plan_models.parts import array
from plan_models.updates import module_step

FLOW_LAYERS = "/bijections/"
"""Parameters that are stacked for a scan."""


def flow(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A neural spline flow of eight coupling layers in 64 dimensions, trained by its likelihood."""
    size, width, layers, knots, batch = 64, 1024, 8, 8, 4096 * devices
    if smoke:
        size, width, layers, knots, batch = 8, 16, 2, 4, 4 * devices
    likelihood = MaximumLikelihoodLoss()

    spline, base = RationalQuadraticSpline(knots=knots, interval=4), Normal(jnp.zeros(size))
    model = coupling_flow(  # flowjax keeps arrays in closures, so it cannot be built as shapes
        jax.random.key(0), base_dist=base, transformer=spline, flow_layers=layers, nn_width=width, nn_depth=2
    )

    def is_fixed(leaf: Any) -> bool:
        return isinstance(leaf, paramax.NonTrainable)

    def loss(model: Any, x: jax.Array) -> jax.Array:
        params, static = eqx.partition(model, eqx.is_inexact_array, is_leaf=is_fixed)
        return likelihood(params, static, constrain(x, "batch", None))

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-4))
    step, state = module_step(lambda _: model, loss, optimizer)
    return step, (state, array(batch, size, dtype=jnp.float32))
