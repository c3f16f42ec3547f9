"""Moves from one plan to another: collectives on one mesh, missing elements between two."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.spec import packs_on
from shardrules.programs.autoplan.answer.move import PlanMove


def plan_of(spec: P, mesh: str | None, dtype: Any = jnp.float32, count: int = 1) -> sr.ShardingPlan:
    tree = {f"w{index}": jax.ShapeDtypeStruct((64, 32), dtype) for index in range(count)}
    return sr.RegexShardingRule([(".", spec)]).plan(tree, None if mesh is None else sr.mesh_shape(mesh))


def move(old: sr.ShardingPlan, new: sr.ShardingPlan) -> PlanMove:
    result = PlanMove.between(old, new)
    assert result is not None
    return result


SHARD_BYTES = 64 * 32 * 4 // 4


@pytest.mark.parametrize(
    ("old", "new", "collectives"),
    [
        (P("data"), P(None, "data"), (("all-to-all", 1, SHARD_BYTES * 3 // 4),)),
        (P("data"), P(), (("all-gather", 1, SHARD_BYTES * 3),)),
        (P(), P("data"), ()),
        (P("data"), P("data"), ()),
    ],
)
def test_moves_on_one_mesh_are_collectives(old: P, new: P, collectives: tuple[Any, ...]) -> None:
    assert move(plan_of(old, "data:4"), plan_of(new, "data:4")).collectives == collectives


def test_arrays_add_up_and_are_counted() -> None:
    three = move(plan_of(P("data"), "data:4", count=3), plan_of(P(), "data:4", count=3))
    assert three.collectives == (("all-gather", 3, 3 * SHARD_BYTES * 3),)
    assert str(three) == "to move from the old plan to the new, each device sends 3 x all-gather 18.0 KiB"
    nothing = move(plan_of(P(), "data:4"), plan_of(P("data"), "data:4"))
    assert str(nothing) == "to move from the old plan to the new, no device sends anything"


def test_only_arrays_of_both_plans_move() -> None:
    fewer = move(plan_of(P("data"), "data:4", count=3), plan_of(P(), "data:4"))
    assert (fewer.collectives[0][1], fewer.left_out) == (1, 2)
    assert move(plan_of(P("data"), "data:8"), plan_of(P(), "data:4", count=2)).received_bytes == tuple(
        (device, 64 * 32 * 4 * 7 // 8) for device in range(4)
    )


def test_arrays_that_are_left_out_are_counted() -> None:
    def plan(**sizes: int) -> sr.ShardingPlan:
        tree = {name: np.ones(size, np.float32) for name, size in sizes.items()}
        return sr.RegexShardingRule([(".", P("data"))]).plan(tree, sr.mesh_shape("data:4"))

    nothing = move(plan(a=8, b=8), plan(b=16, c=8))
    assert (nothing.left_out, nothing.collectives) == (3, ())
    assert str(nothing).endswith(
        "no device sends anything; 3 arrays are left out, without one shape and a sound spec in both plans"
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int4, jnp.bfloat16])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("data:8", P("data")), ("data:4", P(None, "data"))),
        (("data:4", P(None, "data")), ("data:8", P("data"))),
        (("data:4", P("data")), ("x:2,y:4", P("x"))),
        (("x:2,y:4", P("y", "x")), ("data:8", P(None, "data"))),
    ],
)
def test_moves_between_meshes_receive_what_reshard_sends(old: Any, new: Any, dtype: Any) -> None:
    (old_mesh, old_spec), (new_mesh, new_spec) = old, new
    planned = move(plan_of(old_spec, old_mesh, dtype), plan_of(new_spec, new_mesh, dtype))
    meshes = [sr.create_mesh(text, devices=jax.devices()[: sr.mesh_shape(text).size]) for text in (old_mesh, new_mesh)]
    x = jax.ShapeDtypeStruct((64, 32), dtype, sharding=NamedSharding(meshes[0], old_spec))
    actual = sr.plan_reshard(x, NamedSharding(meshes[1], new_spec)).received_bytes
    assert planned.received_bytes is not None
    # Plans without devices pack what CPUs may hold in a byte each.
    factor = 1 if packs_on(jax.devices()[0], dtype) else 8 // jax.dtypes.itemsize_bits(dtype)
    assert {device: factor * size for device, size in planned.received_bytes if size} == actual


def test_moves_between_meshes_are_printed_with_their_condition() -> None:
    text = str(move(plan_of(P("data"), "data:8"), plan_of(P(None, "data"), "data:4")))
    assert text == (
        "to move from the old plan to the new, devices receive 7.0 KiB in all, at most 1.8 KiB each, if both meshes "
        "begin with the same devices: reshard sends just that"
    )
    nothing = str(move(plan_of(P(), "data:8"), plan_of(P(), "data:4")))
    assert nothing == (
        "to move from the old plan to the new, nothing is sent, if both meshes begin with the same devices"
    )


def test_plans_without_a_mesh_have_no_move() -> None:
    with_mesh = plan_of(P(), "data:4")
    without = sr.RegexShardingRule([(".", P())]).plan({"w0": np.ones((64, 32))})
    assert PlanMove.between(without, with_mesh) is None
    assert PlanMove.between(with_mesh, without) is None
