"""Kinds of train steps as users of libraries write them: Flax NNX, Equinox for single examples, CTC of optax."""

from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from plan_models.experts import Splits, constrain, constrain_as_moments
from plan_models.parts import array, in_heads, layer_norm, residual, tokens, whole
from plan_models.updates import optax_step

NNX_SPLITS: Splits = (
    (r"(^|/)attention/(query|key|value)/kernel(/|$)", 1, "tensor"),
    (r"(^|/)attention/(query|key|value)/bias(/|$)", 0, "tensor"),
    (r"(^|/)attention/out/kernel(/|$)", 0, "tensor"),
    (r"(^|/)up/(kernel|bias)(/|$)", -1, "tensor"),
    (r"(^|/)down/kernel(/|$)", 0, "tensor"),
    (r"(^|/)embed/embedding(/|$)", 0, "rows"),
)
MIXER_SPLITS: Splits = (
    (r"(^|/)up/(weight|bias)$", 0, "tensor"),
    (r"(^|/)down/weight$", 1, "tensor"),
)
CONFORMER_SPLITS: Splits = (
    (r"(^|/)(q|k|v|up|value|gate|depth)$", -1, "tensor"),
    (r"(^|/)(out|down|project)$", -2, "tensor"),
    (r"(^|/)(norm|shift)_channels$", 0, "tensor"),
)


