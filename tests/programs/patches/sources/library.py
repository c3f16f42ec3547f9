"""Two linear layers of flax nnx, and their gradient."""

import jax
import jax.numpy as jnp
from flax import nnx


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


def loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def make():
    x, y = jax.random.normal(jax.random.key(0), (2, 64, 32))
    return nnx.value_and_grad(loss), (Model(nnx.Rngs(0)), x, y)
