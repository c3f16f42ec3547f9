"""Operations that each device runs on its own pieces."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.autoplan.run.local import LocalSplit, local_jaxpr, row_major_jaxpr
from tests.programs.autoplan.models import FAST

NUMBERS = np.random.default_rng(0)


def real(*shape: int) -> jax.Array:
    return jnp.asarray(NUMBERS.normal(size=shape), jnp.float32)


def run(fn: Any, args: tuple[Any, ...], split: LocalSplit) -> Any:
    (equation,) = jax.make_jaxpr(fn)(*args).eqns
    return jax.jit(jaxpr_as_fun(local_jaxpr(equation, split, sr.create_mesh("data:4,model:2"))))(*args)


def test_parts_of_a_sum_are_added_up() -> None:
    """Also if another axis splits nothing, where XLA by itself adds too much up."""
    x, gradient = real(8, 16, 6), real(8, 16, 6)

    def kernel_gradient(x: Any, gradient: Any) -> Any:
        numbers = lax.conv_dimension_numbers(x.shape, gradient.shape, ("CWN", "IWO", "WNC"))
        return lax.conv_general_dilated(x, gradient, (1,), [(1, 1)], dimension_numbers=numbers, batch_group_count=6)

    expected = kernel_gradient(x, gradient)
    for axis, pieces in (("data", P("data")), ("model", P("model")), (("data", "model"), P(("data", "model")))):
        axes = (axis,) if isinstance(axis, str) else axis
        (result,) = run(kernel_gradient, (x, gradient), LocalSplit((pieces, pieces), (P(),), (axes,)))
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("sizes", [(16, 0, 5, 11), (0, 0, 0, 32), (1, 2, 3, 4), (9, 7, 9, 7)])
def test_ragged_rows_are_in_their_groups(sizes: tuple[int, ...]) -> None:
    """Groups that are empty, cross the border of a device, or end before the rows do."""
    x, w, counts = real(32, 8), real(4, 8, 6), jnp.array(sizes, jnp.int32)
    split = LocalSplit((P(("data", "model")), P(), P()), (P(("data", "model")),), ((),))
    (result,) = run(lax.ragged_dot, (x, w, counts), split)
    np.testing.assert_allclose(result, lax.ragged_dot(x, w, counts), rtol=1e-4, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("sizes", [(16, 0, 5, 11), (0, 0, 0, 32), (1, 2, 3, 4), (9, 7, 9, 7)])
def test_devices_have_groups_of_ragged_rows(sizes: tuple[int, ...]) -> None:
    """With rows whole, and with rows split along another axis; and gradients of the groups."""
    x, w, y, counts = real(32, 8), real(4, 8, 6), real(32, 6), jnp.array(sizes, jnp.int32)
    expected = lax.ragged_dot(x, w, counts)
    for rows, groups in ((P(), "data"), (P("data"), "model")):
        split = LocalSplit((rows, P(groups), P()), (rows,), ((groups,),))
        (result,) = run(lax.ragged_dot, (x, w, counts), split)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())

    def gradient(x: Any, y: Any, counts: Any) -> Any:
        return lax.ragged_dot_general(x, y, counts, numbers)

    split = LocalSplit((P("model"), P("model"), P()), (P("data"),), (("model",),))
    (result,) = run(gradient, (x, y, counts), split)
    np.testing.assert_allclose(result, gradient(x, y, counts), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_planned_gradient_of_ragged_rows_runs() -> None:
    x, w, sizes = real(32, 8), real(4, 8, 6), jnp.array([16, 0, 5, 11], jnp.int32)
    step = jax.grad(lambda x, w, sizes: (lax.ragged_dot(x, w, sizes) ** 2).sum(), (0, 1))
    pins = sr.RegexShardingRule([("^1", P("model"))])
    planned = sr.autoplan(step, x, w, sizes, mesh=sr.create_mesh("data:4,model:2"), pins=pins, hardware=FAST)
    for gradient, expected in zip(planned.jit(step)(x, w, sizes), step(x, w, sizes), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("spec", [P(), P("data"), P(("data", "model")), P("model", None, "data")])
def test_keeping_the_order_of_dims_sends_nothing(spec: P) -> None:
    mesh = sr.create_mesh("data:4,model:2")
    x = jax.device_put(real(16, 3, 8), NamedSharding(mesh, spec))
    program = jaxpr_as_fun(row_major_jaxpr(jax.ShapeDtypeStruct(x.shape, x.dtype), spec, mesh))
    compiled = jax.jit(lambda x: program(jnp.sin(x))[0]).lower(x).compile()
    text = compiled.as_text()
    assert text is not None
    assert "all-gather" not in text
    assert "all-to-all" not in text
    np.testing.assert_allclose(compiled(x), jnp.sin(x), rtol=1e-4, atol=1e-4)


def routed(x: jax.Array) -> jax.Array:
    return lax.top_k(x, 2)[0] * jnp.abs(jnp.fft.rfft(x))[:, :2]


def same(fn: Any) -> Any:
    return fn


def gradient(fn: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(fn(x) ** 2))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("axis_type", "outer"), [(AxisType.Auto, gradient), (AxisType.Explicit, same), (AxisType.Explicit, jax.jit)]
)
def test_planned_functions_run_inside_others(axis_type: AxisType, outer: Any) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    x = real(16, 8)
    planned = sr.autoplan(routed, x, mesh=mesh, hardware=FAST).jit(routed)
    with jax.set_mesh(mesh):
        result = outer(planned)(x)
    np.testing.assert_allclose(result, outer(routed)(x), rtol=1e-4, atol=1e-4)
