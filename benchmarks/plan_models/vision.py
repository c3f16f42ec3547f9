"""Vision models of the planning benchmark: a transformer of Equinox modules, and a residual net."""

from collections.abc import Callable
from typing import Any, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp

from plan_models.experts import Expert, Splits, constrain, gathered, plain
from plan_models.parts import array, cross_entropy, equinox_step, in_heads, residual, tokens, train_step, with_moments

VIT_SPLITS: Splits = (
    (r"/(query|key|value|up)/(weight|bias)$", 0, "tensor"),
    (r"/(out|down)/weight$", 1, "tensor"),
)
CONV_SPLITS: Splits = (
    (r"(^|/)(first|third)$", -1, "tensor"),
    (r"(^|/)second$", -2, "tensor"),
    (r"(^|/)(scale|shift)_1$", 0, "tensor"),
)


def per_vector(layer: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Applies a layer to every vector of a batch of sequences."""
    return jax.vmap(jax.vmap(layer))(x)


@final
class Block(eqx.Module):
    """A layer of a vision transformer."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm_1: eqx.nn.LayerNorm
    norm_2: eqx.nn.LayerNorm
    activation: Callable[[jax.Array], jax.Array]
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 6)
        self.query, self.key, self.value, self.out = (
            eqx.nn.Linear(width, width, key=part_key) for part_key in keys[:4]
        )
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[4])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[5])
        self.norm_1, self.norm_2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.activation, self.heads = jax.nn.gelu, heads

    def __call__(self, x: jax.Array) -> jax.Array:
        y = per_vector(self.norm_1, x)
        q, k, v = (in_heads(per_vector(layer, y), self.heads) for layer in (self.query, self.key, self.value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
        read = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1).astype(x.dtype), v)
        x = residual(x + residual(per_vector(self.out, constrain(read.reshape(x.shape), "batch", None, "tensor"))))
        y = constrain(self.activation(per_vector(self.up, per_vector(self.norm_2, x))), "batch", None, "tensor")
        return residual(x + residual(per_vector(self.down, y)))


@final
class VisionTransformer(eqx.Module):
    """A transformer on patches of images, with a token for the class."""

    patches: eqx.nn.Linear
    token: jax.Array
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(
        self, image: int, patch: int, width: int, heads: int, layers: int, classes: int, key: jax.Array
    ) -> None:
        keys = jax.random.split(key, layers + 2)
        self.patch = patch
        self.patches = eqx.nn.Linear(3 * patch * patch, width, key=keys[0])
        self.head = eqx.nn.Linear(width, classes, key=keys[1])
        self.token = jnp.zeros((1, width))
        self.positions = jnp.zeros(((image // patch) ** 2 + 1, width))
        self.blocks = [Block(width, heads, block_key) for block_key in keys[2:]]
        self.norm = eqx.nn.LayerNorm(width)

    def __call__(self, images: jax.Array) -> jax.Array:
        batch, side = images.shape[0], images.shape[1] // self.patch
        x = images.reshape(batch, side, self.patch, side, self.patch, 3)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, side * side, self.patch * self.patch * 3)
        x = residual(per_vector(self.patches, constrain(x, "batch", None, None)))
        x = jnp.concatenate([jnp.broadcast_to(self.token, (batch, 1, x.shape[2])), x], 1) + self.positions
        for block in self.blocks:
            x = eqx.filter_checkpoint(block)(residual(x))
        return constrain(jax.vmap(self.head)(jax.vmap(self.norm)(x[:, 0])), "batch", None)


def vit(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """ViT-B/16: 12 layers written out, images of 224 x 224."""
    image, patch, width, heads, layers, classes, batch = 224, 16, 768, 12, 12, 1000, 32 * devices
    if smoke:
        image, patch, width, heads, layers, classes, batch = 16, 8, 32, 4, 2, 16, devices

    def make(key: jax.Array) -> VisionTransformer:
        return VisionTransformer(image, patch, width, heads, layers, classes, key)

    def loss(model: VisionTransformer, batch: Any) -> jax.Array:
        return cross_entropy(model(batch["images"]), batch["labels"])

    step, state = equinox_step(make, loss)
    return step, (state, {"images": array(batch, image, image, 3), "labels": tokens(batch)})


def conv_net(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A residual net of 17 convolutions and three shortcuts, group norm, images of 64 x 64."""
    widths, image, classes, batch, repeats = (128, 256, 512, 1024), 64, 1000, 32 * devices, 2
    if smoke:
        widths, image, classes, batch, repeats = (8, 16), 16, 16, devices, 1
    groups = 32 if not smoke else 4

    def convolution(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
        examples, height, width, channels = x.shape
        y = x.astype(jnp.float32).reshape(examples, height, width, groups, channels // groups)
        y = y - jnp.mean(y, (1, 2, 4), keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, (1, 2, 4), keepdims=True) + 1e-5)
        return y.reshape(x.shape).astype(x.dtype) * scale + shift

    def whole(x: jax.Array) -> jax.Array:
        return constrain(x, "batch", None, None, None)

    def block(p: Any, x: jax.Array, stride: int) -> jax.Array:
        first = gathered(p["first"], None, None, None, "tensor")
        second = gathered(p["second"], None, None, "tensor", None)
        y = constrain(convolution(x, first, stride), "batch", None, None, "tensor")
        y = jax.nn.relu(norm(y, p["scale_1"], p["shift_1"]))
        y = whole(convolution(constrain(y, "batch", None, None, "tensor"), second))
        y = norm(y, p["scale_2"], p["shift_2"])
        x = convolution(x, gathered(p["shortcut"], None, None, None, None), stride) if "shortcut" in p else x
        return whole(jax.nn.relu(whole(x) + y))

    def loss(p: Any, batch: Any) -> jax.Array:
        x = whole(convolution(whole(batch["images"]), p["stem"]))
        for stage_index, stage in enumerate(p["stages"]):
            for block_index, block_params in enumerate(stage):
                x = block(block_params, x, 2 if stage_index and not block_index else 1)
        x = constrain(jnp.mean(x, (1, 2)), "batch", None)
        return cross_entropy(constrain(x @ p["head"], "batch", None), batch["labels"])

    stages, before = [], widths[0]
    for width in widths:
        stage = []
        for _ in range(repeats):
            layer = {"first": array(3, 3, before, width), "second": array(3, 3, width, width)}
            layer |= {name: array(width) for name in ("scale_1", "shift_1", "scale_2", "shift_2")}
            stage.append(layer | ({"shortcut": array(1, 1, before, width)} if before != width else {}))
            before = width
        stages.append(stage)
    params = {"stem": array(3, 3, 3, widths[0]), "stages": stages, "head": array(before, classes)}
    batches = {"images": array(batch, image, image, 3), "labels": tokens(batch)}
    return train_step(loss), (with_moments(params), batches)


def conv_experts() -> tuple[Expert, ...]:
    """The plans for a convolution net: some split channels within each block."""
    d, m, df = ("data",), ("model",), ("data", "fsdp")
    plans = (
        *plain(CONV_SPLITS),
        Expert("channels over model, copies over data", d, (), d, m, splits=CONV_SPLITS),
        Expert("channels over model, FSDP over data", d, d, d, m, splits=CONV_SPLITS),
        Expert("channels over model, ZeRO-1 over data+fsdp", df, (), df, m, splits=CONV_SPLITS),
        Expert("channels over model, FSDP over data+fsdp", df, df, df, m, splits=CONV_SPLITS),
    )
    once = (
        attrs.evolve(expert, name=f"{expert.name}, gathered once", gathers=True)
        for expert in plans
        if expert.parameters
    )
    return (*plans, *once)
