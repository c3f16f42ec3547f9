"""No finding above a note on twenty healthy programs: published steps, models of the zoo, an example of the docs."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from docs.examples import train_gpt
from shardrules.programs.audits.report import AuditReport
from tests.programs.audits.audited import PLANS, audit, closed, f32, language
from tests.programs.audits.checks.healthy import PUBLISHED
from tests.programs.examples import CPU, TPU
from tests.zoo import TREES, as_shapes


def data_parallel(name: str, call: Callable[[Any, Any], Any], *shape: int) -> AuditReport:
    """A train step of a model of the zoo: whole weights, and a batch that is split."""
    model = as_shapes(TREES[name]())
    optimizer = optax.adam(1e-3)

    def step(model: Any, state: Any, x: Any) -> Any:
        grads = eqx.filter_grad(lambda model: jnp.mean(jax.vmap(lambda row: call(model, row))(x) ** 2))(model)
        updates, new_state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), new_state

    arrays = eqx.filter(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    state = jax.eval_shape(optimizer.init, arrays)
    specs = (P(), P(), P("data"))
    return audit(step, model, state, f32(*shape), axes="data:8", in_shardings=specs, target=CPU)


def gpt() -> AuditReport:
    """The step of the example, on windows of text that are split over the batch."""
    optimizer = optax.adamw(1e-3)
    mesh = sr.mesh_shape("data:4,model:2")
    state = eqx.filter_eval_shape(train_gpt.make_state, optimizer, 0)
    where = train_gpt.RULES.plan(state.model, mesh).mirror(state)

    def step(state: Any, windows: Any) -> Any:
        with sr.logical_axes(train_gpt.AXES):
            grads = eqx.filter_grad(train_gpt.loss_of)(state.model, windows)
            params = eqx.filter(state.model, eqx.is_inexact_array)
            updates, moments = optimizer.update(grads, state.optimizer, params)
            return train_gpt.State(eqx.apply_updates(state.model, updates), moments, state.step + 1, state.key)

    windows = jax.ShapeDtypeStruct((train_gpt.BATCH, train_gpt.CONTEXT + 1), jnp.uint8)
    options: dict[str, Any] = {"in_shardings": (where, P("data")), "out_shardings": where}
    return audit(step, state, windows, axes="data:4,model:2", target=CPU, **options)


OTHERS: Mapping[str, Callable[[], AuditReport]] = MappingProxyType(
    {
        "multilayer perceptron": lambda: data_parallel("mlp", lambda model, row: model(row), 64, 8),
        "attention": lambda: data_parallel("attention", lambda model, row: model(row, row, row), 16, 8, 16),
        "convolution": lambda: data_parallel("conv", lambda model, row: model(row), 16, 4, 16, 16),
        "columns and rows": lambda: closed("column then row", CPU, True),
        "layer norm": lambda: data_parallel("layer_norm", lambda model, row: model(row), 64, 16),
        "example GPT": gpt,
        **{
            f"language model, {plan}": (lambda plan=plan: language(TPU if plan == "both" else CPU, plan))
            for plan in PLANS
        },
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_steps_have_no_problems(name: str) -> None:
    assert PUBLISHED[name].audit().problems == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_models_and_examples_have_no_problems(name: str) -> None:
    assert OTHERS[name]().problems == ()


def test_there_are_twenty_healthy_programs() -> None:
    assert len(PUBLISHED) + len(OTHERS) == 20
