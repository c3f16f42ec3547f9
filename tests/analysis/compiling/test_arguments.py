"""Arguments taken apart: their names, their arrays, who says where each is to be, and what can be wrong with it."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.analysis.compiling.arguments import Argument, read_arguments, result_shardings
from shardrules.core.errors import TreeError
from tests.analysis.audited import findings_of

MESH = sr.create_mesh("data:4,model:2")
SHAPE = sr.mesh_shape("data:4,model:2")
OTHER = sr.create_mesh("rows:8")


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"w": f32(8, 16), "b": f32(16)}
RULE = sr.RegexShardingRule([("w", P("data", "model")), ("b", P("model"))])


def step(params: Any, x: Any) -> Any:
    raise AssertionError("nobody calls it")


def specs(*args: Any, fn: Callable[..., Any] = step, **options: Any) -> dict[str, P | None]:
    return {one.path: one.spec for one in read_arguments(fn, args, SHAPE, **options).arrays}


# ---- names ----


def positional(a: Any, b: Any, /, c: Any = None) -> None: ...
def variadic(a: Any, *rest: Any) -> None: ...
def keywords(a: Any, *, b: Any = 3) -> None: ...


class Callme(eqx.Module):
    w: Any

    def __call__(self, x: Any, key: Any = None) -> Any: ...

    def other(self, y: Any) -> Any: ...


NAMES: tuple[tuple[Callable[..., Any], int, list[str]], ...] = (
    (step, 2, ["params", "x"]),
    (positional, 3, ["a", "b", "c"]),
    (positional, 2, ["a", "b"]),
    (variadic, 3, ["a", "rest/0", "rest/1"]),
    (keywords, 1, ["a"]),
    (lambda x: None, 1, ["x"]),
    (functools.partial(step, 3), 1, ["x"]),
    (Callme(f32(3)), 2, ["x", "key"]),
    (Callme(f32(3)).other, 1, ["y"]),
    (jax.jit(step), 2, ["params", "x"]),
    (eqx.filter_jit(step), 2, ["params", "x"]),
    (jax.vmap(step), 2, ["params", "x"]),
    (jax.grad(step), 2, ["params", "x"]),
    (sr.filter_jit(step), 2, ["params", "x"]),
    (max, 2, ["args/0", "args/1"]),
)


@pytest.mark.parametrize(("fn", "count", "names"), NAMES)
def test_arguments_have_the_names_of_the_function(fn: Callable[..., Any], count: int, names: list[str]) -> None:
    found = read_arguments(fn, (f32(8),) * count, SHAPE)
    assert [one.path for one in found.arrays] == names


def test_paths_go_on_inside() -> None:
    found = read_arguments(step, ({"a": [f32(8), (f32(8),)]}, Callme(f32(4))), SHAPE)
    assert [one.path for one in found.arrays] == ["params/a/0", "params/a/1/0", "x/w"]
    assert found.owners == (0, 0, 1)


# ---- arrays, and what is none ----


def test_arrays_of_all_kinds() -> None:
    key, old = jax.random.key(0), jax.random.PRNGKey(0)
    args = (np.ones((8, 2)), jnp.ones(3, jnp.bfloat16), np.float32(2), jnp.array(4), key, old, f32(5), np.int64(3))
    found = read_arguments(variadic, args, SHAPE)
    assert [one.shape for one in found.arrays] == [(8, 2), (3,), (), (), (), (2,), (5,), ()]
    assert str(found.arrays[4].dtype) == "key<fry>"
    structs = [one.struct(MESH) for one in found.arrays]
    assert [str(one.dtype) for one in structs] == [
        "float32",  # JAX has no float64 while x64 is off
        "bfloat16",
        "float32",
        "int32",
        "key<fry>",
        "uint32",
        "float32",
        "int32",
    ]
    assert all(one.sharding is None for one in structs)


def test_what_is_no_array_stays_as_it_is() -> None:
    function = jax.nn.relu
    args = ({"w": f32(8), "name": "relu", "n": 3, "rate": 0.5, "on": True, "none": None, "fn": function}, 7)
    found = read_arguments(step, args, SHAPE)
    assert [one.path for one in found.arrays] == ["params/w"]
    first, second = found.rebuilt(["the array"])
    assert first == args[0] | {"w": "the array"}
    assert second == 7


def test_weak_types_are_kept() -> None:
    weak = jax.ShapeDtypeStruct((4,), jnp.float32, weak_type=True)
    (one, other) = read_arguments(step, (weak, f32(4)), SHAPE).arrays
    assert (one.weak, other.weak) == (True, False)
    assert one.struct(MESH).weak_type


def test_rebuilt_keeps_every_structure() -> None:
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    state = optax.adam(1e-3).init(eqx.filter(model, eqx.is_inexact_array))
    found = read_arguments(step, (model, state), SHAPE)
    arrays = [leaf for leaf in jax.tree.leaves((model, state)) if eqx.is_array(leaf)]
    assert len(arrays) == len(found.arrays)
    assert eqx.tree_equal(found.rebuilt(arrays), (model, state))


def test_a_struct_is_where_it_is_asked_to_be() -> None:
    sharded = Argument("w", (8, 4), np.dtype("float32"), P("data"), memory="pinned_host").struct(MESH)
    assert sharded.sharding == NamedSharding(MESH, P("data"), memory_kind="pinned_host")


# ---- who says where ----

WAYS: dict[str, dict[str, Any]] = {
    "rule": {"in_shardings": (RULE, P("data"))},
    "plan": {"in_shardings": (RULE.plan(PARAMS, SHAPE), P("data"))},
    "plan of another mesh": {"in_shardings": (RULE.plan(PARAMS, sr.mesh_shape("data:2,model:4")), P("data"))},
    "tree": {"in_shardings": ({"w": P("data", "model"), "b": P("model")}, P("data"))},
    "shardings": {
        "in_shardings": (
            {"w": NamedSharding(MESH, P("data", "model")), "b": NamedSharding(MESH, P("model"))},
            NamedSharding(SHAPE, P("data")),
        )
    },
    "function to specs": {"in_shardings": (lambda tree: {"w": P("data", "model"), "b": P("model")}, P("data"))},
    "function to a rule": {"in_shardings": (lambda tree: RULE, lambda x: P("data"))},
    "plan of the first": {"plan": RULE.plan(PARAMS, SHAPE), "in_shardings": (None, P("data"))},
    "plan of all": {"plan": sr.RegexShardingRule([("0/w", P("data", "model")), ("0/b", P("model")), ("1", P("data"))])},
    "over the plan": {"plan": sr.ReplicateShardingRule(), "in_shardings": (RULE, P("data"))},
}


@pytest.mark.parametrize("way", WAYS)
def test_one_thing_can_be_said_in_many_ways(way: str) -> None:
    assert specs(PARAMS, f32(16, 8), **WAYS[way]) == {
        "params/b": P("model"),
        "params/w": P("data", "model"),
        "x": P("data"),
    }


def test_nobody_says() -> None:
    assert specs(PARAMS, f32(16, 8)) == {"params/b": None, "params/w": None, "x": None}
    assert specs(PARAMS, f32(16, 8), in_shardings=(None, None)) == {"params/b": None, "params/w": None, "x": None}


def test_a_prefix_is_for_all_below_it() -> None:
    deep = {"a": {"w": f32(8, 8), "v": f32(8, 8)}, "b": f32(4)}
    found = specs(deep, f32(16), in_shardings=({"a": P("data"), "b": None}, None))
    assert found == {"params/a/v": P("data"), "params/a/w": P("data"), "params/b": None, "x": None}
    assert specs(deep, f32(16), in_shardings=P("data")) == {
        "params/a/v": P("data"),
        "params/a/w": P("data"),
        "params/b": P("data"),
        "x": P("data"),
    }


def test_a_rule_is_for_each_argument_by_itself() -> None:
    """Paths start in the argument, in `in_shardings`, and at the number of the argument in a plan of all of them."""
    assert specs(PARAMS, PARAMS, in_shardings=RULE) == {
        "params/b": P("model"),
        "params/w": P("data", "model"),
        "x/b": P("model"),
        "x/w": P("data", "model"),
    }


def test_arrays_stay_where_they_lie() -> None:
    lying = jax.device_put(jnp.ones((8, 4)), NamedSharding(MESH, P("data", "model")))
    told = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(SHAPE, P("data")))
    assert specs(lying, told) == {"params": P("data", "model"), "x": P("data")}
    assert specs(lying, told, in_shardings=(P(), None)) == {"params": P(), "x": P("data")}
    assert specs(lying, told, plan=sr.ReplicateShardingRule()) == {"params": P(), "x": P()}


def test_memory_of_the_host_is_kept_and_that_of_devices_is_the_default() -> None:
    host, device = (NamedSharding(MESH, P("data"), memory_kind=kind) for kind in ("pinned_host", "device"))
    found = read_arguments(step, (f32(8), f32(8)), SHAPE, in_shardings=(host, device))
    assert [one.memory for one in found.arrays] == ["pinned_host", None]


@pytest.mark.parametrize("name", ["adam", "adafactor", "momentum"])
def test_state_mirrors_a_plan_of_the_first_argument(name: str) -> None:
    optim = {
        "adam": optax.adam(1e-3),
        "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
        "momentum": optax.sgd(1e-3, momentum=0.9),
    }[name]
    plan = RULE.plan(PARAMS, SHAPE)
    state = jax.eval_shape(optim.init, PARAMS)
    found = read_arguments(lambda params, state, x: None, (PARAMS, state, f32(16, 8)), SHAPE, plan)
    by_path = {one.path: one for one in found.arrays}
    for path, one in by_path.items():
        if path.startswith("state") and one.shape in ((8, 16), (16,)) and one.mirrors:
            last = path.rpartition("/")[2]
            if one.shape == PARAMS[last].shape:
                assert one.spec == by_path[f"params/{last}"].spec
    assert any(one.mirrors for one in found.arrays if one.path.startswith("state"))
    assert by_path["x"].spec is None
    assert not by_path["x"].planned
    assert by_path["params/w"].planned
    assert not by_path["params/w"].mirrors


# ---- what is wrong ----


def refused(*args: Any, **options: Any) -> tuple[sr.Finding, ...]:
    with pytest.raises(sr.errors.PlanError, match=r"not all arguments can be where|the plan is unsound") as caught:
        read_arguments(step, args, SHAPE, **options)
    assert all(finding.severity == "error" for finding in findings_of(caught.value))
    assert all(finding.message in str(caught.value) for finding in findings_of(caught.value))
    return findings_of(caught.value)


def test_everything_that_is_wrong_is_told_at_once() -> None:
    findings = refused(
        {"a": f32(10, 8), "b": f32(8), "c": f32(8, 8), "d": f32(8, 8)},
        f32(16, 8),
        in_shardings=({"a": P("data"), "b": P("dta"), "c": P("data", "data"), "d": P("data")}, P(None, None, "model")),
    )
    assert sorted((one.path, one.code) for one in findings) == [
        ("params/a", "indivisible"),
        ("params/b", "unknown-axis"),
        ("params/c", "duplicate-axis"),
        ("x", "rank-overflow"),
    ]
    (rows,) = [one for one in findings if one.code == "indivisible"]
    assert (rows.dim, rows.shape) == (0, (10, 8))
    assert "10" in rows.message
    assert "4" in rows.message


def test_equal_layers_are_one_finding() -> None:
    (finding,) = refused([f32(10, 4)] * 3, f32(8), in_shardings=(P("data"), None))
    assert (finding.path, finding.count) == ("params/*", 3)


def test_an_unsound_plan_is_refused_with_its_findings() -> None:
    findings = refused(
        PARAMS, f32(8), plan=sr.RegexShardingRule([("w", P("dta")), ("b", P("modle"))]).plan(PARAMS, SHAPE)
    )
    assert [(one.code, one.axis) for one in findings] == [("unknown-axis", "modle"), ("unknown-axis", "dta")]


def test_a_typo_in_a_rule() -> None:
    (finding,) = refused(PARAMS, f32(8), in_shardings=(sr.RegexShardingRule([("w", P("dta"))]), None))
    assert (finding.code, finding.axis) == ("unknown-axis", "dta")
    assert "did you mean 'data'" in finding.message


def test_an_array_on_another_mesh() -> None:
    lying = jax.device_put(jnp.ones((8, 4)), NamedSharding(OTHER, P("rows")))
    (finding,) = refused(PARAMS, lying)
    assert (finding.path, finding.code, finding.axis) == ("x", "unknown-axis", "rows")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_shardings": (P("data"),)}, "in_shardings has 1 items, and there are 2 arguments"),
        ({"in_shardings": ("data", None)}, "in_shardings, params: .*'data' stands where"),
        ({"in_shardings": ({"w": P()}, None)}, "in_shardings, params"),
        ({"in_shardings": ({"w": P(), "b": P(), "c": P()}, None)}, "in_shardings, params"),
        ({"in_shardings": ([P(), P()], None)}, "in_shardings, params"),
        ({"plan": P("data")}, "plan is a ShardingPlan or a rule, got P"),
        ({"plan": "fsdp"}, "plan is a ShardingPlan or a rule, got 'fsdp'"),
        ({"plan": RULE.plan({"other": f32(8, 8)}, SHAPE)}, "plan is a plan of neither all arguments nor the first"),
        ({"in_shardings": (RULE.plan({"other": f32(8, 8)}, SHAPE), None)}, "other|structure|differ"),
    ],
)
def test_what_does_not_fit_the_arguments_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TreeError, match=message):
        read_arguments(step, (PARAMS, f32(16, 8)), SHAPE, **options)


# ---- what a jitted function says itself ----


def test_what_a_jitted_function_says_is_taken_where_nobody_else_speaks() -> None:
    found = read_arguments(step, (f32(8, 8), f32(8)), SHAPE, in_shardings=(P("data"), None))
    told_so = found.with_specs({0: P("data", None), 1: P("model")}, SHAPE)
    assert [one.spec for one in told_so.arrays] == [P("data", None), P("model")]
    assert [one.spec for one in found.with_specs({}, SHAPE).arrays] == [P("data"), None]


def test_what_it_says_otherwise_is_refused() -> None:
    found = read_arguments(step, (f32(8, 8), f32(10)), SHAPE, in_shardings=(P("data"), None))
    with pytest.raises(sr.errors.PlanError, match="the function says otherwise where arguments are to be") as caught:
        found.with_specs({0: P("model"), 1: P("rows")}, SHAPE)
    assert sorted((one.path, one.code) for one in findings_of(caught.value)) == [
        ("params", "two-specs"),
        ("x", "unknown-axis"),
    ]
    assert "P('data')" in str(caught.value)
    assert "P('model')" in str(caught.value)


# ---- results ----


def asked(shaped: Any, out_shardings: Any) -> list[P | None]:
    return [None if one is None else one.spec for one in result_shardings(shaped, out_shardings, MESH)]


def test_results_nobody_asks_about() -> None:
    assert asked((f32(8), {"a": f32(4)}), None) == [None, None]


@pytest.mark.parametrize(
    ("shaped", "out_shardings", "specs"),
    [
        (f32(8), P("data"), [P("data")]),
        ((f32(8), f32(16)), P("data"), [P("data"), P("data")]),
        ((f32(8), f32(16)), (P("data"), None), [P("data"), None]),
        ((PARAMS, f32()), (RULE, None), [P("model"), P("data", "model"), None]),
        ((PARAMS, f32()), (RULE.plan(PARAMS, SHAPE), P()), [P("model"), P("data", "model"), P()]),
        ((PARAMS, f32()), (lambda tree: RULE, None), [P("model"), P("data", "model"), None]),
        (PARAMS, {"w": P("data"), "b": None}, [None, P("data")]),
        ({"new": PARAMS, "loss": f32()}, {"new": P("model"), "loss": P()}, [P(), P("model"), P("model")]),
        ([f32(8), f32(8)], [P("data"), None], [P("data"), None]),
        ((f32(8), 3, "text", None), (P("data"), None, None, None), [P("data"), None, None]),
    ],
)
def test_results_that_are_asked_to_be_somewhere(shaped: Any, out_shardings: Any, specs: list[P | None]) -> None:
    assert asked(shaped, out_shardings) == specs


def test_results_that_cannot_be_there_are_told_at_once() -> None:
    with pytest.raises(sr.errors.PlanError, match="not all results can be where they are asked to be") as caught:
        asked((f32(10), f32(8), {"a": f32(8)}), (P("data"), P("dta"), {"a": P("data", "model")}))
    assert [(one.path, one.code) for one in findings_of(caught.value)] == [
        ("result 0", "indivisible"),
        ("result 1", "unknown-axis"),
        ("result 2/a", "rank-overflow"),
    ]


@pytest.mark.parametrize(
    ("shaped", "out_shardings", "message"),
    [
        ((f32(8), f32(8)), (P(),), "out_shardings has 1 items, the function returns 2"),
        ({"a": f32(8)}, {"b": P()}, "out_shardings, the result"),
        ((f32(8), {"a": f32(8)}), (P(), {"b": P()}), "out_shardings, result 1"),
        (f32(8), "data", "out_shardings, the result: 'data' stands where"),
    ],
)
def test_out_shardings_that_do_not_fit(shaped: Any, out_shardings: Any, message: str) -> None:
    with pytest.raises(TreeError, match=message):
        asked(shaped, out_shardings)
