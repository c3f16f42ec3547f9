"""`reshard`: values keep their bits both ways, which arrays share memory or are freed, and what is refused."""

import functools
import gc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.moves import prepare
from tests.moves import cases
from tests.moves.cases import RELAYED, WAYS, check_shards, moving, pointers

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(text: str, start: int = 0, axis_type: AxisType = AUTO) -> Mesh:
    """A mesh of the devices from index `start` on."""
    axes = [axis.split(":") for axis in text.split(",")]
    sizes = [int(size) for _, size in axes]
    devices = np.array(jax.devices()[start : start + int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, tuple(name for name, _ in axes), axis_types=(axis_type,) * len(axes))


MESH = mesh_of("data:4,model:2")
LINE = mesh_of("d:8")
FIRST, LAST = mesh_of("half:4"), mesh_of("half:4", start=4)


def counted(sharding: Sharding, shape: tuple[int, ...] = (8, 8), start: int = 0) -> jax.Array:
    """An array of distinct elements, with its own memory on every device."""
    return jax.device_put(numbers(shape, start), sharding, may_alias=False)


def numbers(shape: tuple[int, ...] = (8, 8), start: int = 0) -> np.ndarray:
    return np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)


# ---- values ----


@pytest.mark.sample(1)
@pytest.mark.parametrize(("way", "examples"), [("in memory", 150), ("by pieces", 100), (RELAYED, 50)])
def test_values_keep_their_bits(way: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(cases.cases())
    def check(case: cases.Case) -> None:
        values, source, target = case.values(), case.source.sharding, case.target.sharding
        old = jax.device_put(values, source)
        with moving(way):
            moved = sr.reshard({"x": old}, target)["x"]
        check_shards(moved, target, values)
        check_shards(old, source, values)

    check()


def test_relayed_pieces_arrive() -> None:
    """The way that moves take between slices and processes, on devices that pretend to be on several."""
    source, target = NamedSharding(FIRST, P("half")), NamedSharding(LAST, P())
    with moving(RELAYED):
        assert sr.plan_reshard(counted(source), target).moves[0].route == "intermediate"
        check_shards(sr.reshard(counted(source), target), target, numbers())
        large = counted(source, (1024, 1024))
        check_shards(sr.reshard(large, target, donate=True), target, numbers((1024, 1024)))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("way", "examples"), [("in memory", 60), ("by pieces", 40)])
def test_donated_arrays_are_freed_and_values_stay(way: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(cases.cases(), st.sampled_from([None, False]))
    def check(case: cases.Case, may_alias: bool | None) -> None:
        target = case.target.sharding
        # JAX lets keys share memory with their data even then: nothing else may hold these.
        old = jax.device_put(case.values(), case.source.sharding, may_alias=False)
        with moving(way):
            planned = sr.plan_reshard(old, target, donate=True, may_alias=may_alias)
            moved = sr.reshard(old, target, donate=True, may_alias=may_alias)
        check_shards(moved, target, case.values())
        assert old.is_deleted() == (planned.moves[0].route != "alias" and moved is not old)
        if may_alias is False:
            assert old.is_deleted()

    check()


@WAYS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"])
def test_every_bit_pattern_survives(way: str, dtype: str) -> None:
    bits = 8 * jnp.dtype(dtype).itemsize
    values = np.arange(2**bits, dtype=f"uint{bits}").view(jnp.dtype(dtype)).reshape(16, -1)
    old = jax.device_put(values, NamedSharding(MESH, P("data", "model")))
    for target in (NamedSharding(LAST, P(None, "half")), NamedSharding(MESH, P("model"))):
        with moving(way):
            check_shards(sr.reshard(old, target), target, values)


@WAYS
@pytest.mark.parametrize("dtype", [ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.uint4, ml_dtypes.float4_e2m1fn])
def test_dtypes_below_a_byte_survive(way: str, dtype: Any) -> None:
    values = (np.arange(48) % 4).astype(dtype).reshape(8, 6)
    old = jax.device_put(values, NamedSharding(MESH, P("data", "model")))
    target = NamedSharding(LAST, P("half"))
    with moving(way):
        check_shards(sr.reshard(old, target), target, values)


@WAYS
@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0), (8, 0, 8)])
def test_empty_arrays_move(way: str, shape: tuple[int, ...]) -> None:
    values = np.zeros(shape, np.float32)
    old = jax.device_put(values, NamedSharding(LINE, P("d")))
    for target in (NamedSharding(LAST, P()), NamedSharding(LINE, P(*(None,) * (len(shape) - 1), "d"))):
        with moving(way):
            check_shards(sr.reshard(old, target), target, values)


