"""Kinds of train steps of transformers on patches: a DiT, a masked autoencoder."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from plan_models.experts import Splits, constrain
from plan_models.parts import array, attend, in_heads, layer_norm, residual, tokens, train_step, whole, with_moments
from plan_models.updates import optax_step

DIT_SPLITS: Splits = (
    (r"(^|/)(q|k|v|up|time_1)$", -1, "tensor"),
    (r"(^|/)(out|down|time_2)$", -2, "tensor"),
    (r"(^|/)key$", 0, None),
)
MAE_SPLITS: Splits = (
    (r"(^|/)(qkv|up)/(w|b)$", -1, "tensor"),
    (r"(^|/)(out|down)/w$", -2, "tensor"),
    (r"(^|/)key$", 0, None),
)


def _patches(images: jax.Array, patch: int) -> jax.Array:
    """Images as sequences of patches, row by row."""
    batch, side, channels = images.shape[0], images.shape[1] // patch, images.shape[-1]
    x = images.reshape(batch, side, patch, side, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    return whole(x.reshape(batch, side * side, patch * patch * channels))


def _positions(side: int, width: int) -> jax.Array:
    """The sines and cosines of the two coordinates of each patch."""
    frequencies = 1e-4 ** (jnp.arange(width // 4) / (width // 4))
    y, x = jnp.meshgrid(*[jnp.arange(side)] * 2, indexing="ij")
    angles = [coordinate.reshape(-1, 1) * frequencies for coordinate in (y, x)]
    return jnp.concatenate([wave(each) for each in angles for wave in (jnp.sin, jnp.cos)], -1)


def diffusion_transformer(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A DiT on latents of 32 x 32: noise is predicted by blocks that a time step and a class scale, shift and gate."""
    width, heads, layers, side, patch, classes, batch = 768, 12, 4, 32, 2, 1000, 32 * devices
    if smoke:
        width, heads, layers, side, patch, classes, batch = 32, 4, 2, 8, 2, 8, devices
    channels, frequencies, steps = 4, 128, 1000
    layer = {
        **dict.fromkeys(("q", "k", "v", "out"), array(width, width)),
        "up": array(width, 4 * width),
        "down": array(4 * width, width),
        "modulation": array(width, 6 * width),
        "modulation_bias": array(6 * width),
    }
    params = {
        "patches": array(patch * patch * channels, width),
        "time_1": array(2 * frequencies, width),
        "time_2": array(width, width),
        "classes": array(classes + 1, width),
        "layers": [layer] * layers,
        "last_modulation": array(width, 2 * width),
        "last": array(width, patch * patch * channels),
    }
    betas = jnp.linspace(1e-4, 0.02, steps)
    kept = jnp.cumprod(1 - betas)
    ones, zeros = jnp.ones(width, jnp.bfloat16), jnp.zeros(width, jnp.bfloat16)

    def norm(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
        return whole(layer_norm(x, ones, zeros) * (1 + scale[:, None]) + shift[:, None])

    def block(w: Any, x: jax.Array, condition: jax.Array) -> jax.Array:
        modulation = constrain(jax.nn.silu(condition) @ w["modulation"] + w["modulation_bias"], "batch", None)
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = jnp.split(modulation, 6, -1)
        y = norm(x, shift_1, scale_1)
        q, k, v = (in_heads(y @ w[name], heads) for name in ("q", "k", "v"))
        x = residual(x + gate_1[:, None] * residual(attend(q, k, v, causal=False) @ w["out"]))
        y = constrain(jax.nn.gelu(norm(x, shift_2, scale_2) @ w["up"]), "batch", None, "tensor")
        return residual(x + gate_2[:, None] * residual(y @ w["down"]))

    def embedded_time(p: Any, time: jax.Array) -> jax.Array:
        angles = time[:, None] * 1e-4 ** (jnp.arange(frequencies) / frequencies)
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1).astype(jnp.bfloat16)
        return constrain(constrain(jax.nn.silu(waves @ p["time_1"]), "batch", "tensor") @ p["time_2"], "batch", None)

    def loss(p: Any, batch: Any) -> jax.Array:
        latents, labels = batch["latents"], batch["labels"]
        noise_key, time_key, drop_key = jax.random.split(jax.random.wrap_key_data(batch["key"]), 3)
        time = jax.random.randint(time_key, labels.shape, 0, steps)
        noise = constrain(jax.random.normal(noise_key, latents.shape), "batch", None, None, None)
        labels = jnp.where(jax.random.bernoulli(drop_key, 0.1, labels.shape), classes, labels)
        weight = kept[time][:, None, None, None]
        noisy = jnp.sqrt(weight) * latents + jnp.sqrt(1 - weight) * noise
        condition = constrain(embedded_time(p, time) + p["classes"][labels], "batch", None)
        x = _patches(noisy.astype(jnp.bfloat16), patch) @ p["patches"]
        x = residual(x + _positions(side // patch, width).astype(x.dtype))
        for w in p["layers"]:
            x = block(w, x, condition)
        shift, scale = jnp.split(constrain(jax.nn.silu(condition) @ p["last_modulation"], "batch", None), 2, -1)
        predicted = (norm(x, shift, scale) @ p["last"]).astype(jnp.float32)
        return jnp.mean((predicted - _patches(noise, patch)) ** 2)

    latents = array(batch, side, side, channels, dtype=jnp.float32)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return train_step(loss), (with_moments(params), {"latents": latents, "labels": tokens(batch), "key": key})


def masked_autoencoder(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """An MAE: an encoder reads a quarter of the patches, a narrower decoder predicts the pixels of the others."""
    widths, heads, layers, image, patch, batch = (768, 512), (12, 16), (12, 8), 256, 16, 64 * devices
    if smoke:
        widths, heads, layers, image, patch, batch = (32, 16), (4, 2), (2, 1), 16, 4, devices
    side, pixels = image // patch, patch * patch * 3
    count = side * side
    shown = count // 4

    def linear(before: int, after: int, *lead: int) -> dict[str, Any]:
        return {"w": array(*lead, before, after, dtype=jnp.float32), "b": array(*lead, after, dtype=jnp.float32)}

    def stack(width: int, layers: int) -> dict[str, Any]:
        norm = array(layers, width, dtype=jnp.float32)
        bias = array(layers, 3, width, dtype=jnp.float32)
        return {
            "qkv": {"w": array(layers, width, 3, width, dtype=jnp.float32), "b": bias},
            "out": linear(width, width, layers),
            "up": linear(width, 4 * width, layers),
            "down": linear(4 * width, width, layers),
            **dict.fromkeys(("scale_1", "shift_1", "scale_2", "shift_2"), norm),
        }

    encoder, decoder = widths
    params = {
        "patches": linear(pixels, encoder),
        "encoder": {"layers": stack(encoder, layers[0])},
        "bridge": linear(encoder, decoder),
        "mask_token": array(decoder, dtype=jnp.float32),
        "decoder": {"layers": stack(decoder, layers[1])},
        "pixels": linear(decoder, pixels),
    }

    def apply(p: Any, x: jax.Array) -> jax.Array:
        return x @ p["w"] + p["b"]

    def transformed(p: Any, x: jax.Array, heads: int) -> jax.Array:
        def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            y = whole(layer_norm(x, w["scale_1"], w["shift_1"]))
            qkv = jnp.einsum("bld,dkh->kblh", y, w["qkv"]["w"])
            q, k, v = (in_heads(each + b, heads) for each, b in zip(qkv, w["qkv"]["b"], strict=True))
            x = residual(x + residual(apply(w["out"], attend(q, k, v, causal=False))))
            y = whole(layer_norm(x, w["scale_2"], w["shift_2"]))
            y = constrain(jax.nn.gelu(apply(w["up"], y)), "batch", None, "tensor")
            return residual(x + residual(apply(w["down"], y))), None

        return jax.lax.scan(jax.checkpoint(block), x, p["layers"])[0]

    def loss(p: Any, batch: Any) -> jax.Array:
        p = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p)
        target = _patches(batch["images"], patch)
        noise = constrain(jax.random.uniform(jax.random.wrap_key_data(batch["key"]), target.shape[:2]), "batch", None)
        order = constrain(jnp.argsort(noise, axis=1), "batch", None)
        back = constrain(jnp.argsort(order, axis=1), "batch", None)
        x = apply(p["patches"], target.astype(jnp.bfloat16)) + _positions(side, encoder).astype(jnp.bfloat16)
        x = residual(jnp.take_along_axis(whole(x), order[:, :shown, None], 1))
        x = apply(p["bridge"], transformed(p["encoder"], x, heads[0]))
        hidden = jnp.broadcast_to(p["mask_token"], (x.shape[0], count - shown, decoder))
        x = jnp.take_along_axis(whole(jnp.concatenate([x, hidden], 1)), back[..., None], 1)
        x = transformed(p["decoder"], residual(x + _positions(side, decoder).astype(x.dtype)), heads[1])
        predicted = apply(p["pixels"], x).astype(jnp.float32)
        mean, variance = jnp.mean(target, -1, keepdims=True), jnp.var(target, -1, keepdims=True)
        errors = jnp.mean((predicted - (target - mean) * jax.lax.rsqrt(variance + 1e-6)) ** 2, -1)
        return jnp.sum(errors * (back >= shown)) / (errors.shape[0] * (count - shown))

    optimizer = optax.adamw(1.5e-4, b2=0.95, weight_decay=0.05)
    step, state = optax_step(loss, optimizer, params)
    images = array(batch, image, image, 3, dtype=jnp.float32)
    return step, (state, {"images": images, "key": jax.ShapeDtypeStruct((2,), jnp.uint32)})
