"""Small programs whose collectives and FLOPs have closed forms, compiled for CPUs, GPUs and TPUs."""

import functools
import math
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import MissingCompilerError
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.program import CompiledProgram, read_program
from shardrules.programs.machine.targets import Target
from tests.quick import USUAL_KERNELS

CPU, CUDA, TPU = "cpu:8", "cuda:h100:8", "tpu:v5e:4x2"
TARGETS = (CPU, CUDA, TPU)

BATCH, LENGTH, WIDTH, HIDDEN, HEADS, LAYERS, STEPS = 16, 32, 64, 256, 8, 12, 4
DATA, MODEL = 4, 2


def mesh_on(target: str, text: str) -> Mesh:
    """A mesh on a target whose compiler must be installed in CI, and is optional elsewhere."""
    try:
        return Target.parse(target).mesh(sr.mesh_shape(text))
    except MissingCompilerError as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))


@final
@attrs.frozen
class Moved:
    """One array in a collective: `payload_bytes` of it, `count` times."""

    kind: str
    axes: tuple[str, ...]
    payload_bytes: int
    count: int = 1


@final
@attrs.frozen
class ClosedForm:
    """A program with its expected costs.

    `build` returns a function, its arguments and the shardings of its results. `moved` holds for compilers that create
    reduce-scatters and hoist collectives out of loops, `on_cpu` for XLA's CPU compiler, which does neither.
    """

    name: str
    axes: str
    build: Callable[[Mesh], tuple[Callable[..., Any], tuple[Any, ...], Any]]
    moved: tuple[Moved, ...]
    on_cpu: tuple[Moved, ...]
    flops: int


