"""Traced functions moved to another mesh of the same axes: nothing of the old mesh stays, and nothing else changes."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.compiling.retarget import retarget
from tests.programs.examples import CUDA, TPU, mesh_on

AXES = "data:4,model:2"
HERE = sr.create_mesh(AXES)
THERE = Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("data", "model"))
"""The same devices in another order: programs that are moved there can be run."""

X = jnp.arange(16.0 * 32).reshape(16, 32)


def con(x: Any, *spec: Any, mesh: Any = HERE) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def plain(x: Any) -> Any:
    return jnp.tanh(con(x, "data", "model"))


def kernel(x: Any) -> Any:
    def double(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = 2 * x_ref[...]

    return pl.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(con(x))


def mapped(x: Any) -> Any:
    spec = P("data", "model")
    return jax.shard_map(
        lambda x: lax.psum(x, "model") + lax.ppermute(x, "data", [(0, 1), (1, 0)]),
        mesh=HERE,
        in_specs=spec,
        out_specs=spec,
    )(x)


def partly(x: Any) -> Any:
    return jax.shard_map(
        lambda x: lax.psum(jnp.sin(x), "model"),
        mesh=HERE,
        in_specs=P(None, "model"),
        out_specs=P(),
        axis_names={"model"},
    )(con(x, "data"))


jitted = jax.jit(
    lambda x: jnp.cos(x) @ X.T, in_shardings=NamedSharding(HERE, P("data")), out_shardings=NamedSharding(HERE, P())
)

PROGRAMS: dict[str, Callable[..., Any]] = {
    "constraint": plain,
    "scan": lambda x: lax.scan(lambda c, _: (plain(c), c.sum()), x, None, length=3),
    "while": lambda x: lax.while_loop(lambda c: c.sum() > 5, lambda c: con(c * 0.5, "data"), x),
    "cond": lambda x: lax.cond(x.sum() > 0, plain, jnp.cos, x),
    "remat": lambda x: jax.grad(lambda x: jax.checkpoint(plain)(x).sum())(x),
    "jit": jitted,
    "jit inside": lambda x: jitted(x * 2) + 1,
    "kernel": kernel,
    "shard_map": mapped,
    "shard_map in scan": lambda x: lax.scan(lambda c, _: (mapped(c) * 0.1, None), x, None, length=2)[0],
    "gradient of shard_map": jax.grad(lambda x: jnp.sum(mapped(x) ** 2)),
    "some axes by hand": partly,
    "numbers inside shard_map": lambda x: jax.shard_map(
        lambda x: lax.pmean(x * 2 + 1, ("data", "model")), mesh=HERE, in_specs=P("data", "model"), out_specs=P()
    )(x),
    "custom rule": lambda x: jax.nn.relu(con(x, "model")),
    "keys": lambda x: x + jax.random.normal(jax.random.key(3), x.shape),
}


def parts(value: Any) -> Iterator[Any]:
    """Everything in a program: parameters, types, contexts."""
    if isinstance(value, ClosedJaxpr) and not isinstance(value, Jaxpr):  # newer JAX has one class for both
        yield from parts(value.jaxpr)
    elif isinstance(value, Jaxpr):
        for variable in (*value.invars, *value.constvars, *value.outvars):
            yield variable.aval
        for equation in value.eqns:
            yield equation.ctx.cur_abstract_mesh
            yield from (variable.aval for variable in (*equation.invars, *equation.outvars))
            for param in equation.params.values():
                yield from parts(param)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from parts(item)
    else:
        yield value


def meshes(program: ClosedJaxpr) -> list[Any]:
    all_meshes: list[Any] = []
    for part in parts(program):
        sharding = getattr(part, "sharding", part)
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else sharding
        if isinstance(mesh, Mesh | AbstractMesh) and not mesh.empty:
            all_meshes.append(mesh)
    return all_meshes


def traced(fn: Callable[..., Any], mesh: Mesh = HERE) -> ClosedJaxpr:
    with jax.set_mesh(mesh):
        return jax.jit(fn).trace(jax.ShapeDtypeStruct(X.shape, X.dtype)).jaxpr


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_moved_program_computes_the_same(name: str) -> None:
    fn = PROGRAMS[name]
    moved = retarget(traced(fn), THERE)
    assert all(mesh == THERE for mesh in meshes(moved) if isinstance(mesh, Mesh))
    with jax.set_mesh(HERE):
        expected = jax.tree.leaves(jax.jit(fn)(X))
    with jax.set_mesh(THERE):
        results = jax.jit(jaxpr_as_fun(moved))(X)
    for result, each in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, each, rtol=1e-6)


@pytest.mark.parametrize("target", [CUDA, TPU])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_moved_program_compiles_for_another_machine(name: str, target: str) -> None:
    """JAX refuses a program in which one mesh of CPUs is left."""
    target_mesh = mesh_on(target, AXES)
    moved = retarget(traced(PROGRAMS[name]), target_mesh)
    kinds = {
        device.device_kind for mesh in meshes(moved) for device in (mesh.devices.flat if isinstance(mesh, Mesh) else ())
    }
    assert kinds <= {target_mesh.devices.flat[0].device_kind}
    with jax.set_mesh(target_mesh):
        text = jax.jit(jaxpr_as_fun(moved)).lower(jax.ShapeDtypeStruct(X.shape, X.dtype)).compile().as_text()
    assert "num_partitions=8" in (text or "")


def test_specs_memory_and_types_of_axes_are_kept() -> None:
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    target_mesh = Mesh(THERE.devices, THERE.axis_names, axis_types=explicit.axis_types)
    with jax.set_mesh(explicit):
        program = jax.jit(lambda x: jax.sharding.reshard(x, P(None, "model"))).trace(X).jaxpr
    (equation,) = retarget(program, target_mesh).jaxpr.eqns
    assert equation.params["dst_sharding"].spec == P(None, "model")
    moved = retarget(traced(plain), THERE)
    assert moved.jaxpr.eqns[0].params["sharding"] == NamedSharding(THERE, P("data", "model"))


def test_a_mesh_of_other_axes_stays() -> None:
    rows = sr.create_mesh("rows:8")
    program = traced(lambda x: con(x, "rows", mesh=rows), rows)
    assert retarget(program, THERE).jaxpr.eqns[0].params["sharding"].mesh == rows


def test_a_mesh_with_other_sizes_stays() -> None:
    other = sr.create_mesh("data:2,model:4")
    program = traced(lambda x: con(x, "data", mesh=other), other)
    assert retarget(program, THERE).jaxpr.eqns[0].params["sharding"].mesh == other


def test_constants_are_kept() -> None:
    constant = np.arange(32.0)
    moved = retarget(traced(lambda x: con(x, "data") + jnp.asarray(constant)), THERE)
    with jax.set_mesh(THERE):
        np.testing.assert_allclose(jax.jit(jaxpr_as_fun(moved))(X)[0], X + constant)


def test_the_program_itself_is_unchanged() -> None:
    program = traced(mapped)
    before = str(program)
    retarget(program, THERE)
    assert str(program) == before
    assert all(mesh == HERE for mesh in meshes(program) if isinstance(mesh, Mesh))