# ---- trees ----


@WAYS
def test_a_tree_of_every_kind_of_leaf_moves(way: str) -> None:
    tree = {
        "array": counted(NamedSharding(MESH, P("data", "model"))),
        "numpy": numbers(),
        "scalar": np.float32(2.5),
        "uncommitted": jnp.arange(8),
        "key": jax.random.key(3),
        "keys": jax.device_put(jax.random.split(jax.random.key(4), 8), NamedSharding(MESH, P("data"))),
        "int": 3,
        "float": 0.5,
        "complex": 2j,
        "flag": True,
        "act": jax.nn.gelu,
        "name": "x",
        "nothing": None,
    }
    target = NamedSharding(LAST, P())
    with moving(way):
        moved = sr.reshard(tree, target)
    static = ("flag", "act", "name", "nothing")
    assert {name: moved[name] for name in static} == {name: tree[name] for name in static}
    for name, value in tree.items():
        if name not in static:
            check_shards(moved[name], target, value if isinstance(value, jax.Array) else jnp.asarray(value))
    assert not tree["array"].is_deleted()


@WAYS
def test_prefixes_cover_all_leaves_below(way: str) -> None:
    tree = {"a": [numbers(), counted(NamedSharding(LINE, P("d")))], "b": numbers((8,)), "act": jnp.tanh}
    first, second = NamedSharding(LINE, P("d")), SingleDeviceSharding(jax.devices()[5])
    with moving(way):
        moved = sr.reshard(tree, {"a": first, "b": second, "act": None})
    for array in moved["a"]:
        check_shards(array, first, numbers())
    check_shards(moved["b"], second, numbers((8,)))
    assert moved["act"] is jnp.tanh


@WAYS
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_rules_and_plans_use_the_mesh_in_force(way: str, kind: AxisType) -> None:
    mesh = mesh_of("data:2,model:4", axis_type=kind)
    rule = sr.DimShardingRule("model", 0)
    target = NamedSharding(mesh, P("model"))
    with jax.set_mesh(mesh), moving(way):
        tree = {"w": numbers(), "b": numbers((4,))}
        for how in (rule, rule.plan(tree), rule.plan(tree, sr.mesh_shape("data:2,model:4"))):
            moved = sr.reshard(tree, how)
            assert moved["w"].sharding.spec == P("model", *moved["w"].sharding.spec[1:])
            assert moved["w"].sharding.is_equivalent_to(target, 2)
            assert moved["w"].sharding.mesh == mesh
            np.testing.assert_array_equal(moved["w"], numbers())
            np.testing.assert_array_equal(moved["b"], numbers((4,)))


@WAYS
def test_rules_keep_memory_kinds_and_shardings_set_them(way: str) -> None:
    on_host = NamedSharding(MESH, P("data")).with_memory_kind("pinned_host")
    tree = {"w": jax.device_put(numbers(), on_host), "key": jax.device_put(jax.random.key(5), on_host.update(spec=P()))}
    rule = sr.RegexShardingRule([("key", P()), ("w", P("model"))])
    with moving(way):
        kept = sr.reshard(tree, rule.plan(tree, MESH))
        assert [array.sharding.memory_kind for array in jax.tree.leaves(kept)] == ["pinned_host"] * 2
        check_shards(kept["w"], NamedSharding(MESH, P("model"), memory_kind="pinned_host"), numbers())
        for target in (
            NamedSharding(MESH, P("data")),  # only the memory differs
            NamedSharding(LAST, P()),
            NamedSharding(LAST, P(), memory_kind="pinned_host"),
        ):
            moved = sr.reshard({"w": tree["w"]}, target)["w"]
            assert moved.sharding.memory_kind == target.memory_kind
            check_shards(moved, target, numbers())
            assert all(shard.data.sharding.memory_kind == target.memory_kind for shard in moved.addressable_shards)
        back = sr.reshard(moved, on_host)
        check_shards(back, on_host, numbers())


