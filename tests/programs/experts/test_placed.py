"""`expert_exchange` takes arrays as they are placed, of any integers, and without any rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import shardrules as sr
from shardrules.errors import ConfigError
from tests.programs.experts.mixtures import EXPERTS, experts_of, parameters, routes_of, tokens_and_weights
from tests.programs.experts.test_expert_exchange import close, expected_of, mesh_of, value_of

P = jax.sharding.PartitionSpec

PLACED: list[tuple[tuple[int, ...], int | None, P, dict[str, Any]]] = [
    ((8, 8), None, P("data"), {"axis": "expert"}),
    ((8, 8), None, P(None, "data"), {"axis": "expert"}),
    ((8, 8), None, P("data", "expert"), {"axis": "expert"}),
    ((4, 8), None, P(None, "data"), {}),
    ((12,), None, P("data"), {"axis": "expert"}),  # 8 devices do not divide 12
    ((12, 3), 2, P("data"), {"axis": "expert"}),
    ((8, 8), 2, P(None, "data"), {"axis": "expert"}),
    ((4, 4, 2), 2, P("data", "expert"), {"axis": "expert"}),
    ((8, 8), 2, P("expert"), {"axis": "expert", "how": "sum"}),
    ((8, 8), 2, P(), {"axis": ("expert", "data"), "how": "ring"}),
]


def placed_call(lead: tuple[int, ...], capacity: int | None, spec: P, options: Any) -> tuple[Any, tuple[Any, ...]]:
    """The exchange as a function, and operands that are placed so; routes come last."""
    tokens, weights = (jax.device_put(array, spec) for array in tokens_and_weights(*lead))
    routes = jax.device_put(routes_of("any expert", *lead), spec)

    def run(tokens: Any, weights: Any, params: Any, routes: Any) -> Any:
        experts = experts_of(params, capacity)
        return sr.expert_exchange(tokens, routes, weights, experts, capacity=capacity, **options)[0]

    return run, (tokens, weights, parameters(), routes)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("lead", "capacity", "spec", "options"), PLACED)
def test_explicit_meshes_allow_it(lead: Any, capacity: int | None, spec: P, options: Any) -> None:
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        run, operands = placed_call(lead, capacity, spec, options)
        assert jax.eval_shape(run, *operands).shape == operands[0].shape


@pytest.mark.slow
@pytest.mark.parametrize(("lead", "capacity", "spec", "options"), PLACED)
def test_on_explicit_meshes(lead: Any, capacity: int | None, spec: P, options: Any) -> None:
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        run, operands = placed_call(lead, capacity, spec, options)
        actual = value_of(run)(*operands)
    routes = routes_of("any expert", *lead)
    close(actual, value_of(expected_of(routes, capacity))(*tokens_and_weights(*lead), parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_of_arrays_that_are_older_than_the_mesh(axis_type: AxisType) -> None:
    (tokens, weights), routes = tokens_and_weights(8, 4), routes_of("any expert", 8, 4)
    experts = experts_of(parameters(), 2)
    with jax.set_mesh(mesh_of(axis_type)):
        results, _ = sr.expert_exchange(tokens, routes, weights, experts, axis="expert", capacity=2)
    close(results, expected_of(routes, 2)(tokens, weights, parameters()))


def scaled(params: Any, rows: Any, *_: Any) -> Any:
    return rows * params.sum()


def grouped_scales(params: Any, rows: Any, sizes: Any) -> Any:
    return rows * jnp.repeat(params, sizes, axis=0, total_repeat_length=len(rows))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.uint32])
def test_routes_of_any_integers(dtype: Any) -> None:
    """256 experts are more than 8 bits count, and so are 16 groups of 16 experts."""
    count, capacity = (256, None) if dtype == jnp.uint8 else (16, 4)
    routes = jnp.arange(64).reshape(16, 4, 1) % count
    experts = jax.tree_util.Partial(grouped_scales if capacity is None else scaled, jnp.arange(1.0, count + 1)[:, None])

    @jax.jit
    def run(routes: Any) -> Any:
        return sr.expert_exchange(jnp.ones((16, 4, 2)), routes, jnp.ones((16, 4, 1)), experts, capacity=capacity)

    results, load = run(routes.astype(dtype))
    np.testing.assert_array_equal(results, jnp.broadcast_to(routes + 1.0, (16, 4, 2)))
    assert load.routed.tolist() == np.bincount(routes.ravel(), minlength=count).tolist()


def test_routes_past_the_last_expert_go_to_none() -> None:
    tokens, weights = tokens_and_weights(3)
    routes = jnp.array([[EXPERTS, -1]] * 3)
    results, load = sr.expert_exchange(tokens, routes, weights, experts_of(parameters(), None))
    assert not results.any()
    assert not load.routed.any()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("lead", "choices", "capacity"), [((0,), 2, None), ((3,), 0, None), ((2, 0), 2, 3)])
def test_of_nothing(lead: tuple[int, ...], choices: int, capacity: int | None) -> None:
    weights = jnp.ones((*lead, choices))
    results, load = sr.expert_exchange(
        jnp.ones((*lead, 4)), weights.astype(int), weights, experts_of(parameters(), capacity), capacity=capacity
    )
    assert results.shape == (*lead, 4)
    assert not results.any()
    assert not load.routed.any()


def test_lists_and_integers_of_numpy_are_taken() -> None:
    experts = jax.tree_util.Partial(scaled, jnp.array([[1.0], [2.0]]))
    operands = [[[1.0, 2.0]]], [[[1]]], [[[0.5]]]
    results, _ = sr.expert_exchange(*operands, experts, capacity=np.int64(2))  # pyright: ignore[reportArgumentType]
    assert results.tolist() == [[[1.0, 2.0]]]
    with pytest.raises(ConfigError, match="capacity must be a whole number of at least 1, got True"):
        sr.expert_exchange(*operands, experts, capacity=True)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_rings_of_integers_have_gradients() -> None:
    """Quantised experts: their scales are trained."""
    generator, (tokens, weights), routes = np.random.default_rng(3), tokens_and_weights(8), routes_of("any expert", 8)
    params = {
        "matrix": jnp.asarray(generator.integers(-3, 4, (EXPERTS, 4, 4)), jnp.int8),
        "scale": jnp.ones((EXPERTS, 4)),
    }

    def loss(scale: Any, tokens: Any, how: str) -> Any:
        def mlp(params: Any, rows: Any, sizes: Any) -> Any:
            matrix = params["matrix"].astype(rows.dtype) * params["scale"][:, None]
            return jax.lax.ragged_dot(rows, matrix, sizes)

        experts = jax.tree_util.Partial(mlp, params | {"scale": scale})
        return (sr.expert_exchange(tokens, routes, weights, experts, axis="expert", how=how)[0] ** 2).mean()

    with jax.set_mesh(mesh_of(AxisType.Auto)):
        gradients = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
        close(gradients(params["scale"], tokens, "ring"), gradients(params["scale"], tokens, "ragged"))
