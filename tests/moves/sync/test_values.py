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
from shardrules.moves.bits import local_shards, with_sharding
from shardrules.moves.sync.checksums import bit_sum
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


@pytest.mark.sample(3)
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


@pytest.mark.parametrize("devices", ["overlapping", "4 + 4"])
@pytest.mark.parametrize("seed", range(0, 40, 3))
def test_bytes_in_flight_are_kept(seed: int, devices: str) -> None:
    """By an independent count over the transfers, of what each device has received or cut out in each round."""
    case = random_case(seed, devices)
    plan = plan_of(case)
    flight: dict[tuple[int, int], int] = defaultdict(int)
    for transfer in plan.transfers():
        flight[transfer.round, transfer.target_device.id] += transfer.bytes
        if not transfer.relayed:
            flight[transfer.round, transfer.source_device.id] += transfer.bytes
    assert max(flight.values(), default=0) <= case.limit
    # What devices keep is cut out, too, and not among the transfers.
    assert max(flight.values(), default=0) <= plan.deliveries.in_flight.max() <= case.limit
    assert devices == "overlapping" or max(flight.values(), default=0) == plan.deliveries.in_flight.max()


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


@pytest.mark.parametrize(
    ("shape", "operations", "expected"),
    [
        ((6, 0), "deinterleave(0, 3)", np.zeros((6, 0))),
        ((0, 4), "pad(0, 0, 8, 1) | interleave(0, 2)", np.ones((8, 4))),
        ((4, 0), "reshape(0, 4) | pad(0, 1, 0, 2)", np.full((1, 4), 2)),
        ((4, 2), "crop(0, 2, 2) | reshape(2, 0) | pad(1, 0, 3, 2)", np.full((2, 3), 2)),
    ],
)
def test_arrays_that_are_empty_at_some_step(shape: tuple[int, ...], operations: str, expected: np.ndarray) -> None:
    mesh = sr.create_mesh("a:4", devices=jax.devices()[:4])
    source = {"x": jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, P()))}
    target = {"x": jax.ShapeDtypeStruct(expected.shape, jnp.float32, sharding=NamedSharding(mesh, P()))}
    result = sr.plan_sync(source, target, names=[("x", "x", operations)]).run(source, check="sums")
    np.testing.assert_array_equal(np.asarray(result["x"]), expected)


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


@pytest.mark.parametrize("donate", [False, True])
def test_unused_arrays_may_be_anything(donate: bool) -> None:
    mesh, other = (sr.create_mesh("a:4", devices=jax.devices()[first : first + 4]) for first in (0, 4))
    source = {
        "x": jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("a"))),
        "opt": {"count": jnp.zeros((), jnp.int32), "mu": np.ones(3), "half": jnp.ones(4)},
        "key": jax.random.key(0),
    }
    source["opt"]["half"].delete()
    target = {"x": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=NamedSharding(other, P("a")))}
    plan = sr.plan_sync(source, target, names=sr.reports.NameTable([("x", "x")], ["opt/{*rest}", "key"]))
    assert plan.peak_bytes[0] == 16 + 16 == plan.peak_bytes[4] - plan.deliveries.in_flight[4] + 16
    assert "unused: opt/{*rest}, key" in str(plan)
    # Their shapes may be others by now.
    tree = {**source, "opt": {**source["opt"], "count": jnp.zeros((2, 2))}}
    assert plan.run(tree, donate=donate)["x"].tolist() == list(range(16))
    assert source["x"].is_deleted() == donate
    assert not source["key"].is_deleted()


@pytest.mark.parametrize("kind", ["HostShards", "DeviceShards"])
def test_arrays_that_are_given_up_may_be_tied_and_not_those_of_the_source(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = importlib.import_module("shardrules.moves.sync.shards")
    monkeypatch.setattr(importlib.import_module("shardrules.moves.sync.run"), "HostShards", getattr(shards, kind))
    mesh, other = (sr.create_mesh("a:4", devices=jax.devices()[first : first + 4]) for first in (0, 4))
    source = {"x": jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("a")))}
    shape = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=NamedSharding(other, P("a")))
    plan = sr.plan_sync(source, {"x": shape, "y": shape}, names=[("x", "x"), ("x", "y", "tied()")])
    old = plan.run(source)["x"]
    result = plan.run(source, into={"x": old, "y": old})
    assert old.is_deleted()
    assert result["x"].tolist() == result["y"].tolist() == list(range(16))
    # The same memory under another array.
    same = sr.plan_sync(source, source, names=[("x", "x", "scale(2.0)")])
    with pytest.raises(sr.errors.ConfigError, match="`into` has arrays of the source"):
        same.run(source, into={"x": with_sharding(source["x"], source["x"].sharding)})
    assert source["x"].tolist() == list(range(16))