@WAYS
def test_tied_arrays_are_freed_once(way: str) -> None:
    source, target = NamedSharding(LINE, P("d")), NamedSharding(LAST, P("half"))
    tied, untied = counted(source), counted(source, start=100)
    with moving(way):
        moved = sr.reshard({"embed": tied, "own": untied, "head": tied}, target, donate=True)
    check_shards(moved["embed"], target, numbers())
    check_shards(moved["head"], target, numbers())
    check_shards(moved["own"], target, numbers(start=100))
    assert tied.is_deleted()
    assert untied.is_deleted()


@WAYS
@pytest.mark.parametrize("stays", ["embed", "head"])
@pytest.mark.parametrize("limit", [None, 0])
def test_tied_arrays_are_kept_if_either_stays(way: str, stays: str, limit: int | None) -> None:
    source, target = NamedSharding(LINE, P("d")), NamedSharding(LAST, P("half"))
    tied = counted(source)
    goes = {"embed": "head", "head": "embed"}[stays]
    with moving(way):
        moved = sr.reshard(
            {"embed": tied, "head": tied}, {stays: source, goes: target}, donate=True, max_bytes_in_flight=limit
        )
    assert moved[stays] is tied
    check_shards(tied, source, numbers())
    check_shards(moved[goes], target, numbers())


@pytest.mark.parametrize("limit", [None, 1, 5 * 256, 10**9])
@WAYS
def test_batch_sizes_do_not_change_results(way: str, limit: int | None) -> None:
    tree = [counted(NamedSharding((LINE, FIRST)[n % 2], P(("d", "half")[n % 2])), start=n) for n in range(12)]
    target = NamedSharding(LAST, P(None, "half"))
    with moving(way):
        moved = sr.reshard(tree, target, max_bytes_in_flight=limit)
    for index, array in enumerate(moved):
        check_shards(array, target, numbers(start=index))


@WAYS
def test_more_arrays_move_than_one_launch_takes(way: str) -> None:
    source, target = NamedSharding(LINE, P("d")), NamedSharding(LAST, P(None, "half"))
    with moving(way):
        moved = sr.reshard([counted(source, start=index) for index in range(70)], target)
    for index, array in enumerate(moved):
        check_shards(array, target, numbers(start=index))


# ---- shared memory ----


@WAYS
def test_arrays_in_place_are_the_same_objects(way: str) -> None:
    target = NamedSharding(MESH, P("data", "model"))
    tree = {
        "w": counted(target),
        "key": jax.device_put(jax.random.key(0), NamedSharding(MESH, P())),
        "host": jax.device_put(numbers(), target.with_memory_kind("pinned_host")),
    }
    with moving(way):
        again = sr.reshard(tree, jax.tree.map(lambda array: array.sharding, tree))
    assert all(again[name] is tree[name] for name in tree)


@WAYS
def test_may_alias_false_makes_new_arrays(way: str) -> None:
    for target in (NamedSharding(MESH, P("data", "model")), NamedSharding(MESH, P()), NamedSharding(MESH, P("model"))):
        old = counted(target)
        with moving(way):
            moved = sr.reshard(old, target, may_alias=False)
        assert moved is not old
        assert not {*pointers(moved).values()} & {*pointers(old).values()}
        old.delete()
        check_shards(moved, target, numbers())
    whole = NamedSharding(MESH, P())
    key = jax.device_put(jax.random.key(2), whole)
    with moving(way):
        moved = sr.reshard(key, whole, may_alias=False)
    key.delete()
    check_shards(moved, whole, jax.random.key(2))


