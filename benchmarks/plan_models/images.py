"""Kinds of train steps that learn codes of ratings and images: a tied autoencoder, a VQ-VAE."""

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
CODES_SPLITS: Splits = (
    (r"/(\d+/)?first/(w|b)$", -1, "tensor"),
    (r"/(\d+/)?second/w$", 2, "tensor"),
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


def vq_vae(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A VQ-VAE of 128 x 128 images: 1,024 codes of 32 x 32, straight-through gradients, a loss of commitment."""
    width, size, codes, blocks, image, batch = 256, 64, 1024, 2, 128, 16 * devices
    if smoke:
        width, size, codes, blocks, image, batch = 16, 8, 16, 1, 16, devices

    def layer(side: int, before: int, after: int) -> dict[str, Any]:
        return {"w": array(side, side, before, after, dtype=jnp.float32), "b": array(after, dtype=jnp.float32)}

    stack = [{"first": layer(3, width, width), "second": layer(1, width, width)}] * blocks
    params = {
        "encoder": {
            "first": layer(4, 3, width // 2),
            "second": layer(4, width // 2, width),
            "stack": stack,
            "last": layer(1, width, size),
        },
        "codebook": array(codes, size, dtype=jnp.float32),
        "decoder": {
            "into": layer(3, size, width),
            "stack": stack,
            "first": layer(4, width, width // 2),
            "second": layer(4, width // 2, 3),
        },
    }
    dims = ("NHWC", "HWIO", "NHWC")

    def conv(p: Any, x: jax.Array, stride: int = 1, channels: str | None = None) -> jax.Array:
        y = jax.lax.conv_general_dilated(x, p["w"], (stride, stride), "SAME", dimension_numbers=dims) + p["b"]
        return constrain(y, "batch", None, None, channels)

    def larger(p: Any, x: jax.Array, channels: str | None = None) -> jax.Array:
        y = jax.lax.conv_transpose(x, p["w"], (2, 2), "SAME", dimension_numbers=dims) + p["b"]
        return constrain(y, "batch", None, None, channels)

    def residuals(stack: Any, x: jax.Array) -> jax.Array:
        for p in stack:
            x = x + conv(p["second"], jax.nn.relu(conv(p["first"], jax.nn.relu(x), 1, "tensor")))
        return jax.nn.relu(x)

    def nearest(codebook: jax.Array, z: jax.Array) -> jax.Array:
        flat = constrain(z.reshape(-1, size), "batch", None)
        distances = jnp.sum(flat**2, 1, keepdims=True) - 2 * flat @ codebook.T + jnp.sum(codebook**2, 1)
        ids = jnp.argmin(constrain(distances, "batch", None), 1)
        return constrain(codebook[ids], "batch", None).reshape(z.shape)

    def loss(p: Any, images: jax.Array) -> jax.Array:
        encoder, decoder = p["encoder"], p["decoder"]
        x = jax.nn.relu(conv(encoder["first"], constrain(images, "batch", None, None, None), 2, "tensor"))
        x = residuals(encoder["stack"], conv(encoder["second"], x, 2))
        z = conv(encoder["last"], x)
        quantized = nearest(p["codebook"], z)
        commitment = jnp.mean((z - jax.lax.stop_gradient(quantized)) ** 2)
        codebook_loss = jnp.mean((quantized - jax.lax.stop_gradient(z)) ** 2)
        x = z + jax.lax.stop_gradient(quantized - z)
        x = residuals(decoder["stack"], conv(decoder["into"], x))
        x = larger(decoder["second"], jax.nn.relu(larger(decoder["first"], x, "tensor")))
        return jnp.mean((x - images) ** 2) + codebook_loss + 0.25 * commitment

    step, state = optax_step(loss, optax.adam(2e-4), params)
    return step, (state, array(batch, image, image, 3, dtype=jnp.float32))
