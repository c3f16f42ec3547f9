"""The wrappers of Equinox as functions: made, copied as trees, placed, and as shapes."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr


class Scale(eqx.Module):
    weight: jax.Array

    def __call__(self, x: Any) -> Any:
        return self.weight * x

    def method(self, x: Any) -> Any:
        return self.weight * x


with_vjp: Any = eqx.filter_custom_vjp(lambda x: 2 * x)
with_vjp.def_fwd(lambda perturbed, x: (2 * x, None))
with_vjp.def_bwd(lambda residuals, gradient, perturbed, x: gradient)


with_jvp: Any = eqx.filter_custom_jvp(lambda x: 2 * x)
with_jvp.def_jvp(lambda primals, tangents: (2 * primals[0], tangents[0]))

X = np.arange(16.0, dtype=np.float32).reshape(8, 2)
SCALE = Scale(jnp.full(2, 2.0))
"""The result of each wrapper is `2 * X`."""

WRAPPERS: dict[str, Callable[..., Any]] = {
    "vmap": eqx.filter_vmap(SCALE),
    "vmap of a method": eqx.filter_vmap(SCALE.method),
    "checkpoint": eqx.filter_checkpoint(SCALE),
    "jit": eqx.filter_jit(SCALE),
    "our jit": sr.filter_jit(SCALE),
    "partial": eqx.Partial(SCALE),
    "JAX's partial": jtu.Partial(SCALE),
    "method": SCALE.method,
    "assert_max_traces": eqx.debug.assert_max_traces(SCALE, max_traces=None),
    "closure": eqx.filter_closure_convert(SCALE, X),
    "custom vjp": with_vjp,
    "custom jvp": with_jvp,
    "gradient": eqx.filter_vmap(eqx.filter_grad(lambda x: jnp.sum(x**2))),
    "value and gradient": eqx.Partial(lambda fn, x: fn(x)[1], eqx.filter_value_and_grad(lambda x: jnp.sum(x**2))),
    "several": eqx.filter_jit(eqx.filter_checkpoint(eqx.filter_vmap(eqx.Partial(SCALE)))),
    "sequential": eqx.filter_vmap(eqx.nn.Sequential([eqx.nn.Lambda(lambda x: 2 * x)])),
}


def copied(tree: Any) -> Any:
    return jax.tree.map(lambda x: x, tree)


def placed(tree: Any) -> Any:
    return sr.filter_shard(tree, P(), sr.create_mesh("data:8"))


@pytest.mark.parametrize("prepare", [copied, placed])
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_are_compiled_and_initialised(name: str, prepare: Callable[..., Any]) -> None:
    fn, mesh = prepare(WRAPPERS[name]), sr.create_mesh("data:8")
    expected = 2 * X
    options: Any = {"in_shardings": P("data"), "out_shardings": P("data")}
    step = sr.filter_jit(fn, mesh=mesh, **options)
    np.testing.assert_array_equal(step(X), expected)
    np.testing.assert_array_equal(copied(step)(X), expected)
    np.testing.assert_array_equal(sr.filter_init(fn, P("data"), mesh)(X), expected)
    structs = eqx.filter_eval_shape(lambda fn: fn, fn)
    lowered = sr.filter_jit(structs, mesh=mesh).lower(jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert "@jit_" in lowered.as_text()
    assert jax.eval_shape(step, X).shape == X.shape


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "closure"])  # it is for whole arrays alone
def test_wrappers_are_mapped_over_shards(name: str) -> None:
    fn, mesh = copied(WRAPPERS[name]), sr.create_mesh("data:8")
    mapped = sr.filter_shard_map(fn, mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    np.testing.assert_array_equal(sr.filter_jit(copied(mapped))(X), 2 * X)


@pytest.mark.parametrize("name", ["vmap", "checkpoint", "assert_max_traces", "several"])
def test_copied_wrappers_have_reports(name: str) -> None:
    report = sr.audit(
        copied(WRAPPERS[name]), X, mesh=sr.mesh_shape("data:8"), target="cpu:8", in_shardings=(P("data"),)
    )
    assert report.name == "Scale"


@pytest.mark.parametrize("when", ["before", "after"])
def test_equinox_may_have_ours_in_the_place_of_its_own(when: str) -> None:
    ours = "{name} = lambda *args, **kwargs: sr.{name}(*args, **kwargs)"
    lines = ["import equinox as eqx, jax, jax.numpy as jnp, shardrules as sr"]
    if when == "after":
        lines.append("sr.filter_jit, sr.filter_shard, sr.filter_init")
    lines += [f"eqx.{ours.format(name=name)}" for name in ("filter_jit", "filter_shard")]
    lines += [
        "def checked(x):",
        "    return eqx.error_if(x, x.sum() < 0, 'negative')",
        "assert float(eqx.filter_jit(checked)(jnp.ones(4)).sum()) == 4",
        "assert float(eqx.filter_jit(eqx.filter_vmap(lambda x: 2 * x), donate='none')(jnp.ones(4)).sum()) == 8",
        "assert eqx.filter_eval_shape(eqx.filter_jit(checked), jnp.ones(4)).shape == (4,)",
        "mesh = sr.create_mesh('data:8')",
        "x = eqx.filter_shard(jnp.ones(8), jax.NamedSharding(mesh, jax.P('data')))",
        "assert sr.filter_init(eqx.filter_jit(lambda: jnp.ones(8)), jax.P('data'), mesh)().sharding == x.sharding",
        "try:",
        "    eqx.filter_jit(checked)(-jnp.ones(4))",
        "except eqx.EquinoxRuntimeError as error:",
        "    assert 'negative' in str(error)",
        "    print('raised')",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.stdout == "raised\n", done.stderr


OURS = {
    "jax.lax.with_sharding_constraint": (
        "lambda x, sharding: sr.with_sharding_constraint(x, sharding)",
        "jax.jit(lambda x: jax.lax.with_sharding_constraint(x, sharding))(x)",
    ),
    "jax.shard_map": (
        "lambda fn, **options: sr.filter_shard_map(fn, **options)",
        "jax.jit(jax.shard_map(lambda x: x, mesh=mesh, in_specs=P('data'), out_specs=P('data')))(x)",
    ),
    "jax.sharding.reshard": (
        "lambda x, sharding: sr.reshard(x, sharding)",
        "jax.jit(lambda x: jax.sharding.reshard(x, sharding))(jax.sharding.reshard(x, sharding))",
    ),
    "jax.device_put": (
        "lambda x, sharding, **options: sr.reshard(x, sharding)",
        "jax.device_put(jax.device_put(x, NamedSharding(mesh, P())), sharding)",
    ),
    "jax.jit": ("lambda fn, **options: sr.filter_jit(fn)", "sr.filter_init(lambda: jnp.ones(8), P('data'), mesh)()"),
}
"""Replacements of a function of JAX by a program, and a call of each."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_jax_may_have_ours_in_the_place_of_its_own(name: str) -> None:
    ours, call = OURS[name]
    types = "explicit" if name == "jax.sharding.reshard" else "auto"
    lines = [
        "import equinox, jax, jax.numpy as jnp, shardrules as sr",
        "from jax.sharding import NamedSharding, PartitionSpec as P",
        f"{name} = {ours}",
        f"mesh = sr.create_mesh('data:8', axis_types={types!r})",
        "sharding, x = NamedSharding(mesh, P('data')), jnp.ones(8)",
        f"print({call}.sharding == sharding)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
