"""`filter_jit`: where arguments and results are, what is compiled when, and what it refuses."""

import functools
import gc
import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.compiles import compiles

EXPLICIT = (AxisType.Explicit,) * 2
MESH = sr.create_mesh("data:4,model:2")
MESHES = [MESH, jax.make_mesh((4, 2), ("data", "model"), axis_types=EXPLICIT)]
RULE = sr.FSDPShardingRule("data", min_size_mb=0)


SHARDED: dict[str, Any] = {"mesh": MESH, "in_shardings": P("data"), "out_shardings": P("data")}


class Counter:
    """Counts how often a function is traced."""

    def __init__(self) -> None:
        self.traces = 0

    def __call__(self, x: Any, scale: Any = 2) -> Any:
        self.traces += 1
        return jax.tree.map(lambda leaf: leaf * scale, x)


@pytest.mark.parametrize("mesh", MESHES, ids=["Auto", "Explicit"])
def test_arguments_and_results_are_where_rules_and_specs_say(mesh: Mesh) -> None:
    def step(params: Any, x: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda p: p + 1, params), x.sum()

    run = sr.filter_jit(step, mesh=mesh, in_shardings=(RULE, P("data")), out_shardings=(RULE, P()))
    params, total = run({"w": np.ones((8, 4), np.float32), "b": np.ones(3, np.float32)}, np.ones((8, 2)))
    assert params["w"].sharding == NamedSharding(mesh, P("data", None))
    assert params["b"].sharding.is_fully_replicated
    assert total.sharding.is_fully_replicated
    np.testing.assert_array_equal(params["w"], np.full((8, 4), 2.0))
    params, _ = run(params, np.ones((8, 2)))
    np.testing.assert_array_equal(params["w"], np.full((8, 4), 3.0))


def test_one_item_covers_all_arguments_and_none_keeps_shardings() -> None:
    seen: list[Any] = []
    run = sr.filter_jit(lambda a, b: (a, b), mesh=MESH, in_shardings=P("data"))
    a, b = run(jnp.ones(8), jnp.ones((8, 2)))
    assert [a.sharding.spec, b.sharding.spec] == [P("data"), P("data")]
    free = sr.filter_jit(lambda a, b: seen.append(1) or (a, b), mesh=MESH, in_shardings=(None, P("model")))
    kept = jax.device_put(jnp.ones(8), NamedSharding(MESH, P("data")))
    a, b = free(kept, jnp.ones(8))
    assert [a.sharding.spec, b.sharding.spec] == [P("data"), P("model")]


def test_each_structure_shape_dtype_and_static_value_compiles_once() -> None:
    counter = Counter()
    run = sr.filter_jit(counter, mesh=MESH, in_shardings=(RULE, None), out_shardings=RULE)
    calls: list[tuple[Any, Any]] = [
        ({"w": np.ones((8, 4), np.float32)}, 2),
        ({"w": np.ones((4, 8), np.float32)}, 2),
        ({"v": np.ones((8, 4), np.float32)}, 2),
        ({"w": np.ones((8, 4), np.int32)}, 2),
        ({"w": np.ones((8, 4), np.float32)}, 3),
        ([np.ones((8, 4), np.float32)], 2),
    ]
    for count, (tree, scale) in enumerate(calls, start=1):
        run(tree, scale)
        assert counter.traces == count
    for tree, scale in calls:
        run(tree, scale)
    assert counter.traces == len(calls)


@pytest.mark.parametrize("axis_types", ["auto", None])
@pytest.mark.parametrize("mesh", MESHES, ids=["Auto", "Explicit"])
def test_the_first_step_compiles_for_all_steps(mesh: Mesh, axis_types: Any) -> None:
    """Arrays that are not placed yet, and arrays that come back."""
    counter = Counter()
    run = sr.filter_jit(counter, mesh=mesh, in_shardings=(RULE, P()), out_shardings=RULE, axis_types=axis_types)
    fresh = {"w": jnp.ones((8, 4)), "b": np.ones(8, np.float32)}
    placed = jax.block_until_ready(run(fresh, jnp.float32(2)))
    assert compiles(lambda: run(placed, np.float32(2))) == 0
    assert compiles(lambda: run(sr.filter_shard(fresh, RULE, mesh), jnp.float32(2))) == 0
    assert counter.traces == 1
    lowered = run.lower(jax.eval_shape(lambda: jax.tree.map(jnp.asarray, fresh)), jnp.float32(2))
    assert lowered.as_text() == run.lower(placed, jnp.float32(2)).as_text()


