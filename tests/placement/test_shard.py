"""`filter_shard`: what it accepts as `how`, what happens to each kind of leaf, and what it refuses."""

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.compiles import compiles

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
TYPES = [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (EXPLICIT, AUTO), (AUTO, EXPLICIT)]
RULE = sr.DimShardingRule("model", 0) | sr.FSDPShardingRule("data", min_size_mb=0)


def mesh_of(types: tuple[AxisType, AxisType] = (AUTO, AUTO)) -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=types)


MESH = mesh_of()


def tree() -> dict[str, Any]:
    return {"w": np.arange(64.0, dtype=np.float32).reshape(8, 8), "b": np.arange(8, dtype=np.float32)}


def same_values(placed: Any, original: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(placed), original)


# ---- how ----


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_a_rule_places_on_axes_of_any_type(types: tuple[AxisType, AxisType]) -> None:
    mesh = mesh_of(types)
    placed = sr.filter_shard(tree(), RULE, mesh)
    assert placed["w"].sharding == NamedSharding(mesh, P("model", "data"))
    assert placed["b"].sharding == NamedSharding(mesh, P("model"))
    same_values(placed, tree())


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("in_force", [True, False])
def test_inside_jit_it_constrains_on_axes_of_any_type(types: tuple[AxisType, AxisType], in_force: bool) -> None:
    mesh = mesh_of(types)

    @jax.jit
    def double(tree: Any) -> Any:
        return sr.filter_shard(jax.tree.map(lambda x: 2 * x, tree), RULE, mesh)

    placed = jax.device_put(tree(), NamedSharding(mesh, P()))
    if in_force:
        with jax.set_mesh(mesh):
            constrained = double(placed)
    else:
        constrained = double(placed)
    assert constrained["w"].sharding.is_equivalent_to(NamedSharding(mesh, P("model", "data")), 2)
    assert constrained["b"].sharding.is_equivalent_to(NamedSharding(mesh, P("model")), 1)
    same_values(constrained, jax.tree.map(lambda x: 2 * x, tree()))


def test_closed_over_arrays_are_constrained_too() -> None:
    array = jnp.ones((8, 8))
    assert jax.jit(lambda: sr.filter_shard(array, P("data", "model"), MESH))().sharding.spec == P("data", "model")


@pytest.mark.parametrize(
    "how",
    [
        RULE.plan(tree(), MESH),
        RULE.plan(tree(), sr.mesh_shape("data:4,model:2")),
        {"w": P("model", "data"), "b": P("model")},
        {"w": NamedSharding(MESH, P("model", "data")), "b": P("model")},
        lambda tree: RULE.plan(tree, MESH),
    ],
    ids=["plan", "plan of a shape", "specs", "shardings and specs", "function"],
)
def test_plans_specs_shardings_and_functions_agree(how: Any) -> None:
    placed = sr.filter_shard(tree(), how, MESH)
    assert placed["w"].sharding.spec == P("model", "data")
    assert placed["b"].sharding.spec == P("model")


def test_a_prefix_stands_for_all_below_it() -> None:
    placed = sr.filter_shard({"a": tree(), "c": [np.ones(8), np.ones((8, 2))]}, {"a": P("model"), "c": P("data")}, MESH)
    assert [x.sharding.spec for x in jax.tree.leaves(placed)] == [P("model")] * 2 + [P("data")] * 2


def test_a_device_takes_everything() -> None:
    device = jax.devices()[3]
    assert sr.filter_shard(tree(), device)["w"].sharding == SingleDeviceSharding(device)


def test_empty_specs_and_none_replicate() -> None:
    for how in (P(), None, {"w": None, "b": P()}):
        for array in jax.tree.leaves(sr.filter_shard(tree(), how, MESH)):
            assert array.sharding == NamedSharding(MESH, P())
            assert len(array.addressable_shards) == 8


