"""Experts that are split inside: `inner` says along which dims."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import shardrules as sr
from shardrules.errors import ConfigError
from tests.programs.experts.mixtures import expert, experts_of, parameters, routes_of, tokens_and_weights
from tests.programs.experts.test_expert_exchange import close, exchanged, expected_of, value_of

P = jax.sharding.PartitionSpec

INNER = {"up": 2, "bias": 1, "down": 1}
SPLIT = {"up": P("expert", None, "model"), "bias": P("expert", "model"), "down": P("expert", "model")}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("how", "capacity"),
    [*((how, 3) for how in ("all_to_all", "dense", "ragged", "ring", "sum")), ("ragged", None), ("sum", None)],
)
def test_parts_are_added_up(how: str, capacity: int | None) -> None:
    lead = 8, 4
    mesh = jax.make_mesh((4, 2), ("expert", "model"), axis_types=(AxisType.Explicit,) * 2)
    operands, routes = (*tokens_and_weights(*lead), parameters()), routes_of("any expert", *lead)
    with jax.set_mesh(mesh):
        spec = P() if how == "sum" else P("expert")
        tokens, weights, placed_routes = (jax.device_put(array, spec) for array in (*operands[:2], routes))
        params = {name: jax.device_put(array, SPLIT[name]) for name, array in operands[2].items()}
        run = exchanged(placed_routes, capacity, how=how, axis="expert", inner=INNER)
        gradients, results = value_of(run)(tokens, weights, params)
    assert gradients[2]["up"].sharding.spec == SPLIT["up"]
    close((gradients, results), value_of(expected_of(routes, capacity))(*operands))


@pytest.mark.slow
def test_plans_split_few_large_experts_inside() -> None:
    def layer(tokens: Any, weights: Any, routes: Any, params: Any) -> Any:
        experts = jax.tree_util.Partial(expert, params)
        return sr.expert_exchange(tokens, routes, weights, experts, capacity=8, inner=INNER)[0]

    shapes = {"up": (2, 4096, 8192), "bias": (2, 8192), "down": (2, 8192, 4096)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    tokens, weights = (jax.ShapeDtypeStruct((8, size), jnp.bfloat16) for size in (4096, 2))
    routes = jax.ShapeDtypeStruct((8, 2), jnp.int32)
    plan = sr.autoplan(layer, tokens, weights, routes, params, mesh=sr.mesh_shape("model:8"))
    assert [dict(use.axes) for use in plan.regions] == [{"h": ("model",)}]
    assert plan.specs[-3:] == (P(None, "model"), P(None, "model"), P(None, None, "model"))


@pytest.mark.parametrize(
    ("inner", "problem"),
    [
        ({"up": 2}, "a dim, or None, for each of 3 arrays"),
        ({"up": 0, "bias": None, "down": 1}, r"positions after the first.*0 of \(16, 4, 6\)"),
        ({"up": 1, "bias": None, "down": 1}, r"one size.*1 of \(16, 6, 4\), 1 of \(16, 4, 6\)"),
    ],
)
def test_dims_that_do_not_fit_are_refused(inner: Any, problem: str) -> None:
    tokens, weights = tokens_and_weights(2, 6)
    with pytest.raises(ConfigError, match=problem):
        sr.expert_exchange(
            tokens, jnp.zeros(weights.shape, jnp.int32), weights, experts_of(parameters(), 2), capacity=2, inner=inner
        )