def test_lowering_moves_nothing() -> None:
    run = sr.filter_jit(lambda w, x: w @ x, mesh=MESH, in_shardings=(P("data"), P()), out_shardings=P("data"))
    with jax.transfer_guard("disallow_explicit"):
        lowered = run.lower(np.ones((8, 4)), np.ones(4))
    assert lowered.as_text() == run.lower(jax.ShapeDtypeStruct((8, 4), np.float32), np.ones(4, np.float32)).as_text()


def test_new_arrays_go_to_the_requested_memory() -> None:
    on_host = NamedSharding(MESH, P("data"), memory_kind="pinned_host")
    seen: list[Any] = []
    run = sr.filter_jit(lambda x: seen.append(jax.typeof(x).memory_space) or x, mesh=MESH, in_shardings=on_host)
    results = [run(x) for x in (np.ones(8), jax.device_put(np.ones(8), on_host))]
    assert {array.sharding.memory_kind for array in results} == {"pinned_host"}
    assert seen == [jax.memory.Space.Host]


def test_a_tree_never_meets_the_shardings_of_an_earlier_one() -> None:
    run = sr.filter_jit(lambda x: x, mesh=MESH, out_shardings=RULE)
    assert run({"w": np.ones((8, 12))})["w"].sharding.spec == P(None, "data")
    assert run({"w": np.ones((12, 8))})["w"].sharding.spec == P("data", None)
    assert run({"w": np.ones((12, 7))})["w"].sharding.spec == P("data", None)
    assert run({"w": np.ones((12, 7)), "b": np.ones(4)})["b"].sharding.spec == P("data")


def test_the_mesh_in_force_is_part_of_the_cache_key() -> None:
    counter = Counter()
    run = sr.filter_jit(counter, out_shardings=P("data"))
    other = sr.create_mesh("data:8")
    for mesh in (MESH, other, MESH):
        with jax.set_mesh(mesh):
            assert run(jnp.ones(8)).sharding == NamedSharding(mesh, P("data"))
    assert counter.traces == 2


@pytest.mark.parametrize(
    ("donate", "gone"),
    [
        ("none", []),
        ("all", [0, 1]),
        ("all-except-first", [1]),
        ([0], [0]),
        (["b"], [1]),
        (["b", "a"], [0, 1]),
        ([-1], [1]),
    ],
)
def test_donated_arguments_are_deleted(donate: Any, gone: list[int]) -> None:
    run = sr.filter_jit(
        lambda a, b: (a + 1, b + 1), mesh=MESH, in_shardings=P("data"), out_shardings=P("data"), donate=donate
    )
    arrays = [sr.filter_shard(np.full(8, n), P("data"), MESH) for n in range(2)]
    run(*arrays)
    assert [n for n, array in enumerate(arrays) if array.is_deleted()] == gone


def test_keyword_arguments_and_methods_are_accepted() -> None:
    run = sr.filter_jit(lambda a, *, b: a + b, mesh=MESH, in_shardings=(P("data"),))
    assert run(b=jnp.ones(8), a=jnp.ones(8)).sharding.spec == P("data")

    class Model(eqx.Module):
        w: jax.Array

        @sr.filter_jit(mesh=MESH, out_shardings=P("data"))
        def __call__(self, x: Any) -> Any:
            return self.w * x

    assert Model(jnp.ones(8))(jnp.full(8, 3.0)).sharding.spec == P("data")