def test_the_mesh_comes_from_argument_then_arrays_then_context() -> None:
    other = Mesh(np.array(jax.devices()[:4]), ("data",))
    placed = sr.filter_shard(tree(), P("data"), other)
    with jax.set_mesh(MESH):
        assert sr.filter_shard(tree(), P("model"))["w"].sharding.mesh == MESH
        assert sr.filter_shard(placed, P())["w"].sharding.mesh == other
        assert sr.filter_shard(placed, sr.ReplicateShardingRule())["w"].sharding.mesh == other
        assert sr.filter_shard(placed, P("model"), MESH)["w"].sharding.mesh == MESH
    assert sr.filter_shard(placed, P())["w"].sharding.mesh == other


# ---- leaves ----


def test_static_leaves_stay_as_they_are() -> None:
    mixed = {"w": np.ones(8), "act": jax.nn.gelu, "p": 0.5, "n": 3, "name": "x", "nothing": None}
    placed = sr.filter_shard(mixed, P("data"), MESH)
    assert {key: placed[key] for key in mixed if key != "w"} == {key: mixed[key] for key in mixed if key != "w"}


def test_a_module_keeps_its_type_and_its_functions() -> None:
    model = eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(0))
    placed = sr.filter_shard(model, RULE, MESH)
    assert isinstance(placed, eqx.nn.MLP)
    assert placed.activation is model.activation
    assert placed.layers[0].weight.sharding == NamedSharding(MESH, P("model", "data"))
    np.testing.assert_allclose(eqx.filter_jit(placed)(jnp.ones(8)), model(jnp.ones(8)), rtol=1e-5, atol=1e-7)


def test_flax_boxes_are_placed_inside() -> None:
    boxed = {"w": nn.Partitioned(jnp.ones((8, 8)), ("embed", "mlp")), "b": jnp.ones(8)}
    placed = sr.filter_shard(boxed, sr.LogicalShardingRule({"embed": "data", "mlp": "model"}), MESH)
    assert isinstance(placed["w"], nn.Partitioned)
    assert placed["w"].value.sharding.spec == P("data", "model")


def test_placed_arrays_come_back_as_the_same_object() -> None:
    placed = sr.filter_shard(tree(), RULE, MESH)
    again = sr.filter_shard(placed, RULE, MESH)
    assert again["w"] is placed["w"]
    assert again["b"] is placed["b"]


def test_a_mesh_of_other_axis_types_moves_nothing() -> None:
    placed = sr.filter_shard(tree(), RULE, MESH)["w"]
    renamed = sr.filter_shard(placed, P("model", "data"), mesh_of((EXPLICIT, EXPLICIT)))
    assert renamed.sharding.mesh.axis_types == (EXPLICIT, EXPLICIT)
    assert [shard.data.unsafe_buffer_pointer() for shard in renamed.addressable_shards] == [
        shard.data.unsafe_buffer_pointer() for shard in placed.addressable_shards
    ]


def test_specs_keep_the_memory_kind_and_shardings_set_it() -> None:
    kept = jax.device_put(np.ones((8, 8)), NamedSharding(MESH, P("data"), memory_kind="pinned_host"))
    for how in (P("model"), sr.DimShardingRule("model", 0), sr.DimShardingRule("model", 0).plan(kept, MESH)):
        moved = sr.filter_shard(kept, how, MESH)
        assert moved.sharding.spec == P("model", *moved.sharding.spec[1:])
        assert moved.sharding.memory_kind == "pinned_host"
    assert sr.filter_shard(kept, NamedSharding(MESH, P("model"))).sharding.memory_kind == "device"
    on_host = NamedSharding(MESH, P("model"), memory_kind="pinned_host")
    assert sr.filter_shard(np.ones((8, 8)), on_host).sharding == on_host


