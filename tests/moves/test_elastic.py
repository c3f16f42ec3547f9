"""Meshes, batches and states after the loss of devices.

The simulator deletes or overwrites the shards of lost devices under the arrays: reading them fails, or shows 77.
"""

import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.moves.cases import WAYS, FakeDevice, moving

DEVICES = jax.devices()


def without(*lost: int) -> list[Any]:
    return [device for device in DEVICES if device.id not in lost]


def lose(tree: Any, *lost: int) -> Any:
    """The simulator: the same arrays, but the shards of lost devices are garbage, and deleted where JAX allows that.

    An array whose very first shard is deleted counts as deleted.
    """

    def poisoned(array: jax.Array) -> jax.Array:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(poisoned(jax.random.key_data(array)))
        shards = [
            jax.device_put(np.full(shard.data.shape, 77, array.dtype), shard.device)
            if shard.device.id in lost
            else shard.data + 0
            for shard in array.addressable_shards
        ]
        result = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
        for shard in result.addressable_shards[1:]:
            if shard.device.id in lost and shard.data is not None:
                shard.data.delete()
        return result

    return jax.tree.map(poisoned, tree)


def ids(mesh: Mesh) -> list[Any]:
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


# ---- the surviving mesh ----


@pytest.mark.parametrize(
    ("axes", "axis", "lost", "left"),
    [
        ("data:8", "data", [3], [0, 1, 2, 4, 5, 6, 7]),
        ("data:8", "data", [], [*range(8)]),
        ("data:4,model:2", "data", [5], [[0, 1], [2, 3], [6, 7]]),
        ("data:4,model:2", "data", [1, 5], [[0, 4], [2, 3], [6, 7]]),  # the two that lost a neighbour make a row
        ("data:4,model:2", "model", [5], [[0], [2], [4], [6]]),
        ("data:2,model:4", "data", [0, 1, 2, 3], [[4, 5, 6, 7]]),
        ("data:2,model:4", "data", [0, 7], [[1, 2, 3, 4]]),
    ],
)
def test_one_axis_shrinks(axes: str, axis: str, lost: list[int], left: list[Any]) -> None:
    mesh = sr.create_mesh(axes)
    survivors = sr.meshes.surviving_mesh(mesh, without(*lost), axis)
    assert ids(survivors) == left
    assert survivors.axis_names == mesh.axis_names


def test_axis_types_are_kept() -> None:
    mesh = sr.create_mesh("data:4,model:2", axis_types=("auto", "explicit"))
    assert sr.meshes.surviving_mesh(mesh, without(0), "data").axis_types == (AxisType.Auto, AxisType.Explicit)


def test_the_new_size_divides_the_number() -> None:
    mesh = sr.create_mesh("data:8")
    sizes = [
        sr.meshes.surviving_mesh(mesh, without(0), "data", divides=multiple).shape["data"]
        for multiple in (64, 12, 7, 11)
    ]
    assert sizes == [4, 6, 7, 1]


def test_spare_devices_grow_the_mesh() -> None:
    small = sr.create_mesh("data:2,model:2", devices=DEVICES[2:6])
    assert ids(sr.meshes.surviving_mesh(small, DEVICES, "data")) == [[2, 3], [4, 5], [0, 1], [6, 7]]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_mesh_is_the_largest_and_intact_rows_stay(data: st.DataObject) -> None:
    sizes = data.draw(st.sampled_from([(8,), (4, 2), (2, 4), (2, 2, 2), (1, 8)]))
    mesh = Mesh(np.array(DEVICES).reshape(sizes), tuple("abc"[: len(sizes)]))
    axis = data.draw(st.sampled_from(mesh.axis_names))
    lost = data.draw(st.sets(st.integers(0, 7), max_size=7))
    row = math.prod(size for name, size in mesh.shape.items() if name != axis)
    if (8 - len(lost)) // row == 0:
        with pytest.raises(
            sr.errors.MeshError, match=rf"{8 - len(lost)} devices are alive, but one row of .* takes {row} "
        ):
            sr.meshes.surviving_mesh(mesh, without(*lost), axis)
        return
    survivors = sr.meshes.surviving_mesh(mesh, without(*lost), axis)
    assert survivors.shape[axis] == (8 - len(lost)) // row
    assert not lost & {device.id for device in survivors.devices.flat}
    assert len({device.id for device in survivors.devices.flat}) == survivors.size
    dim = mesh.axis_names.index(axis)
    rows = [{device.id for device in mesh.devices.take([index], axis=dim).flat} for index in range(mesh.shape[axis])]
    kept = [
        {device.id for device in survivors.devices.take([index], axis=dim).flat}
        for index in range(survivors.shape[axis])
    ]
    intact = [row_ids for row_ids in rows if not row_ids & lost]
    assert [row_ids for row_ids in kept if row_ids in intact] == intact
    if len(kept) == len(rows):
        assert all(kept[index] == row_ids for index, row_ids in enumerate(rows) if row_ids in intact)


