"""`filter_init`: what it accepts, where results are, and how often it compiles. Values: test_init_values.py."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.compiles import compiles

pytestmark = pytest.mark.usefixtures("optimized")

MESH = sr.create_mesh("data:4,model:2")
MESHES = [
    MESH,
    jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2),
    jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto)),
]
RULE = sr.FSDPShardingRule("data", min_size_mb=0)
MLP = functools.partial(eqx.nn.MLP, 8, 8, 64, 2)


def arrays(tree: Any) -> list[jax.Array]:
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", MESHES, ids=["Auto", "Explicit", "mixed"])
def test_models_are_initialised_in_their_shards(mesh: Mesh) -> None:
    model = sr.filter_init(MLP, RULE, mesh)(key=jax.random.key(0))
    assert isinstance(model, eqx.nn.MLP)
    assert model.layers[0].weight.sharding == NamedSharding(mesh, P("data", None))
    for leaf, other in zip(arrays(model), arrays(MLP(key=jax.random.key(0))), strict=True):
        np.testing.assert_array_equal(leaf, other)


@pytest.mark.slow
def test_one_device_and_the_mesh_in_force_are_accepted() -> None:
    device = jax.devices()[5]
    model = sr.filter_init(MLP, device)(key=jax.random.key(0))
    assert {x.sharding for x in arrays(model)} == {SingleDeviceSharding(device)}
    for mesh in MESHES:
        with jax.set_mesh(mesh):
            model = sr.filter_init(MLP, RULE)(key=jax.random.key(0))
        assert model.layers[0].weight.sharding == NamedSharding(mesh, P("data", None))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "how",
    [
        lambda tree: RULE.plan(tree, MESH),
        RULE.plan(eqx.filter_eval_shape(MLP, key=jax.random.key(0)), sr.mesh_shape("data:4,model:2")),
        RULE.plan(eqx.filter_eval_shape(MLP, key=jax.random.key(0)), MESH).specs,
        RULE.plan(eqx.filter_eval_shape(MLP, key=jax.random.key(0)), MESH).shardings(),
    ],
    ids=["function", "plan", "specs", "shardings"],
)
def test_it_takes_what_filter_shard_takes(how: Any) -> None:
    model = sr.filter_init(MLP, how, MESH)(key=jax.random.key(0))
    assert model.layers[0].weight.sharding == NamedSharding(MESH, P("data", None))


def test_inside_of_jit_the_result_is_constrained() -> None:
    tree = jax.jit(lambda key: arrays(sr.filter_init(MLP, RULE, MESH)(key=key)))(jax.random.key(0))
    assert tree[0].sharding.spec == P("data")


def test_arguments_may_lie_anywhere() -> None:
    init = sr.filter_init(lambda key, w, n: (jax.random.normal(key, (8, n)), w * 2), P("data"), MESH)
    ones = np.ones((8, 2), np.float32)
    committed = jax.device_put(jax.random.key(0), jax.devices()[3])
    for key in (jax.random.key(0), committed, sr.filter_shard(jax.random.key(0), P(), MESHES[1])):
        for w in (
            ones,
            jnp.asarray(ones),
            jax.device_put(ones, jax.devices()[2]),
            sr.filter_shard(ones, P("model"), MESHES[1]),
        ):
            drawn, doubled = init(key, w, 4)
            np.testing.assert_array_equal(drawn, jax.random.normal(jax.random.key(0), (8, 4)))
            np.testing.assert_array_equal(doubled, 2 * ones)
            assert drawn.sharding == doubled.sharding == NamedSharding(MESH, P("data"))


def test_a_tree_over_several_meshes_is_made_on_each() -> None:
    first, second = (Mesh(np.array(jax.devices()[n : n + 4]), ("data",)) for n in (0, 4))
    how = {"a": NamedSharding(first, P("data")), "b": NamedSharding(second, P("data"))}
    init = sr.filter_init(lambda key: {n: jax.random.normal(key, (8, 2)) for n in "ab"}, how)
    tree = init(jax.random.key(0))
    assert {name: x.sharding for name, x in tree.items()} == how
    np.testing.assert_array_equal(tree["a"], tree["b"])


class Stack(eqx.Module):
    """Equal layers in a row."""

    layers: list[eqx.nn.Linear]

    def __init__(self, depth: int, key: jax.Array) -> None:
        self.layers = [eqx.nn.Linear(16, 16, key=subkey) for subkey in jax.random.split(key, depth)]


def test_equal_layers_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    jit = jax.jit

    def counting(run: Any, **options: Any) -> Any:
        index, compiled = len(calls), jit(run, **options)
        calls.append(0)

        def call(*args: Any) -> Any:
            calls[index] += 1
            return compiled(*args)

        return call

    for depth in (4, 16):
        init = sr.filter_init(functools.partial(Stack, depth), RULE, MESH)
        calls.clear()
        monkeypatch.setattr("shardrules.placement.init.jit", counting)
        init(jax.random.key(0))
        monkeypatch.undo()
        assert calls == [depth]


def test_a_second_call_compiles_nothing() -> None:
    init = sr.filter_init(functools.partial(Stack, 4), RULE, MESH)
    tree = [init(jax.random.key(0))]
    key = jax.block_until_ready(jax.random.key(1))
    assert compiles(lambda: tree.append(init(key))) == 0
    assert not np.array_equal(tree[0].layers[0].weight, tree[1].layers[0].weight)


def test_unhashable_static_arguments_are_accepted() -> None:
    init = sr.filter_init(lambda key, names: {n: jax.random.normal(key, (8,)) for n in sorted(names)}, P("data"), MESH)
    assert sorted(init(jax.random.key(0), {"a", "b"})) == ["a", "b"]


def test_wrong_plans_are_refused_before_anything_is_computed() -> None:
    ran: list[int] = []

    def make(key: jax.Array) -> Any:
        jax.debug.callback(lambda: ran.append(1))
        return {"a": jax.random.normal(key, (7,)), "b": jax.random.normal(key, (6,))}

    with pytest.raises(sr.errors.PlanError, match=r"(?s)filter_init: 2 arrays cannot be placed:.*a \(7,\).*b \(6,\)"):
        sr.filter_init(make, P("data"), MESH)(jax.random.key(0))
    jax.effects_barrier()
    assert ran == []
    with pytest.raises(sr.errors.NoMeshError, match="filter_init needs a mesh"):
        sr.filter_init(make, P("data"))(jax.random.key(0))
    with pytest.raises(sr.errors.AxisTypeError, match="a mesh must be a Mesh"):
        sr.filter_init(make, P("data"), "data:8")  # pyright: ignore[reportArgumentType]


def test_it_looks_like_what_it_wraps() -> None:
    def make_model(key: jax.Array) -> Any:
        """Makes a model."""
        return jax.random.normal(key, (8,))

    init = sr.filter_init(make_model, P("data"), MESH)
    assert (init.__name__, init.__doc__) == ("make_model", "Makes a model.")


def test_passed_through_arrays_are_copies() -> None:
    w = sr.filter_shard(np.ones(8, np.float32), P("data"), MESH)
    closed_over = jnp.ones(8)
    how = {"z": P("data"), "twice": P("data"), "held": P("data"), "key": P()}
    tree = sr.filter_init(lambda p: {"z": p, "twice": p, "held": closed_over, "key": jax.random.key(1)}, how, MESH)(w)
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)({n: tree[n] for n in ("z", "held")})
    np.testing.assert_array_equal(w, np.ones(8))
    np.testing.assert_array_equal(tree["twice"], np.ones(8))
    np.testing.assert_array_equal(closed_over, np.ones(8))


def test_equal_python_values_of_other_types_are_traced_separately() -> None:
    full = sr.filter_init(lambda s: jnp.full((8,), s), P("data"), MESH)
    assert [full(s).dtype.name for s in (1, 1.0, True, 1)] == ["int32", "float32", "bool", "int32"]
    sign = sr.filter_init(lambda s: jnp.full((8,), np.copysign(1, s)), P("data"), MESH)
    assert [float(sign(s)[0]) for s in (0.0, -0.0)] == [1, -1]


def test_jax_settings_are_read_at_every_call() -> None:
    init = sr.filter_init(lambda seed: jax.random.normal(jax.random.key(seed), (8,), float), P("data"), MESH)
    plain = init(3)
    with jax.enable_x64(True):
        assert init(3).dtype == np.float64
    with jax.default_prng_impl("rbg"):
        assert not np.array_equal(init(3), plain)
    np.testing.assert_array_equal(init(3), plain)


def test_the_mesh_of_a_plan_is_in_force() -> None:
    def make(key: jax.Array) -> jax.Array:
        return sr.with_sharding_constraint(jax.random.normal(key, (8, 8)), P("data"))

    plan = RULE.plan(jax.ShapeDtypeStruct((8, 8), jnp.float32), MESH)
    assert sr.filter_init(make, plan)(jax.random.key(0)).sharding == NamedSharding(MESH, P(None, "data"))
    assert jax.jit(lambda key: sr.filter_init(make, RULE, MESH)(key))(jax.random.key(0)).sharding.spec == P(
        None, "data"
    )


def test_large_inputs_are_not_copied_to_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.ones((1024, 64), np.float32)
    seen: list[Any] = []
    jit = jax.jit

    def watching(run: Any, **options: Any) -> Any:
        compiled = jit(run, **options)
        return lambda *args: seen.extend(args) or compiled(*args)

    for value in (table, jnp.asarray(table), jax.device_put(table, jax.devices()[3])):
        init = sr.filter_init(lambda p: 2 * p, P("data"), MESH)
        monkeypatch.setattr("shardrules.placement.init.jit", watching)
        tree = init(value)
        monkeypatch.undo()
        np.testing.assert_array_equal(tree, 2 * table)
    assert len(seen) == 3
    assert all(isinstance(leaf, np.ndarray) for leaf in seen)