@WAYS
def test_may_alias_false_copies_host_arrays(way: str) -> None:
    memory = np.zeros(4096 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4  # where the CPU backend could adopt it
    values = memory[start : start + 4096]
    target = SingleDeviceSharding(jax.devices()[0])
    with moving(way):
        moved = jax.block_until_ready(sr.reshard(values, target, may_alias=False))
    values[:] = 1
    check_shards(moved, target, np.zeros(4096, np.float32))


EQUIVALENT = {
    "a longer spec": (NamedSharding(LINE, P("d")), NamedSharding(LINE, P("d", None))),
    "another name of the axis": (NamedSharding(LINE, P("d")), NamedSharding(mesh_of("other:8"), P("other"))),
    "another mesh": (
        NamedSharding(MESH, P(("data", "model"))),
        NamedSharding(mesh_of("a:2,b:4"), P(("a", "b"))),
    ),
    "other axis types": (NamedSharding(LINE, P("d")), NamedSharding(mesh_of("d:8", axis_type=EXPLICIT), P("d"))),
    "a mesh of one device": (
        SingleDeviceSharding(jax.devices()[3]),
        NamedSharding(mesh_of("one:1", start=3), P("one")),
    ),
    "replicas in another order": (
        NamedSharding(LINE, P()),
        NamedSharding(Mesh(np.array(jax.devices()[::-1]), ("x",)), P()),
    ),
}


@WAYS
@pytest.mark.parametrize("name", EQUIVALENT)
@pytest.mark.parametrize("back", [False, True])
def test_equivalent_shardings_share_memory(way: str, name: str, back: bool) -> None:
    source, target = EQUIVALENT[name][::-1] if back else EQUIVALENT[name]
    old = counted(source)
    with moving(way):
        moved = sr.reshard(old, target)
        kept = sr.reshard(old, target, donate=True)
    assert pointers(moved) == pointers(old)
    for array in (moved, kept):
        check_shards(array, target, numbers())
    assert not old.is_deleted()


@WAYS
def test_uncommitted_arrays_become_committed(way: str) -> None:
    old = jnp.arange(8.0)
    assert not old.committed
    with moving(way):
        moved = sr.reshard(old, SingleDeviceSharding(jax.devices()[0]))
    check_shards(moved, SingleDeviceSharding(jax.devices()[0]), old)
    assert pointers(moved) == pointers(old)


# ---- donation ----


@WAYS
def test_donated_arrays_that_move_are_freed_others_kept(way: str) -> None:
    source = NamedSharding(LINE, P("d"))
    tree = {
        "cut": counted(source),
        "gone": counted(NamedSharding(FIRST, P("half")), start=1),
        "whole": counted(NamedSharding(LINE, P()), start=2),
        "stays": counted(NamedSharding(LAST, P("half")), start=3),
        "same": counted(NamedSharding(LAST, P("half", None)), start=4),
        "key": jax.device_put(jax.random.split(jax.random.key(6), 8), source),
        "numpy": numbers(start=5),
    }
    target = NamedSharding(LAST, P("half"))
    with moving(way):
        moved = sr.reshard(tree, target, donate=True)
    for start, name in enumerate(["cut", "gone", "whole", "stays", "same"]):
        check_shards(moved[name], target, numbers(start=start))
    check_shards(moved["key"], target, jax.random.split(jax.random.key(6), 8))
    gone = {name: array.is_deleted() for name, array in tree.items() if name != "numpy"}
    assert gone == {"cut": True, "gone": True, "whole": True, "stays": False, "same": False, "key": True}
    assert moved["stays"] is tree["stays"]
    check_shards(tree["same"], NamedSharding(LAST, P("half", None)), numbers(start=4))
    np.testing.assert_array_equal(tree["numpy"], numbers(start=5))


@WAYS
@pytest.mark.parametrize("target", [NamedSharding(LAST, P()), SingleDeviceSharding(jax.devices()[6])], ids=str)
def test_donating_replicas_frees_the_other_devices(way: str, target: Sharding) -> None:
    old = counted(NamedSharding(LINE, P()))
    alone = counted(NamedSharding(LINE, P()))
    with moving(way):
        shared = sr.reshard(alone, target)
        moved = sr.reshard(old, target, donate=True)
    assert old.is_deleted()
    check_shards(moved, target, numbers())
    assert not alone.is_deleted()  # without donation they may share
    check_shards(shared, target, numbers())


add_in_place = jax.jit(lambda array: array.at[0].add(1000.0), donate_argnums=0)


@WAYS
@pytest.mark.parametrize(
    "target",
    [NamedSharding(LINE, P()), NamedSharding(MESH, P("data")), NamedSharding(MESH, P("model"))],
    ids=["whole", "twice", "four times"],
)
@pytest.mark.parametrize("donate", [False, True])
def test_results_can_be_donated_to_programs(way: str, target: Sharding, donate: bool) -> None:
    source = NamedSharding(LINE, P("d"))
    tree = {"a": counted(source, (64, 8)), "b": counted(source, (64, 8), start=7)}
    with moving(way):
        moved = sr.reshard(tree, target, donate=donate)
        again = sr.reshard(moved["a"], target, may_alias=False)
    if way == "in memory":  # replicas share one buffer: written in place, every device would add to it
        assert len({*pointers(moved["a"]).values()}) < 8
    expected = numbers((64, 8))
    for _ in range(3):
        before, expected[0] = moved["a"], expected[0] + 1000
        moved["a"] = jax.block_until_ready(add_in_place(before))
        check_shards(moved["a"], target, expected)
        assert before.is_deleted()
    check_shards(moved["b"], target, numbers((64, 8), start=7))
    check_shards(again, target, numbers((64, 8)))
    if not donate:
        check_shards(tree["a"], source, numbers((64, 8)))


@pytest.mark.slow
@WAYS
def test_shared_memory_outlives_its_first_array(way: str) -> None:
    target = NamedSharding(LINE, P())
    for _ in range(3):
        with moving(way):
            moved = sr.reshard({"x": counted(NamedSharding(LINE, P("d")), (64, 64))}, target)["x"]
        gc.collect()
        other = np.random.default_rng(0).random((64, 64))  # which may reuse freed memory
        check_shards(moved, target, numbers((64, 64)))
        del other


# ---- refusals ----


def refused(tree: Any, shardings: Any, *, message: str, error: type[Exception] = sr.errors.PlanError) -> list[str]:
    """The paths in the error of `reshard`, after which every array is as it was."""
    alive = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) and not leaf.is_deleted()]
    before = [np.asarray(leaf) for leaf in alive]
    where = [leaf.sharding for leaf in alive]
    with pytest.raises(error, match=message) as caught:
        sr.reshard(tree, shardings, donate=True)
    for array, values, sharding in zip(alive, before, where, strict=True):
        assert not array.is_deleted()
        assert array.sharding == sharding
        np.testing.assert_array_equal(array, values)
    return [finding.path for finding in getattr(caught.value, "findings", ())]