def test_rows_across_processes_warn() -> None:
    pod = np.array([FakeDevice(index, index // 4) for index in range(12)], dtype=object)
    mesh = Mesh(pod.reshape(6, 2), ("data", "model"))
    alive = [device for device in pod if device.id not in (0, 2, 5, 8)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        near = sr.meshes.surviving_mesh(mesh, [device for device in alive if device.id not in (4, 9)], "data")
    assert ids(near) == [[1, 3], [6, 7], [10, 11]]
    with pytest.warns(sr.errors.MeshWarning, match="1 of 4 rows of 'data' mix devices of several slices or processes"):
        far = sr.meshes.surviving_mesh(mesh, alive, "data")
    assert ids(far) == [[1, 3], [4, 9], [6, 7], [10, 11]]


def test_device_ids_are_not_devices() -> None:
    mesh = sr.create_mesh("data:8")
    with pytest.raises(
        sr.errors.ConfigTypeError, match=r"alive must be a list of devices, such as jax.devices\(\)\[:4\]; got 0, 1, 2"
    ):
        sr.meshes.surviving_mesh(mesh, range(4), "data")
    with pytest.raises(sr.errors.ConfigTypeError, match="alive must be a list of devices"):
        sr.recover(np.ones(8), NamedSharding(mesh, P()), [0])


def test_the_axis_must_exist() -> None:
    with pytest.raises(sr.errors.MeshError, match=r"unknown axis 'date'; the mesh is data:8 \(did you mean 'data'\?\)"):
        sr.meshes.surviving_mesh(sr.create_mesh("data:8"), DEVICES, "date")


def test_groups_are_slices_or_processes() -> None:
    pod = [FakeDevice(index, index // 2) for index in range(6)]
    assert sr.meshes.group_devices(reversed(pod)) == {0: tuple(pod[:2]), 1: tuple(pod[2:4]), 2: tuple(pod[4:])}
    slices = [FakeDevice(index, index, index // 3) for index in range(6)]
    assert sr.meshes.group_devices(slices) == {0: tuple(slices[:3]), 1: tuple(slices[3:])}


# ---- the batch ----


@pytest.mark.parametrize(
    ("batch", "before", "after", "axis", "scaled"),
    [
        (512, "data:8", "data:6", "data", 384),
        (96, "data:4,model:2", "data:3,model:2", "data", 72),
        (96, "data:4,fsdp:2", "data:2,fsdp:1", ("data", "fsdp"), 24),
        (12, "data:3", "data:4", "data", 16),
    ],
)
def test_batches_scale_with_the_axis(batch: int, before: str, after: str, axis: Any, scaled: int) -> None:
    assert sr.meshes.scale_batch(batch, sr.mesh_shape(before), sr.mesh_shape(after), axis) == scaled


def test_batches_must_divide_before() -> None:
    with pytest.raises(ValueError, match=r"100 over 8 devices is 12\.50 for each.* start from 96 or 104"):
        sr.meshes.scale_batch(100, sr.mesh_shape("data:8"), sr.mesh_shape("data:6"), "data")
    with pytest.raises(ValueError, match=r"4 over 8 devices is 0\.50 for each.* start from 8$"):
        sr.meshes.scale_batch(4, sr.mesh_shape("data:8"), sr.mesh_shape("data:6"), "data")
    with pytest.raises(sr.errors.MeshError, match=r"unknown axis 'dta'; the mesh is data:8 \(did you mean 'data'\?\)"):
        sr.meshes.scale_batch(96, sr.mesh_shape("data:8"), sr.mesh_shape("data:6"), "dta")
    with pytest.raises(sr.errors.ConfigError, match="batch_size"):
        sr.meshes.scale_batch(0, sr.mesh_shape("data:8"), sr.mesh_shape("data:6"), "data")


# ---- the state ----


def states() -> Iterator[tuple[Any, Mesh, sr.ShardingRule]]:
    """Training states in two copies."""
    optim = optax.adamw(1e-3)

    def make() -> dict[str, Any]:
        model = eqx.nn.MLP(16, 16, 64, 2, key=jax.random.key(0))
        params = eqx.filter(model, eqx.is_array)
        keys = jax.random.split(jax.random.key(1), 8)
        return {"params": params, "opt_state": optim.init(params), "step": jnp.array(7), "keys": keys}

    for mesh in (sr.create_mesh("replica:2,data:4"), jax.make_mesh((2, 4), ("replica", "data"))):
        rules = sr.CompositeShardingRule(
            sr.RegexShardingRule([("step", P())]), sr.FSDPShardingRule("data", min_size_mb=0)
        )
        yield sr.filter_shard(make(), rules, mesh), mesh, rules


@WAYS
@pytest.mark.parametrize("lost", [(0,), (0, 5), (4, 5, 6, 7)], ids=str)
def test_states_survive_lost_devices(lost: tuple[int, ...], way: str) -> None:
    for state, mesh, rules in states():
        alive = without(*lost)
        after = sr.meshes.surviving_mesh(mesh, alive, "replica")
        plan = rules.plan(state, after)
        with moving(way):
            recovered = sr.recover(lose(state, *lost), plan, alive)
        for array, original, sharding in zip(
            jax.tree.leaves(recovered), jax.tree.leaves(state), jax.tree.leaves(plan.shardings()), strict=True
        ):
            assert array.sharding == sharding
            assert not {device.id for device in array.devices()} & set(lost)
            if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
                array, original = jax.random.key_data(array), jax.random.key_data(original)
            np.testing.assert_array_equal(array, original)


def test_every_lost_part_is_listed_and_nothing_moves() -> None:
    mesh = sr.create_mesh("data:8")
    tree = {
        "rows": sr.filter_shard(np.arange(64.0).reshape(16, 4), P("data"), mesh),
        "whole": sr.filter_shard(np.ones(4), P(), mesh),
        "columns": sr.filter_shard(np.ones((2, 8)), P(None, "data"), mesh),
    }
    alive = without(2, 5)
    after = sr.meshes.surviving_mesh(mesh, alive, "data", divides=2)
    with pytest.raises(sr.errors.PlanError, match="recover") as caught:
        sr.recover(tree, NamedSharding(after, P()), alive)
    assert str(caught.value).splitlines() == [
        "recover: 2 arrays cannot be placed:",
        "  error lost: columns (2, 8): no living device holds 25.0% of it: [0:2, 2:3], [0:2, 5:6]",
        "      -> Load it from a checkpoint: load_equinox, load_orbax",
        "  error lost: rows (16, 4): no living device holds 25.0% of it: [4:6, 0:4], [10:12, 0:4]",
        "      -> Load it from a checkpoint: load_equinox, load_orbax",
    ]
    whole = sr.recover({"whole": tree["whole"]}, NamedSharding(after, P()), alive)["whole"]
    np.testing.assert_array_equal(whole, np.ones(4))


def test_targets_must_be_alive() -> None:
    x = sr.filter_shard(np.ones((8, 8)), P(), sr.create_mesh("data:8"))
    target = NamedSharding(sr.create_mesh("data:4", devices=DEVICES[4:]), P("data"))
    with pytest.raises(
        sr.errors.PlanError, match=r"dead-device: w \(8, 8\): its new sharding needs devices 5-6, not alive"
    ):
        sr.recover({"w": x}, target, without(5, 6))


def test_losses_agree_with_brute_force() -> None:
    mesh = sr.create_mesh("replica:2,data:4")
    values = np.arange(64.0).reshape(8, 8)
    for spec in (P(), P("data"), P(("replica", "data")), P("replica", "data"), P(None, "replica")):
        x = sr.filter_shard(values, spec, mesh)
        for lost in itertools.combinations(range(8), 3):
            seen = np.zeros((8, 8), bool)
            for shard in x.addressable_shards:
                if shard.device.id not in lost:
                    seen[shard.index] = True
            alive = without(*lost)
            target = NamedSharding(Mesh(np.array(alive), ("d",)), P())
            if seen.all():
                np.testing.assert_array_equal(sr.recover(x, target, alive), values)
            else:
                with pytest.raises(sr.errors.PlanError, match=f"{1 - seen.mean():.1%} of it"):
                    sr.recover(x, target, alive)
