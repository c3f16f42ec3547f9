"""Transformers of the planning benchmark that read text, as plain functions of dicts."""

from typing import Any

import jax
import jax.numpy as jnp

from plan_models.experts import Splits, constrain
from plan_models.parts import (
    array,
    attend,
    cross_entropy,
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

GPT_SPLITS: Splits = (
    (r"(^|/)(q|k|v|up|up_bias)$", -1, "tensor"),
    (r"(^|/)(out|down)$", -2, "tensor"),
    (r"(^|/)embed$", 0, "rows"),
)
LLAMA_SPLITS: Splits = (
    (r"(^|/)(q|k|v|gate|up)$", -1, "tensor"),
    (r"(^|/)(out|down)$", -2, "tensor"),
    (r"(^|/)embed$", 0, "rows"),
    (r"(^|/)embed$", 1, "columns"),
    (r"(^|/)head$", 1, "vocab"),
)


def gpt2(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """GPT-2 small: 12 layers written out, learned positions, a tied head, the vocabulary padded to 50,304."""
    width, heads, layers, vocab, length, batch = 768, 12, 12, 50304, 1024, 8 * devices
    if smoke:
        width, heads, layers, vocab, length, batch = 32, 4, 2, 64, 16, devices
    layer = {
        **dict.fromkeys(("q", "k", "v", "out"), array(width, width)),
        "up": array(width, 4 * width),
        "up_bias": array(4 * width),
        "down": array(4 * width, width),
        "down_bias": array(width),
        **dict.fromkeys(("norm_1", "norm_2", "shift_1", "shift_2"), array(width)),
    }
    params = {
        "embed": array(vocab, width),
        "positions": array(length, width),
        "layers": [layer] * layers,
        "norm": array(width),
        "shift": array(width),
    }

    @jax.checkpoint
    def block(p: Any, x: jax.Array) -> jax.Array:
        y = whole(layer_norm(x, p["norm_1"], p["shift_1"]))
        q, k, v = (in_heads(y @ p[name], heads) for name in ("q", "k", "v"))
        x = residual(x + residual(attend(q, k, v, causal=True) @ p["out"]))
        y = whole(layer_norm(x, p["norm_2"], p["shift_2"]))
        y = constrain(jax.nn.gelu(y @ p["up"] + p["up_bias"]), "batch", None, "tensor")
        return residual(x + residual(y @ p["down"]) + p["down_bias"])

    def loss(p: Any, text: jax.Array) -> jax.Array:
        x = look_up(p["embed"], text[:, :-1]) + p["positions"]
        for layer_params in p["layers"]:
            x = block(layer_params, x)
        return cross_entropy(vocabulary_scores(layer_norm(x, p["norm"], p["shift"]), p["embed"].T), text[:, 1:])

    return train_step(loss), (with_moments(params), tokens(batch, length + 1))


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions."""
    length, half = x.shape[1], x.shape[-1] // 2
    angle = jnp.arange(length)[:, None] / 10000 ** (jnp.arange(half) / half)
    cos, sin = (part.astype(x.dtype)[:, None, :] for part in (jnp.cos(angle), jnp.sin(angle)))
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def llama(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A Llama with grouped queries: 8 layers stacked for a scan, RoPE, RMSNorm, SwiGLU."""
    width, heads, kv_heads, hidden, layers, vocab, length, batch = 2048, 16, 4, 5632, 8, 32000, 1024, 4 * devices
    if smoke:
        width, heads, kv_heads, hidden, layers, vocab, length, batch = 32, 8, 4, 64, 2, 64, 16, devices
    size = width // heads

    def stacked(*shape: int) -> jax.ShapeDtypeStruct:
        return array(layers, *shape)

    layer = {
        "q": stacked(width, width),
        "out": stacked(width, width),
        **dict.fromkeys(("k", "v"), stacked(width, kv_heads * size)),
        **dict.fromkeys(("gate", "up"), stacked(width, hidden)),
        "down": stacked(hidden, width),
        "norm_1": stacked(width),
        "norm_2": stacked(width),
    }
    params = {
        "embed": array(vocab, width),
        "layers": layer,
        "norm": array(width),
        "head": array(width, vocab),
    }

    def grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        examples, positions = q.shape[:2]
        q = q.reshape(examples, positions, kv_heads, heads // kv_heads, size)
        q = constrain(q, "batch", None, "tensor", None, None)
        scores = jnp.einsum("bqngd,bknd->bngqk", q, k).astype(jnp.float32) / size**0.5
        scores = jnp.where(jnp.tril(jnp.ones((positions, positions), bool)), scores, -1e9)
        mixed = jnp.einsum("bngqk,bknd->bqngd", jax.nn.softmax(scores, -1).astype(q.dtype), v)
        return constrain(mixed.reshape(examples, positions, width), "batch", None, "tensor")

    @jax.checkpoint
    def block(x: jax.Array, p: Any) -> jax.Array:
        x = residual(x)
        y = whole(rms_norm(x, p["norm_1"]))
        q, k, v = (in_heads(y @ p[name], count) for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
        x = residual(x + residual(grouped(_rotated(q), _rotated(k), v) @ p["out"]))
        y = whole(rms_norm(x, p["norm_2"]))
        y = constrain(jax.nn.silu(y @ p["gate"]) * (y @ p["up"]), "batch", None, "tensor")
        return residual(x + residual(y @ p["down"]))

    def loss(p: Any, text: jax.Array) -> jax.Array:
        x = look_up(p["embed"], text[:, :-1])
        x, _ = jax.lax.scan(lambda x, layer_params: (block(x, layer_params), None), x, p["layers"])
        return cross_entropy(vocabulary_scores(rms_norm(x, p["norm"]), p["head"]), text[:, 1:])

    return train_step(loss), (with_moments(params), tokens(batch, length + 1))


ENCODER_DECODER_SPLITS: Splits = (
    (r"(^|/)(cross_)?(q|k|v|up)$", -1, "tensor"),
    (r"(^|/)((cross_)?out|down)$", -2, "tensor"),
    (r"(^|/)embed$", 0, "rows"),
    (r"(^|/)embed$", 1, "columns"),
    (r"(^|/)head$", 1, "vocab"),
)


def encoder_decoder(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """Four encoder layers and four decoder layers, with cross-attention."""
    width, heads, hidden, layers, vocab, source, target, batch = 1024, 16, 4096, 4, 32128, 512, 256, 8 * devices
    if smoke:
        width, heads, hidden, layers, vocab, source, target, batch = 32, 4, 64, 1, 64, 16, 8, devices
    names = ("q", "k", "v", "out")
    reader = {
        **dict.fromkeys(names, array(width, width)),
        "up": array(width, hidden),
        "down": array(hidden, width),
        **dict.fromkeys(("norm_1", "norm_2"), array(width)),
    }
    writer = {**reader, **{f"cross_{name}": reader[name] for name in names}, "norm_3": array(width)}
    params = {
        "embed": array(vocab, width),
        "positions": array(source, width),
        "encoder": [reader] * layers,
        "encoder_norm": array(width),
        "decoder": [writer] * layers,
        "norm": array(width),
        "head": array(width, vocab),
    }

    def attention(p: Any, x: jax.Array, read: jax.Array, prefix: str = "", *, causal: bool = False) -> jax.Array:
        q = in_heads(x @ p[f"{prefix}q"], heads)
        k, v = (in_heads(read @ p[f"{prefix}{name}"], heads) for name in ("k", "v"))
        return residual(attend(q, k, v, causal=causal) @ p[f"{prefix}out"])

    def mlp(p: Any, x: jax.Array) -> jax.Array:
        y = constrain(jax.nn.relu(whole(rms_norm(x, p["norm_2"])) @ p["up"]), "batch", None, "tensor")
        return residual(x + residual(y @ p["down"]))

    @jax.checkpoint
    def encode(p: Any, x: jax.Array) -> jax.Array:
        y = whole(rms_norm(x, p["norm_1"]))
        return mlp(p, residual(x + attention(p, y, y)))

    @jax.checkpoint
    def decode(p: Any, x: jax.Array, read: jax.Array) -> jax.Array:
        y = whole(rms_norm(x, p["norm_1"]))
        x = residual(x + attention(p, y, y, causal=True))
        x = residual(x + attention(p, whole(rms_norm(x, p["norm_3"])), read, "cross_"))
        return mlp(p, x)

    def loss(p: Any, texts: Any) -> jax.Array:
        x = look_up(p["embed"], texts["source"]) + p["positions"]
        for layer_params in p["encoder"]:
            x = encode(layer_params, x)
        read = whole(rms_norm(x, p["encoder_norm"]))
        x = look_up(p["embed"], texts["target"][:, :-1]) + p["positions"][:target]
        for layer_params in p["decoder"]:
            x = decode(layer_params, x, read)
        return cross_entropy(vocabulary_scores(rms_norm(x, p["norm"]), p["head"]), texts["target"][:, 1:])

    texts = {"source": tokens(batch, source), "target": tokens(batch, target + 1)}
    return train_step(loss), (with_moments(params), texts)
