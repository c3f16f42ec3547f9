"""What cannot be planned as it is asked for is said, and what has to stay stays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

X = jax.ShapeDtypeStruct((512, 256), jnp.float32)
BOTH = "data:4,model:2"


def double(x: Any) -> Any:
    return 2 * x


def test_a_shard_map_with_one_result_stays_as_it_is() -> None:
    mesh = sr.create_mesh(BOTH, axis_types="auto")
    inside = jax.shard_map(double, mesh=mesh, in_specs=P("data"), out_specs=P("data"))

    def whole(x: Any) -> Any:
        return inside(jnp.tanh(x))

    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    planned = sr.autoplan(whole, x, mesh=mesh, pins=sr.SpecTreeShardingRule((P("data"),)))
    assert planned.wire_bytes == 0
    assert planned.result_specs == (P("data"),)
    np.testing.assert_allclose(planned.jit(whole)(x), 2 * np.tanh(x), rtol=1e-6)


def test_pins_with_axes_in_another_order_are_refused() -> None:
    with pytest.raises(sr.PlanError, match="in the order of the mesh"):
        sr.autoplan(double, X, mesh=sr.mesh_shape(BOTH), pins=sr.SpecTreeShardingRule((P(("model", "data")),)))


def test_constraints_that_do_not_divide_are_told() -> None:
    mesh = sr.create_mesh(BOTH, axis_types="auto")

    def constrained(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(2 * x, NamedSharding(mesh, P("data")))

    planned = sr.autoplan(constrained, jax.ShapeDtypeStruct((6, 64), jnp.float32), mesh=mesh)
    assert "constraint-ignored" in [finding.code for finding in planned.findings]


def test_two_constraints_on_one_array_are_both_kept() -> None:
    mesh = sr.create_mesh(BOTH, axis_types="auto")

    def constrained(x: Any) -> Any:
        rows, columns = (NamedSharding(mesh, spec) for spec in (P("data"), P(None, "model")))
        y = jnp.tanh(x)
        return jax.lax.with_sharding_constraint(y, rows), jax.lax.with_sharding_constraint(y, columns)

    planned = sr.autoplan(constrained, X, mesh=mesh)
    assert "constrained" in [finding.code for finding in planned.findings]


def test_a_pin_on_an_axis_that_not_all_meshes_have() -> None:
    planned = sr.autoplan(double, X, mesh=4, pins=sr.SpecTreeShardingRule((P(None, "model"),)))
    assert planned.specs == (P(None, "model"),)
    assert [one.mesh for one in planned.candidates if one.seconds is None] == ["data:4"]


@pytest.mark.parametrize("number", [1, -2])
def test_donating_what_is_no_argument_is_refused(number: int) -> None:
    planned = sr.autoplan(double, X, mesh=sr.mesh_shape("data:8"))
    with pytest.raises(sr.TreeError, match=f"donate_argnums names argument {number}, and there are 1"):
        planned.jit(double, donate_argnums=number)


def test_large_arrays_that_are_no_arguments_are_told() -> None:
    held = np.ones((1024, 512), np.float32)
    planned = sr.autoplan(lambda x: x @ held[:256], X, mesh=sr.mesh_shape("data:8"))
    known = [finding for finding in planned.findings if finding.code == "whole-constant"]
    assert len(known) <= 1  # of small ones nothing is said
    planned = sr.autoplan(lambda x: x @ jnp.asarray(np.ones((256, 2048), np.float32)), X, mesh=sr.mesh_shape("data:8"))
    assert "whole-constant" in [finding.code for finding in planned.findings]


def test_numbers_among_the_arguments_are_traced_once() -> None:
    calls: list[int] = []

    def scaled(x: Any, rate: float) -> Any:
        calls.append(1)
        return rate * x

    x = np.ones((16, 8), np.float32)
    planned = sr.autoplan(scaled, x, 0.25, mesh=sr.create_mesh("data:8"))
    run = planned.jit(scaled)
    for _ in range(3):
        run(x, float("0.25"))
    assert len(calls) == 2
