"""Two layers of products, and a step of training."""

import jax
import jax.numpy as jnp

WIDTH, HIDDEN = 32, 64


def mlp(w, x):
    return jax.nn.relu(x @ w["up"]) @ w["down"]


def loss(params, x, y):
    for w in params:
        x = x + mlp(w, x)
    return jnp.mean((x - y) ** 2)


def step(params, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def make():
    key = jax.random.key(0)
    layer = {"up": jax.random.normal(key, (WIDTH, HIDDEN)) / 8, "down": jax.random.normal(key, (HIDDEN, WIDTH)) / 8}
    return step, ([layer, layer], *jax.random.normal(key, (2, 16, 8, WIDTH)))
