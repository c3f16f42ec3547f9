"""Kinds of train steps with attention inside windows: a Swin transformer."""

from typing import Any, final

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from plan_models.experts import Splits, constrain
from plan_models.parts import array, cross_entropy, tokens
from plan_models.updates import optax_step

SWIN_SPLITS: Splits = (
    (r"/up/(kernel|bias)$", -1, "tensor"),
    (r"/down/kernel$", -2, "tensor"),
)
"""Its first stage has three heads, so experts split only hidden units."""


def _in_windows(x: Any, window: int) -> Any:
    """Cuts images into windows: examples and windows become one dimension, the positions in a window another."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // window, window, width // window, window, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, window * window, channels)


def _distances(window: int) -> np.ndarray:
    """The row of the table of biases for each pair of positions in a window."""
    places = np.stack(np.meshgrid(np.arange(window), np.arange(window), indexing="ij")).reshape(2, -1)
    rows, columns = places[:, :, None] - places[:, None] + window - 1
    return rows * (2 * window - 1) + columns


def _mask(side: int, window: int, shift: int) -> np.ndarray:
    """Whether two positions of a window that was shifted were neighbors before it."""
    line = np.zeros(side, int)
    line[-window:-shift], line[-shift:] = 1, 2
    regions = _in_windows((3 * line[:, None] + line)[None, :, :, None], window)[..., 0]
    return regions[:, :, None] == regions[:, None]


@final
class SwinBlock(nn.Module):
    """Attention inside windows, which are shifted or not, then an MLP."""

    heads: int
    window: int
    shift: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, side, width, length = x.shape[0], x.shape[1], x.shape[3], self.window**2
        y = nn.LayerNorm(dtype=x.dtype)(x)
        y = jnp.roll(y, (-self.shift, -self.shift), (1, 2)) if self.shift else y
        y = constrain(_in_windows(y, self.window), "batch", None, None)
        qkv = nn.Dense(3 * width, dtype=x.dtype, name="qkv")(y).reshape(-1, length, 3, self.heads, width // self.heads)
        q, k, v = jnp.moveaxis(constrain(qkv, "batch", None, None, None, None), 2, 0)
        table = self.param("biases", nn.initializers.normal(0.02), ((2 * self.window - 1) ** 2, self.heads))
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k).astype(jnp.float32) / (width // self.heads) ** 0.5
        scores = scores + table[_distances(self.window)].transpose(2, 0, 1)
        if self.shift:
            mask = _mask(side, self.window, self.shift)
            scores = scores.reshape(batch, -1, *scores.shape[1:])
            scores = jnp.where(mask[:, None], scores, -1e9).reshape(-1, self.heads, length, length)
        weights = nn.softmax(constrain(scores, "batch", None, None, None)).astype(x.dtype)
        y = nn.Dense(width, dtype=x.dtype, name="out")(jnp.einsum("nhqk,nkhd->nqhd", weights, v).reshape(y.shape))
        y = y.reshape(batch, side // self.window, side // self.window, self.window, self.window, width)
        y = constrain(y.transpose(0, 1, 3, 2, 4, 5).reshape(x.shape), "batch", None, None, None)
        x = x + (jnp.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y)
        y = nn.Dense(4 * width, dtype=x.dtype, name="up")(nn.LayerNorm(dtype=x.dtype)(x))
        y = nn.Dense(width, dtype=x.dtype, name="down")(constrain(nn.gelu(y), "batch", None, None, "tensor"))
        return constrain(x + y, "batch", None, None, None)


@final
class Swin(nn.Module):
    """Stages of two blocks; between them four neighbors are merged, with half of their channels."""

    width: int
    heads: tuple[int, ...]
    window: int
    classes: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (4, 4), (4, 4), dtype=jnp.bfloat16, name="patches")(images)
        x = constrain(nn.LayerNorm(dtype=x.dtype)(x), "batch", None, None, None)
        for stage, heads in enumerate(self.heads):
            if stage:
                x = jnp.concatenate([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], -1)
                x = nn.LayerNorm(dtype=x.dtype)(x)
                x = nn.Dense(x.shape[-1] // 2, use_bias=False, dtype=x.dtype)(x)
            for shift in (0, self.window // 2):
                x = SwinBlock(heads, self.window, shift)(x)
        x = nn.LayerNorm(dtype=x.dtype)(x)
        return constrain(nn.Dense(self.classes, name="head")(jnp.mean(x, (1, 2))), "batch", None)


def window_attention(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """The first two stages of a Swin-T, on images of 256 x 256: windows of 8 x 8, every second block shifts them."""
    width, heads, window, image, classes, batch = 96, (3, 6), 8, 256, 1000, 32 * devices
    if smoke:
        width, heads, window, image, classes, batch = 12, (3, 6), 2, 32, 16, devices
    model = Swin(width, heads, window, classes)
    images = array(batch, image, image, 3, dtype=jnp.float32)
    apply: Any = model.apply

    def loss(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(apply(params, constrain(batch["images"], "batch", None, None, None)), batch["labels"])

    optimizer = optax.chain(optax.clip_by_global_norm(5.0), optax.adamw(1e-3, weight_decay=0.05))
    step, state = optax_step(loss, optimizer, jax.eval_shape(model.init, jax.random.key(0), images))
    return step, (state, {"images": images, "labels": tokens(batch)})
