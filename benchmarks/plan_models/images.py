"""Kinds of train steps for images and ratings that learn codes: a tied autoencoder, a VQ-VAE, a Wasserstein GAN."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from plan_models.experts import Splits, constrain
from plan_models.parts import array
from plan_models.updates import optax_step

TIED_SPLITS: Splits = (
    (r"(^|/)weights/(0|2)$", 0, "tensor"),
    (r"(^|/)(weights/1|encoder/1)$", -1, "tensor"),
    (r"(^|/)decoder/(0|2)$", 0, "tensor"),
    (r"(^|/)key$", 0, None),
)


def tied_autoencoder(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A stacked autoencoder of ratings of 17,768 films, whose decoder has the transposed weights of the encoder."""
    widths, batch = (17768, 512, 512, 1024), 2048 * devices
    if smoke:
        widths, batch = (64, 32, 16, 32), 4 * devices
    sizes = list(itertools.pairwise(widths))
    params = {
        "weights": [array(*size, dtype=jnp.float32) for size in sizes],
        "encoder": [array(after, dtype=jnp.float32) for _, after in sizes],
        "decoder": [array(before, dtype=jnp.float32) for before, _ in reversed(sizes)],
    }

    def loss(p: Any, batch: Any) -> jax.Array:
        ratings = constrain(batch["ratings"], "batch", "tensor")
        x = ratings
        for index, (weight, bias) in enumerate(zip(p["weights"], p["encoder"], strict=True)):
            x = constrain(jax.nn.selu(x @ weight + bias), "batch", "tensor" if index == 1 else None)
        mask = jax.random.bernoulli(jax.random.wrap_key_data(batch["key"]), 0.2, x.shape)
        x = constrain(jnp.where(mask, x / 0.2, 0), "batch", None)
        for index, (weight, bias) in enumerate(zip(reversed(p["weights"]), p["decoder"], strict=True)):
            x = constrain(jax.nn.selu(x @ weight.T + bias), "batch", None if index == 1 else "tensor")
        rated = (ratings != 0).astype(x.dtype)
        return jnp.sum(rated * (x - ratings) ** 2) / jnp.maximum(jnp.sum(rated), 1)

    step, state = optax_step(loss, optax.sgd(5e-3, momentum=0.9), params)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return step, (state, {"ratings": array(batch, widths[0], dtype=jnp.float32), "key": key})
