"""The models of the planning benchmark compute under a plan what they compute without, and they learn."""

import importlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardrules as sr
from tests.house.source import REPOSITORY

BENCHMARKS = str(REPOSITORY / "benchmarks")


def toy(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Any, Any, Any]:
    """The names in the file of models, one of its models, its step, and arrays for that."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = vars(importlib.import_module("plan_models"))
    model: Any = {**names["MODELS"], **names["KINDS"]}[name]
    step, _ = model.build(8, True)
    return names, model, step, model.arrays(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixture", "vit", "encoder_decoder", "conv_net", "lstm"])
def test_planned_models_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, step, args = toy(name, monkeypatch)
    planned = sr.autoplan(step, *args, mesh=sr.create_mesh("data:4,model:2"))
    plain, run = eqx.filter_jit(step), planned.jit(step)
    _, loss = plain(*args)
    state, same = run(*args)
    np.testing.assert_allclose(same, loss, rtol=1e-2)
    here = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)) if eqx.is_array(leaf) else leaf, state)
    _, later = plain(here, args[1])
    assert later < loss  # it learns
    np.testing.assert_allclose(run(state, args[1])[1], later, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["switch_experts", "neural_ode"])
def test_experts_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names, model, step, args = toy(name, monkeypatch)
    arrays, rest = eqx.partition(args, eqx.is_array)

    def whole(*values: Any) -> Any:
        state, loss = step(*eqx.combine(values, rest))
        return eqx.filter(state, eqx.is_array), loss

    loss = jax.jit(whole)(*arrays)[1]
    mesh = sr.create_mesh("data:4,model:2", axis_types="auto")
    suiting = [expert for expert in model.experts if expert.suits(mesh)]
    assert len({expert.name for expert in suiting}) == len(suiting)
    expert = suiting[-1]
    shardings = expert.shardings(args, mesh)
    placed = jax.tree.map(jax.device_put, arrays, shardings)
    with names["expert_constraints"](mesh, expert):
        state, same = jax.jit(whole, out_shardings=(shardings[0], None))(*placed)
    np.testing.assert_allclose(same, loss, rtol=1e-2)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