def test_a_module_that_is_called_is_an_argument_of_its_own() -> None:
    counter: list[int] = []

    class Model(eqx.Module):
        w: jax.Array

        def __call__(self, x: Any) -> Any:
            counter.append(1)
            return self.w * x

    for scale in (1.0, 2.0):
        run = sr.filter_jit(Model(jnp.full(8, scale)), mesh=MESH)
        np.testing.assert_array_equal(run(jnp.ones(8)), np.full(8, scale))


def test_all_misplaced_arguments_are_named() -> None:
    run = sr.filter_jit(lambda a, b: (a, b), mesh=MESH, in_shardings=(P("data"), P("model")))
    args = [
        sr.filter_shard({"w": np.ones((8, 2)), "b": np.ones(8)}, P(), MESH),
        sr.filter_shard(np.ones(8), P(), MESH),
    ]
    with pytest.raises(
        sr.errors.PlanError,
        match=r"(?s)argument 0, b \(8,\): is P\(\) on data:4,model:2, not P\('data'\).*0, w.*argument 1",
    ):
        run(*args)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"in_shardings": (P("data"), None)},
            sr.errors.TreeError,
            "in_shardings has 2 items, and the call has 1 positional",
        ),
        (
            {"in_shardings": P("model", "data")},
            sr.errors.PlanError,
            r"filter_jit, argument 0: 1 array cannot be placed",
        ),
        ({"out_shardings": P("x")}, sr.errors.PlanError, "filter_jit, the result: .*"),
        ({"donate": "first"}, sr.errors.ConfigError, "donate is 'none', 'all', 'all-except-first'"),
        ({"donate": ["y"]}, sr.errors.ConfigError, r"donate names \['y'\]; the arguments are x"),
        ({"mesh": "data:8"}, sr.errors.AxisTypeError, "a mesh must be a Mesh"),
    ],
)
def test_wrong_options_are_refused(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        sr.filter_jit(lambda x: x, **{"mesh": MESH, **options})(jnp.ones(8))


def test_a_rule_is_not_a_function_to_compile() -> None:
    with pytest.raises(sr.errors.ConfigTypeError, match="filter_jit compiles a function"):
        sr.filter_jit(RULE)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_unhashable_static_arguments_are_refused() -> None:
    with pytest.raises(sr.errors.ConfigTypeError, match="non-array arguments must be hashable"):
        sr.filter_jit(lambda x, y: x, mesh=MESH)(jnp.ones(8), {1, 2})


def test_equal_python_values_of_other_types_compile_separately() -> None:
    run = sr.filter_jit(lambda x, n: (x + (n if isinstance(n, float) else 100), n), mesh=MESH)
    results = [run(jnp.ones(2), n) for n in (1, 1.0, True, 0.0, -0.0, 1)]
    assert [repr(n) for _, n in results] == ["1", "1.0", "True", "0.0", "-0.0", "1"]
    assert [float(x[0]) for x, _ in results] == [101, 2, 101, 1, 1, 101]


def test_static_results_and_structures_belong_to_their_own_call() -> None:
    def pair_or_single(x: jax.Array) -> Any:
        spec = jax.typeof(x).sharding.spec
        return ((x, x) if spec[0] == "data" else x), str(spec)

    run = sr.filter_jit(pair_or_single, mesh=MESHES[1], axis_types=None)
    a, b = (sr.filter_shard(np.ones((8, 8)), spec, MESHES[1]) for spec in (P("data"), P(None, "model")))
    for _ in range(2):
        pair, text = run(a)
        assert len(pair) == 2
        assert "data" in text
        single, text = run(b)
        assert single.shape == (8, 8)
        assert "model" in text


def test_shardings_of_arguments_are_part_of_the_cache_key() -> None:
    other = sr.create_mesh("data:8")
    run = sr.filter_jit(lambda x: 2 * x, in_shardings=P("data"))
    for mesh in (MESH, other, MESH):
        assert run(sr.filter_shard(np.ones(8), P("data"), mesh)).sharding.mesh == mesh
    fixed = sr.filter_jit(lambda x: x, mesh=other, in_shardings=P("data"))
    for memory in ("pinned_host", "device", "pinned_host"):
        placed = jax.device_put(np.ones(8), NamedSharding(other, P("data"), memory_kind=memory))
        assert fixed(placed).sharding.memory_kind == memory


def test_the_mesh_is_in_force_under_every_transformation() -> None:
    run = sr.filter_jit(lambda x: (sr.with_sharding_constraint(x * x, P("data"))).sum(), mesh=MESH)
    ones = jnp.ones(8)
    assert float(run(ones)) == 8
    assert float(jax.jit(run)(ones)) == 8
    assert jax.eval_shape(run, ones).shape == ()
    np.testing.assert_array_equal(jax.grad(run)(ones), 2 * ones)
    np.testing.assert_array_equal(jax.vmap(run)(jnp.ones((2, 8))), np.full(2, 8.0))
    inner = sr.filter_jit(
        lambda x: sr.with_sharding_constraint(2 * x, P("data")), mesh=sr.create_mesh("data:2,model:4")
    )
    assert jax.jit(inner)(jnp.ones((6, 4))).sharding.shard_shape((6, 4)) == (3, 4)
    with pytest.raises(sr.errors.MeshError, match="on the mesh data:2,model:4, while data:4,model:2 is in force"):
        sr.filter_jit(lambda x: inner(x), mesh=MESH)(jnp.ones((6, 4)))


def test_donated_arguments_need_no_mesh() -> None:
    a, b = jnp.ones(8), jnp.ones(8)
    sr.filter_jit(lambda a, b: (a + 1, b + 1), donate=["b"])(a, b)
    assert [a.is_deleted(), b.is_deleted()] == [False, True]


def test_functions_without_a_signature_are_accepted() -> None:
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(max)
    assert sr.filter_jit(max, mesh=MESH)(1, 2) == 2


def test_sources_are_not_arguments() -> None:
    source = sr.ArraySource((8,), np.float32, lambda index: np.ones(8, np.float32)[index])
    with pytest.raises(sr.errors.ConfigTypeError, match="place it with filter_shard first"):
        sr.filter_jit(lambda x: x, mesh=MESH)(source)


class Scale(eqx.Module):
    """A model that counts how often it is traced."""

    w: jax.Array
    counter: Counter = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return self.counter(x, self.w)

    def method(self, x: Any) -> Any:
        return self.counter(x, self.w)


WRAPPED: dict[str, Callable[[Any, Counter], Any]] = {
    "function": lambda fn, _: fn,
    "method": lambda _, counter: Scale(jnp.ones(8), counter).method,
    "model": lambda _, counter: Scale(jnp.ones(8), counter),
    "gradient": lambda fn, _: eqx.filter_vmap(eqx.filter_grad(fn)),
    "partial with an array": lambda fn, _: functools.partial(fn, scale=jnp.ones(())),
    "partial with a number": lambda fn, _: functools.partial(fn, scale=3.0),
    "partial of a partial": lambda fn, _: functools.partial(functools.partial(fn), scale=3.0),
    "jax.jit": lambda fn, _: jax.jit(fn),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("options", [{}, SHARDED], ids=["plain", "sharded"])
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED.keys())
def test_all_wrappers_of_a_function_share_what_is_compiled(wrap: Callable[[Any, Counter], Any], options: Any) -> None:
    counter = Counter()

    def scale_by(x: Any, scale: Any = 2.0) -> Any:
        return counter(x, scale)

    for _ in range(5):
        assert sr.filter_jit(wrap(scale_by, counter), **options)(jnp.ones(8)).shape == (8,)
    assert counter.traces == 1


def test_wrappers_share_only_under_equal_options() -> None:
    counter = Counter()

    def double(x: Any) -> Any:
        return counter(x)

    plan = RULE.plan({"w": np.ones((8, 4))}, MESH)
    options: list[dict[str, Any]] = [
        {"in_shardings": {"w": P("data")}},
        {"in_shardings": RULE},
        {"in_shardings": plan.mirror},
        {"in_shardings": plan},
        {"in_shardings": RULE, "donate": "all"},
        {"in_shardings": {"w": P("model")}, "axis_types": None},
    ]
    for count, option in enumerate(options, start=1):
        for _ in range(2):
            result = sr.filter_jit(double, mesh=MESH, **option)({"w": np.ones((8, 4))})
            assert result["w"].sharding.spec[0] == ("model" if "axis_types" in option else "data")
        assert counter.traces == count


class Adder:
    """A plain object with an array, whose methods are compiled."""

    def __init__(self, big: jax.Array) -> None:
        self.big = big

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x + self.big).sum(0)

    def twice(self, x: jax.Array) -> jax.Array:
        """Another method."""
        return 2 * self(x)


