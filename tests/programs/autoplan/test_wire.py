"""Bytes on the wire: what plans model against what the compiler for GPUs makes of them."""

import functools
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.program import read_program
from tests.programs.examples import CUDA, mesh_on

pytestmark = pytest.mark.slow  # real compilers for GPUs

D, F, HEADS, VOCAB, LAYERS = 1024, 4096, 8, 8192, 3
bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)


def block(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w[name]) for name in ("q", "k", "v"))
    scores = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k).astype(jnp.float32), -1).astype(x.dtype)
    x = x + jnp.einsum("bhqk,bkhe,hed->bqd", scores, v, w["out"])
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def loss(w: dict[str, Any], tokens: jax.Array, scanned: bool) -> jax.Array:
    x = w["embed"][tokens[:, :-1]]
    if scanned:
        x, _ = jax.lax.scan(lambda x, layer: (jax.checkpoint(block)(layer, x), None), x, w["layers"])
    else:
        for layer in w["layers"]:
            x = jax.checkpoint(block)(layer, x)
    logits = jax.nn.log_softmax((x @ w["head"]).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


def step(state: Any, tokens: jax.Array, scanned: bool) -> tuple[Any, jax.Array]:
    w, m = state
    value, slope = jax.value_and_grad(loss)(w, tokens, scanned)
    m = jax.tree.map(lambda m, g: 0.9 * m + g.astype(m.dtype), m, slope)
    return (jax.tree.map(lambda w, m: w - (1e-3 * m).astype(w.dtype), w, m), m), value


def arguments(scanned: bool, batch: int, layers: int = LAYERS) -> tuple[Any, jax.ShapeDtypeStruct]:
    shapes = dict.fromkeys(("q", "k", "v"), (D, HEADS, D // HEADS))
    shapes |= {"out": (HEADS, D // HEADS, D), "up": (D, F), "down": (F, D)}
    layer = {name: bf16((layers, *shape) if scanned else shape) for name, shape in shapes.items()}
    w = {"embed": bf16((VOCAB, D)), "head": bf16((D, VOCAB)), "layers": layer if scanned else [layer] * layers}
    moments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), w)
    return (w, moments), jax.ShapeDtypeStruct((batch, 257), jnp.int32)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("axes", "scanned", "part"),
    [
        *(
            (axes, scanned, None)
            for axes in ("data:8", "data:4,model:2", "data:2,model:4")
            for scanned in (True, False)
        ),
        ("data:4,model:2", True, 0.9),
    ],
)
def test_planned_and_compiled_wire_bytes_agree(axes: str, scanned: bool, part: float | None) -> None:
    mesh = mesh_on(CUDA, axes)
    run = functools.partial(step, scanned=scanned)
    args = arguments(scanned, 64, LAYERS if scanned else 2)  # the first few layers make searches longer
    planned = sr.autoplan(run, *args, mesh=mesh)
    if part is not None:
        planned = sr.autoplan(run, *args, mesh=mesh, memory_limit=int(part * planned.result.peak_bytes))
        assert planned.price_of_memory > 0
    text = planned.jit(run, donate_argnums=0).lower(*args).compile().as_text()
    assert text is not None
    sent = sum(collective.total_wire_bytes for collective in find_collectives(read_program(text), mesh))
    assert sent > 2**20
    assert abs(planned.wire_bytes / sent - 1) < 0.1


def peak_bytes(planned: sr.reports.AutoPlan, run: Any, args: Any) -> int:
    usage = planned.jit(run, donate_argnums=0).lower(*args).compile().memory_analysis()
    assert usage is not None
    result_bytes = usage.output_size_in_bytes - usage.alias_size_in_bytes
    return usage.argument_size_in_bytes + result_bytes + usage.temp_size_in_bytes


@pytest.mark.slow
def test_the_compiler_uses_less_within_a_memory_limit() -> None:
    """Without the limit it uses more, as long as the device has it, to overlap more."""
    mesh = mesh_on(CUDA, "data:8")
    run = functools.partial(step, scanned=False)
    args = arguments(False, 4096)
    free = sr.autoplan(run, *args, mesh=mesh)
    free_bytes = peak_bytes(free, run, args)
    limited = attrs.evolve(free, memory_limit=int(0.95 * free_bytes))
    assert peak_bytes(limited, run, args) < free_bytes


def test_a_plan_with_a_limit_compiles_inside_another_jit() -> None:
    mesh = mesh_on(CUDA, "data:8")
    run = functools.partial(step, scanned=True)
    args = arguments(True, 64)
    planned = sr.autoplan(run, *args, mesh=mesh, memory_limit="1 GB").jit(run)
    jax.jit(lambda *arrays: planned(*arrays)).lower(*args)


# Lookups and updates, pinned to where their tables and tokens are split.

WORDS, TOKENS = 16384, 8192
f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def embedded(w: dict[str, jax.Array], words: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.sum((w["table"][words] @ w["out"] - targets) ** 2)


def permuted(w: dict[str, jax.Array], x: jax.Array, order: jax.Array) -> jax.Array:
    """Tokens to experts and back."""
    y = x[order].reshape(8, -1, D // 2)
    y = jax.nn.relu(jnp.einsum("etd,edf->etf", y, w["up"]))
    y = jnp.einsum("etf,efd->etd", y, w["down"]).reshape(-1, D // 2)
    return jnp.sum(jnp.zeros_like(x).at[order].set(y) ** 2)


def filtered(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A depthwise convolution over time."""
    y = jax.lax.conv_general_dilated(
        x, w["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=D // 2
    )
    return jnp.sum(jax.nn.silu(y) ** 2)


def routed(w: dict[str, jax.Array], x: jax.Array, order: jax.Array) -> jax.Array:
    """Tokens that are sorted by their expert."""
    sizes = jnp.full((8,), TOKENS // 8, jnp.int32)
    y = jax.lax.ragged_dot(jax.nn.relu(jax.lax.ragged_dot(x[order], w["up"], sizes)), w["down"], sizes)
    return jnp.sum(jnp.zeros_like(x).at[order].set(y) ** 2)


TABLE = {"table": f32((WORDS, D // 2)), "out": f32((D // 2, D // 2))}
WORDS_AND_TARGETS = jax.ShapeDtypeStruct((64, 128), jnp.int32), f32((64, 128, D // 2))
EXPERTS = {"up": f32((8, D // 2, D)), "down": f32((8, D, D // 2))}
TOKENS_AND_ORDER = f32((TOKENS, D // 2)), jax.ShapeDtypeStruct((TOKENS,), jnp.int32)


@pytest.mark.parametrize(
    ("function", "args", "path", "spec"),
    [
        (embedded, (TABLE, *WORDS_AND_TARGETS), "table", P("data", None)),
        (embedded, (TABLE, *WORDS_AND_TARGETS), "table", P("model", "data")),
        (permuted, (EXPERTS, *TOKENS_AND_ORDER), "^1", P("data")),
        (routed, (EXPERTS, *TOKENS_AND_ORDER), "^1", P("data")),
        (filtered, ({"kernel": f32((4, 1, D // 2))}, f32((64, 256, D // 2))), "^1", P("data")),
    ],
    ids=[
        "rows of a table",
        "rows and columns of a table",
        "tokens",
        "sorted tokens",
        "batch of a depthwise convolution",
    ],
)
def test_split_lookups_send_what_is_planned(function: Any, args: Any, path: str, spec: P) -> None:
    mesh = mesh_on(CUDA, "data:4,model:2")

    def train(w: Any, *batch: Any) -> Any:
        return jax.tree.map(lambda w, gradient: w - 0.1 * gradient, w, jax.grad(function)(w, *batch))

    planned = sr.autoplan(train, *args, mesh=mesh, pins=sr.RegexShardingRule([(path, spec)]))
    assert [finding for finding in planned.findings if finding.code == "unknown-operation"] == []
    text = planned.jit(train, donate_argnums=0).lower(*args).compile().as_text()
    assert text is not None
    sent = sum(collective.total_wire_bytes for collective in find_collectives(read_program(text), mesh))
    assert sent > 0
    assert abs(planned.wire_bytes / sent - 1) < 0.02
