"""Models and steps that are audited, with what is known of them beforehand."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.analysis.audits.report import AuditReport
from shardrules.analysis.machine.targets import Target
from tests.analysis.programs import CLOSED, mesh_on

AXES = "data:4,model:2"

VOCABULARY, WIDTH, HIDDEN, BATCH, LENGTH, DEPTH = 640, 64, 256, 16, 24, 2
"""Of the language model. No weight has as many elements as an activation, nor have parts of them."""


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def con(x: Any, *spec: Any) -> Any:
    return lax.with_sharding_constraint(x, P(*spec))  # <con>


def line_of(fn: Callable[..., Any], marker: str) -> str:
    """The line with a comment `# <marker>` in the source of a function, as findings write it."""
    lines, first = inspect.getsourcelines(fn)
    found = [first + number for number, line in enumerate(lines) if line.rstrip().endswith(f"# <{marker}>")]
    assert len(found) == 1, f"marker {marker!r} is on {len(found)} lines"
    return f"{inspect.getsourcefile(fn)}:{found[0]}"


def audit(fn: Callable[..., Any], *args: Any, target: str, axes: str = AXES, **options: Any) -> AuditReport:
    """An audit on a target whose compiler has to be there in CI."""
    mesh_on(target, axes)
    return sr.ShardingAnalyzer(sr.mesh_shape(axes)).audit(fn, *args, target=Target.parse(target), **options)


def codes(report: AuditReport, *severities: str) -> list[str]:
    """What kinds of findings there are, each once."""
    found = [one.code for one in report.findings if one.severity in (severities or ("error", "warning"))]
    return sorted(dict.fromkeys(found))


def told(error: sr.errors.PlanError) -> tuple[sr.Finding, ...]:
    """The findings of an error."""
    return tuple(one for one in error.findings if isinstance(one, sr.Finding))


def normed(x: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def language_step(constrain: bool) -> Callable[..., Any]:
    """A train step of a small language model, whose weights are fully sharded and split as Megatron splits them."""

    def at(x: Any, *spec: Any) -> Any:
        return con(x, *spec) if constrain else x

    def loss(params: Any, tokens: Any) -> Any:
        x = at(params["embed"][tokens[:, :-1]], "data")  # <lookup>
        for layer in params["layers"]:
            h = at(normed(x), "data")
            h = at(jax.nn.silu(h @ layer["up"]), "data", None, "model")  # <up>
            x = at(x + at(h @ layer["down"], "data"), "data")  # <down>
        logits = at(x @ params["head"], "data", None, "model")  # <head>
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1))

    def step(params: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads), value

    return step


def language_params(vocabulary: int = VOCABULARY) -> Any:
    layer = {"up": f32(WIDTH, HIDDEN), "down": f32(HIDDEN, WIDTH)}
    return {"embed": f32(vocabulary, WIDTH), "head": f32(WIDTH, vocabulary), "layers": [layer] * DEPTH}


def language_specs(data: str | None, model: str | None, embed: P) -> Any:
    layer = {"up": P(data, model), "down": P(model, data)}
    return {"embed": embed, "head": P(data, model), "layers": [layer] * DEPTH}


def language_flops() -> int:
    """Forward, and twice that backward, of all matmuls on one of 8 devices."""
    each = 2 * BATCH * LENGTH * WIDTH
    return 3 * each * (2 * HIDDEN * DEPTH + VOCABULARY) // 8


PLANS: Mapping[str, tuple[str | None, str | None]] = MappingProxyType(
    {
        "data parallel": (None, None),
        "fully sharded": ("data", None),
        "Megatron": (None, "model"),
        "both": ("data", "model"),
    }
)
"""Over which axes a plan splits the weights: as FSDP does, and as Megatron does."""


@functools.cache
def language(
    target: str, plan: str, *, constrain: bool = True, split_embedding: bool = False, vocabulary: int = VOCABULARY
) -> AuditReport:
    """The audit of the language model under one of `PLANS`.

    The columns of the embedding are as wide as what follows it. Split over the axis of the batch, they make XLA go on
    with activations that are split in their columns, if no constraint forbids that.
    """
    specs = language_specs(*PLANS[plan], P(None, "data") if split_embedding else P())
    return audit(
        language_step(constrain),
        language_params(vocabulary),
        i32(BATCH, LENGTH + 1),
        in_shardings=(specs, P("data")),
        out_shardings=(specs, None),
        donate_argnums=0,
        target=target,
    )


ROLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    dict.fromkeys(("column then row", "attention", "sequence parallel"), ("parameters", "parameters", "batch"))
)
"""Of programs with several weights and no optimizer, which would tell."""


@functools.cache
def closed(name: str, target: str, said: bool = False) -> AuditReport:
    """The audit of a program whose costs are known. If `ROLES` knows its arguments, these can be said."""
    case = next(case for case in CLOSED if case.name == name)
    fn, args, out = case.build(mesh_on(target, case.axes))
    roles = ROLES[name] if said else None
    return audit(fn, *args, axes=case.axes, out_shardings=out, roles=roles, target=target)
