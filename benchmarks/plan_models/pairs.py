"""Kinds of train steps whose losses compare examples or look things up: DLRM, DPO, CLIP."""

from typing import Any

import jax
import jax.numpy as jnp

from plan_models.experts import Splits, constrain
from plan_models.kinds import decoder, mlp
from plan_models.parts import (
    array,
    attend,
    in_heads,
    layer_norm,
    look_up,
    residual,
    rms_norm,
    tokens,
    train_step,
    vocabulary_scores,
    whole,
    with_moments,
)

TABLE_SPLITS: Splits = (
    (r"(^|/)tables/\d+$", 0, "rows"),
    (r"(^|/)tables/\d+$", 1, "columns"),
    (r"(^|/)(bottom/(0|2)|top/0)$", 1, "tensor"),
    (r"(^|/)(top|bottom)/1$", 0, "tensor"),
)
CLIP_SPLITS: Splits = (
    (r"(^|/)(q|k|v|up)$", -1, "tensor"),
    (r"(^|/)(out|down)$", -2, "tensor"),
    (r"(^|/)embed$", 0, "rows"),
)


def recommendations(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A DLRM: eight large tables, an MLP for numbers, products of all pairs of features, an MLP on top."""
    rows, width, dense, tables, batch = 524288, 64, 16, 8, 2048 * devices
    bottom, top = (512, 256, width), (1024, 512, 1)
    if smoke:
        rows, width, dense, tables, batch = 64, 16, 8, 2, 4 * devices
        bottom, top = (32, 16, width), (32, 16, 1)
    features = tables + 1
    pairs = features * (features - 1) // 2 + width

    def layers(size: int, widths: tuple[int, ...]) -> list[Any]:
        return [array(before, after) for before, after in zip((size, *widths), widths, strict=False)]

    params = {"tables": [array(rows, width)] * tables, "bottom": layers(dense, bottom), "top": layers(pairs, top)}

    def forward(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for index, weight in enumerate(weights):
            x = constrain(x @ weight, "batch", None if index == 1 or weight.shape[1] == 1 else "tensor")
            x = x if index == len(weights) - 1 else jax.nn.relu(x)
        return constrain(x, "batch", None)

    def loss(p: Any, batch: Any) -> jax.Array:
        looked_up = [
            constrain(constrain(table[ids], "batch beside table", "columns"), "batch", None)
            for table, ids in zip(p["tables"], batch["ids"].T, strict=True)
        ]
        x = forward(p["bottom"], batch["dense"])
        stacked = constrain(jnp.stack([x, *looked_up], 1), "batch", None, None)
        products = jnp.einsum("bfd,bgd->bfg", stacked, stacked)
        first, second = jnp.triu_indices(features, 1)
        x = jnp.concatenate([x, products[:, first, second]], -1)
        scores = forward(p["top"], constrain(x, "batch", None))[:, 0].astype(jnp.float32)
        return jnp.mean(jax.nn.softplus(scores) - scores * batch["clicks"])

    batches = {"ids": tokens(batch, tables), "dense": array(batch, dense), "clicks": array(batch, dtype=jnp.float32)}
    return train_step(loss), (with_moments(params), batches)


def preferences(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """DPO: a policy learns from pairs of answers, beside the frozen model that it started as."""
    width, heads, hidden, layers, vocab, length, batch = 1024, 16, 2816, 4, 32000, 512, 2 * devices
    if smoke:
        width, heads, hidden, layers, vocab, length, batch = 32, 4, 64, 2, 64, 16, devices

    def log_likelihood(p: Any, text: jax.Array) -> jax.Array:
        @jax.checkpoint
        def block(x: jax.Array, w: Any) -> jax.Array:
            y = whole(rms_norm(x, w["norm_1"]))
            q, k, v = (in_heads(y @ w[name], heads) for name in ("q", "k", "v"))
            return mlp(w, residual(x + residual(attend(q, k, v, causal=True) @ w["out"])))

        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), look_up(p["embed"], text[:, :-1]), p["layers"])
        scores = vocabulary_scores(rms_norm(x, p["norm"]), p["head"])
        chances = jax.nn.log_softmax(scores.astype(jnp.float32), -1)
        return jnp.take_along_axis(chances, text[:, 1:, None], -1)[..., 0].sum(-1)

    def loss(p: Any, batch: Any) -> jax.Array:
        text = constrain(jnp.concatenate([batch["chosen"], batch["rejected"]]), "batch", None)
        policy = log_likelihood(p, text)
        reference = jax.lax.stop_gradient(log_likelihood(batch["reference"], text))
        chosen, rejected = jnp.split(policy - reference, 2)
        return -jnp.mean(jax.nn.log_sigmoid(0.1 * (chosen - rejected)))

    params, text = decoder(width, hidden, layers, vocab), tokens(batch, length + 1)
    return train_step(loss), (with_moments(params), {"reference": params, "chosen": text, "rejected": text})


def image_text_pairs(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """CLIP: two transformers, and a loss over all pairs of an image and a text of the whole batch."""
    width, heads, layers, patches, vocab, length, batch = 512, 8, 2, 64, 32000, 64, 64 * devices
    if smoke:
        width, heads, layers, patches, vocab, length, batch = 32, 4, 1, 8, 64, 8, devices
    inputs = 3 * 16 * 16
    layer = {
        **dict.fromkeys(("q", "k", "v", "out"), array(width, width)),
        "up": array(width, 4 * width),
        "down": array(4 * width, width),
        **dict.fromkeys(("norm_1", "norm_2", "shift_1", "shift_2"), array(width)),
    }
    tower = {"layers": [layer] * layers, "project": array(width, width)}
    params = {
        "image": {**tower, "patches": array(inputs, width), "positions": array(patches, width)},
        "text": {**tower, "embed": array(vocab, width), "positions": array(length, width)},
        "scale": array(dtype=jnp.float32),
    }

    @jax.checkpoint
    def block(w: Any, x: jax.Array) -> jax.Array:
        y = whole(layer_norm(x, w["norm_1"], w["shift_1"]))
        q, k, v = (in_heads(y @ w[name], heads) for name in ("q", "k", "v"))
        x = residual(x + residual(attend(q, k, v, causal=False) @ w["out"]))
        y = whole(layer_norm(x, w["norm_2"], w["shift_2"]))
        return residual(x + residual(constrain(jax.nn.gelu(y @ w["up"]), "batch", None, "tensor") @ w["down"]))

    def embedded(p: Any, x: jax.Array) -> jax.Array:
        x = residual(x + p["positions"])
        for w in p["layers"]:
            x = block(w, x)
        y = constrain((jnp.mean(x, 1) @ p["project"]).astype(jnp.float32), "batch", None)
        return y / jnp.linalg.norm(y, axis=-1, keepdims=True)

    def loss(p: Any, batch: Any) -> jax.Array:
        images = embedded(p["image"], residual(batch["patches"] @ p["image"]["patches"]))
        texts = embedded(p["text"], look_up(p["text"]["embed"], batch["text"]))
        scores = constrain(images @ texts.T, "batch", None) * jnp.exp(p["scale"])
        matches = jnp.arange(scores.shape[0])
        by_image, by_text = jax.nn.log_softmax(scores, 1), jax.nn.log_softmax(scores, 0)
        return -jnp.mean(by_image[matches, matches] + by_text[matches, matches]) / 2

    batches = {"patches": array(batch, patches, inputs), "text": tokens(batch, length)}
    return train_step(loss), (with_moments(params), batches)