def test_methods_of_one_object_are_compiled_each() -> None:
    adder, other = Adder(jnp.ones((8, 8))), Adder(jnp.zeros((8, 8)))
    jitted = [sr.filter_jit(fn, **SHARDED) for fn in (adder, adder.twice, adder.__call__, other, other.twice)]
    assert [float(fn(jnp.ones(8))[0]) for fn in jitted] == [16, 32, 16, 8, 16]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["function", "model"])
def test_functions_and_models_are_freed_when_they_are_dropped(kind: str) -> None:
    def make() -> Any:
        big = jnp.ones((8, 8))
        return (lambda x: (x + big).sum(0)) if kind == "function" else Scale(big, Counter())

    gc.collect()
    before = len(jax.live_arrays())
    dropped: list[weakref.ref[Any]] = []
    for _ in range(3):
        fn = make()
        dropped.append(weakref.ref(fn))
        sr.filter_jit(fn, **SHARDED)(jnp.ones(8))
        del fn
    gc.collect()
    assert [ref() for ref in dropped] == [None] * 3
    assert len(jax.live_arrays()) == before


def test_without_options_it_gives_what_equinox_gives() -> None:
    model = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0))
    x = jnp.ones(4)
    ours, theirs = (jit(lambda model, x: (model(x), "static"))(model, x) for jit in (sr.filter_jit, eqx.filter_jit))
    assert ours[1] == theirs[1]
    np.testing.assert_array_equal(ours[0], theirs[0])
    nested = sr.filter_jit(sr.filter_jit(model))
    assert len(jax.tree.leaves(eqx.filter(nested, eqx.is_array))) == 6  # arrays of the model are arguments
    np.testing.assert_array_equal(nested(x), ours[0])


