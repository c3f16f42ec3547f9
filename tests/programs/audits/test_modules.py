"""The module of an operation, as JAX, Flax and Equinox name it, and the costs of modules."""

from typing import Any

import attrs
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from shardrules.core.source import Source
from shardrules.programs.audits.modules import ModuleCost, module_costs, module_path
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.flow import Times
from tests.programs.audits.audited import Program, f32
from tests.programs.examples import TARGETS

OWN = Source("model.py", 12, "Block.__call__")
LIBRARY = Source(jax.__file__, 3, "dot")

PATHS: tuple[tuple[str, tuple[Source, ...], str], ...] = (
    ("jit(step)/Model/up/dot_general", (), "Model/up"),
    ("jit(step)/jvp(Model)/up/dot_general", (), "Model/up"),
    ("jit(step)/transpose(jvp(Model))/up/dot_general", (OWN,), "Model/up"),
    ("jit(step)/transpose(jvp(Model/Block))/up/dot_general", (), "Model/Block/up"),
    ("jit(step)/vmap(transpose(jvp(Model)))/up/add", (), "Model/up"),
    ("jit(step)/while/body/closed_call/Model/up/dot_general", (), "Model/up"),
    ("jit(step)/checkpoint/Model/rematted_computation/up/dot_general", (), "Model/up"),
    ("jit(step)/jit(relu)/Model/up/max", (), "Model/up"),
    ("jit(step)/cond/branch_1_fun/Model/up/dot_general", (), "Model/up"),
    ("jit(step)/shard_map/Model/up/psum", (), "Model/up"),
    ("jit(step)/custom_jvp_call/Model/up/tanh", (), "Model/up"),
    ("jit(step)/Model/up/bd,dh->bh/dot_general", (), "Model/up"),
    ("jit(step)/dot_general", (LIBRARY, OWN), "Block"),
    ("jit(step)/jvp()/dot_general", (OWN,), "Block"),
    ("jit(step)/jvp(eqx.nn.Linear)/dot_general", (LIBRARY, OWN), "Block/eqx.nn.Linear"),
    ("jit(step)/dot_general", (Source("model.py", 3, "make.<locals>.step"),), "step"),
    ("jit(step)/dot_general", (Source("model.py", 3, "<lambda>"), Source("model.py", 9, "loss")), "loss"),
    ("jit(step)/up/dot_general", (), "up"),
    ("jit(step)/dot_general", (), "(unknown)"),
    ("jit(step)/dot_general", (LIBRARY,), "(unknown)"),
    ("", (), "(unknown)"),
)


@pytest.mark.parametrize(("op_name", "stack", "path"), PATHS)
def test_the_scopes_around_an_operation(op_name: str, stack: tuple[Source, ...], path: str) -> None:
    assert module_path(op_name, stack) == path


def test_costs_of_equal_paths_are_added() -> None:
    gather = Collective("all-gather", ("data",), ("data",), 8, (), 64, 56, Times(12), "body", "all-gather.1")
    up = attrs.evolve(gather, op_name="jit(f)/Model/up/dot_general")
    back = attrs.evolve(gather, kind="all-reduce", op_name="jit(f)/transpose(jvp(Model))/up/dot_general", wire_bytes=7)
    down = attrs.evolve(gather, op_name="jit(f)/Model/down/dot_general", times=Times(1))
    assert module_costs([up, down, back], []) == (
        ModuleCost("Model/up", 0, 12 * (56 + 7), 24),
        ModuleCost("Model/down", 0, 56, 1),
    )
    assert module_costs([], []) == ()


class Dense(eqx.Module):
    """A layer of the user's own, around one of a library."""

    linear: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        return jax.nn.gelu(self.linear(x))


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for name in ("first", "second"):
            x = nn.relu(nn.Dense(64, name=name)(x))
        return nn.Dense(8, name="head")(x)


def costs(target: str, fn: Any, model: Any) -> dict[str, int]:
    report = Program(fn, (model, f32(64, 64)), (P(), P("data")), "data:8").audit(target)
    assert sum(module.flops for module in report.modules) == report.flops
    assert sum(module.wire_bytes for module in report.modules) == report.wire_bytes
    assert sum(module.run_count for module in report.modules) == sum(
        collective.times.count for collective in report.collectives
    )
    return {module.path: module.flops for module in report.modules if module.flops}


PRODUCT = 2 * 8 * 64
"""FLOPs for each column of a matrix that a device's rows of 64 meet."""


@pytest.mark.parametrize("target", TARGETS)
def test_layers_of_flax_have_their_names(target: str) -> None:
    model: Any = Deep()
    params = jax.eval_shape(model.init, jax.random.key(0), f32(8, 64))
    assert costs(target, jax.grad(lambda params, x: jnp.sum(jnp.square(model.apply(params, x)))), params) == {
        "Deep/first": 2 * PRODUCT * 64,  # the gradient of the batch is not computed
        "Deep/second": 3 * PRODUCT * 64,
        "Deep/head": 3 * PRODUCT * 8,
    }


@pytest.mark.parametrize("target", TARGETS)
def test_equinox_layers_are_named_after_their_module(target: str) -> None:
    model = eqx.filter_eval_shape(lambda: Dense(eqx.nn.Linear(64, 64, key=jax.random.key(0))))
    grad = eqx.filter_grad(lambda model, x: jnp.sum(jax.vmap(model)(x)))
    assert costs(target, grad, model) == {"Dense/eqx.nn.Linear": 2 * PRODUCT * 64}


@pytest.mark.parametrize("target", TARGETS)
def test_scopes_and_functions(target: str) -> None:
    def outer(w: Any, x: Any) -> Any:
        with jax.named_scope("attention"), jax.named_scope("query"):
            x = jnp.tanh(x @ w)
        return inner(w, x)

    def inner(w: Any, x: Any) -> Any:
        return x @ w

    flops = costs(target, outer, f32(64, 64))
    assert flops == {"attention/query": PRODUCT * 64, "inner": PRODUCT * 64}