def tree_of_three() -> dict[str, Any]:
    source = NamedSharding(LINE, P("d"))
    return {"a": counted(source), "b": [counted(source, (16,)), numbers()], "act": jnp.tanh}


def test_prefixes_must_fit() -> None:
    target = NamedSharding(LAST, P("half"))
    for how in ({"a": target, "c": target, "act": None}, {"a": target, "b": [target], "act": None}, [target] * 3):
        refused(
            tree_of_three(),
            how,
            error=sr.errors.TreeError,
            message="reshard: the .* do not have the structure",
        )


@pytest.mark.parametrize("what", [P(), P("half"), None, "half"], ids=str)
def test_only_shardings_are_accepted(what: Any) -> None:
    target = NamedSharding(LAST, P("half"))
    text = r"must contain only `jax\.sharding\.Sharding`, got .*"
    refused(tree_of_three(), what, error=sr.errors.ConfigError, message=text)
    refused(
        tree_of_three(), {"a": what, "b": [target, what], "act": None}, error=ValueError, message=f"{text}at a.*b/1"
    )


@WAYS
def test_all_deleted_arrays_are_listed(way: str) -> None:
    tree = {"a": counted(NamedSharding(LINE, P("d"))), **{f"gone{n}": counted(NamedSharding(LINE, P())) for n in "12"}}
    for name in ("gone1", "gone2"):
        tree[name].delete()
    with moving(way):
        paths = refused(tree, NamedSharding(LAST, P()), message="2 arrays cannot be placed:\n.*deleted or donated")
    assert paths in (["gone1", "gone2"], ["gone*"])


def test_all_indivisible_arrays_are_listed() -> None:
    tree = {**tree_of_three(), "c": numbers((6, 2)), "d": counted(NamedSharding(LINE, P()), (3,)), "e": 5.0}
    paths = refused(tree, NamedSharding(LINE, P("d")), message="(?s)3 arrays cannot be placed:.*not divisible by mesh")
    assert paths == ["c", "d", "e"]


def test_different_problems_are_listed_together() -> None:
    tree = {
        "fits": counted(NamedSharding(LINE, P("d"))),
        "gone": counted(NamedSharding(LINE, P())),
        "odd": numbers((7,)),
    }
    tree["gone"].delete()
    paths = refused(tree, NamedSharding(LINE, P("d")), message="2 arrays cannot be placed")
    assert sorted(paths) == ["gone", "odd"]