@pytest.mark.sample(3)
@pytest.mark.parametrize("options", [{}, SHARDED], ids=["plain", "sharded"])
@pytest.mark.parametrize("donate", ["all", "warn", "all-except-first", "warn-except-first"])
def test_only_warn_warns_of_memory_that_is_not_reused(donate: Any, options: Any) -> None:
    run = sr.filter_jit(lambda x, y: (x + y.sum())[:8], donate=donate, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(jnp.ones(16), jnp.ones((16, 2)))
    assert ["donated buffers" in str(warning.message) for warning in caught] == [True] * donate.startswith("warn")


def test_all_except_first_donates_the_module_as_in_equinox() -> None:
    for options in ({}, {"mesh": MESH, "in_shardings": P()}):
        model = sr.filter_shard(Scale(jnp.ones(8), Counter()), P(), MESH)
        sr.filter_jit(model, donate="all-except-first", **options)(sr.filter_shard(jnp.ones(8), P(), MESH))
        assert model.w.is_deleted()


def test_donated_arguments_may_be_left_out() -> None:
    run = sr.filter_jit(lambda a, b=None, *, c=None: (a, b, c), donate=["b", "c"])
    a, b, c = jnp.ones(8), jnp.ones(8), jnp.ones(8)
    run(a)
    run(a, c=c)
    assert [a.is_deleted(), b.is_deleted(), c.is_deleted()] == [False, False, True]
    run(a, b)
    assert [a.is_deleted(), b.is_deleted()] == [False, True]
