"""Layers that run in a loop, each checkpointed."""

import jax
import jax.numpy as jnp

WIDTH, HIDDEN, LAYERS = 32, 64, 2


@jax.checkpoint
def block(x, w):
    hidden = jax.nn.relu(x @ w["up"])
    return x + hidden @ w["down"], None


def loss(params, x, y):
    x, _ = jax.lax.scan(block, x, params)
    return jnp.mean((x - y) ** 2)


def step(params, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def make():
    key = jax.random.key(0)
    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    params = {name: jax.random.normal(key, shape) / 8 for name, shape in shapes.items()}
    return step, (params, *jax.random.normal(key, (2, 16, 8, WIDTH)))
