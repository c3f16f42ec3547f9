"""Small functions of the kinds that people plan, with arguments: every replay is tested on all of them."""

from collections.abc import Callable
from typing import Any, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from shardrules.programs.machine.hardware import Hardware

BATCH, LENGTH, WIDTH, HIDDEN, HEADS, LAYERS, WORDS, EXPERTS, CLASSES = 16, 8, 16, 32, 4, 3, 32, 4, 8

FAST = attrs.evolve(
    Hardware.named("cpu"),
    name="slow at all but sending",
    memory_bytes_per_second=1e6,
    peak_flops={kind: 1e6 for kind, _ in Hardware.named("cpu").peak_flops},
    link_bytes_per_second=1e12,
    link_latency_seconds=1e-12,
)
"""Hardware on which small arrays are worth splitting."""


@final
@attrs.frozen
class Case:
    """A function, and a function that makes its arguments."""

    name: str
    fn: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    axes: str | None = None  # of the only mesh that it runs on

    @property
    def args(self) -> tuple[Any, ...]:
        return self.make()


def real(*shape: int, seed: int = 0) -> jax.Array:
    numbers = np.random.default_rng([seed, *shape]).normal(size=shape)
    return jnp.asarray((numbers / np.sqrt(shape[0] if len(shape) > 1 else 1)).astype(np.float32))