@final
class DecoderLayer(nnx.Module):
    """A layer of a GPT in Flax NNX: parameters are float32, and computed with in bfloat16."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        low = jnp.bfloat16
        self.norm_1, self.norm_2 = (nnx.LayerNorm(width, dtype=low, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(
            heads, width, dtype=low, dropout_rate=0.1, deterministic=True, decode=False, keep_rngs=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, dtype=low, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=low, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = residual(x + residual(self.attention(whole(self.norm_1(x)), mask=mask)))
        y = constrain(nnx.gelu(self.up(whole(self.norm_2(x)))), "batch", None, "tensor")
        return residual(x + residual(self.down(y)))


@final
class LanguageModel(nnx.Module):
    """A GPT with learned positions and a tied head."""

    def __init__(self, width: int, heads: int, layers: int, vocab: int, length: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab, width, dtype=jnp.bfloat16, rngs=rngs)
        self.positions = nnx.Embed(length, width, dtype=jnp.bfloat16, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(text)
        x = constrain(self.embed(text), "batch beside table", None, None)
        x = residual(residual(x) + self.positions(jnp.arange(text.shape[1])))
        for layer in self.layers:
            x = layer(x, mask)
        x = constrain(self.norm(x), "batch beside vocab", None, None)
        return constrain(self.embed.attend(x), "batch beside vocab", None, "vocab")


def nnx_decoder(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A GPT of four Flax NNX layers: the step merges the module from its parameters."""
    width, heads, layers, vocab, length, batch = 768, 12, 4, 50304, 1024, 4 * devices
    if smoke:
        width, heads, layers, vocab, length, batch = 32, 4, 2, 64, 16, devices
    model = nnx.eval_shape(lambda: LanguageModel(width, heads, layers, vocab, length, nnx.Rngs(0)))
    graph, params = nnx.split(model)

    def loss(params: Any, text: jax.Array) -> jax.Array:
        scores = nnx.merge(graph, params)(text[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(scores, text[:, 1:]).mean()

    schedule = optax.warmup_cosine_decay_schedule(1e-4, 6e-4, 100, 10_000)
    step, state = optax_step(loss, optax.adamw(schedule, b2=0.95, weight_decay=0.1), params, "optimizer")
    return step, (state, tokens(batch, length + 1))


@final
class MixerMLP(eqx.Module):
    """Two layers on a vector."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, size: int, hidden: int, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.up = eqx.nn.Linear(size, hidden, key=first)
        self.down = eqx.nn.Linear(hidden, size, key=second)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(constrain(jax.nn.gelu(self.up(x)), "tensor"))


@final
class MixerBlock(eqx.Module):
    """Mixes the patches of each channel, then the channels of each patch."""

    over_patches: MixerMLP
    over_channels: MixerMLP
    norm_1: eqx.nn.LayerNorm
    norm_2: eqx.nn.LayerNorm

    def __init__(self, width: int, patches: int, hidden: tuple[int, int], key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.over_patches = MixerMLP(patches, hidden[0], first)
        self.over_channels = MixerMLP(width, hidden[1], second)
        self.norm_1, self.norm_2 = eqx.nn.LayerNorm((width, patches)), eqx.nn.LayerNorm((patches, width))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = constrain(x + jax.vmap(self.over_patches)(self.norm_1(x)), None, None).T
        return constrain(x + jax.vmap(self.over_channels)(self.norm_2(x)), None, None).T


@final
class Mixer(eqx.Module):
    """An MLP-Mixer for a single image of `(channels, height, width)`."""

    patches: eqx.nn.Conv2d
    blocks: list[MixerBlock]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(
        self, image: int, patch: int, width: int, hidden: tuple[int, int], layers: int, classes: int, key: jax.Array
    ) -> None:
        first, last, *keys = jax.random.split(key, layers + 2)
        patches = (image // patch) ** 2
        self.patches = eqx.nn.Conv2d(3, width, patch, patch, key=first)
        self.blocks = [MixerBlock(width, patches, hidden, block_key) for block_key in keys]
        self.norm = eqx.nn.LayerNorm((width, patches))
        self.head = eqx.nn.Linear(width, classes, key=last)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.patches(image)
        x = x.reshape(x.shape[0], -1)
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(self.norm(x), -1))


def mixer(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A Mixer-B/16 of four blocks in float32, a `vmap` of the module for one image, learned by Lion."""
    image, patch, width, hidden, layers, classes, batch = 224, 16, 768, (384, 3072), 4, 1000, 32 * devices
    if smoke:
        image, patch, width, hidden, layers, classes, batch = 16, 8, 32, (16, 64), 2, 16, devices
    optimizer = optax.lion(1e-4, weight_decay=0.1)

    def start(key: jax.Array) -> Any:
        model = Mixer(image, patch, width, hidden, layers, classes, key)
        return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_value_and_grad
    def loss(model: Mixer, batch: Any) -> jax.Array:
        scores = jax.vmap(model)(constrain(batch["images"], "batch", None, None, None))
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["labels"]).mean()

    def step(state: Any, batch: Any) -> Any:
        model, moments = state
        value, gradients = loss(model, batch)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, moments = optimizer.update(constrain_as_moments(gradients), moments, params)
        return (constrain_as_moments(eqx.apply_updates(model, updates)), moments), value

    images = array(batch, 3, image, image, dtype=jnp.float32)
    return step, (eqx.filter_eval_shape(start, jax.random.key(0)), {"images": images, "labels": tokens(batch)})


def speech_encoder(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A Conformer of four blocks on spectrograms, with CTC: float32 parameters, computed with in bfloat16."""
    width, heads, hidden, kernel, layers, bins = 512, 8, 2048, 31, 4, 80
    vocab, frames, labels, batch = 1024, 1024, 64, 8 * devices
    if smoke:
        width, heads, hidden, kernel, layers, bins = 32, 4, 64, 3, 2, 8
        vocab, frames, labels, batch = 32, 64, 4, devices

    def weight(*shape: int) -> jax.ShapeDtypeStruct:
        return array(*shape, dtype=jnp.float32)

    norm = {"norm": weight(width), "shift": weight(width)}
    feed = {**norm, "up": weight(width, hidden), "down": weight(hidden, width)}
    block = {
        "first": feed,
        "attention": {**norm, **dict.fromkeys(("q", "k", "v", "out"), weight(width, width))},
        "convolution": {
            **norm,
            **dict.fromkeys(("value", "gate", "project"), weight(width, width)),
            "depth": weight(kernel, 1, width),
            **dict.fromkeys(("norm_channels", "shift_channels"), weight(width)),
        },
        "second": feed,
        "last": norm,
    }
    params = {
        "subsample": [weight(3, 3, 1, width), weight(3, 3, width, width)],
        "into": weight(bins // 4 * width, width),
        "blocks": [block] * layers,
        "head": weight(width, vocab),
    }

    def normed(w: Any, x: jax.Array) -> jax.Array:
        return whole(layer_norm(x, w["norm"], w["shift"]))

    def feed_forward(w: Any, x: jax.Array) -> jax.Array:
        return whole(constrain(jax.nn.silu(normed(w, x) @ w["up"]), "batch", None, "tensor") @ w["down"])

    def attention(w: Any, x: jax.Array, bias: jax.Array) -> jax.Array:
        y = normed(w, x)
        q, k, v = (in_heads(y @ w[name], heads) for name in ("q", "k", "v"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * (width // heads) ** -0.5 + bias
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1).astype(x.dtype), v)
        return whole(constrain(mixed.reshape(x.shape), "batch", None, "tensor") @ w["out"])

    def convolution(w: Any, x: jax.Array) -> jax.Array:
        y = normed(w, x)
        y = constrain((y @ w["value"]) * jax.nn.sigmoid(y @ w["gate"]), "batch", None, "tensor")
        numbers = ("NWC", "WIO", "NWC")
        y = jax.lax.conv_general_dilated(
            y, w["depth"], (1,), "SAME", dimension_numbers=numbers, feature_group_count=width
        )
        y = jax.nn.silu(layer_norm(y, w["norm_channels"], w["shift_channels"]))
        return whole(constrain(y, "batch", None, "tensor") @ w["project"])

    def encode(p: Any, x: jax.Array, padded: jax.Array) -> jax.Array:
        x = x[..., None].astype(jnp.bfloat16)
        for weights in p["subsample"]:
            numbers = ("NHWC", "HWIO", "NHWC")
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, weights, (2, 2), "SAME", dimension_numbers=numbers))
            x = constrain(x, "batch", None, None, None)
        x = x.reshape(*x.shape[:2], -1) @ p["into"]
        angles = jnp.arange(x.shape[1])[:, None] / 1e4 ** jnp.linspace(0, 1, width // 2)
        x = whole(x + jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(x.dtype))
        bias = jnp.where(padded, -1e9, 0.0)[:, None, None]
        for w in p["blocks"]:
            x = whole(x + 0.5 * feed_forward(w["first"], x))
            x = whole(x + attention(w["attention"], x, bias))
            x = whole(x + convolution(w["convolution"], x))
            x = normed(w["last"], x + 0.5 * feed_forward(w["second"], x))
        return (x @ p["head"]).astype(jnp.float32)

    def loss(p: Any, batch: Any) -> jax.Array:
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p)
        padded = jnp.all(batch["spectrograms"] == 0, -1)[:, ::4]
        scores = constrain(encode(low, batch["spectrograms"], padded), "batch", None, None)
        no_label = (batch["labels"] == 0).astype(jnp.float32)
        losses = optax.ctc_loss(scores, padded.astype(jnp.float32), batch["labels"], no_label)
        return jnp.mean(losses / jnp.maximum(jnp.sum(1 - no_label, -1), 1))

    optimizer = optax.chain(optax.clip_by_global_norm(5.0), optax.adamw(1e-3, b2=0.98, weight_decay=1e-3))
    step, state = optax_step(loss, optimizer, params, "optimizer")
    return step, (state, {"spectrograms": weight(batch, frames, bins), "labels": tokens(batch, labels)})
