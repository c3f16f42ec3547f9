"""Kinds of train steps that fit fields: a radiance field, a Fourier neural operator."""

from collections.abc import Callable
from typing import Any, final

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from plan_models.experts import Splits, constrain
from plan_models.parts import array
from plan_models.updates import optax_step

RAYS_SPLITS: Splits = (
    (r"/(hidden_[1357]|view)/(kernel|bias)$", -1, "tensor"),
    (r"/(hidden_[246]|feature|density|color)/kernel$", 0, "tensor"),
    (r"(^|/)key$", 0, None),
)
OPERATOR_SPLITS: Splits = (
    (r"(^|/)layers/[02]/spectral$", 2, "tensor"),
    (r"(^|/)(layers/[02]|project_1)/(w|b)$", -1, "tensor"),
    (r"(^|/)layers/[13]/spectral$", 1, "tensor"),
    (r"(^|/)(layers/[13]|project_2)/w$", 0, "tensor"),
)


def _encoded(x: jax.Array, degrees: int) -> jax.Array:
    """Sines and cosines of coordinates, at frequencies that double."""
    angles = (x[..., None, :] * 2.0 ** jnp.arange(degrees)[:, None]).reshape(*x.shape[:-1], -1)
    return jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles)], -1)


@final
class RadianceField(nn.Module):
    """A density at a point, and its color seen from a direction."""

    width: int
    layers: int = 8

    @nn.compact
    def __call__(self, points: jax.Array, directions: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs = _encoded(points, 10)
        x = inputs
        for index in range(self.layers):
            x = jnp.concatenate([x, inputs], -1) if index == self.layers // 2 + 1 else x
            x = nn.relu(nn.Dense(self.width, name=f"hidden_{index}")(x))
            x = constrain(x, "batch", None, "tensor" if index % 2 else None)
        density = constrain(nn.Dense(1, name="density")(x)[..., 0], "batch", None)
        x = constrain(nn.Dense(self.width, name="feature")(x), "batch", None, None)
        seen = jnp.broadcast_to(_encoded(directions, 4)[:, None], (*x.shape[:2], 27))
        x = nn.relu(nn.Dense(self.width // 2, name="view")(jnp.concatenate([x, seen], -1)))
        return nn.sigmoid(nn.Dense(3, name="color")(constrain(x, "batch", None, "tensor"))), density


def nerf(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A NeRF: 64 samples along each ray are composited by how much light reaches them."""
    width, samples, rays, near, far = 256, 64, 1024 * devices, 2.0, 6.0
    if smoke:
        width, samples, rays = 16, 8, 2 * devices
    field = RadianceField(width)
    points, directions = array(rays, samples, 3, dtype=jnp.float32), array(rays, 3, dtype=jnp.float32)
    apply: Callable[..., Any] = field.apply
    params = jax.eval_shape(field.init, jax.random.key(0), points, directions)

    def rendered(params: Any, origins: jax.Array, directions: jax.Array, key: jax.Array) -> jax.Array:
        edges = jnp.linspace(near, far, samples + 1)
        shift = constrain(jax.random.uniform(key, (origins.shape[0], samples)), "batch", None)
        depths = edges[:-1] + (edges[1:] - edges[:-1]) * shift
        points = origins[:, None] + directions[:, None] * depths[..., None]
        unit = directions / jnp.linalg.norm(directions, axis=-1, keepdims=True)
        colors, density = apply(params, constrain(points, "batch", None, None), unit)
        steps = jnp.diff(depths, axis=-1, append=jnp.full_like(depths[:, :1], 1e10))
        steps = steps * jnp.linalg.norm(directions, axis=-1, keepdims=True)
        alpha = 1 - jnp.exp(-nn.relu(density) * steps)
        light = jnp.cumprod(1 - alpha[:, :-1] + 1e-10, -1)
        weights = alpha * jnp.concatenate([jnp.ones_like(alpha[:, :1]), light], -1)
        color = jnp.sum(weights[..., None] * colors, 1)
        return constrain(color + 1 - jnp.sum(weights, -1, keepdims=True), "batch", None)

    def loss(params: Any, batch: Any) -> jax.Array:
        key = jax.random.wrap_key_data(batch["key"])
        colors = rendered(params, batch["origins"], batch["directions"], key)
        return jnp.mean((colors - batch["colors"]) ** 2)

    step, state = optax_step(loss, optax.adam(5e-4), params)
    batches = dict.fromkeys(("origins", "directions", "colors"), directions)
    return step, (state, batches | {"key": jax.ShapeDtypeStruct((2,), jnp.uint32)})


def fourier_operator(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """An FNO on grids of 128 x 128: in each layer, complex weights of low modes beside a pointwise layer."""
    width, modes, layers, side, batch = 64, 16, 4, 128, 16 * devices
    if smoke:
        width, modes, layers, side, batch = 8, 2, 2, 8, devices

    def linear(before: int, after: int) -> dict[str, Any]:
        return {"w": array(before, after, dtype=jnp.float32), "b": array(after, dtype=jnp.float32)}

    spectral = array(2, width, width, modes, modes, 2, dtype=jnp.float32)  # positive and negative rows; real, imaginary
    params = {
        "lift": linear(3, width),
        "layers": [linear(width, width) | {"spectral": spectral}] * layers,
        "project_1": linear(width, 2 * width),
        "project_2": linear(2 * width, 1),
    }

    def convolved(weights: jax.Array, x: jax.Array, channels: str | None) -> jax.Array:
        low, high = jax.lax.complex(weights[..., 0], weights[..., 1])
        waves = jnp.fft.rfft2(x, axes=(1, 2))
        results = jnp.zeros((*waves.shape[:3], width), waves.dtype)
        results = results.at[:, :modes, :modes].set(jnp.einsum("bxyi,ioxy->bxyo", waves[:, :modes, :modes], low))
        results = results.at[:, -modes:, :modes].set(jnp.einsum("bxyi,ioxy->bxyo", waves[:, -modes:, :modes], high))
        results = constrain(results, "batch", None, None, channels)
        return jnp.fft.irfft2(results, (side, side), axes=(1, 2))

    def solved(p: Any, inputs: jax.Array) -> jax.Array:
        line = jnp.linspace(0.0, 1.0, side)
        grid = jnp.broadcast_to(jnp.stack(jnp.meshgrid(line, line), -1), (*inputs.shape[:3], 2))
        x = jnp.concatenate([constrain(inputs, "batch", None, None, None), grid], -1) @ p["lift"]["w"] + p["lift"]["b"]
        for index, layer in enumerate(p["layers"]):
            channels = None if index % 2 else "tensor"
            x = convolved(layer["spectral"], x, channels) + x @ layer["w"] + layer["b"]
            x = constrain(jax.nn.gelu(x) if index < layers - 1 else x, "batch", None, None, channels)
        x = jax.nn.gelu(x @ p["project_1"]["w"] + p["project_1"]["b"])
        return constrain(x, "batch", None, None, "tensor") @ p["project_2"]["w"] + p["project_2"]["b"]

    def loss(p: Any, batch: Any) -> jax.Array:
        errors = jnp.sum((solved(p, batch["inputs"]) - batch["outputs"]) ** 2, (1, 2, 3))
        return jnp.mean(jnp.sqrt(errors / jnp.sum(batch["outputs"] ** 2, (1, 2, 3))))

    optimizer = optax.adamw(optax.cosine_decay_schedule(1e-3, 50_000), weight_decay=1e-4)
    step, state = optax_step(loss, optimizer, params)
    return step, (state, dict.fromkeys(("inputs", "outputs"), array(batch, side, side, 1, dtype=jnp.float32)))
