"""The constraints in a traced function, wherever they are, and which of them JAX weakens."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.source import user_line
from shardrules.programs.compiling.constraints import find_constraints, weakened_constraints

MESH = sr.create_mesh("data:4,model:2")
SIZES = {"data": 4, "model": 2}
X = jnp.ones((16, 32))


def constrained(x: Any, *spec: Any) -> Any:
    return lax.with_sharding_constraint(x, P(*spec))


def once(x: Any) -> Any:
    return constrained(x, "data")


PROGRAMS: dict[str, Any] = {
    "plain": once,
    "jit": jax.jit(once),
    "scan": lambda x: lax.scan(lambda c, _: (once(c), None), x, None, length=3)[0],
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 0, once, x),
    "cond": lambda x: lax.cond(x.sum() > 0, once, jnp.sin, x),
    "remat": jax.checkpoint(once),
    "filter_shard": lambda x: eqx.filter_shard(x, P("data")),
    "named": lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, P("data"))),
    "filter_jit": eqx.filter_jit(once),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_constraints_are_found_wherever_they_are(name: str) -> None:
    with jax.set_mesh(MESH):
        program = jax.make_jaxpr(PROGRAMS[name])(X)
    ((shape, spec, stack),) = find_constraints(program)
    assert (shape, spec) == ((16, 32), P("data"))
    assert user_line(stack).startswith(f"{__file__}:")


def constraints(fn: Any, x: Any, mesh: Any = MESH) -> list[tuple[tuple[int, ...], P]]:
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(fn)(x)
    return [(shape, spec) for shape, spec, _ in find_constraints(program)]


def test_a_batch_in_front_takes_part() -> None:
    ((shape, spec),) = constraints(jax.vmap(once), jnp.ones((3, 16, 32)))
    assert (shape, spec[1]) == ((3, 16, 32), "data")


def test_gradients_are_constrained_as_their_values() -> None:
    assert constraints(jax.grad(lambda x: jnp.sum(once(x * 2) ** 2)), X) == [((16, 32), P("data"))] * 2
    assert constraints(lambda x: jnp.tanh(x) @ x.T, X) == []


def test_explicit_meshes_have_them_too() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    moved = constraints(lambda x: jax.sharding.reshard(x, P(None, "model")), X, mesh)
    assert moved == [((16, 32), P(None, "model"))]


@pytest.mark.parametrize(
    ("rows", "spec", "stays"),
    [
        (10, P(("data", "model")), False),
        (10, P(None, ("data", "model")), True),
        (10, P("model"), True),
        (10, P("data"), False),
        (16, P(("data", "model")), True),
        (12, P("data", "model"), True),
    ],
)
def test_constraints_that_do_not_divide(rows: int, spec: P, stays: bool) -> None:
    def fn(x: Any) -> Any:
        return lax.with_sharding_constraint(x, spec)

    with jax.set_mesh(MESH):
        program = jax.make_jaxpr(fn)(jnp.ones((rows, 32)))
    findings = list(weakened_constraints(find_constraints(program), SIZES))
    assert [finding.code for finding in findings] == ([] if stays else ["weakened"])
    assert all(f"({rows}, 32)" in finding.message and finding.source.startswith(__file__) for finding in findings)
