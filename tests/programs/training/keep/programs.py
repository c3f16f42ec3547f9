"""Losses that the tests of what is kept share."""

from collections.abc import Callable
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

import shardrules as sr
from shardrules.programs.jaxprs.walk import equations
from shardrules.programs.training.keep.apply import with_kept
from shardrules.programs.training.keep.choices import keep_choices
from shardrules.programs.training.keep.keep import Keep

H100 = sr.Hardware.named("cuda:h100")

AS_WRITTEN = Keep()

LAYERS, WIDTH, HEADS, ROWS, LENGTH = 4, 32, 2, 4, 8


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def attention(x: jax.Array, qkv: jax.Array) -> jax.Array:
    rows, length, width = x.shape
    q, k, v = (part.reshape(rows, length, HEADS, -1) for part in jnp.split(x @ qkv, 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(rows, length, width)


def layer(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    x = x + attention(norm(x), weights["qkv"]) @ weights["out"]
    return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"]


def scanned(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    y, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
    return jnp.mean(y**2)


def unrolled(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for index in range(LAYERS):
        x = layer(x, {name: each[index] for name, each in weights.items()})
    return jnp.mean(x**2)


def layer_weights(count: int = LAYERS, width: int = WIDTH) -> dict[str, jax.Array]:
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, (count, *shape)) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def batch(rows: int = ROWS, length: int = LENGTH, width: int = WIDTH) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (rows, length, width))


@final
@attrs.frozen(eq=False)
class Traced:
    """A loss with its arrays, traced. The leaves of its first argument are trainable."""

    program: ClosedJaxpr
    arrays: tuple[Any, ...]
    trainable_count: int

    @classmethod
    def of(cls, loss: Callable[..., Any], *args: Any) -> "Traced":
        return cls(jax.make_jaxpr(loss)(*args), tuple(jtu.tree_leaves(args)), len(jtu.tree_leaves(args[0])))

    def choices(self, **options: Any) -> tuple[Keep, ...]:
        return keep_choices(self.program, H100, trainable_count=self.trainable_count, **options)

    def gradient_of(self, program: ClosedJaxpr) -> Callable[..., Any]:
        def loss(*arrays: Any) -> Any:
            return jaxpr_as_fun(program)(*arrays)[0]

        return jax.value_and_grad(loss, tuple(range(self.trainable_count)))

    def gradient(self, keep: Keep = AS_WRITTEN) -> tuple[Any, ...]:
        return jax.jit(self.gradient_of(with_kept(self.program, keep)))(*self.arrays)

    def gradient_program(self, keep: Keep = AS_WRITTEN) -> ClosedJaxpr:
        return jax.make_jaxpr(self.gradient_of(with_kept(self.program, keep)))(*self.arrays)

    def matmul_count(self, keep: Keep = AS_WRITTEN) -> int:
        return count_of("dot_general", self.gradient_program(keep))


def count_of(primitive: str, program: ClosedJaxpr) -> int:
    return sum(equation.primitive.name == primitive for equation in equations(program))
