"""A transformer of Equinox modules, with its blocks in a list."""

import equinox as eqx
import jax
import jax.numpy as jnp

WIDTH, HIDDEN, WORDS, HEADS, LAYERS = 32, 64, 64, 4, 2


class Attention(eqx.Module):
    qkv: jax.Array
    out: jax.Array

    def __init__(self, key):
        self.qkv = jax.random.normal(key, (WIDTH, 3, HEADS, WIDTH // HEADS)) / WIDTH**0.5
        self.out = jax.random.normal(key, (HEADS, WIDTH // HEADS, WIDTH)) / WIDTH**0.5

    def __call__(self, x):
        q, k, v = jnp.einsum("btd,dnhk->nbthk", x, self.qkv)
        scores = jnp.einsum("bqhk,bshk->bhqs", q, k)
        mixed = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores, -1), v)
        return jnp.einsum("bthk,hkd->btd", mixed, self.out)


class Block(eqx.Module):
    attention: Attention
    up: jax.Array
    down: jax.Array
    scale: jax.Array

    def __init__(self, key):
        self.attention = Attention(key)
        self.up = jax.random.normal(key, (WIDTH, HIDDEN)) / WIDTH**0.5
        self.down = jax.random.normal(key, (HIDDEN, WIDTH)) / HIDDEN**0.5
        self.scale = jnp.ones(WIDTH)

    def __call__(self, x):
        x = x + self.attention(norm(x) * self.scale)
        hidden = jax.nn.silu(norm(x) @ self.up)
        x += hidden @ self.down
        return x


class Model(eqx.Module):
    embed: jax.Array
    blocks: list[Block]

    def __init__(self, key):
        self.embed = jax.random.normal(key, (WORDS, WIDTH))
        self.blocks = [Block(each) for each in jax.random.split(key, LAYERS)]

    def __call__(self, tokens):
        x = self.embed[tokens]
        for block in self.blocks:
            x = block(x)
        return norm(x) @ self.embed.T


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def loss(model, tokens):
    logits = model(tokens[:, :-1])
    scores = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))


def make():
    key = jax.random.key(0)
    return jax.value_and_grad(loss), (Model(key), jax.random.randint(key, (16, 9), 0, WORDS))