def test_a_source_is_read_by_the_distinct_shard() -> None:
    whole = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    indices: list[Any] = []

    def read(index: Any) -> np.ndarray:
        indices.append(index)
        return whole[index]

    source = sr.ArraySource((8, 4), np.float32, read)
    placed = sr.filter_shard({"w": source}, P("data"), MESH)["w"]
    np.testing.assert_array_equal(placed, whole)
    assert placed.sharding == NamedSharding(MESH, P("data"))
    assert len(indices) == 4  # not 8: two devices hold each part
    assert all((index[0].stop - index[0].start) == 2 for index in indices)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (np.zeros((8, 3), np.float32), r"returned float32\[8, 3\]"),
        (np.zeros((8, 4), np.int8), r"returned int8\[8, 4\]"),
    ],
)
def test_sources_must_read_their_shape_and_dtype(part: np.ndarray, message: str) -> None:
    source = sr.ArraySource((8, 4), np.float32, lambda index: part)
    with pytest.raises(ValueError, match=message):
        sr.filter_shard(source, P(), MESH)


def test_nothing_is_compiled_per_leaf() -> None:
    warm = {"layers": [{"w": np.full((8, 8 + n), 1.0, np.float32)} for n in range(40)]}
    sr.filter_gather(sr.filter_shard(warm, sr.DimShardingRule("data", 0), MESH))
    fresh = {"layers": [{"w": np.full((16, 9 + n), 1.0, np.float32)} for n in range(40)]}
    assert compiles(lambda: sr.filter_gather(sr.filter_shard(fresh, sr.DimShardingRule("data", 0), MESH))) == 0
    assert compiles(lambda: jax.jit(lambda x: x + 41)(np.ones(3))) > 0  # a compilation would have been seen


# ---- refusals ----


def test_all_misfits_are_listed_and_nothing_is_moved() -> None:
    arrays = {"a": np.ones((7, 8)), "b": [np.ones(6), np.ones(16)], "c": np.ones(3)}
    with pytest.raises(sr.errors.PlanError, match="filter_shard: 3 arrays cannot be placed") as caught:
        sr.filter_shard(arrays, P("data"), MESH)
    assert [finding.path for finding in caught.value.findings] == ["a", "b/0", "c"]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(sr.errors.PlanError, match=r"(?s)indivisible: a \(7, 8\).*indivisible: b/0.*indivisible: c"):
        sr.filter_shard(arrays, sr.DimShardingRule("data", 0), MESH)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (P("modle"), r"unknown axis 'modle' \(did you mean 'model'\?\)"),
        (P(None, None, "data"), "has 3 entries, the array has 2 dimensions"),
        (P("data", "data"), "uses axis 'data' twice"),
        ("data", "expected a PartitionSpec, a sharding, a device or None, got 'data'"),
    ],
)
def test_unsound_specs_are_refused(how: Any, message: str) -> None:
    with pytest.raises(sr.errors.PlanError, match=message):
        sr.filter_shard(np.ones((8, 8)), how, MESH)


def test_indivisible_specs_are_errors_inside_jit() -> None:
    with pytest.raises(sr.errors.PlanError, match="not divisible by mesh axis data x model size 8"):
        jax.jit(lambda x: sr.filter_shard(x, P(("data", "model")), MESH))(jnp.ones((10, 8)))


def test_a_tree_of_specs_for_another_tree_is_refused() -> None:
    with pytest.raises(sr.errors.TreeError, match="do not have the structure of the tree"):
        sr.filter_shard(tree(), {"w": P(), "c": P()}, MESH)


def test_a_plan_for_another_tree_is_refused_with_all_differences() -> None:
    plan = RULE.plan({**tree(), "extra": np.ones(8)}, MESH)
    with pytest.raises(
        sr.errors.TreeError, match=r"(?s)w: \(4, 4\) float64 in the tree, \(8, 8\).*extra: in the plan, not in"
    ):
        sr.filter_shard({"w": np.ones((4, 4)), "b": np.ones(8)}, plan, MESH)


def test_a_plan_serves_other_dtypes() -> None:
    plan = RULE.plan(tree(), MESH)
    placed = sr.filter_shard(jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree()), plan)
    assert placed["w"].dtype == jnp.bfloat16


def test_errors_without_a_mesh_say_what_to_pass() -> None:
    with pytest.raises(sr.errors.NoMeshError, match="filter_shard needs a mesh and there is none"):
        sr.filter_shard(tree(), P("data"))
    with pytest.raises(sr.errors.NoMeshError, match=r"data:4,model:2 is only the shape of a mesh.*sr.create_mesh"):
        sr.filter_shard(tree(), RULE.plan(tree(), sr.mesh_shape("data:4,model:2")))
    with pytest.raises(sr.errors.AxisTypeError, match="a mesh must be a Mesh or an AbstractMesh"):
        sr.filter_shard(tree(), P("data"), "data:8")  # pyright: ignore[reportArgumentType]


