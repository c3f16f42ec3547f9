"""A mixture of experts, to which tokens are sent by a product with what the router says."""

import jax
import jax.numpy as jnp

WIDTH, HIDDEN, EXPERTS, CAPACITY = 32, 64, 8, 4


def route(w, x):
    weights = jax.nn.softmax(x @ w["router"], -1)
    chosen = jax.nn.one_hot(jnp.argmax(weights, -1), EXPERTS)
    position = (jnp.cumsum(chosen, 1) - 1) * chosen
    slots = jax.nn.one_hot(position.astype(jnp.int32), CAPACITY) * chosen[..., None]
    return slots, slots * weights[..., None]


def experts(w, x):
    dispatch, combine = route(w, x)
    sent = jnp.einsum("gtec,gtd->egcd", dispatch, x)
    hidden = jax.nn.relu(jnp.einsum("egcd,edh->egch", sent, w["up"]))
    returned = jnp.einsum("egch,ehd->egcd", hidden, w["down"])
    return jnp.einsum("gtec,egcd->gtd", combine, returned)


def loss(params, x, y):
    for w in params:
        x = x + experts(w, x)
    return jnp.mean((x - y) ** 2)


def make():
    key = jax.random.key(0)
    shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    layer = {name: jax.random.normal(key, shape) / shape[-2] ** 0.5 for name, shape in shapes.items()}
    return jax.value_and_grad(loss), ([layer, layer], *jax.random.normal(key, (2, 8, 16, WIDTH)))