def array(mesh: Mesh, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def put(mesh: Mesh, x: Any, *spec: Any) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def compiled(fn: Callable[..., Any], *args: Any, out: Any = None, **options: Any) -> Any:
    jitted = jax.jit(fn) if out is None else jax.jit(fn, out_shardings=out)
    return jitted.lower(*args).compile(compiler_options=options or None)


def program_of(fn: Callable[..., Any], *args: Any, out: Any = None, **options: Any) -> CompiledProgram:
    text = compiled(fn, *args, out=out, **options).as_text()
    assert isinstance(text, str)
    return read_program(text)


@functools.cache
def text_of(name: str, target: str) -> str:
    """The compiled text of a closed form, which is compiled once."""
    case = next(case for case in CLOSED_FORMS if case.name == name)
    fn, args, out = case.build(mesh_on(target, case.axes))
    return compiled(fn, *args, out=out, **(USUAL_KERNELS if target == CPU else {})).as_text()


def arrays_moved(collectives: tuple[Collective, ...]) -> Counter[tuple[str, tuple[str, ...] | None, int]]:
    """How often each array is moved, whichever arrays a compiler combines."""
    counts: Counter[tuple[str, tuple[str, ...] | None, int]] = Counter()
    for collective in collectives:
        for part in collective.arrays:
            whole = part.nbytes * (collective.group_size if collective.kind == "reduce-scatter" else 1)
            counts[collective.kind, collective.axes, whole] += collective.times.count
    return counts


def expected(moved: tuple[Moved, ...]) -> Counter[tuple[str, tuple[str, ...] | None, int]]:
    counts: Counter[tuple[str, tuple[str, ...] | None, int]] = Counter()
    for move in moved:
        counts[move.kind, move.axes, move.payload_bytes] += move.count
    return counts


def ring_bytes(moved: tuple[Moved, ...], axes: str) -> int:
    """What a device sends in rings, by the textbook."""
    sizes = dict(sr.mesh_shape(axes).shape)
    total = 0
    for move in moved:
        devices = math.prod(sizes[axis] for axis in move.axes)
        rounds = 2 if move.kind == "all-reduce" else 1
        sent, rest = divmod(move.payload_bytes * (devices - 1) * rounds, devices)
        assert rest == 0, "choose sizes that divide, so that the formula holds to the byte"
        total += sent * move.count
    return total


def data_parallel(mesh: Mesh) -> tuple[Any, ...]:
    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - grad, loss

    out = NamedSharding(mesh, P()), NamedSharding(mesh, P())
    return step, (array(mesh, (WIDTH, HIDDEN)), array(mesh, (BATCH, WIDTH), "data")), out


def fully_sharded(mesh: Mesh) -> tuple[Any, ...]:
    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - grad, loss

    out = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    return step, (array(mesh, (WIDTH, HIDDEN), "data"), array(mesh, (BATCH, WIDTH), "data")), out


def column_then_row(mesh: Mesh) -> tuple[Any, ...]:
    def mlp(up: Any, down: Any, x: Any) -> Any:
        return put(mesh, jax.nn.gelu(x @ up) @ down, "data")

    up, down = array(mesh, (WIDTH, HIDDEN), None, "model"), array(mesh, (HIDDEN, WIDTH), "model", None)
    return mlp, (up, down, array(mesh, (BATCH, LENGTH, WIDTH), "data")), None


def attention(mesh: Mesh) -> tuple[Any, ...]:
    def attend(w: Any, out: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[name]) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k), -1)
        mixed = jnp.einsum("bhqs,bshk->bqhk", scores, v)
        return put(mesh, jnp.einsum("bthk,hkd->btd", mixed, out), "data")

    projection = array(mesh, (WIDTH, HEADS, WIDTH // HEADS), None, "model")
    out = array(mesh, (HEADS, WIDTH // HEADS, WIDTH), "model")
    return attend, (dict.fromkeys("qkv", projection), out, array(mesh, (BATCH, LENGTH, WIDTH), "data")), None


def sequence_parallel(mesh: Mesh) -> tuple[Any, ...]:
    def mlp(up: Any, down: Any, x: Any) -> Any:
        gathered = put(mesh, x, "data", None, None)
        return put(mesh, jax.nn.gelu(gathered @ up) @ down, "data", "model", None)

    up, down = array(mesh, (WIDTH, HIDDEN), None, "model"), array(mesh, (HIDDEN, WIDTH), "model", None)
    return mlp, (up, down, array(mesh, (BATCH, LENGTH, WIDTH), "data", "model")), None


def scanned(mesh: Mesh) -> tuple[Any, ...]:
    """A train step over scanned layers: fully sharded over `data`, column then row over `model`."""

    def loss(layers: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            return put(mesh, x + jnp.tanh(x @ w["up"]) @ w["down"], "data"), None

        return jnp.mean(lax.scan(body, x, layers)[0] ** 2)

    def step(layers: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(layers, x)
        return jax.tree.map(lambda w, g: w - g, layers, grads), value

    layers = {
        "up": array(mesh, (LAYERS, WIDTH, HIDDEN), None, "data", "model"),
        "down": array(mesh, (LAYERS, HIDDEN, WIDTH), None, "model", "data"),
    }
    out = jax.tree.map(lambda w: w.sharding, layers), NamedSharding(mesh, P())
    return step, (layers, array(mesh, (BATCH, WIDTH), "data")), out


def accumulated(mesh: Mesh) -> tuple[Any, ...]:
    def step(w: Any, batches: Any) -> Any:
        def accumulate(carry: Any, x: Any) -> Any:
            loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
            return (carry[0] + loss, carry[1] + grad), None

        (loss, grad), _ = lax.scan(accumulate, (0.0, jnp.zeros_like(w)), batches)
        return w - grad, loss

    return step, (array(mesh, (WIDTH, HIDDEN)), array(mesh, (STEPS, BATCH, WIDTH), None, "data")), None


_W = WIDTH * HIDDEN * 4  # bytes of one matrix
_X = BATCH * LENGTH * WIDTH * 4 // DATA  # bytes of a device's activations
_ROW = BATCH * WIDTH * 4 // DATA
_LAYER = _W // MODEL
_PRODUCT = 2 * BATCH * WIDTH * HIDDEN  # FLOPs of one product of a batch, on all devices
_LONG = _PRODUCT * LENGTH

CLOSED_FORMS = (
    ClosedForm(
        "data parallel",
        "data:8",
        data_parallel,
        (Moved("all-reduce", ("data",), _W), Moved("all-reduce", ("data",), 4)),
        (Moved("all-reduce", ("data",), _W), Moved("all-reduce", ("data",), 4)),
        2 * _PRODUCT // 8,
    ),
    ClosedForm(
        "fully sharded",
        "data:8",
        fully_sharded,
        (
            Moved("all-gather", ("data",), _W),
            Moved("reduce-scatter", ("data",), _W),
            Moved("all-reduce", ("data",), 4),
        ),
        (Moved("all-gather", ("data",), _W), Moved("all-reduce", ("data",), _W), Moved("all-reduce", ("data",), 4)),
        2 * _PRODUCT // 8,
    ),
    ClosedForm(
        "column then row",
        "data:4,model:2",
        column_then_row,
        (Moved("all-reduce", ("model",), _X),),
        (Moved("all-reduce", ("model",), _X),),
        2 * _LONG // 8,
    ),
    ClosedForm(
        "attention",
        "data:4,model:2",
        attention,
        (Moved("all-reduce", ("model",), _X),),
        (Moved("all-reduce", ("model",), _X),),
        (4 * 2 * BATCH * LENGTH * WIDTH * WIDTH + 2 * 2 * BATCH * LENGTH * LENGTH * WIDTH) // 8,
    ),
    ClosedForm(
        "sequence parallel",
        "data:4,model:2",
        sequence_parallel,
        (Moved("all-gather", ("model",), _X), Moved("reduce-scatter", ("model",), _X)),
        (Moved("all-gather", ("model",), _X), Moved("all-reduce", ("model",), _X)),
        2 * _LONG // 8,
    ),
    ClosedForm(
        "scanned",
        "data:4,model:2",
        scanned,
        (
            Moved("all-gather", ("data",), _LAYER, 4 * LAYERS),  # two matrices, forward and backward
            Moved("reduce-scatter", ("data",), _LAYER, 2 * LAYERS),
            Moved("all-reduce", ("model",), _ROW, 2 * LAYERS),  # activations forward, their gradients backward
            Moved("all-reduce", ("data",), 4),
        ),
        (
            Moved("all-gather", ("data",), _LAYER, 4 * LAYERS),
            Moved("all-reduce", ("data",), _LAYER, 2 * LAYERS),
            Moved("all-reduce", ("model",), _ROW, 2 * LAYERS),
            Moved("all-reduce", ("data",), 4),
        ),
        6 * LAYERS * _PRODUCT // 8,
    ),
    ClosedForm(
        "accumulated",
        "data:8",
        accumulated,
        (Moved("all-reduce", ("data",), _W), Moved("all-reduce", ("data",), 4, STEPS)),
        (Moved("all-reduce", ("data",), _W, STEPS), Moved("all-reduce", ("data",), 4, STEPS)),
        2 * STEPS * _PRODUCT // 8,
    ),
)