def test_large_replicated_arrays_warn() -> None:
    large = np.zeros((4096, 1024), np.float32)
    with pytest.warns(
        sr.errors.ShardingWarning, match=r"(?s)filter_shard:.*large-replicated: w .*16.0 MiB on every device"
    ):
        sr.filter_shard({"w": large}, sr.RegexShardingRule([("bias", P())]), MESH)


def test_an_ignored_mesh_warns() -> None:
    rule = sr.AutoShardingRule(MESH, min_shard_size=0)
    other = Mesh(np.array(jax.devices()), ("data",))
    with pytest.warns(sr.errors.ShardingWarning, match="the rule's own mesh"):
        assert sr.filter_shard(tree(), rule, other)["w"].sharding.mesh == MESH


def test_auto_axes_before_explicit_ones_are_errors_inside_jit() -> None:
    mesh = mesh_of((AUTO, EXPLICIT))
    array = jax.device_put(np.ones((8, 8)), NamedSharding(mesh, P()))
    with pytest.raises(sr.errors.SpecError, match="the Auto axis 'data' cannot come before an Explicit one"):
        jax.jit(lambda x: sr.filter_shard(x, P(("data", "model")), mesh))(array)
    assert sr.filter_shard(array, P(("data", "model")), mesh).sharding.spec == P(("data", "model"))


@pytest.mark.parametrize("how", [P("data"), sr.DimShardingRule("data", 0)], ids=["spec", "rule"])
@pytest.mark.parametrize("rows", [16, 8])
def test_mapped_axes_are_refused_inside_shard_map(how: Any, rows: int) -> None:
    mapped = jax.shard_map(lambda x: sr.filter_shard(2 * x, how, MESH), in_specs=P("data"), out_specs=P("data"))
    with jax.set_mesh(MESH), pytest.raises(sr.errors.PlanError, match=r"axis 'data' of .* is Manual here"):
        jax.jit(mapped)(jnp.ones((rows, 8)))


@pytest.mark.parametrize(
    ("value", "how", "message"),
    [
        (jax.ShapeDtypeStruct((8,), jnp.float32), P("data"), "it has a shape and no values"),
        (np.ones((8, 8)), P(P.UNCONSTRAINED, "model"), "no compiler chooses how an UNCONSTRAINED dimension is split"),
        (np.ones(8), NamedSharding(MESH.abstract_mesh, P("data")), "on the shape of a mesh, without devices"),
    ],
)
def test_unplaceable_leaves_are_refused_with_their_path(value: Any, how: Any, message: str) -> None:
    for verb in (sr.filter_shard, sr.reshard) if isinstance(how, NamedSharding) else (sr.filter_shard,):
        with (
            jax.set_mesh(MESH),
            pytest.raises(sr.errors.PlanError, match=f"1 array cannot be placed:\n.*not-placeable: w .*{message}"),
        ):
            verb({"w": value}, how)


def test_a_source_is_not_read_inside_of_jit() -> None:
    source = sr.ArraySource((8,), np.float32, lambda index: np.ones(8, np.float32)[index])
    with pytest.raises(sr.errors.ConfigTypeError, match="an ArraySource is read outside of jit"):
        jax.jit(lambda: sr.filter_shard(source, P("data"), MESH))()


def test_callables_other_than_trees_of_specs_are_called() -> None:
    placed = sr.filter_shard(tree(), functools.partial(RULE.plan, mesh=MESH))
    assert placed["w"].sharding.spec == P("model", "data")
    model = eqx.nn.Linear(8, 8, key=jax.random.key(0))  # a module of specs can be called, and is not
    assert sr.filter_shard(model, RULE.plan(model, MESH).specs, MESH).weight.sharding.spec == P("model", "data")
