"""Values after a sync, bit by bit, against NumPy; what is in flight; and the two ways to work on shards."""

import importlib
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.moves.sync.plan import SyncPlan
from tests.moves.cases import bits_of
from tests.moves.sync.sync_cases import DEVICE_SETS, Case, random_case


def plan_of(case: Case) -> SyncPlan:
    table = sr.reports.NameTable(case.lines, case.unused)
    return sr.plan_sync(case.source, case.target, names=table, max_bytes_in_flight=case.limit)


def check(case: Case, result: dict[str, jax.Array]) -> None:
    assert sorted(result) == sorted(case.target)
    for path, array in result.items():
        assert array.sharding == case.target[path].sharding
        expected = bits_of(case.expected[path])
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(bits_of(np.asarray(shard.data)), expected[shard.index], err_msg=path)


@pytest.mark.parametrize("devices", list(DEVICE_SETS))
@pytest.mark.parametrize("seed", range(0, 40, 8))
def test_random_trees_are_as_numpy_makes_them(seed: int, devices: str) -> None:
    for number in range(seed, seed + 8):
        case = random_case(number, devices)
        check(case, plan_of(case).run(case.source, check="sums"))


@pytest.mark.parametrize("seed", range(12))
def test_programs_on_devices_make_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("shardrules.moves.sync.run")
    monkeypatch.setattr(module, "HostShards", importlib.import_module("shardrules.moves.sync.shards").DeviceShards)
    case = random_case(seed, "overlapping")
    plan = plan_of(case)
    first = plan.run(case.source)
    check(case, first)
    check(case, plan.run(case.source, into=first))
    assert all(array.is_deleted() for array in first.values() if array.size)


@pytest.mark.parametrize("seed", range(0, 40, 3))
def test_bytes_in_flight_are_kept(seed: int) -> None:
    """By an independent count over the transfers, of what each device has received or cut out in each round."""
    case = random_case(seed, "overlapping")
    plan = plan_of(case)
    flight: dict[tuple[int, int], int] = defaultdict(int)
    for transfer in plan.transfers():
        flight[transfer.round, transfer.target_device.id] += transfer.bytes
        if not transfer.relayed:
            flight[transfer.round, transfer.source_device.id] += transfer.bytes
    assert max(flight.values(), default=0) <= case.limit
    assert max(flight.values(), default=0) == plan.deliveries.in_flight.max()


@pytest.mark.parametrize("seed", range(20))
def test_transfers_are_all_that_a_transport_needs(seed: int) -> None:
    """A transport of NumPy carries them; what devices have already and constants are the only rest."""
    case = random_case(seed, "4 + 4")
    plan = plan_of(case)
    shards: dict[tuple[str, int], np.ndarray] = {}
    for path, array in case.source.items():
        shards.update({(path, shard.device.id): np.asarray(shard.data) for shard in array.addressable_shards})
    written: dict[tuple[str, int], np.ndarray] = {}
    for path, shape in case.target.items():
        for device in shape.sharding.device_set:
            cell = shape.sharding.shard_shape(shape.shape)
            # Only padding is never sent, and its value is 3, before it is scaled and cast.
            shards[path, device.id] = np.zeros(cell, shape.dtype)
            written[path, device.id] = np.zeros(cell, np.int64)
    for transfer in plan.transfers():
        part = shards[transfer.source, transfer.source_device.id][transfer.source_slice].transpose(transfer.dims)
        for name, value in transfer.changes:
            part = part.astype(value) if name == "cast" else (part * np.asarray(value, part.dtype)).astype(part.dtype)
        goal = shards[transfer.target, transfer.target_device.id][transfer.target_slice]
        shards[transfer.target, transfer.target_device.id][transfer.target_slice] = part.reshape(goal.shape)
        written[transfer.target, transfer.target_device.id][transfer.target_slice] += 1
    for path, shape in case.target.items():
        for device, index in shape.sharding.devices_indices_map(shape.shape).items():
            counts, values = written[path, device.id], shards[path, device.id]
            assert counts.max(initial=0) <= 1
            expected = case.expected[path][index]
            assert (bits_of(values) == bits_of(expected))[counts == 1].all()
            assert (counts == 1).all() or "pad" in str(case.lines)


@pytest.mark.parametrize("kind", ["HostShards", "DeviceShards"])
def test_every_dtype_empty_arrays_and_explicit_axes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = importlib.import_module("shardrules.moves.sync.shards")
    monkeypatch.setattr(importlib.import_module("shardrules.moves.sync.run"), "HostShards", getattr(shards, kind))
    devices = np.array(jax.devices())
    old = Mesh(devices[:4].reshape(2, 2), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Auto))
    new = Mesh(devices[2:], ("c",), axis_types=(AxisType.Explicit,))
    names = ["int4", "bool", "complex64", "uint32", "float8_e4m3fn", "float64", "int64"]
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        values: dict[str, np.ndarray] = {
            name: rng.integers(0, 2, (12, 4)).astype(jnp.dtype(name)) for name in names
        } | {"empty": np.zeros((0, 4), np.float32), "none": np.zeros((12, 0), np.float32)}
        source = {
            name: jax.device_put(array, NamedSharding(old, P("a") if len(array) else P()))
            for name, array in values.items()
        }
        target = {
            name: jax.ShapeDtypeStruct(array.shape[::-1], array.dtype, sharding=NamedSharding(new, P(None, "c")))
            for name, array in values.items()
        }
    plan = sr.plan_sync(source, target, names=[("{name}", "{name}", "transpose(1, 0)")], max_bytes_in_flight=100)
    result = plan.run(source, check="sums")
    for name, array in values.items():
        assert (result[name].dtype, result[name].sharding) == (array.dtype, target[name].sharding)
        np.testing.assert_array_equal(np.asarray(result[name]), array.T)


def test_donated_arrays_are_freed_and_shared_buffers_stay() -> None:
    mesh = sr.create_mesh("a:4", devices=jax.devices()[:4])
    target = NamedSharding(sr.create_mesh("b:4", devices=jax.devices()[4:]), P("b"))
    array = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("a")))
    source = {"x": array, "y": array, "z": array + 1, "rest": array + 2}
    shapes = {name: jax.ShapeDtypeStruct((16,), jnp.float32, sharding=target) for name in "xyz"}
    table = sr.reports.NameTable([("{name}", "{name}")], "rest")
    result = sr.plan_sync(source, shapes, names=table, max_bytes_in_flight=16).run(source, donate=True)
    assert [result[name].tolist() == (np.arange(16) + (name == "z")).tolist() for name in "xyz"] == [True] * 3
    assert [path for path, array in source.items() if not array.is_deleted()] == ["rest"]


def test_a_wrong_value_on_the_way_is_found_by_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("shardrules.moves.sync.shards")
    join = module.HostShards.join

    def spoil(self: Any, shard: np.ndarray, content: Any, flow: Any, offset: Any) -> np.ndarray:
        shard = join(self, shard, content, flow, offset)
        shard.flat[0] = 77
        return shard

    mesh = sr.create_mesh("a:4", devices=jax.devices()[:4])
    target = NamedSharding(sr.create_mesh("b:4", devices=jax.devices()[4:]), P("b"))
    source = {"x": jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("a")))}
    plan = sr.plan_sync(source, {"x": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=target)})
    plan.run(source, check="sums")
    monkeypatch.setattr(module.HostShards, "join", spoil)
    with pytest.raises(sr.errors.CheckpointError, match=r"checksums of 1 arrays differ.*: x"):
        plan.run(source, check="sums")
