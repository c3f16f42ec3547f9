"""Kinds of train steps of convolution nets: a Wasserstein GAN with a gradient penalty, a ConvNeXt, a VGG."""

import itertools
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from plan_models.experts import Splits, constrain, constrain_as_moments
from plan_models.parts import array, cross_entropy, tokens, train_step, with_moments

GAN_SPLITS: Splits = (
    (r"(critic|generator)/(convs/)?[02]/(w|b|scale|shift)$", -1, "tensor"),
    (r"(critic|generator)/(convs/)?[13]/w$", 2, "tensor"),
    (r"(^|/)key$", 0, None),
)
POOLED_SPLITS: Splits = ((r"/first$", -1, "tensor"), (r"/second$", -2, "tensor"))
NEXT_SPLITS: Splits = (
    (r"/up/(weight|bias)$", 0, "tensor"),
    (r"/down/weight$", 1, "tensor"),
)


def gradient_penalty(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A WGAN-GP for images of 64 x 64: the loss of the critic contains the norm of its gradient by its inputs."""
    widths, image, latent, batch = (128, 256, 512, 1024), 64, 128, 64 * devices
    if smoke:
        widths, image, latent, batch = (8, 16), 16, 8, devices
    side, dims = image >> len(widths), ("NHWC", "HWIO", "NHWC")

    def conv_params(before: int, after: int) -> dict[str, Any]:
        vector = array(after, dtype=jnp.float32)
        norm = {} if 3 in (before, after) else {"scale": vector, "shift": vector}
        return {"w": array(5, 5, before, after, dtype=jnp.float32), "b": vector, **norm}

    pairs = list(itertools.pairwise((3, *widths)))
    params = {
        "critic": {
            "convs": [conv_params(before, after) for before, after in pairs],
            "head": array(side * side * widths[-1], 1, dtype=jnp.float32),
        },
        "generator": {
            "into": array(latent, side * side * widths[-1], dtype=jnp.float32),
            "convs": [conv_params(after, before) for before, after in reversed(pairs)],
        },
    }

    def norm(p: Any, x: jax.Array) -> jax.Array:
        mean, variance = jnp.mean(x, (1, 2, 3), keepdims=True), jnp.var(x, (1, 2, 3), keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["shift"]

    def split(x: jax.Array, index: int) -> jax.Array:
        return constrain(x, "batch", None, None, None if index % 2 else "tensor")

    def criticized(p: Any, x: jax.Array) -> jax.Array:
        for index, w in enumerate(p["convs"]):
            x = jax.lax.conv_general_dilated(x, w["w"], (2, 2), "SAME", dimension_numbers=dims) + w["b"]
            x = norm(w, split(x, index)) if "scale" in w else split(x, index)
            x = jax.nn.leaky_relu(x, 0.2)
        return constrain(x.reshape(x.shape[0], -1) @ p["head"], "batch", None)[:, 0]

    def generated(p: Any, key: jax.Array) -> jax.Array:
        z = constrain(jax.random.normal(key, (batch, latent)), "batch", None)
        x = constrain((z @ p["into"]).reshape(batch, side, side, -1), "batch", None, None, None)
        for index, w in enumerate(p["convs"]):
            x = jax.lax.conv_transpose(jax.nn.relu(x), w["w"], (2, 2), "SAME", dimension_numbers=dims) + w["b"]
            x = norm(w, split(x, index)) if "scale" in w else split(x, index)
        return jnp.tanh(x)

    def critic_loss(p: Any, real: jax.Array, fake: jax.Array, key: jax.Array) -> jax.Array:
        mixed = fake + jax.random.uniform(key, (batch, 1, 1, 1)) * (real - fake)
        slopes = jax.grad(lambda x: jnp.sum(criticized(p, x)))(constrain(mixed, "batch", None, None, None))
        lengths = jnp.sqrt(jnp.sum(slopes**2, (1, 2, 3)) + 1e-12)
        distance = jnp.mean(criticized(p, fake)) - jnp.mean(criticized(p, real))
        return distance + 10 * jnp.mean((lengths - 1) ** 2)

    optimizer = optax.adam(1e-4, b1=0.0, b2=0.9)

    def updated(state: Any, name: str, gradients: Any) -> tuple[Any, Any]:
        gradients = constrain_as_moments({name: gradients})
        updates, momentum = optimizer.update(gradients, state["momentum"][name])
        params = constrain_as_moments(optax.apply_updates({name: state["params"][name]}, updates))
        return params[name], momentum

    def step(state: Any, batch: Any) -> Any:
        critic, generator = state["params"]["critic"], state["params"]["generator"]
        noise_key, mix_key, next_key = jax.random.split(jax.random.wrap_key_data(batch["key"]), 3)
        fake = generated(generator, noise_key)
        value, gradients = jax.value_and_grad(critic_loss)(critic, batch["images"], fake, mix_key)
        critic, critic_momentum = updated(state, "critic", gradients)
        gradients = jax.grad(lambda p: -jnp.mean(criticized(critic, generated(p, next_key))))(generator)
        generator, generator_momentum = updated(state, "generator", gradients)
        params = {"critic": critic, "generator": generator}
        return {"params": params, "momentum": {"critic": critic_momentum, "generator": generator_momentum}}, value

    momentum = {name: jax.eval_shape(optimizer.init, {name: params[name]}) for name in params}
    batches = {
        "images": array(batch, image, image, 3, dtype=jnp.float32),
        "key": jax.ShapeDtypeStruct((2,), jnp.uint32),
    }
    return step, ({"params": params, "momentum": momentum}, batches)


@final
class NextBlock(eqx.Module):
    """A depthwise convolution, a norm over channels, an MLP at each pixel: one example, channels first."""

    depthwise: eqx.nn.Conv2d
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    scale: jax.Array
    kept: float = eqx.field(static=True)

    def __init__(self, width: int, kept: float, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.depthwise = eqx.nn.Conv2d(width, width, 7, padding=3, groups=width, key=keys[0])
        self.norm = eqx.nn.LayerNorm(width)
        self.up, self.down = eqx.nn.Linear(width, 4 * width, key=keys[1]), eqx.nn.Linear(4 * width, width, key=keys[2])
        self.scale, self.kept = jnp.full(width, 1e-6), kept

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        def mixed(pixel: jax.Array) -> jax.Array:
            hidden = constrain(jax.nn.gelu(self.up(self.norm(pixel).astype(pixel.dtype))), "tensor")
            return self.scale * self.down(hidden)

        y = jax.vmap(jax.vmap(mixed))(self.depthwise(x).transpose(1, 2, 0)).transpose(2, 0, 1)
        keep = jax.random.bernoulli(key, self.kept).astype(x.dtype)
        return x + y * keep / self.kept


@final
class ConvNext(eqx.Module):
    """A ConvNeXt: a stem of patches, stages at lower and lower resolutions, a head."""

    reductions: list[tuple[eqx.nn.LayerNorm | None, eqx.nn.Conv2d]]
    stages: list[list[NextBlock]]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, widths: tuple[int, ...], depth: int, classes: int, key: jax.Array) -> None:
        first, second, third = jax.random.split(key, 3)
        keys = jax.random.split(first, len(widths))
        channels = (3, *widths)
        self.reductions = [
            (
                eqx.nn.LayerNorm(before) if index else None,
                eqx.nn.Conv2d(before, after, 2 if index else 4, 2 if index else 4, key=each),
            )
            for index, (before, after, each) in enumerate(zip(channels, widths, keys, strict=False))
        ]
        rates = iter(np.linspace(0, 0.1, depth * len(widths)).tolist())
        block_keys = iter(jax.random.split(second, depth * len(widths)))
        self.stages = [[NextBlock(width, 1 - next(rates), next(block_keys)) for _ in range(depth)] for width in widths]
        self.norm, self.head = eqx.nn.LayerNorm(widths[-1]), eqx.nn.Linear(widths[-1], classes, key=third)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        for (norm, reduction), stage in zip(self.reductions, self.stages, strict=True):
            x = reduction(x if norm is None else jax.vmap(jax.vmap(norm, 1, 1), 1, 1)(x).astype(x.dtype))
            for block in stage:
                key, block_key = jax.random.split(key)
                x = block(x, block_key)
        return self.head(self.norm(jnp.mean(x, (1, 2))))


def depthwise_net(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A ConvNeXt of four stages of one block, with stochastic depth; the state has a moving average of parameters."""
    widths, depth, image, classes, batch = (96, 192, 384, 768), 1, 224, 1000, 32 * devices
    if smoke:
        widths, depth, image, classes, batch = (8, 16), 1, 16, 16, devices
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(4e-3, weight_decay=0.05))

    def start(key: jax.Array) -> Any:
        model = ConvNext(widths, depth, classes, key)
        params = eqx.filter(model, eqx.is_inexact_array)
        momentum = {"optimizer": optimizer.init(params), "average": params}  # the average is placed as moments are
        return {"model": model, "momentum": momentum, "key": jax.random.key_data(key)}

    def loss(model: ConvNext, batch: Any, key: jax.Array) -> jax.Array:
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, model)
        images = constrain(batch["images"], "batch", None, None, None)
        scores = jax.vmap(low)(images, jax.random.split(key, images.shape[0]))
        targets = optax.smooth_labels(jax.nn.one_hot(batch["labels"], classes), 0.1)
        return jnp.mean(optax.softmax_cross_entropy(constrain(scores, "batch", None).astype(jnp.float32), targets))

    def step(state: Any, batch: Any) -> Any:
        key, next_key = jax.random.split(jax.random.wrap_key_data(state["key"]))
        value, gradients = eqx.filter_value_and_grad(loss)(state["model"], batch, key)
        params, static = eqx.partition(state["model"], eqx.is_inexact_array)
        momentum = state["momentum"]
        updates, moments = optimizer.update(constrain_as_moments(gradients), momentum["optimizer"], params)
        params = constrain_as_moments(optax.apply_updates(params, updates))
        average = optax.incremental_update(params, momentum["average"], 1e-4)
        momentum = {"optimizer": moments, "average": average}
        return {"model": eqx.combine(params, static), "momentum": momentum, "key": jax.random.key_data(next_key)}, value

    state = eqx.filter_eval_shape(start, jax.random.key(0))
    return step, (state, {"images": array(batch, 3, image, image), "labels": tokens(batch)})


def pooled_net(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A plain net, as VGG: eight convolutions, and a max pool after each two; images of 64 x 64."""
    widths, image, classes, batch = (64, 128, 256, 512), 64, 1000, 64 * devices
    if smoke:
        widths, image, classes, batch = (8, 16), 16, 16, devices

    def convolution(x: jax.Array, kernel: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y)

    def loss(p: Any, batch: Any) -> jax.Array:
        x = constrain(batch["images"], "batch", None, None, None)
        for layer in p["layers"]:
            x = constrain(convolution(x, layer["first"]), "batch", None, None, "tensor")
            x = constrain(convolution(x, layer["second"]), "batch", None, None, None)
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return cross_entropy(constrain(jnp.mean(x, (1, 2)) @ p["head"], "batch", None), batch["labels"])

    layers = [
        {"first": array(3, 3, before, width), "second": array(3, 3, width, width)}
        for before, width in itertools.pairwise((3, *widths))
    ]
    params = {"layers": layers, "head": array(widths[-1], classes)}
    return train_step(loss), (with_moments(params), {"images": array(batch, image, image, 3), "labels": tokens(batch)})