def test_shardings_without_devices_are_refused() -> None:
    target = NamedSharding(LINE.abstract_mesh, P("d"))
    paths = refused(tree_of_three(), target, message="3 arrays cannot be placed:\n.*without devices")
    assert paths == ["a", "b/0", "b/1"]


def test_shapes_without_values_are_refused() -> None:
    target = NamedSharding(LINE, P("d"))
    tree = {"x": jax.ShapeDtypeStruct((8,), jnp.float32), "y": jax.ShapeDtypeStruct((16,), jnp.int8, sharding=target)}
    paths = refused(
        {**tree, "z": counted(target)}, target, message="2 arrays cannot be placed:\n.*a shape and no values"
    )
    assert paths == ["x", "y"]


class Elsewhere(Sharding):
    """Whole copies on the devices of a backend that this machine does not have."""

    @property
    def device_set(self) -> Any:
        return {cases.FakeDevice(0, platform="tpu"), cases.FakeDevice(1, platform="tpu")}

    @property
    def memory_kind(self) -> None:
        return None

    def shard_shape(self, global_shape: tuple[int, ...]) -> tuple[int, ...]:
        return global_shape


def test_devices_of_another_backend_are_refused() -> None:
    tree = tree_of_three()
    paths = refused(
        tree, Elsewhere(), message="(?s)2 arrays.*it is on cpu devices, and its new sharding on tpu devices.*Go through"
    )
    assert paths == ["a", "b/0"]  # the third comes from the host


def test_unreduced_arrays_are_refused() -> None:
    mesh = mesh_of("d:8", axis_type=EXPLICIT)
    tree = {"a": counted(NamedSharding(mesh, P())), "b": numbers()}
    paths = refused(tree, NamedSharding(mesh, P(unreduced=frozenset({"d"}))), message="holds unreduced sums")
    assert paths == ["a", "b"]


@pytest.mark.parametrize("limit", [-1, "64 MiB", float("nan"), float("inf"), True, 1j])
def test_limits_must_be_bytes(limit: Any) -> None:
    old = counted(NamedSharding(LINE, P("d")))
    for act in (sr.reshard, sr.plan_reshard):
        with pytest.raises(sr.errors.ConfigError, match="max_bytes_in_flight must be a number of bytes, 0 or more"):
            act(old, NamedSharding(LAST, P()), donate=True, max_bytes_in_flight=limit)
    assert not old.is_deleted()


# ---- inside jit ----


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("in_force", [True, False])
def test_reshard_constrains_inside_jit(kind: AxisType, in_force: bool) -> None:
    mesh = mesh_of("data:4,model:2", axis_type=kind)
    target = {"w": NamedSharding(mesh, P("model", "data")), "n": NamedSharding(mesh, P())}

    @jax.jit
    def double(w: jax.Array) -> Any:
        return sr.reshard({"w": 2 * w, "n": 3.0, "act": None}, {**target, "act": None})

    old = counted(NamedSharding(mesh, P("data")))
    if in_force:
        with jax.set_mesh(mesh):
            moved = double(old)
    else:
        moved = double(old)
    assert moved["w"].sharding.is_equivalent_to(target["w"], 2)
    np.testing.assert_array_equal(moved["w"], 2 * numbers())
    assert (moved["n"], moved["n"].sharding.is_equivalent_to(target["n"], 0)) == (3.0, True)


def test_only_shardings_are_accepted_inside_jit() -> None:
    with pytest.raises(ValueError, match=r"must contain only `jax\.sharding\.Sharding`, got P\('d',\)"):
        jax.jit(lambda x: sr.reshard(x, P("d")))(jnp.ones(8))


def test_rules_use_the_mesh_in_force_inside_jit() -> None:
    with jax.set_mesh(MESH):
        moved = jax.jit(lambda x: sr.reshard(x, sr.DimShardingRule("model", 0)))(jnp.ones((8, 8)))
    assert moved.sharding.is_equivalent_to(NamedSharding(MESH, P("model")), 2)


# ---- cached schedules ----


def cache() -> Any:
    return prepare._cached_schedule.cache_info()


