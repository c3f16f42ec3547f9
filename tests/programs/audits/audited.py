"""Models and steps to audit, whose costs and layouts follow from their sizes."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.audits.report import AuditReport
from shardrules.programs.machine.targets import Target
from tests.programs.examples import CLOSED_FORMS, mesh_on

AXES = "data:4,model:2"

VOCABULARY, WIDTH, HIDDEN, BATCH, LENGTH, DEPTH = 640, 64, 256, 16, 24, 2
"""Sizes of the language model. No weight has as many elements as an activation, and no shards of them have either."""


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def con(x: Any, *spec: Any) -> Any:
    return lax.with_sharding_constraint(x, P(*spec))  # <con>


def line_of(fn: Callable[..., Any], marker: str) -> str:
    """The line of a function's source that ends in `# <marker>`, as findings print it."""
    lines, first = inspect.getsourcelines(fn)
    numbers = [number for number, line in enumerate(lines, first) if line.rstrip().endswith(f"# <{marker}>")]
    assert len(numbers) == 1, f"marker {marker!r} is on {len(numbers)} lines"
    return f"{inspect.getsourcefile(fn)}:{numbers[0]}"


def audit(fn: Callable[..., Any], *args: Any, target: str, axes: str = AXES, **options: Any) -> AuditReport:
    """An audit on a target whose compiler must be installed in CI, and is optional elsewhere."""
    mesh_on(target, axes)
    return sr.audit(fn, *args, mesh=sr.mesh_shape(axes), target=Target.parse(target), **options)


@final
@attrs.frozen(eq=False)
class Program:
    """A function to audit, with its arguments, their specs and what else `audit` takes."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    specs: Any
    axes: str = AXES
    out: Any = None
    roles: Any = None
    donate: int | tuple[int, ...] = ()

    @functools.cache  # noqa: B019 - programs live as long as the session, which compiles each of them once for a target
    def audit(self, target: str, hardware: sr.Hardware | None = None) -> AuditReport:
        options: dict[str, Any] = {"in_shardings": self.specs, "out_shardings": self.out, "roles": self.roles}
        options |= {"donate_argnums": self.donate, "hardware": hardware}
        return audit(self.fn, *self.args, axes=self.axes, target=target, **options)


def codes(report: AuditReport, *severities: str) -> list[str]:
    """The codes of findings of these severities, by default errors and warnings, each once."""
    severities = severities or ("error", "warning")
    return sorted({finding.code for finding in report.findings if finding.severity in severities})


def findings_of(error: sr.errors.PlanError) -> tuple[sr.Finding, ...]:
    """The findings of an error."""
    return tuple(finding for finding in error.findings if isinstance(finding, sr.Finding))


def normed(x: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def cross_entropy(logits: Any, labels: Any) -> Any:
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def language_step(constrain: bool) -> Callable[..., Any]:
    """A train step of a small language model whose weights are fully sharded and split as in Megatron."""

    def constrained(x: Any, *spec: Any) -> Any:
        return con(x, *spec) if constrain else x

    def loss(params: Any, tokens: Any) -> Any:
        x = constrained(params["embed"][tokens[:, :-1]], "data")  # <lookup>
        for layer in params["layers"]:
            h = constrained(normed(x), "data")
            h = constrained(jax.nn.silu(h @ layer["up"]), "data", None, "model")  # <up>
            x = constrained(x + constrained(h @ layer["down"], "data"), "data")  # <down>
        logits = constrained(x @ params["head"], "data", None, "model")  # <head>
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
    """The FLOPs of all matmuls on one of 8 devices: forward, and twice as many backward."""
    per_column = 2 * BATCH * LENGTH * WIDTH
    return 3 * per_column * (2 * HIDDEN * DEPTH + VOCABULARY) // 8


PLANS: Mapping[str, tuple[str | None, str | None]] = MappingProxyType(
    {
        "data parallel": (None, None),
        "fully sharded": ("data", None),
        "Megatron": (None, "model"),
        "both": ("data", "model"),
    }
)
"""The axes that split the weights: as in FSDP, and as in Megatron."""


@functools.cache
def language(
    target: str, plan: str, *, constrain: bool = True, split_embedding: bool = False, vocabulary: int = VOCABULARY
) -> AuditReport:
    """The audit of the language model under one of `PLANS`.

    With `split_embedding`, the columns of the embedding are split over the axis of the batch. Without constraints XLA
    then keeps splitting activations by column.
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
"""The roles of arguments in programs with several weights and no optimizer to infer them from."""


@functools.cache
def closed(name: str, target: str, with_roles: bool = False) -> AuditReport:
    """The audit of a closed form, `with_roles` from `ROLES` or without."""
    case = next(case for case in CLOSED_FORMS if case.name == name)
    fn, args, out = case.build(mesh_on(target, case.axes))
    roles = ROLES[name] if with_roles else None
    return audit(fn, *args, axes=case.axes, out_shardings=out, roles=roles, target=target)
