"""A multi-layer perceptron of flax nnx, and its gradient."""

import jax
import jax.numpy as jnp
from flax import nnx


class Block(nnx.Module):
    def __init__(self, width, hidden, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = Block(32, 64, rngs)
        self.second = Block(32, 64, rngs)
        self.head = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        x = self.second(x)
        return self.head(x)


def loss(model, x, y):
    logits = model(x)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * y, -1))


def make():
    key = jax.random.key(0)
    x, y = jax.random.normal(key, (64, 32)), jax.nn.softmax(jax.random.normal(key, (64, 16)))
    return nnx.value_and_grad(loss), (Model(nnx.Rngs(0)), x, y)
