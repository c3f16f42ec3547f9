"""An encoder and a decoder that attends to what the encoder returns, each example on its own under `vmap`."""

import jax
import jax.numpy as jnp

WIDTH, HIDDEN, WORDS = 32, 64, 64


def attend(w, x, memory):
    q, k, v = x @ w["q"], memory @ w["k"], memory @ w["v"]
    weights = jax.nn.softmax(q @ k.T / WIDTH**0.5, -1)
    return weights @ v @ w["o"]


def mlp(w, x):
    hidden = jax.nn.relu(x @ w["up"])
    return hidden @ w["down"]


def encode(params, x):
    for w in params:
        x = x + attend(w, x, x)
        x = x + mlp(w, x)
    return x


def decode(params, x, memory):
    for w in params:
        x = x + attend(w["self"], x, x)
        x = x + attend(w["cross"], x, memory)
        x = x + mlp(w["self"], x)
    return x


def score(params, source, target):
    memory = encode(params["encoder"], params["embed"][source])
    x = decode(params["decoder"], params["embed"][target[:-1]], memory)
    scores = jax.nn.log_softmax(x @ params["head"])
    answers = jax.nn.one_hot(target[1:], WORDS)
    return jnp.mean(jnp.sum(scores * answers, -1))


def loss(params, sources, targets):
    return -jnp.mean(jax.vmap(score, in_axes=(None, 0, 0))(params, sources, targets))


def make():
    key = jax.random.key(0)
    square = {name: jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for name in "qkvo"}
    layer = {
        **square,
        "up": jax.random.normal(key, (WIDTH, HIDDEN)) / WIDTH**0.5,
        "down": jax.random.normal(key, (HIDDEN, WIDTH)) / HIDDEN**0.5,
    }
    params = {
        "embed": jax.random.normal(key, (WORDS, WIDTH)),
        "head": jax.random.normal(key, (WIDTH, WORDS)) / WIDTH**0.5,
        "encoder": [layer],
        "decoder": [{"self": layer, "cross": square}],
    }
    return jax.value_and_grad(loss), (params, *jax.random.randint(key, (2, 16, 8), 0, WORDS))
