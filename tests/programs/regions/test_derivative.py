"""The backward pass of a region is a region, of its operands and the cotangents."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.errors import ConfigError
from shardrules.programs.jaxprs.walk import equations, without_dead_code
from tests.programs.regions.test_region import close, gradients, mesh_of, normalise, place, real


def test_a_custom_vjp_is_the_gradient() -> None:
    @jax.custom_vjp
    def cube(x: Any) -> Any:
        return x**3

    # The largest element of all rows is another on each device: what is kept means nothing elsewhere.
    cube.defvjp(lambda x: (x**3, (x, jnp.abs(x).max())), lambda saved, g: (7 * saved[0] ** 2 * g + 0 * saved[1],))
    region = sr.region("r d -> r d", split="r")(lambda x: cube(x))
    close(jax.grad(lambda x: region(x).sum())(real(4, 2)), 7 * real(4, 2) ** 2)
    sr.check_region(region, real(4, 2))


@pytest.mark.slow
def test_passes_may_be_split_differently() -> None:
    """Rows sorted within a shard are in another order than the same rows in another shard."""

    def mixture(x: Any, groups: Any, w: Any) -> Any:
        order = jnp.argsort(groups)
        return (jnp.tanh(x[order] @ w) ** 2)[jnp.argsort(order)]

    mesh, region = mesh_of(AxisType.Auto), sr.region("t d, t, d f -> t f", split="t")(mixture)
    x, w, cotangent = real(16, 4), real(4, 4, seed=1), jnp.arange(64.0).reshape(16, 4)
    groups = jnp.asarray(np.random.default_rng(5).permutation(16))
    expected = jax.vjp(lambda x, w: mixture(x, groups, w), x, w)[1](cotangent)
    placed = place(mesh, groups, P("data"))
    _, backward = jax.jit(lambda x, w: jax.vjp(lambda x, w: region(x, placed, w), x, w))(place(mesh, x, P("data")), w)
    close(jax.jit(lambda run, g: run(g))(backward, place(mesh, cotangent, P(("data", "model")))), expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_constants_made_inside_have_no_layout(axis_type: AxisType) -> None:
    def layer_norm(x: Any, w: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * w

    mesh, x, w = mesh_of(axis_type), real(16, 4), real(4, seed=1)
    region = sr.region("r d, d -> r d", split="r")(layer_norm)
    with jax.set_mesh(mesh):
        placed = place(mesh, x, P("data")), place(mesh, w, P())
        close(jax.jit(gradients(region, 2))(*placed), gradients(layer_norm, 2)(x, w))


def test_whole_numbers_have_no_gradient() -> None:
    region = sr.region("r d, k -> k d", whole="r d k")(lambda table, indices: table[indices])
    table, indices = real(6, 4), jnp.array([1, 5, 1])
    expected = jnp.zeros((6, 4)).at[1].set(4 * table[1]).at[5].set(2 * table[5])
    close(jax.grad(lambda table: (region(table, indices) ** 2).sum())(table), expected)


def test_gradients_that_nothing_needs_are_not_computed() -> None:
    region = sr.region("r d, d -> r d", split="r")(normalise)
    x, weight = real(8, 4), real(4, seed=1)
    program = without_dead_code(jax.make_jaxpr(jax.grad(lambda x: (region(x, weight) ** 2).sum()))(x))
    backward = [equation for equation in equations(program) if equation.primitive.name == "region"][-1]
    assert [aval.shape for aval in backward.params["program"].out_avals] == [(8, 4)]
    assert len(backward.outvars) == 1


@pytest.mark.slow
def test_second_derivatives_are_regions_too() -> None:
    def second(norm: Any, x: Any) -> Any:
        return jax.grad(lambda x: (jax.grad(lambda x: (norm(x, jnp.ones(4)) ** 3).sum())(x) ** 2).sum())(x)

    region = sr.region("r d, d -> r d", split="r")(normalise)
    x = real(8, 4)
    close(jax.jit(lambda x: second(region, x))(place(mesh_of(AxisType.Auto), x, P("data"))), second(normalise, x))


def test_losses_in_loops_have_gradients() -> None:
    region = sr.region("r d, d -> r d", split="r")(normalise)

    def loss(norm: Any, x: Any, weights: Any) -> Any:
        def layer(x: Any, weight: Any) -> Any:
            return jax.checkpoint(norm)(x, weight) + x, None

        return (lax.scan(layer, x, weights)[0] ** 2).sum()

    x, weights = real(8, 4), real(3, 4, seed=1)
    close(*(jax.grad(lambda w, norm=norm: loss(norm, x, w))(weights) for norm in (region, normalise)))


def test_bfloat16_gradients_keep_their_dtype() -> None:
    region = sr.region("r d, d -> r d", split="r")(normalise)
    x, weight = real(8, 4, dtype=jnp.bfloat16), real(4, seed=1)
    grads = gradients(region, 2)(x, weight)
    assert [grad.dtype for grad in grads] == [jnp.bfloat16, np.float32]


def test_settings_of_the_call_hold_for_shards_and_gradients() -> None:
    region = sr.region("m k, k n -> m n", split="m")(jnp.matmul)

    def loss(a: Any, b: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            product = region(a, b)
        return (product**2).sum()

    sharding = NamedSharding(mesh_of(AxisType.Auto), P("data"))
    shapes = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*shapes))
    assert text.count("dot_general[") == text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 4


def test_results_of_different_operands() -> None:
    region = sr.region("s d, t d -> s d, t d", split="s t")(lambda q, k: (jnp.sin(q), jnp.cos(k)))
    sr.check_region(region, real(4, 3), real(6, 3, seed=1))


def test_a_gradient_from_shards_and_from_what_they_share_is_refused() -> None:
    region = sr.region("r d, d -> r d, d", split="r")(lambda x, w: (x * w, jnp.sin(w)))
    message = r"gradient of operand 1 is a sum over 'r' and comes from result 1, too, which has no 'r'"
    with pytest.raises(ConfigError, match=message):
        gradients(lambda x, w: region(x, w)[0], 2)(real(8, 3), real(3, seed=1))