def _wrong_value(shard: np.ndarray) -> None:
    shard.flat[0] = 77


def _swapped(shard: np.ndarray) -> None:
    shard[...] = shard[::-1].copy()


@pytest.mark.parametrize("spoil", [_wrong_value, _swapped])
def test_a_shard_that_is_written_wrong_is_told_by_checksums(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("shardrules.moves.sync.shards")
    join = module.HostShards.join

    def wrong_join(self: Any, shard: np.ndarray, content: Any, flow: Any, offset: Any) -> np.ndarray:
        shard = join(self, shard, content, flow, offset)
        spoil(shard)
        return shard

    plan, source = _plan_between_halves()
    plan.run(source, check="sums")
    monkeypatch.setattr(module.HostShards, "join", wrong_join)
    with pytest.raises(sr.errors.CheckpointError, match=r"checksums of 1 arrays differ.*: x"):
        plan.run(source, check="sums")


def _plan_between_halves() -> tuple[SyncPlan, dict[str, jax.Array]]:
    mesh = sr.create_mesh("a:4", devices=jax.devices()[:4])
    target = NamedSharding(sr.create_mesh("b:4", devices=jax.devices()[4:]), P("b"))
    source = {"x": jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("a")))}
    return sr.plan_sync(source, {"x": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=target)}), source


def test_values_that_change_between_devices_are_told_by_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices get what is meant for each other: the same elements, at the same places of their shards."""
    plan, source = _plan_between_halves()
    values = {device.id: np.asarray(shard) for device, shard in local_shards(source["x"]).items()}
    order = {4: 5, 5: 4, 6: 6, 7: 7}
    module = importlib.import_module("shardrules.moves.sync.shards")
    monkeypatch.setattr(module.HostShards, "send", lambda _, content, device: values[order[device.id] - 4])
    result = plan.run(source)["x"].tolist()
    assert result == [*range(4, 8), *range(4), *range(8, 16)]
    with pytest.raises(sr.errors.CheckpointError, match=r"checksums of 1 arrays differ.*: x"):
        plan.run(source, check="sums")


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float32", "float64", "complex128"])
def test_sums_of_parts_are_the_sum_of_the_whole(dtype: str) -> None:
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 2 if dtype == "bool" else 100, (4, 6, 5)).astype(jnp.dtype(dtype))
    words = np.ascontiguousarray(whole).reshape(-1).view(f"u{min(8, whole.itemsize)}").reshape(whole.size, -1)
    terms = [
        (2 * place + 1) * (2 * number + 1) * int(word)
        for place, row in enumerate(words)
        for number, word in enumerate(row)
    ]
    assert bit_sum(whole, (30, 5, 1), 0) == sum(terms) % 2**64
    parts = [bit_sum(whole[:, start::3].transpose(2, 0, 1), (1, 30, 15), 5 * start) for start in range(3)]
    assert sum(parts) % 2**64 == bit_sum(whole, (30, 5, 1), 0)
    assert bit_sum(whole[0, 0, 0], (), 7) == 15 * terms[0] % 2**64


@pytest.mark.parametrize("kind", ["HostShards", "DeviceShards"])
def test_each_round_is_waited_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices run behind, and the rounds after one would be in flight with it."""
    shards = importlib.import_module("shardrules.moves.sync.shards")
    monkeypatch.setattr(importlib.import_module("shardrules.moves.sync.run"), "HostShards", getattr(shards, kind))
    mesh = sr.create_mesh("a:4", devices=jax.devices()[:4])
    source = {"x": jax.device_put(jnp.arange(64.0), NamedSharding(mesh, P()))}
    target = {"x": jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(mesh, P("a")))}
    # What devices have already is cut out, too.
    plan = sr.plan_sync(source, target, max_bytes_in_flight=20)
    assert plan.moved_bytes == 0
    assert plan.round_count >= 4
    waits: list[int] = []
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: waits.append(len(arrays)))
    assert plan.run(source)["x"].tolist() == list(range(64))
    assert waits == [4] * plan.round_count
