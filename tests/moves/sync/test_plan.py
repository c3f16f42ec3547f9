"""Schedules and reports of syncs: who sends, what crosses, rounds, peaks, seconds, and the forms of a plan."""

import json
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.reports import NameTable, SyncPlan

MIB = 2**20


def placed(mesh: Any, spec: P, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def plan_one(shape: tuple[int, ...], old: tuple[str, P], new: tuple[str, P], limit: int | None = None) -> SyncPlan:
    source = placed(sr.mesh_shape(old[0]), old[1], *shape)
    target = placed(sr.mesh_shape(new[0]), new[1], *shape)
    return sr.plan_sync({"w": source}, {"w": target}, max_bytes_in_flight=limit)


@pytest.mark.parametrize("count", [1, 3, 8, 100])
def test_sources_are_spread_over_replicas(count: int) -> None:
    """Four replicas have each part: none sends more than another by more than one content."""
    old, new = sr.mesh_shape("dp:4,tp:2"), sr.mesh_shape("tp:2")
    source = {f"w{index}": placed(old, P(None, "tp"), 1024, 2048) for index in range(count)}
    target = {path: placed(new, P(None, "tp"), 1024, 2048) for path in source}
    sent = sr.plan_sync(source, target).sent_bytes
    assert len(sent) == 8
    assert max(sent.values()) - min(sent.values()) <= MIB


def test_what_two_replicas_need_crosses_between_hosts_once() -> None:
    plan = plan_one((1024, 1024), ("fsdp:8", P("fsdp")), ("dp:4,tp:2", P(None, "tp")))
    assert sum(plan.network_bytes.values()) == 4 * MIB
    assert plan.moved_bytes == plan.lower_bound_bytes == 16 * MIB
    # All replicas pass on alike.
    relayed = Counter(leg.source_device.id for leg in plan.transfers() if leg.relayed)
    assert len(relayed) == 8
    assert max(relayed.values()) == min(relayed.values())


def test_devices_keep_what_they_have_and_near_ones_send_first() -> None:
    devices = jax.devices()
    old = sr.create_mesh("a:4", devices=devices[:4])
    new = sr.create_mesh("a:4", devices=devices[2:6])
    plan = sr.plan_sync({"w": placed(old, P("a"), 16)}, {"w": placed(new, P("a"), 16)})
    assert (plan.moved_bytes, plan.kept_bytes) == (64, 0)
    plan = sr.plan_sync({"w": placed(old, P(), 16)}, {"w": placed(new, P("a"), 16)})
    assert (plan.moved_bytes, plan.kept_bytes) == (32, 32)
    assert plan.received_bytes == {4: 16, 5: 16}
    assert plan.link_bytes.keys() <= {(sender, receiver) for sender in range(4) for receiver in (4, 5)}


@pytest.mark.parametrize("limit", [64, 1000, 64 * 1024, None])
def test_rounds_are_within_the_limit(limit: int | None) -> None:
    plan = plan_one((96, 2048), ("fsdp:4,tp:2", P("tp", "fsdp")), ("tp:3,dp:2", P("tp")), limit)
    flight = plan.deliveries.in_flight
    assert 0 < flight.max() <= (limit or 256 * MIB)
    assert plan.round_count == (1 if limit is None else plan.round_count)
    assert plan.round_count >= plan.received_bytes[8] / (limit or 256 * MIB)
    kept = {device: plan.peak_bytes[device] - flight[index] for index, device in enumerate(plan.peak_bytes)}
    assert kept == {device: 96 * 2048 * 4 // (8 if device < 8 else 3) for device in range(14)}


@pytest.mark.parametrize(
    ("shape", "old", "new"),
    [
        ((1024, 512), ("fsdp:8", P("fsdp")), ("tp:8", P(None, "tp"))),
        ((1024, 512), ("fsdp:8", P("fsdp")), ("tp:4", P("tp"))),
        ((64, 128, 128), ("fsdp:8,tp:4", P(None, "fsdp", "tp")), ("tp:8", P(None, None, "tp"))),
        ((64, 128, 128), ("fsdp:8,tp:4", P(None, "fsdp", "tp")), ("dp:4,tp:8", P(None, None, "tp"))),
        ((64, 128, 128), ("fsdp:64", P(None, "fsdp")), ("dp:8,tp:8", P(None, "tp"))),
    ],
)
def test_all_devices_are_busy_in_each_round(shape: tuple[int, ...], old: Any, new: Any) -> None:
    """There are no more rounds than the device with the most bytes needs, and one more."""
    limit = math.prod(shape) * 4 // 32
    plan = plan_one(shape, old, new, limit)
    most = max(*plan.sent_bytes.values(), *plan.received_bytes.values())
    assert plan.round_count <= most / limit + 1


@pytest.mark.parametrize("is_source", [True, False])
def test_made_up_devices_are_apart_from_those_that_exist(is_source: bool) -> None:
    shapes = [{"w": placed(mesh, P("a"), 16)} for mesh in (sr.mesh_shape("a:4"), sr.create_mesh("a:8"))]
    plan = sr.plan_sync(*(shapes if is_source else shapes[::-1]))
    assert sorted(device.id for device in plan.devices) == list(range(12))
    assert set(plan.sent_bytes) == set(range(8, 12) if is_source else range(8))
    assert len(np.unique(plan.networks)) == 2


def test_seconds_are_of_the_slowest_device() -> None:
    slow = SimpleNamespace(
        link_bytes_per_second=1e9, link_latency_seconds=0.0, network_bytes_per_second=1e6, network_latency_seconds=1e-3
    )
    fast = SimpleNamespace(**{**vars(slow), "network_bytes_per_second": 1e9})
    source = {"w": placed(sr.mesh_shape("a:8"), P("a"), 1000, 1000, dtype=jnp.int8)}
    target = {"w": placed(sr.mesh_shape("b:1"), P(), 1000, 1000, dtype=jnp.int8)}
    times = [
        sr.plan_sync(source, target, hardware=hardware).seconds for hardware in (None, slow, (slow, fast), (fast, slow))
    ]
    assert times[0] is None
    assert times[1:] == pytest.approx([1 + 1e-3, 0.125 + 1e-3, 1 + 1e-3])
    plan = sr.plan_sync(source, target, hardware=sr.Hardware.named("cuda:h100"))
    assert "modelled time: " in str(plan)


def test_rows_on_several_meshes_say_them() -> None:
    meshes = [sr.mesh_shape(text) for text in ("a:4", "b:2", "c:2")]
    source = {name: placed(meshes[0], P("a"), 8) for name in "xy"}
    target = {name: placed(mesh, P(), 8) for name, mesh in zip("xy", meshes[1:], strict=True)}
    text = str(sr.plan_sync(source, target))
    assert "P('a') on a:4  P() on c:2" in text
    assert "\n2 arrays become 2\n" in text
    assert "{*path}" not in text


def test_a_plan_prints_and_is_the_same_in_other_forms() -> None:
    source = {
        **{f"layers/{index}/up": placed(sr.mesh_shape("a:4"), P("a"), 8, 4) for index in range(3)},
        "opt": placed(sr.mesh_shape("a:4"), P(), 4),
    }
    target = {"ups": placed(sr.mesh_shape("b:2"), P(None, "b"), 3, 8, 4)}
    table = NameTable([("layers/{i}/up", "ups", "stack('i')")], "opt")
    plan = sr.plan_sync(source, target, names=table)
    text = str(plan)
    assert text.splitlines() == [
        "target  shape      dtype    from    to            moves  stays",
        "------  ---------  -------  ------  ------------  -----  -----",
        "ups     (3, 8, 4)  float32  P('a')  P(None, 'b')  384 B    0 B",
        "  layers/{i}/up: stack('i')",
        "4 arrays become 1, from a:4 to b:2",
        "384 B move, of which 384 B must and 384 B cross between hosts; 0 B stay",
        "1 round; a device sends at most 96 B, receives 192 B, has 192 B in flight, and holds 384 B",
        "unused: opt",
    ]
    assert repr(plan) == "<SyncPlan of 4 to 1 arrays, 384 B>"
    html = plan._repr_html_()
    assert html.count("<tr>") == 2 and "&#x27;b&#x27;" in html  # noqa: PT018
    data = json.loads(plan.to_json())
    assert data["fingerprint"] == plan.fingerprint
    assert (data["moved_bytes"], data["rounds"], len(data["devices"])) == (384, 1, 6)
    assert sum(data["links"].values()) == sum(data["networks"].values()) == 384
    assert NameTable.from_toml(data["names"]) == table
    again = sr.plan_sync(source, target, names=table)
    assert (again.fingerprint, again.to_json()) == (plan.fingerprint, plan.to_json())
    for other in (
        sr.plan_sync(source, target, names=table, max_bytes_in_flight=64),
        sr.plan_sync({**source, "opt": placed(sr.mesh_shape("a:4"), P("a"), 4)}, target, names=table),
        sr.plan_sync(source, target, names=NameTable(table.lines, "op{*rest}")),
    ):
        assert other.fingerprint != plan.fingerprint


@attrs.frozen
class Metadata:
    """What a server may say of its arrays: no array, and no shape of JAX."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any


def test_any_object_with_a_shape_dtype_and_sharding_is_an_array() -> None:
    mesh = sr.create_mesh("a:4", devices=jax.devices()[4:])
    source = {"w": jax.device_put(np.arange(8.0, dtype=np.float32), SingleDeviceSharding(jax.devices()[0])), "n": 3}
    target = {"w": Metadata((8,), np.dtype("float32"), NamedSharding(mesh, P("a"))), "name": "sampler"}
    plan = sr.plan_sync(source, target)
    result = plan.run(source)
    assert result["w"].tolist() == list(range(8))
    assert result["w"].sharding == target["w"].sharding
    assert result["name"] == "sampler"


def test_plans_of_rules_are_sides_too() -> None:
    old = sr.create_mesh("fsdp:4", devices=jax.devices()[:4])
    new = sr.create_mesh("tp:4", devices=jax.devices()[4:])
    tree = {"layers": [{"w": np.arange(32.0, dtype=np.float32).reshape(8, 4) + index} for index in range(2)]}
    rule, other = sr.FSDPShardingRule("fsdp", min_size_mb=0), sr.DimShardingRule("tp", 1)
    placed_tree = sr.filter_shard(tree, rule, old)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    plan = sr.plan_sync(rule.plan(shapes, old), other.plan(shapes, new))
    result = plan.run(placed_tree, check="sums")
    assert jax.tree.map(np.asarray, result)["layers"][1]["w"].tolist() == tree["layers"][1]["w"].tolist()
    assert result["layers"][0]["w"].sharding.spec == P(None, "tp")
    # A plan that was read without its tree makes a dictionary by path.
    loaded = attrs.evolve(sr.ShardingPlan.from_json(other.plan(shapes, new).to_json()), mesh=new)
    by_path = sr.plan_sync(placed_tree, loaded).run(placed_tree)
    assert list(by_path) == ["layers/0/w", "layers/1/w"]


def test_equal_arrays_of_many_layers_are_computed_together() -> None:
    old, new = sr.mesh_shape("a:4"), sr.mesh_shape("b:2")
    source = {f"layers/{index}/w": placed(old, P("a"), 64, 64) for index in range(2000)}
    plan = sr.plan_sync(
        source, {"w": placed(new, P(None, "b"), 2000, 64, 64)}, names=[("layers/{i}/w", "w", "stack('i')")]
    )
    assert len(plan.flows) == 1
    assert len(list(plan.transfers())) == 2000 * 4
