"""`expert_exchange` computes the same on every mesh, says what it drops, and refuses what it cannot do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import shardrules as sr
from shardrules.errors import ConfigError, ConfigTypeError
from tests.programs.experts.mixtures import (
    CHOICES,
    EXPERTS,
    WIDTH,
    expert,
    experts_of,
    is_kept,
    mixture,
    parameters,
    routes_of,
    tokens_and_weights,
)


def mesh_of(axis_type: AxisType) -> Mesh:
    return jax.make_mesh((4, 2), ("data", "expert"), axis_types=(axis_type,) * 2)


def value_of(run: Callable[..., Any]) -> Callable[..., Any]:
    """Results, and gradients of the sum of their squares."""

    def value(*operands: Any) -> Any:
        results = run(*operands)
        return (results**2).sum(), results

    return jax.jit(jax.grad(value, (0, 1, 2), has_aux=True))


def exchanged(routes: Any, capacity: int | None, **options: Any) -> Callable[..., Any]:
    def run(tokens: Any, weights: Any, params: Any) -> Any:
        experts = experts_of(params, capacity)
        return sr.expert_exchange(tokens, routes, weights, experts, capacity=capacity, **options)[0]

    return run


def expected_of(routes: Any, capacity: int | None) -> Callable[..., Any]:
    kept = is_kept(routes, capacity)

    def run(tokens: Any, weights: Any, params: Any) -> Any:
        return mixture(tokens, weights, params, routes, kept)

    return run


def close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected)


def check(lead: tuple[int, ...], capacity: int | None, **options: Any) -> None:
    operands, routes = (*tokens_and_weights(*lead), parameters()), routes_of("any expert", *lead)
    actual = value_of(exchanged(routes, capacity, **options))(*operands)
    close(actual, value_of(expected_of(routes, capacity))(*operands))


@pytest.mark.slow
@pytest.mark.parametrize(("lead", "capacity"), [((6,), None), ((2, 3), None), ((6,), 2), ((2, 2, 3), 2)])
def test_on_one_device(lead: tuple[int, ...], capacity: int | None) -> None:
    check(lead, capacity)


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("lead", "capacity", "options"),
    [
        ((16,), None, {"axis": "expert"}),
        ((7,), None, {"axis": ("data", "expert"), "how": "ring"}),  # no axis divides 7
        ((16,), None, {"axis": "expert", "how": "sum"}),
        ((3, 3), 2, {"axis": "expert", "how": "ragged"}),
        ((8,), 2, {"axis": "expert"}),  # one group cannot be split
    ],
)
def test_on_meshes(axis_type: AxisType, lead: tuple[int, ...], capacity: int | None, options: Any) -> None:
    with jax.set_mesh(mesh_of(axis_type)):
        check(lead, capacity, **options)


def compiled_text(axis_type: AxisType, **options: Any) -> str:
    mesh, params = mesh_of(axis_type), parameters()
    operands = (*tokens_and_weights(8, 4), params)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(operand, jax.P("data")) for operand in operands[:2]]
        run = exchanged(routes_of("any expert", 8, 4), 3, **options)
        return jax.jit(run).lower(*placed, params).compile().as_text() or ""


@pytest.mark.sample(1)
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_tokens_go_to_the_experts(axis_type: AxisType) -> None:
    text = compiled_text(axis_type, axis="expert")
    assert text.count("all-to-all(") == 2
    assert "all-reduce(" not in text


def test_a_ring_sends_experts_only() -> None:
    text = compiled_text(AxisType.Auto, axis="expert", how="ring")
    assert "collective-permute(" in text
    assert "all-to-all(" not in text


@pytest.mark.slow
def test_in_a_scan_over_layers() -> None:
    (tokens, weights), params, routes = tokens_and_weights(8, 4), parameters(), routes_of("any expert", 8, 4)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2]), params)

    def layers(apply: Callable[..., Any], tokens: Any, weights: Any, stacked: Any) -> Any:
        return jax.lax.scan(lambda x, layer: (x + apply(x, weights, layer), None), tokens, stacked)[0]

    mesh = mesh_of(AxisType.Auto)
    with jax.set_mesh(mesh):
        run, placed = (
            exchanged(routes, 3, axis="expert"),
            jax.device_put(tokens, jax.P("data")),
        )
        actual = value_of(lambda *operands: layers(run, *operands))(placed, weights, stacked)
    expected = value_of(lambda *operands: layers(expected_of(routes, 3), *operands))
    close(actual, expected(tokens, weights, stacked))


@pytest.mark.slow
def test_in_a_plan() -> None:
    lead, mesh = (64, 32), sr.create_mesh("data:4,expert:2")
    operands, routes = (*tokens_and_weights(*lead), parameters()), routes_of("any expert", *lead)
    run = exchanged(routes, 8)
    planned = sr.autoplan(run, *operands, mesh=mesh)
    close(planned.jit(run)(*operands), mixture(*operands, routes, is_kept(routes, 8)))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("lead", "capacity"), [((4, 3), 3), ((2, 2, 3), 1), ((4, 3), None), ((12,), None), ((12,), 3)])
def test_load(lead: tuple[int, ...], capacity: int | None) -> None:
    (tokens, weights), routes = tokens_and_weights(*lead), routes_of("few experts", *lead)
    _, load = sr.expert_exchange(tokens, routes, weights, experts_of(parameters(), capacity), capacity=capacity)
    kept = is_kept(routes, capacity)
    assert load.routed.tolist() == np.bincount(np.ravel(routes), minlength=EXPERTS).tolist()
    assert load.dropped.tolist() == np.bincount(np.asarray(routes)[~kept], minlength=EXPERTS).tolist()


@pytest.mark.slow
def test_modules_of_one_expert_keep_what_is_not_an_array() -> None:
    import equinox as eqx

    experts = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, 3, key=key))(jax.random.split(jax.random.key(0), 4))

    class Rows(eqx.Module):
        linear: eqx.nn.Linear
        scale: float

        def __call__(self, rows: jax.Array) -> jax.Array:
            return self.scale * jax.vmap(self.linear)(rows)

    tokens, weights = tokens_and_weights(2, 6)
    routes = jnp.zeros((2, 6, CHOICES), jnp.int32)
    results, _ = sr.expert_exchange(tokens, routes, weights, Rows(experts, 2.0), capacity=12)
    expected = 2 * (tokens @ experts.weight[0].T + experts.bias[0]) * weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(results, expected, rtol=1e-5, atol=1e-5)


def test_everything_that_is_wrong_is_listed() -> None:
    tokens, weights = tokens_and_weights(2, 6)
    routes = weights[:1]
    experts = jax.tree_util.Partial(expert, {"up": jnp.ones((3, 4, 4)), "down": jnp.ones((2, 4, 4))})
    with pytest.raises(
        ConfigError, match=r"indices of experts.*a row for each token.*stacked along.*unknown how.*mesh"
    ):
        sr.expert_exchange(tokens, routes, weights, experts, axis="model", how="dance")
    with pytest.raises(ConfigError, match=r"got function with 0 arrays.*has slots.*pass capacity"):
        sr.expert_exchange(tokens, routes_of("any expert", 2, 6), weights, lambda rows: rows, how="dense")
    with pytest.raises(ConfigError, match=r"one group.*reshape"):
        sr.expert_exchange(
            tokens[0], routes_of("any expert", 6), weights[0], experts_of(parameters(), 2), how="ring", capacity=2
        )


def test_axes_that_do_not_fit_are_refused() -> None:
    tokens, weights = tokens_and_weights(8)
    routes, experts = routes_of("any expert", 8), experts_of({"up": jnp.ones((3, 4, 4))}, None)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        with pytest.raises(ConfigError, match="unknown axis 'model'; the mesh has"):
            sr.expert_exchange(tokens, routes, weights, experts, axis="model")
        with pytest.raises(ConfigError, match="3 experts cannot be split evenly over"):
            sr.expert_exchange(tokens, routes, weights, experts, axis="expert")


def test_axes_are_names() -> None:
    tokens, weights = tokens_and_weights(8)
    with pytest.raises(ConfigTypeError, match="axis must be a name or a tuple of names, got 1"):
        sr.expert_exchange(tokens, routes_of("any expert", 8), weights, experts_of(parameters(), None), axis=1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("made_for", "capacity", "form"),
    [
        (2, None, r"without a capacity, as experts\(rows, group_sizes\)"),
        (None, 2, r"with a capacity, as experts\(rows\)"),
    ],
)
def test_experts_take_what_the_capacity_says(made_for: int | None, capacity: int | None, form: str) -> None:
    tokens, weights = tokens_and_weights(2, 6)
    experts = experts_of(parameters(), made_for)
    with pytest.raises(ConfigTypeError, match=f"experts are called {form}"):
        sr.expert_exchange(tokens, routes_of("any expert", 2, 6), weights, experts, capacity=capacity)


def test_experts_must_return_rows() -> None:
    tokens, weights = tokens_and_weights(2, 6)
    experts = jax.tree_util.Partial(lambda params, rows: rows.sum() + params.sum(), jnp.ones((4, 2)))
    with pytest.raises(ConfigError, match="must return a vector for each row"):
        sr.expert_exchange(tokens, routes_of("few experts", 2, 6) // 5, weights, experts, capacity=2)
