"""Programs without inner calls compute the same."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.jaxprs.inline import flattened
from shardrules.programs.jaxprs.walk import equations


def names(program: object) -> list[str]:
    return [equation.primitive.name for equation in equations(program)]  # pyright: ignore[reportArgumentType]


def test_a_function_that_is_called_twice_is_inlined_twice() -> None:
    inner = jax.jit(lambda x: jnp.sin(x) * jnp.asarray([1.0, 2.0]))
    program = jax.make_jaxpr(lambda x: inner(inner(x)))(jnp.ones(2))
    flat = flattened(program)
    assert names(flat).count("sin") == 2
    assert not {"jit", "pjit"} & set(names(flat))
    np.testing.assert_allclose(jaxpr_as_fun(flat)(jnp.ones(2))[0], inner(inner(jnp.ones(2))))


def test_bodies_of_scans_are_flattened_too() -> None:
    step = jax.jit(lambda x, w: (jnp.tanh(x @ w), x.sum()))
    weights = jnp.ones((3, 4, 4))
    program = jax.make_jaxpr(lambda x: jax.lax.scan(step, x, weights))(jnp.ones((2, 4)))
    flat = flattened(program)
    assert not {"jit", "pjit"} & set(names(flat))
    for actual, expected in zip(
        jaxpr_as_fun(flat)(jnp.ones((2, 4))), jaxpr_as_fun(program)(jnp.ones((2, 4))), strict=True
    ):
        np.testing.assert_allclose(actual, expected)


def test_checkpoints_stay_unless_they_are_to_be_replaced() -> None:
    program = jax.make_jaxpr(jax.checkpoint(eqx.filter_jit(lambda x: jnp.sin(x))))(1.0)
    assert len(flattened(program).eqns) == 1
    assert "sin" not in [equation.primitive.name for equation in flattened(program).eqns]
    assert names(flattened(program, replace_checkpoints=True)) == ["sin"]


def test_calls_with_shardings_stay() -> None:
    sharding = NamedSharding(sr.mesh_shape("data:8"), P("data"))
    inner = jax.jit(jnp.sin, in_shardings=sharding)
    program = jax.make_jaxpr(lambda x: inner(x))(jax.ShapeDtypeStruct((8,), jnp.float32))
    assert {"jit", "pjit"} & set(names(flattened(program)))


def test_source_lines_stay_true() -> None:
    def scoped(x: jax.Array) -> jax.Array:
        with jax.named_scope("inside"):
            return jnp.sin(x)

    def outer(x: jax.Array) -> jax.Array:
        with jax.named_scope("outside"):
            return jax.jit(scoped)(x)

    (equation,) = flattened(jax.make_jaxpr(outer)(1.0)).eqns
    assert str(equation.source_info.name_stack) == "outside/inside"
