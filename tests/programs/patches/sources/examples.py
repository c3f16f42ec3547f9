"""Products of each example on its own under `vmap`, with weights in a tree."""

import jax
import jax.numpy as jnp

WIDTH, HIDDEN = 32, 64


def score(params, x, y):
    hidden = jax.nn.relu(x @ params["up"])
    return jnp.mean((hidden @ params["down"] - y) ** 2)


def loss(params, xs, ys):
    return jnp.mean(jax.vmap(score, in_axes=(None, 0, 0))(params, xs, ys))


def make():
    key = jax.random.key(0)
    params = {"up": jax.random.normal(key, (WIDTH, HIDDEN)) / 8, "down": jax.random.normal(key, (HIDDEN, WIDTH)) / 8}
    return jax.value_and_grad(loss), (params, *jax.random.normal(key, (2, 16, 8, WIDTH)))
