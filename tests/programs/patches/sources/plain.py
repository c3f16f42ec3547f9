"""A transformer of plain functions, with a training step."""

import jax
import jax.numpy as jnp

WIDTH, HIDDEN, WORDS, HEADS = 32, 64, 64, 4


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attention(w, x):
    batch, length, width = x.shape
    q = (x @ w["q"]).reshape(batch, length, HEADS, -1)
    k = (x @ w["k"]).reshape(batch, length, HEADS, -1)
    v = (x @ w["v"]).reshape(batch, length, HEADS, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
    return mixed.reshape(batch, length, width) @ w["o"]


def mlp(w, x):
    return jax.nn.gelu(x @ w["up"]) @ w["down"]


def loss(params, tokens):
    x = params["embed"][tokens]
    for w in params["layers"]:
        x = x + attention(w, norm(x))
        x = x + mlp(w, norm(x))
    logits = norm(x) @ params["embed"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
    return -jnp.mean(picked)


def step(params, tokens):
    value, grads = jax.value_and_grad(loss)(params, tokens)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def make():
    key = jax.random.key(0)
    square, up = (WIDTH, WIDTH), (WIDTH, HIDDEN)
    shapes = {"q": square, "k": square, "v": square, "o": square, "up": up, "down": (HIDDEN, WIDTH)}
    layer = {name: jax.random.normal(key, shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    params = {"embed": jax.random.normal(key, (WORDS, WIDTH)), "layers": [layer, layer]}
    return step, (params, jax.random.randint(key, (16, 8), 0, WORDS))