@pytest.mark.sample(1)
@WAYS
def test_schedules_are_cached_on_request(way: str) -> None:
    jax.clear_caches()
    assert (cache().currsize, cache().maxsize) == (0, 4096)
    source, target = NamedSharding(LINE, P("d")), NamedSharding(LAST, P("half"))
    tree = [counted(source), counted(source), counted(source, (16, 2)), jax.device_put(numbers().astype(int), source)]
    with moving(way):
        sr.reshard(tree, target)
        assert (cache().currsize, cache().hits) == (0, 0)
        move = functools.partial(sr.reshard, tree, target, cache_resharding_plans=True)
        move()
        assert (cache().currsize, cache().hits) == (3, 1)
        moved = move()
        assert (cache().currsize, cache().hits) == (3, 5)
    for array, old in zip(moved, tree, strict=True):
        check_shards(array, target, old)
    sr.reshard(tree, SingleDeviceSharding(jax.devices()[0]), cache_resharding_plans=True)
    assert cache().currsize == 6
    jax.clear_caches()
    assert cache().currsize == 0


# ---- where arrays go, as in filter_shard ----


def test_specs_rules_and_plans_take_the_mesh_beside_them() -> None:
    with moving("in memory"):
        old = counted(NamedSharding(LAST, P("half")))
        rule = sr.RegexShardingRule([(".*", P("data"))])
        for how in (P("data"), rule, rule.plan({"x": old}, MESH), {"x": P("data")}, lambda tree: rule):
            assert sr.reshard({"x": old}, how, MESH)["x"].sharding == NamedSharding(MESH, P("data")), how
            assert sr.reshard({"x": old}, how, mesh=MESH)["x"].sharding.mesh == MESH
            (move,) = sr.plan_reshard({"x": old}, how, MESH).moves
            assert move.target == NamedSharding(MESH, P("data"))
        mixed = sr.reshard({"a": old, "b": old, "n": 3}, {"a": P("model"), "b": jax.devices()[2], "n": None}, MESH)
        assert mixed["a"].sharding == NamedSharding(MESH, P("model"))
        assert mixed["b"].devices() == {jax.devices()[2]}
        assert mixed["n"].sharding == NamedSharding(MESH, P())
        check_shards(mixed["a"], NamedSharding(MESH, P("model")), numbers())


def test_specs_take_the_mesh_in_force() -> None:
    with moving("in memory"), jax.set_mesh(MESH):
        moved = sr.reshard({"x": numbers()}, P("data", "model"))
    assert moved["x"].sharding == NamedSharding(MESH, P("data", "model"))


def test_specs_without_a_mesh_say_how_to_pass_it() -> None:
    with pytest.raises(sr.errors.ConfigError, match="third argument") as caught:
        sr.reshard({"x": numbers(), "y": numbers()}, {"x": P("data"), "y": P()})
    assert "P" in str(caught.value)
    assert "at x" in str(caught.value)


def test_inside_jit_the_mesh_is_taken_too() -> None:
    moved = jax.jit(lambda x: sr.reshard(x, P("data"), MESH))(numbers())
    assert moved.sharding.spec == P("data")


@WAYS
def test_training_continues_after_moves(way: str) -> None:
    step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).sum())(w), donate_argnums=0)
    x = np.ones((4, 64), np.float32)
    expected = moved = numbers((64, 8)) / 512
    targets = (NamedSharding(LINE, P("d")), NamedSharding(LAST, P()), NamedSharding(MESH, P("model", "data")))
    for target in targets:
        expected = np.asarray(step(jnp.asarray(expected), x))
        with moving(way):
            moved = step(sr.reshard(moved, target, donate=isinstance(moved, jax.Array)), x)
    np.testing.assert_allclose(moved, expected, rtol=1e-5)


@WAYS
def test_modules_keep_their_type_and_functions(way: str) -> None:
    model = eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(0))
    placed = sr.filter_shard(model, sr.FSDPShardingRule("data", min_size_mb=0), MESH)
    with moving(way):
        moved = sr.reshard(placed, NamedSharding(LAST, P("half")))
    assert isinstance(moved, eqx.nn.MLP)
    assert moved.activation is model.activation
    for new, old in zip(jax.tree.leaves(eqx.filter(moved, eqx.is_array)), jax.tree.leaves(model), strict=False):
        check_shards(new, NamedSharding(LAST, P("half")), old)
