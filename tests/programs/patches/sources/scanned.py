"""A transformer whose layers run in a loop, each checkpointed."""

import jax
import jax.numpy as jnp

WIDTH, HIDDEN, LAYERS = 32, 64, 3


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


@jax.checkpoint
def block(w, x):
    q, k, v = jnp.einsum("btd,dnk->nbtk", norm(x), w["qkv"])
    mixed = jax.nn.softmax(jnp.einsum("bqk,bsk->bqs", q, k), -1) @ v
    x = x + mixed @ w["out"]
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def loss(params, x, y):
    def body(x, w):
        x = block(w, x)
        return x, jnp.mean(x)

    x, means = jax.lax.scan(body, x, params)
    return jnp.mean((x - y) ** 2) + 1e-3 * jnp.sum(means)


def step(params, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def make():
    key = jax.random.key(0)
    shapes = {"qkv": (WIDTH, 3, WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    params = {name: jax.random.normal(key, (LAYERS, *shape)) / (2 * shape[0] ** 0.5) for name, shape in shapes.items()}
    x, y = jax.random.normal(key, (2, 16, 8, WIDTH))
    return step, (params, x, y)