def integers(*shape: int, below: int = WORDS) -> jax.Array:
    return jnp.asarray(np.random.default_rng([1, *shape]).integers(0, below, shape), jnp.int32)


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step of gradient descent: from weights and a batch to weights and a loss."""

    def step(w: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(w, *batch)
        return jax.tree.map(lambda weight, grad: weight - 0.1 * grad, w, grads), value

    return step


def normed(x: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def mlp(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"]


def mlp_weights() -> dict[str, jax.Array]:
    return {"up": real(WIDTH, HIDDEN), "bias": real(HIDDEN), "down": real(HIDDEN, WIDTH)}


def mlp_loss(w: Any, x: Any, y: Any) -> Any:
    return jnp.mean((mlp(w, x) - y) ** 2)


def pairs() -> tuple[jax.Array, jax.Array]:
    return real(BATCH, WIDTH), real(BATCH, WIDTH, seed=1)


def attention(w: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[name]) for name in "qkv")
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k)
    seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    mixed = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(jnp.where(seen, scores, -1e9), -1), v)
    return jnp.einsum("bthk,hkd->btd", mixed, w["out"])


def block(w: Any, x: Any) -> Any:
    x = x + attention(w, normed(x))
    return x + mlp(w, normed(x))


def block_weights(*stacked: int) -> dict[str, jax.Array]:
    each = WIDTH // HEADS
    shapes = {
        **dict.fromkeys("qkv", (WIDTH, HEADS, each)),
        "out": (HEADS, each, WIDTH),
        "up": (WIDTH, HIDDEN),
        "bias": (HIDDEN,),
        "down": (HIDDEN, WIDTH),
    }
    return {name: 0.3 * real(*stacked, *shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def recomputed_loss(w: Any, x: Any) -> Any:
    return jnp.mean(jax.checkpoint(block)(w, x) ** 2)


def scanned_loss(w: Any, x: Any) -> Any:
    x, norms = lax.scan(jax.checkpoint(lambda x, layer: (block(layer, x), jnp.sum(x * x))), x, w)
    return jnp.mean(x**2) + 1e-3 * jnp.sum(norms)


def unrolled_loss(w: Any, x: Any) -> Any:
    for layer in w:
        x = block(layer, x)
    return jnp.mean(x**2)


def lstm_loss(w: Any, xs: Any) -> Any:
    def cell(carry: Any, x: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(x @ w["in"] + h @ w["again"] + w["bias"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = (jnp.zeros((xs.shape[1], HIDDEN)), jnp.zeros((xs.shape[1], HIDDEN)))
    (_, last), hs = lax.scan(cell, start, xs)
    return jnp.mean(hs**2) + jnp.mean(last)


def conv_loss(w: Any, images: Any, labels: Any) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    x = jax.nn.relu(lax.conv_general_dilated(images, w["first"], (1, 1), "SAME", dimension_numbers=dims))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(lax.conv_general_dilated(x, w["second"], (2, 2), "SAME", dimension_numbers=dims))
    logits = x.reshape(x.shape[0], -1) @ w["head"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1))


def tied_loss(w: Any, tokens: Any) -> Any:
    x = w["embed"][tokens[:, :-1]] + w["places"]
    x = block(w["block"], x)
    logits = normed(x) @ w["embed"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1))


def experts_loss(w: Any, x: Any) -> Any:
    gates = jax.nn.softmax(x @ w["router"])
    top, which = lax.top_k(gates, 2)
    hot = jnp.einsum("tk,tke->te", top, jax.nn.one_hot(which, EXPERTS))
    sent = jnp.einsum("te,td->etd", (hot > 0).astype(x.dtype), x)
    hidden = jax.nn.silu(jnp.einsum("etd,edf->etf", sent, w["up"]))
    back = jnp.einsum("etf,efd->etd", hidden, w["down"])
    return jnp.mean((jnp.einsum("te,etd->td", hot, back) - x) ** 2)


def dropout_loss(w: Any, x: Any, key: Any) -> Any:
    first, second = jax.random.split(key)
    kept = jax.random.bernoulli(first, 0.7, (BATCH, HIDDEN))
    hidden = jnp.where(kept, jnp.tanh(x @ w["up"] + w["bias"]), 0.0)
    noise = jax.random.normal(second, (BATCH, WIDTH))
    return jnp.mean((hidden @ w["down"] + 0.1 * noise) ** 2)


class Net(eqx.Module):
    """A model whose leaves are not all arrays."""

    layers: list[eqx.nn.Linear]
    activation: Callable[[Any], Any]
    scale: float
    name: str = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.scale * self.layers[-1](x)


TABLE = np.arange(16, dtype=np.float32)

OPTIMIZER = optax.adamw(1e-2)


def net() -> Net:
    keys = jax.random.split(jax.random.key(0), 2)
    sizes = [(WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    layers = [eqx.nn.Linear(*size, key=key) for size, key in zip(sizes, keys, strict=True)]
    return Net(layers, jax.nn.gelu, 0.5, "net")


@eqx.filter_jit
def equinox_step(model: Any, state: Any, x: Any, y: Any) -> Any:
    @eqx.filter_value_and_grad
    def loss(model: Any) -> Any:
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    value, grads = loss(model)
    updates, state = OPTIMIZER.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, value


def equinox_args() -> tuple[Any, ...]:
    model = net()
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array)), *pairs()


# Control flow.


def while_not_small(w: Any, x: Any) -> Any:
    """Data decides how often it goes round; the body reads `w`, and the condition the bound."""
    bound = jnp.sum(w * w) * 1e-3
    return lax.while_loop(lambda s: jnp.sum(s[0] ** 2) > bound, lambda s: (0.5 * jnp.tanh(s[0] @ w), s[1] + 1), (x, 0))


def either(w: Any, x: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda w, x: (jnp.tanh(x @ w), w), lambda w, x: (x @ w.T, w + 1), w, x)


def switched(index: Any, x: Any) -> Any:
    return lax.switch(index, [jnp.sin, lambda x: x.T @ x, lambda x: jnp.ones((WIDTH, WIDTH))], x)


def counted(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) + i * y.sum(0), x)


def nested(x: Any, w: Any) -> Any:
    """A loop in a loop, which reads what goes round in the outer one."""

    def outer(x: Any, layer: Any) -> Any:
        y, ys = lax.scan(lambda y, row: (jnp.tanh(y + x @ layer), row @ layer), x, x)
        return y, (ys, lax.cond(y[0, 0] > 0, jnp.sin, jnp.cos, y))

    return lax.scan(outer, x, w)


def swapped(x: Any, y: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, s: (s[1], s[0] @ s[1]), (x, y))


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return 2 * x


clipped.defvjp(lambda x: (2 * x, x.sum(0)), lambda kept, grad: (jnp.clip(grad, -1, 1) + kept,))


@jax.custom_jvp
def bent(x: Any) -> Any:
    return jnp.where(x > 0, x, 0.1 * x)


bent.defjvp(lambda xs, ts: (bent(xs[0]), jnp.where(xs[0] > 0, ts[0], 0.3 * ts[0])))


def custom_loss(w: Any, x: Any) -> Any:
    return jnp.sum(clipped(bent(x @ w)) ** 2)


# Operations with many dims that have to be whole.


def ordered(x: Any) -> Any:
    top, where = lax.top_k(x, 3)
    return jnp.sort(x, 0), jnp.argsort(x, 1), jnp.cumsum(x, 0), lax.cummax(x, 1), top, where, jnp.argmax(x, 0)


def moved_about(x: Any, i: Any) -> Any:
    y = lax.dynamic_update_slice(x, x[:2, :3] * 2, (i, i))
    return (
        jnp.roll(y, 3, 0),
        jnp.pad(y, ((1, 2), (0, 3))),
        jnp.concatenate([x, y[::-1]], 1),
        lax.dynamic_slice(y, (i, 0), (4, WIDTH)),
        y.reshape(4, 4, -1).transpose(2, 0, 1),
        x.at[i].add(1.0),
        jnp.repeat(x, 2, axis=0),
        lax.rev(x, (1,)),
        jnp.einsum("ab,cb->acb", x, x),
    )


# Functions with shardings of their own.


def constrained(w: Any, x: Any) -> Any:
    hidden = lax.with_sharding_constraint(jnp.tanh(x @ w["up"] + w["bias"]), P(None, "data"))
    return lax.with_sharding_constraint(hidden @ w["down"], P("data"))


def constrained_loss(w: Any, x: Any) -> Any:
    return jnp.mean(constrained(w, x) ** 2)


def mapped_loss(w: Any, x: Any) -> Any:
    """An all-reduce by hand."""

    def shard(x: Any, w: Any) -> Any:
        return lax.psum(x @ w, "data")

    y = jax.shard_map(shard, in_specs=(P(None, "data"), P("data")), out_specs=P())(jnp.sin(x), w["up"])
    return jnp.mean((y @ w["down"]) ** 2)


def convolved_loss(w: Any, x: Any) -> Any:
    """Convolutions of separate channels and of groups, and a norm over the batch."""

    def norm(x: Any) -> Any:
        x = x - lax.pmean(x, "batch")
        return x * lax.rsqrt(lax.pmean(jnp.mean(x**2, 0), "batch") + 1e-3)

    names = ("NWC", "WIO", "NWC")
    x = lax.conv_general_dilated(x, w["each"], (1,), "SAME", dimension_numbers=names, feature_group_count=WIDTH)
    x = jax.vmap(norm, axis_name="batch")(x)
    x = lax.conv_general_dilated(x, w["groups"], (1,), "SAME", dimension_numbers=names, feature_group_count=4)
    return jnp.mean(x**3)


def solved(x: Any, y: Any, segments: Any) -> Any:
    matrices = x @ jnp.swapaxes(x, -1, -2) + 8 * jnp.eye(x.shape[-1])
    return (
        jnp.linalg.inv(matrices),
        jnp.linalg.solve(matrices, y),
        jax.ops.segment_sum(x, segments, 8),
    )


def twice(x: Any) -> Any:
    return x, x, x + 1


TRAINED = (
    Case("mlp", trained(mlp_loss), lambda: (mlp_weights(), *pairs())),
    Case("recomputed block", trained(recomputed_loss), lambda: (block_weights(), real(BATCH, LENGTH, WIDTH))),
    Case("scanned blocks", trained(scanned_loss), lambda: (block_weights(LAYERS), real(BATCH, LENGTH, WIDTH))),
    Case(
        "unrolled blocks",
        trained(unrolled_loss),
        lambda: ([block_weights() for _ in range(LAYERS)], real(BATCH, LENGTH, WIDTH)),
    ),
    Case(
        "lstm",
        trained(lstm_loss),
        lambda: (
            {"in": real(WIDTH, 4 * HIDDEN), "again": real(HIDDEN, 4 * HIDDEN), "bias": real(4 * HIDDEN)},
            real(LENGTH, BATCH, WIDTH),
        ),
    ),
    Case(
        "conv net",
        trained(conv_loss),
        lambda: (
            {"first": real(3, 3, 4, 8), "second": real(3, 3, 8, 16), "head": real(2 * 2 * 16, CLASSES)},
            real(BATCH, 8, 8, 4),
            integers(BATCH, below=CLASSES),
        ),
    ),
    Case(
        "tied embedding",
        trained(tied_loss),
        lambda: (
            {"embed": real(WORDS, WIDTH), "places": real(LENGTH, WIDTH), "block": block_weights()},
            integers(BATCH, LENGTH + 1),
        ),
    ),
    Case(
        "experts",
        trained(experts_loss),
        lambda: (
            {
                "router": real(WIDTH, EXPERTS),
                "up": real(EXPERTS, WIDTH, HIDDEN),
                "down": real(EXPERTS, HIDDEN, WIDTH),
            },
            real(2 * BATCH, WIDTH),
        ),
    ),
    Case("dropout", trained(dropout_loss), lambda: (mlp_weights(), real(BATCH, WIDTH), jax.random.key(3))),
    Case("dropout, raw key", trained(dropout_loss), lambda: (mlp_weights(), real(BATCH, WIDTH), jax.random.PRNGKey(3))),
    Case("equinox and optax", equinox_step, equinox_args),
    Case("custom derivatives", trained(custom_loss), lambda: (real(WIDTH, HIDDEN), real(BATCH, WIDTH))),
    Case("while with data", while_not_small, lambda: (real(WIDTH, WIDTH), real(BATCH, WIDTH))),
    Case(
        "groups of channels",
        trained(convolved_loss),
        lambda: ({"each": real(3, 1, WIDTH), "groups": real(3, WIDTH // 4, HIDDEN)}, real(BATCH, LENGTH, WIDTH)),
    ),
    Case("nested loops", nested, lambda: (real(BATCH, WIDTH), real(LAYERS, WIDTH, WIDTH))),
)
"""Trainings, and loops."""

SMALL = (
    Case("cond", either, lambda: (real(WIDTH, WIDTH), real(BATCH, WIDTH))),
    Case("switch", switched, lambda: (jnp.int32(1), real(WIDTH, WIDTH))),
    Case("fori_loop", counted, lambda: (real(BATCH, WIDTH),)),
    Case("swapped in a loop", swapped, lambda: (real(WIDTH, WIDTH), real(WIDTH, WIDTH, seed=1))),
    Case("a scan of nothing", lambda x: lax.scan(lambda c, y: (c + y, y), x[0], x[:0]), lambda: (real(BATCH, WIDTH),)),
    Case(
        "a scan backwards", lambda x: lax.scan(lambda c, y: (c + y, c), x[0], x, reverse=True), lambda: (real(16, 8),)
    ),
    Case("sort, top_k, cumsum", ordered, lambda: (real(BATCH, WIDTH),)),
    Case("slices and shapes", moved_about, lambda: (real(BATCH, WIDTH), jnp.int32(2))),
    Case(
        "fft and cholesky",
        lambda x: (jnp.fft.fft(x), jnp.linalg.cholesky(x @ x.T + 9 * jnp.eye(8))),
        lambda: (real(8, 8),),
    ),
    Case("solves and segments", solved, lambda: (real(16, 4, 4), real(16, 4, 2), integers(16, below=8))),
    Case("no arrays", lambda a, b: (a, b, "text"), lambda: ("one", None)),
    Case("no arguments", lambda: jnp.arange(16.0), lambda: ()),
    Case("no results", lambda x: None, lambda: (real(BATCH, WIDTH),)),
    Case("constants only", lambda x: (jnp.ones((8, 8)), 3, np.arange(8)), lambda: (real(BATCH, WIDTH),)),
    Case("an array in its closure", lambda x: x + TABLE, lambda: (real(BATCH, WIDTH),)),
    Case("scalars", lambda a, b: (a * b, a + 1, jnp.sin(b)), lambda: (jnp.float32(2), jnp.float32(3))),
    Case("Python numbers", lambda a, x: (a * x, x**2), lambda: (3.0, real(BATCH, WIDTH))),
    Case("empty arrays", lambda x, y: (x @ y, x.sum(0), x + 1), lambda: (real(0, 8), real(8, 8))),
    Case("empty inside", lambda x: (x[:0] @ x.T, jnp.concatenate([x, x[:0]])), lambda: (real(8, 8),)),
    Case("integers", lambda x: (x * 2, x.sum(0), jnp.bincount(x[0], length=8)), lambda: (integers(16, 8),)),
    Case("booleans", lambda x: (x > 0, (x > 0).any(0), ~(x > 0)), lambda: (real(16, 8),)),
    Case(
        "half precision",
        lambda x, y: (x @ y, x.astype(jnp.float32)),
        lambda: tuple(real(16, 16).astype(jnp.bfloat16) for _ in range(2)),
    ),
    Case("an argument returned", lambda x, y: (x, y + 1), lambda: (real(16, 8), real(8))),
    Case("an argument alone", lambda x: x, lambda: (real(16, 8),)),
    Case("a result twice", twice, lambda: (real(16, 8),)),
    Case("an argument twice", lambda x, y: x @ y.T, lambda: (real(16, 8),) * 2),
    Case("an argument unused", lambda x, y: y * 2, lambda: (real(16, 8), real(16, 8))),
    Case("sizes that do not divide", lambda x, y: jnp.tanh(x @ y), lambda: (real(15, 7), real(7, 9))),
    Case(
        "keys",
        lambda keys: jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys),
        lambda: (jax.random.split(jax.random.key(0), 8),),
    ),
    Case("keys returned", lambda key: jax.random.split(key, 8), lambda: (jax.random.key(0),)),
    Case("a result that weighs nothing", lambda x: (x.sum(), 2.0 * x.sum(), x), lambda: (real(16, 8),)),
)
"""Everything else that a function may do."""

WRITTEN = (
    Case("constraints", trained(constrained_loss), lambda: (mlp_weights(), real(BATCH, WIDTH)), "data:4,model:2"),
    Case("shard_map", trained(mapped_loss), lambda: (mlp_weights(), real(BATCH, WIDTH)), "data:4,model:2"),
)
"""Functions that say themselves how arrays are laid out."""


def plain(tree: Any) -> list[Any]:
    """The leaves of a tree, keys as numbers."""
    return [
        jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf
        for leaf in jax.tree.leaves(tree)
    ]


def compare(actual: Any, expected: Any) -> None:
    """Asserts that two trees have the same structure, dtypes and numbers, up to rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(plain(actual), plain(expected), strict=True):
        if not isinstance(y, jax.Array | np.ndarray):
            assert x is y or x == y
            continue
        assert (x.shape, x.dtype) == (y.shape, jnp.asarray(y).dtype)
        if isinstance(y, jax.Array):
            assert x.weak_type == y.weak_type
        if jnp.issubdtype(y.dtype, jnp.inexact):
            tolerance = 2e-2 if y.dtype == jnp.bfloat16 else 5e-4
            dtype = np.complex128 if jnp.iscomplexobj(y) else np.float64
            np.testing.assert_allclose(
                np.asarray(x).astype(dtype), np.asarray(y).astype(dtype), tolerance, tolerance / 5
            )
        else:
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
