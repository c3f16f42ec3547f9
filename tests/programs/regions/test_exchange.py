"""Regions whose functions communicate along letters, and alternatives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.regions.declaration import Declaration, ShardAxes
from shardrules.programs.regions.exchanges import exchanges_of
from tests.programs.regions.test_region import close, real


@sr.region("rows dim -> rows dim", split="rows", exchange="dim")
def softmax(x: Any, *, axis_name: Any) -> Any:
    largest = lax.stop_gradient(x).max(-1, keepdims=True)
    terms = jnp.exp(x - (lax.pmax(largest, axis_name) if axis_name else largest))
    total = terms.sum(-1, keepdims=True)
    return terms / (lax.psum(total, axis_name) if axis_name else total)


@sr.region("t d, t, e d -> t d, e,", split="t", exchange="t e")
def pick(tokens: Any, routes: Any, scales: Any, *, axis_name: Any) -> Any:
    """Scales each token by its expert, all of which are gathered, and counts tokens of each expert."""
    count = len(scales) * (lax.axis_size(axis_name) if axis_name else 1)
    everywhere = lax.all_gather(scales, axis_name, tiled=True) if axis_name else scales
    here = jax.nn.one_hot(routes, count).sum(0)
    load = lax.psum_scatter(here, axis_name, tiled=True) if axis_name else here
    picked = tokens * everywhere[routes]
    return picked, load, (picked**2).sum()


def picked(tokens: Any, routes: Any, scales: Any) -> Any:
    result = tokens * scales[routes]
    return result, jax.nn.one_hot(routes, len(scales)).sum(0), (result**2).sum()


def operands(count: int = 16) -> tuple:
    routes = jax.random.randint(jax.random.key(3), (count,), 0, 8)
    return real(count, 4), routes, real(8, 4, seed=1)


def sharded(mesh: Any, *arrays_and_specs: Any) -> list[Any]:
    return [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in arrays_and_specs]


def test_letters_of_an_exchange_share_axes() -> None:
    declaration = Declaration.parse("t d, t, e d -> t d, e,", "t", None, "t e")
    axes = ShardAxes({"t": ("data",)}, ("expert",), ("expert", "data"))
    specs, results = declaration.specs(axes)
    assert specs == (P(("expert", "data"), None), P(("expert", "data")), P(("expert",), None))
    assert results == (P(("expert", "data"), None), P(("expert",)), P())
    assert [declaration.sum_axes(index, axes) for index in range(3)] == [(), ("data",), ("data", "expert")]
    assert declaration.text.endswith("split t; exchange t e")


@pytest.mark.parametrize(
    ("specs", "exchange", "letters"),
    [
        ((P("x"), P("x"), P()), (), {"t": ("x",)}),
        ((P("x"), P("x"), P("x")), ("x",), {}),
        ((P(("x", "y")), P(), P("y")), ("y",), {"t": ("x",)}),
        ((P(), P(), P("y")), ("y",), {}),
        ((P("z"), P(), P("z")), (), {"t": ("z",)}),  # 8 experts on 3 devices
    ],
)
def test_axes_of_an_exchange_are_those_that_letters_share(specs: tuple, exchange: tuple, letters: dict) -> None:
    declaration = Declaration.parse("t d, t, e d -> t d, e,", "t", None, "t e")
    sizes = {"t": 24, "d": 4, "e": 8}
    axes = declaration.axes_of(specs, [P()] * 3, {"x": 2, "y": 2, "z": 3}, sizes)
    assert axes.exchange == exchange
    assert axes.letters == letters


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_functions_get_the_axes_to_exchange_over(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((2, 4), ("rows", "dim"), axis_types=(axis_type,) * 2)
    x = real(4, 16)
    (here,) = sharded(mesh, (x, P("rows", "dim")))
    compiled = jax.jit(softmax).lower(here).compile()
    assert "all-gather" not in (compiled.as_text() or "")
    result = compiled(here)
    assert result.sharding.spec == P("rows", "dim")
    close(result, jax.nn.softmax(x))


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_gradients_of_what_is_exchanged(axis_type: AxisType) -> None:
    def loss(function: Any) -> Any:
        def run(tokens: Any, routes: Any, scales: Any) -> Any:
            result, load, total = function(tokens, routes, scales)
            return (jnp.sin(result)).sum() + (load**2).sum() + total

        return jax.value_and_grad(run, (0, 2))

    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(axis_type,) * 2)
    tokens, routes, scales = operands()
    both = P(("data", "expert"))
    here = sharded(mesh, (tokens, both), (routes, both), (scales, P("expert")))
    close(jax.jit(loss(pick))(*here), loss(picked)(tokens, routes, scales))
    close(jax.jit(pick)(*here), picked(tokens, routes, scales))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data:8", "data:4,model:2"])
def test_plans_choose_exchanges(mesh: str) -> None:
    tokens, routes, scales = operands(4096)

    def step(scales: Any, tokens: Any, routes: Any) -> Any:
        return jax.value_and_grad(lambda scales: pick(tokens, routes, scales)[2])(scales)

    spec = P(("data", "model") if "model" in mesh else "data")
    pins = sr.SpecTreeShardingRule((spec, None, None))
    plan = sr.autoplan(step, scales, tokens, routes, mesh=sr.create_mesh(mesh), pins=pins)
    assert plan.specs[1][0] is not None
    close(plan.jit(step)(scales, tokens, routes), step(scales, tokens, routes))


@sr.region("rows dim -> rows dim", split="rows")
def softmax_of_rows(x: Any) -> Any:
    return jax.nn.softmax(x)


@sr.region("rows dim -> rows dim", split="rows", exchange="dim")
def softmax_of_pairs(x: Any, *, axis_name: Any) -> Any:
    if axis_name and lax.axis_size(axis_name) > 2:
        raise sr.errors.SplitError("it runs on two devices")
    return softmax.fn(x, axis_name=axis_name)


EITHER = sr.alternatives(softmax_of_rows, softmax_of_pairs)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("axes", "spec"), [((8, 1), P("rows", None)), ((1, 2), P(None, "dim")), ((4, 2), P("rows", "dim"))]
)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_alternatives_run_as_operands_are_split(axes: tuple, spec: P, axis_type: AxisType) -> None:
    devices = jax.devices()[: axes[0] * axes[1]]
    mesh = jax.make_mesh(axes, ("rows", "dim"), axis_types=(axis_type,) * 2, devices=devices)
    x = real(8, 16)
    (here,) = sharded(mesh, (x, spec))
    compiled = jax.jit(EITHER).lower(here).compile()
    assert "all-gather" not in (compiled.as_text() or "")
    close(compiled(here), jax.nn.softmax(x))
    gradient = jax.jit(jax.grad(lambda x: (EITHER(x) ** 2).sum()))(here)
    close(gradient, jax.grad(lambda x: (jax.nn.softmax(x) ** 2).sum())(x))


def test_an_alternative_that_cannot_run_is_not_taken() -> None:
    x = real(8, 16)
    (here,) = sharded(sr.create_mesh("dim:8"), (x, P(None, "dim")))
    result = jax.jit(EITHER)(here)
    close(result, jax.nn.softmax(x))
    plan = sr.autoplan(EITHER, x, mesh=sr.create_mesh("dim:8"))
    assert plan.specs == (P("dim"),)


@pytest.mark.slow
def test_mapped_alternatives() -> None:
    x = real(2, 8, 16)
    (here,) = sharded(sr.create_mesh("a:2,b:2,c:2"), (x, P("a", "b", "c")))
    close(jax.jit(jax.vmap(EITHER))(here), jax.nn.softmax(x))


def test_wrong_alternatives_are_refused() -> None:
    other = sr.region("rows d -> rows d", split="rows")(jnp.sin)
    with pytest.raises(
        sr.errors.ConfigError, match="one rule: sin is rows d -> rows d, and softmax_of_rows rows dim -> rows dim"
    ):
        sr.alternatives(softmax_of_rows, other)
    by_rows = sr.region("rows dim -> rows dim", exchange="rows")(lambda x, axis_name: x)
    with pytest.raises(sr.errors.ConfigError, match="exchange along different letters: dim, rows"):
        sr.alternatives(softmax, by_rows)
    with pytest.raises(sr.errors.ConfigTypeError, match="at least two functions"):
        sr.alternatives(softmax)
    narrow = sr.region("rows dim -> rows dim", split="rows")(lambda x: x.astype(jnp.bfloat16))
    with pytest.raises(sr.errors.ConfigError, match="must return the same types"):
        sr.alternatives(softmax_of_rows, narrow)(jnp.ones((8, 4)))


@pytest.mark.slow
def test_check_region_splits_exchanges() -> None:
    shapes = (jax.ShapeDtypeStruct((8, 16), jnp.float32),)
    sr.check_region(softmax, *shapes)
    sr.check_region(EITHER, *shapes)
    arrays = operands()
    sr.check_region(pick, *arrays)
    wrong = sr.region("rows dim -> rows dim", split="rows", exchange="dim")(lambda x, axis_name: jax.nn.softmax(x))
    with pytest.raises(sr.errors.ExpectationError, match="dim in 8: result 0 differs"):
        sr.check_region(wrong, *shapes)
    np.testing.assert_allclose(pick(*arrays)[1].sum(), 16)


@sr.region("rows dim, rows -> rows", split="rows", exchange="dim")
def biased(x: Any, bias: Any, *, axis_name: Any) -> Any:
    """The log-sum-exp of rows with a bias: of both each device returns a part."""
    if not axis_name:
        return jax.nn.logsumexp(x, axis=1) + bias
    largest = lax.pmax(lax.stop_gradient(x).max(1), axis_name)
    total = lax.psum(jnp.exp(x - largest[:, None]).sum(1), axis_name)
    return (largest + jnp.log(total) + bias) / lax.axis_size(axis_name)


@pytest.mark.slow
def test_gradients_that_come_from_the_cotangent_alone_are_sums() -> None:
    x, bias = real(4, 16), real(4, seed=1)
    (here,) = sharded(sr.create_mesh("dim:8"), (x, P(None, "dim")))
    expected = jax.grad(lambda x, bias: (jax.nn.logsumexp(x, axis=1) + bias).sum(), (0, 1))(x, bias)
    close(jax.jit(jax.grad(lambda x, bias: biased(x, bias).sum(), (0, 1)))(here, bias), expected)
    sr.check_region(biased, x, bias)


@pytest.mark.slow
def test_rings_are_checked_on_more_than_two_devices() -> None:
    @sr.region("t d -> t d", exchange="t")
    def turned(x: Any, *, axis_name: Any) -> Any:  # to the wrong neighbour
        if not axis_name:
            return jnp.roll(x, 2, 0)
        count = lax.axis_size(axis_name)
        return lax.ppermute(x, axis_name, [((device + 1) % count, device) for device in range(count)])

    with pytest.raises(sr.errors.ExpectationError, match="t in 8: result 0 differs"):
        sr.check_region(turned, real(16, 2), gradients=False)


def test_alternatives_that_refuse_whole_arrays_are_left() -> None:
    def of_even(x: Any) -> Any:
        if len(x) % 2:
            raise sr.errors.SplitError("it takes an even number of rows")
        return 2 * x

    even, any_rows = (sr.region("t d -> t d", split="t")(run) for run in (of_even, lambda x: 2 * x))
    for function in (sr.alternatives(even, any_rows), sr.alternatives(any_rows, even)):
        close(function(jnp.ones((5, 2))), 2 * jnp.ones((5, 2)))
    with pytest.raises(sr.errors.SplitError, match="an even number of rows"):
        sr.alternatives(even, even)(jnp.ones((5, 2)))


def test_of_branches_the_longest_exchange_counts() -> None:
    def run(index: Any, x: Any) -> Any:
        once = lambda x: lax.all_gather(x, "a", tiled=True).sum()  # noqa: E731
        return lax.switch(index, [once, lambda x: once(x) + once(2 * x), jnp.sum], x)

    program = jax.make_jaxpr(run, axis_env=[("a", 4)])(0, jnp.ones(8))
    assert [exchange.sent_bytes for exchange in exchanges_of(program, {"a": 4})] == [96, 96]
    groups = jax.make_jaxpr(lambda x: lax.psum(x, "a", axis_index_groups=[[0, 1], [2, 3]]), axis_env=[("a", 4)])(
        jnp.ones(8)
    )
    assert [exchange.sent_bytes for exchange in exchanges_of(groups, {"a": 4})] == [32]
