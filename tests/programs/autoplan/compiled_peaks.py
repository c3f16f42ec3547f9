"""The peaks of functions that show one way each in which XLA for GPUs uses memory, as modelled and as compiled.

`python -m tests.programs.autoplan.compiled_peaks` compiles each for H100s, with its plan, and writes the table
`compiled_peaks.json`: the specs of the arguments, the compiled bytes, and how many times these the model says.
"""

import functools
import itertools
import json
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.spec import spec_repr
from shardrules.programs.compiling.compile import compiled_memory

TABLE = pathlib.Path(__file__).with_suffix(".json")


@final
@attrs.frozen
class Program:
    """A function, its arguments, and the specs that arrays of these are pinned to."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    axes: str = "x:1"
    pins: tuple[P | None, ...] = ()

    def plan(self, mesh: Any = None) -> sr.reports.AutoPlan:
        leaves, treedef = jax.tree.flatten(self.args)
        specs = [*self.pins, *[None] * (len(leaves) - len(self.pins))]
        pins = sr.SpecTreeShardingRule(treedef.unflatten(specs)) if self.pins else None
        return sr.autoplan(
            self.fn, *self.args, mesh=mesh or sr.mesh_shape(self.axes), hardware="cuda:h100", pins=pins, time_limit=600
        )

    def compiled_bytes(self) -> int:
        shape = sr.mesh_shape(self.axes)
        mesh = sr.Target("cuda", "h100", (shape.size,)).mesh(shape)
        plan = self.plan(mesh)
        donated = sorted({plan.call.argument_indices[index] for index in plan.call.feedback.values()})
        with jax.set_mesh(mesh), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            return compiled_memory(plan.jit(self.fn, donate_argnums=donated).lower(*plan.args), mesh).peak_bytes


def specs_text(plan: sr.reports.AutoPlan) -> str:
    runs = ((spec, len([*run])) for spec, run in itertools.groupby(map(spec_repr, plan.specs)))
    return ", ".join(spec if count == 1 else f"{count} x {spec}" for spec, count in runs)


real, half, whole = (
    functools.partial(lambda *shape, dtype: jax.ShapeDtypeStruct(shape, dtype), dtype=dtype)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32)
)


# Losses.


def scored(words: int, is_looked_up: bool, w: Any, x: Any, labels: Any) -> Any:
    """The logarithm of a softmax in float32, of bfloat16 scores."""
    scores = jax.nn.log_softmax((x @ w).astype(jnp.float32))
    if is_looked_up:
        return -jnp.take_along_axis(scores, labels[:, None], -1)
    return -jax.nn.one_hot(labels, words) * scores


def loss_slope(words: int, is_looked_up: bool, w: Any, x: Any, labels: Any) -> Any:
    return jax.grad(lambda w: jnp.mean(scored(words, is_looked_up, w, x, labels)))(w)


def mean_loss(words: int, is_looked_up: bool, w: Any, x: Any, labels: Any) -> Any:
    return jnp.mean(row_losses(words, is_looked_up, w, x, labels))


def row_losses(words: int, is_looked_up: bool, w: Any, x: Any, labels: Any) -> Any:
    return jnp.sum(scored(words, is_looked_up, w, x, labels), -1)


def slopes_in_rounds(w: Any, x: Any, labels: Any) -> Any:
    """Gradients of a loss that looks up what nothing but its value is computed from, added up over microbatches."""

    def loss(w: Any, x: Any, labels: Any) -> Any:
        scores = (x @ w).astype(jnp.float32)
        return jnp.mean(jax.nn.logsumexp(scores, -1) - jnp.take_along_axis(scores, labels[:, None], -1)[:, 0])

    rounds = jnp.stack([x, x]), jnp.stack([labels, labels])
    return lax.map(lambda part: jax.value_and_grad(loss)(w, *part), rounds)


def loss_of(
    fn: Callable[..., Any], words: int, is_looked_up: bool = False, axes: str = "x:1", pins: tuple[P, ...] = ()
) -> Program:
    args = half(64, words), half(4096, 64), whole(4096)
    return Program(functools.partial(fn, words, is_looked_up), args, axes, pins)


ROWS = "x:4", (P(), P("x"), P("x"))
"""Each device has rows of its own."""


def cut_slope(w: Any, x: Any) -> Any:
    """The gradient of scores of all tokens but the last."""
    return jax.grad(lambda w: jnp.sum(jax.nn.logsumexp((x @ w)[:, :-1], -1)))(w)


# Functions of activation and norms.


def activated(activation: Callable[..., Any], dtype: Any) -> Program:
    def slopes(x: Any, w: Any) -> Any:
        return jax.grad(lambda x, w: jnp.sum(activation(x @ w) @ w), (0, 1))(x, w)

    return Program(slopes, (jax.ShapeDtypeStruct((2**15, 256), dtype), jax.ShapeDtypeStruct((256, 256), dtype)))


ACTIVATIONS = {
    "gelu": (jax.nn.gelu, jnp.bfloat16),
    "exact gelu": (lambda x: jax.nn.gelu(x, approximate=False), jnp.bfloat16),
    "mish": (jax.nn.mish, jnp.bfloat16),
    "silu": (jax.nn.silu, jnp.bfloat16),
    "elu": (jax.nn.elu, jnp.bfloat16),
    "gelu of float32": (jax.nn.gelu, jnp.float32),
    "gelu in float32": (lambda x: jax.nn.gelu(x.astype(jnp.float32)).astype(x.dtype), jnp.bfloat16),
}


def grouped_norms(kernels: Any, x: Any) -> Any:
    """The gradient of convolutions of what norms of 16 groups of channels return, as bfloat16 computed in float32."""

    def loss(kernels: Any) -> Any:
        y = x
        for kernel in kernels:
            groups = y.astype(jnp.float32).reshape(*y.shape[:3], 16, -1)
            mean, variance = groups.mean((1, 2, 4), keepdims=True), groups.var((1, 2, 4), keepdims=True)
            norm = ((groups - mean) * lax.rsqrt(variance + 1e-5)).reshape(y.shape).astype(y.dtype)
            dims = ("NHWC", "HWIO", "NHWC")
            y = lax.conv_general_dilated(
                jax.nn.silu(norm * kernel[0, 0, 0]), kernel, (1, 1), "SAME", dimension_numbers=dims
            )
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return jax.grad(loss)(kernels)


# Trainings.


def descent(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(w: Any, x: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, slopes), value

    return step


def layer(h: Any, w: Any) -> tuple[Any, None]:
    return h + jnp.tanh(h @ w["up"]) @ w["down"], None


def unrolled(w: Any, x: Any) -> Any:
    for layer_w in w:
        x, _ = layer(x, layer_w)
    return jnp.mean(x**2)


def scanned(body: Callable[..., Any], w: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(body, x, w)[0] ** 2)


def adam(state: Any, x: Any) -> Any:
    w, moments = state
    value, slopes = jax.value_and_grad(unrolled)(w, x)
    updates, moments = optax.adam(1e-3).update(slopes, moments)
    return (optax.apply_updates(w, updates), moments), value


def attention(w: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k) / 8, axis=-1)
    return jnp.mean(jnp.einsum("bhst,bthk,hkd->bsd", weights, v, w["o"]) ** 2)


def towers(ws: Any, xs: Any) -> Any:
    """Two chains that do not need each other."""
    first, second = (chained(w, x) for w, x in zip(ws, xs, strict=True))
    return first * second


def chained(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def decoded(encoder: Any, before: Any, decoder: Any, x: Any, memory: Any) -> Any:
    """The decoder needs the encoder, and what comes before it does not."""
    for w in encoder:
        memory = jnp.tanh(memory @ w)
    for w in before:
        x = jnp.tanh(x @ w)
    for w in decoder:
        x = jnp.tanh((x + jnp.mean(memory, 0)) @ w)
    return jnp.sum(x)


def gathered_again(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w) @ w.T)(x, w)
    return jnp.mean(x**2)


def experts(w: Any, x: Any, sizes: Any) -> Any:
    inner = jax.nn.silu(lax.ragged_dot(x, w["gate"], sizes)) * lax.ragged_dot(x, w["up"], sizes)
    return jnp.sum(lax.ragged_dot(inner, w["down"], sizes).astype(jnp.float32) ** 2)


def experts_step(w: Any, x: Any, sizes: Any) -> Any:
    return jax.tree.map(lambda a, b: a - b, w, jax.grad(experts)(w, x, sizes))


def table_steps(state: Any, ids: Any) -> Any:
    """The rate of learning is computed last."""
    tables, count = state

    def loss(tables: Any) -> Any:
        return sum(jnp.sum((table[ids] @ jnp.ones((64, 64))) ** 2) for table in tables)

    slopes = jax.grad(loss)(tables)
    rate = 1 / jnp.sqrt(count)
    return [table - rate * slope for table, slope in zip(tables, slopes, strict=True)], count + 1


APART = [{"up": real(256, 1024), "down": real(1024, 256)}] * 4
STACKED = {"up": real(4, 256, 1024), "down": real(4, 1024, 256)}
HEADS = {**{name: real(256, 8, 64) for name in "qkv"}, "o": real(8, 64, 256)}
ADAM = (APART, jax.eval_shape(optax.adam(1e-3).init, APART))
EXPERTS = {"gate": half(8, 256, 512), "up": half(8, 256, 512), "down": half(8, 512, 256)}

STEPS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "adam": (adam, ADAM, real(2048, 256)),
    "scan": (descent(functools.partial(scanned, layer)), STACKED, real(2048, 256)),
    "recomputed": (descent(functools.partial(scanned, jax.checkpoint(layer))), STACKED, real(2048, 256)),
    "attention": (descent(attention), HEADS, real(16, 256, 256)),
}


# Updates, loops and branches.


def decode(cache: Any, x: Any) -> Any:
    cache = lax.dynamic_update_slice(cache, x[:, None], (0, 3, 0))
    return cache, jnp.einsum("be,bte->bt", x, cache)


def decode_scattered(cache: Any, x: Any) -> Any:
    cache = cache.at[:, 3].set(x).at[:, 4].set(2 * x)
    return cache, jnp.einsum("be,bte->bt", x, cache)


def decode_often(cache: Any, x: Any) -> Any:
    return lax.fori_loop(0, 8, lambda _, carry: (*decode(*carry)[:1], carry[1]), (cache, x))


def branches(x: Any, y: Any) -> Any:
    def add(x: Any, y: Any) -> Any:
        return jnp.sort(x) + 1, y - 1

    return lax.switch(x.sum().astype(jnp.int32), (lambda x, y: (x, y), add, add), x, jnp.sort(x + y))


def uneven_branches(x: Any, y: Any) -> Any:
    """What only one branch takes is there while the other, which runs later, uses more memory."""

    def much(_: Any, y: Any) -> Any:
        y, z = jnp.sort(y, 0), jnp.sort(-y, 0)
        return (jnp.sort(y * z) + y + z)[:8]

    return lax.cond(x.sum() > 0, much, lambda x, y: jnp.sort(x)[:8] + y[:8], jnp.sort(x, 0), jnp.sort(y))


def summed_up(x: Any) -> Any:
    return jnp.mean(jnp.sin(jnp.cumsum(jnp.cos(x), 0)) * jnp.cumsum(jnp.sin(x), 0))


def masked(x: Any, w: Any) -> Any:
    """A mask that a kernel could compute as it goes enters a loop."""
    mask = jnp.broadcast_to(jnp.arange(256) > 3, x.shape)
    return lax.scan(lambda y, _: (jnp.where(mask, y @ w, 0.0), None), x, length=4)[0]


def selective_scan(w: Any, x: Any) -> Any:
    """The states of a Mamba, by an associative scan."""

    def follow(first: Any, second: Any) -> Any:
        return second[0] * first[0], second[0] * first[1] + second[1]

    pace = jax.nn.softplus(x @ w["pace"])
    fed, read = jnp.split(x @ w["states"], 2, -1)
    kept = jnp.exp(pace[..., None] * -jnp.exp(w["decay"]))
    _, states = lax.associative_scan(follow, (kept, (pace * x)[..., None] * fed[:, :, None]), axis=1)
    return jnp.mean(jnp.einsum("bldn,bln->bld", states, read) ** 2)


PROGRAMS = {
    **{
        f"loss, {'looked up' if is_looked_up else 'multiplied'}, {words} words": loss_of(
            loss_slope, words, is_looked_up
        )
        for is_looked_up in (True, False)
        for words in (12000, 32768)
    },
    "loss, looked up, split": loss_of(loss_slope, 16000, True, "x:4", (P(None, "x"), P(), P())),
    "loss alone, mean of all": loss_of(mean_loss, 16000, False, *ROWS),
    "loss alone, of each row": loss_of(row_losses, 16000, False, *ROWS),
    "loss alone, long rows": loss_of(mean_loss, 32000, False, *ROWS),
    "loss in rounds, split": Program(
        slopes_in_rounds, (half(64, 4096), half(2048, 64), whole(2048)), "x:4", (P(None, "x"), P(), P())
    ),
    "loss of a slice": Program(cut_slope, (real(64, 32768), real(4, 256, 64))),
    **{f"activation, {name}": activated(*activation) for name, activation in ACTIVATIONS.items()},
    **{
        f"norms of groups, {examples} examples": Program(
            grouped_norms, ([half(3, 3, 128, 128)] * 5, half(examples, 32, 32, 128))
        )
        for examples in (8, 64)
    },
    **{
        f"{name} on {axes}": Program(fn, (state, x), axes)
        for name, (fn, state, x) in STEPS.items()
        for axes in ("data:8", "data:4,model:2")
    },
    "two towers": Program(
        jax.grad(towers), (([half(512, 512)] * 4, [half(256, 256)] * 4), (half(8192, 512), half(32768, 256)))
    ),
    "encoder and decoder": Program(
        jax.grad(decoded, (0, 1, 2)), ([half(512, 512)] * 3,) * 3 + (half(8192, 512), half(8192, 512))
    ),
    "gathered again": Program(
        jax.grad(gathered_again), ([half(512, 2048)] * 6, half(65536, 512)), "data:4", (P("data"),) * 7
    ),
    "experts": Program(experts_step, (EXPERTS, half(4096, 256), whole(8)), "data:8"),
    "tables": Program(table_steps, (([real(2**16, 64)] * 3, real()), whole(4096))),
    "decode": Program(decode, (real(64, 512, 256), real(64, 256))),
    "decode, scattered": Program(decode_scattered, (real(64, 512, 256), real(64, 256))),
    "decode in a loop": Program(decode_often, (real(64, 512, 256), real(64, 256))),
    "branches": Program(branches, (real(4096, 1024), real(4096, 1024))),
    "branches, one with more": Program(uneven_branches, (real(4096, 1024), real(4096, 1024))),
    "cumulative sums": Program(lambda w: w - 0.1 * jax.grad(summed_up)(w), (real(4096, 1024),)),
    "a mask in a loop": Program(masked, (real(16384, 256), real(256, 256))),
    "associative scan": Program(
        descent(selective_scan),
        ({"pace": real(256, 256), "states": real(256, 32), "decay": real(256, 16)}, real(8, 512, 256)),
    ),
}


def row(program: Program) -> dict[str, Any]:
    plan, nbytes = program.plan(), program.compiled_bytes()
    return {"plan": specs_text(plan), "compiled_bytes": nbytes, "ratio": round(plan.peak_bytes / nbytes, 2)}


if __name__ == "__main__":
    rows = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for name in sys.argv[1:] or PROGRAMS:
        rows[name] = row(PROGRAMS[name])
        print(f"{name}: {rows[name]}", flush=True)
        lines = [f"{json.dumps(name)}: {json.dumps(rows[name])}" for name in PROGRAMS if name in rows]
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
