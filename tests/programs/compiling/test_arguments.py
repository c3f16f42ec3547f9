"""Flattened arguments: their names, their arrays, how each is requested to be sharded, and what can be wrong."""

import functools
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import ConfigTypeError, TreeError
from shardrules.programs.compiling.arguments import Argument, read_arguments, result_shardings
from tests.programs.audits.audited import f32, findings_of

MESH = sr.create_mesh("data:4,model:2")
SHAPE = sr.mesh_shape("data:4,model:2")
OTHER = sr.create_mesh("rows:8")


PARAMS = {"w": f32(8, 16), "b": f32(16)}
RULE = sr.RegexShardingRule([("w", P("data", "model")), ("b", P("model"))])


def step(params: Any, x: Any) -> Any:
    raise AssertionError("it is never called")


def specs(*args: Any, fn: Callable[..., Any] = step, **options: Any) -> dict[str, P | None]:
    return {array.path: array.spec for array in read_arguments(fn, args, SHAPE, **options).arrays}


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
def test_arguments_are_named_as_the_function_names_them(fn: Callable[..., Any], count: int, names: list[str]) -> None:
    arguments = read_arguments(fn, (f32(8),) * count, SHAPE)
    assert [array.path for array in arguments.arrays] == names


def test_paths_continue_inside_arguments() -> None:
    arguments = read_arguments(step, ({"a": [f32(8), (f32(8),)]}, Callme(f32(4))), SHAPE)
    assert [array.path for array in arguments.arrays] == ["params/a/0", "params/a/1/0", "x/w"]
    assert arguments.owners == (0, 0, 1)


# ---- arrays and other leaves ----


def test_arrays_of_all_kinds() -> None:
    key, old = jax.random.key(0), jax.random.PRNGKey(0)
    args = (np.ones((8, 2)), jnp.ones(3, jnp.bfloat16), np.float32(2), jnp.array(4), key, old, f32(5), np.int64(3))
    arguments = read_arguments(variadic, args, SHAPE)
    assert [array.shape for array in arguments.arrays] == [(8, 2), (3,), (), (), (), (2,), (5,), ()]
    assert str(arguments.arrays[4].dtype) == "key<fry>"
    structs = [array.struct(MESH) for array in arguments.arrays]
    assert [str(struct.dtype) for struct in structs] == [
        "float32",  # JAX has no float64 while x64 is off
        "bfloat16",
        "float32",
        "int32",
        "key<fry>",
        "uint32",
        "float32",
        "int32",
    ]
    assert all(struct.sharding is None for struct in structs)


def test_other_leaves_stay_as_they_are() -> None:
    function = jax.nn.relu
    args = ({"w": f32(8), "name": "relu", "n": 3, "rate": 0.5, "on": True, "none": None, "fn": function}, 7)
    arguments = read_arguments(step, args, SHAPE)
    assert [array.path for array in arguments.arrays] == ["params/w"]
    first, second = arguments.rebuild(["the array"])
    assert first == args[0] | {"w": "the array"}
    assert second == 7


def test_weak_types_are_kept() -> None:
    weak = jax.ShapeDtypeStruct((4,), jnp.float32, weak_type=True)
    (weak_array, array) = read_arguments(step, (weak, f32(4)), SHAPE).arrays
    assert (weak_array.weak, array.weak) == (True, False)
    assert weak_array.struct(MESH).weak_type


def test_rebuild_keeps_every_structure() -> None:
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    state = optax.adam(1e-3).init(eqx.filter(model, eqx.is_inexact_array))
    arguments = read_arguments(step, (model, state), SHAPE)
    arrays = [leaf for leaf in jax.tree.leaves((model, state)) if eqx.is_array(leaf)]
    assert len(arrays) == len(arguments.arrays)
    assert eqx.tree_equal(arguments.rebuild(arrays), (model, state))


def test_a_struct_has_the_requested_sharding() -> None:
    sharded = Argument("w", (8, 4), np.dtype("float32"), P("data"), memory="pinned_host").struct(MESH)
    assert sharded.sharding == NamedSharding(MESH, P("data"), memory_kind="pinned_host")


# ---- requests ----

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
def test_rules_plans_specs_and_functions_request_the_same(way: str) -> None:
    assert specs(PARAMS, f32(16, 8), **WAYS[way]) == {
        "params/b": P("model"),
        "params/w": P("data", "model"),
        "x": P("data"),
    }


def test_without_requests_the_compiler_chooses() -> None:
    assert specs(PARAMS, f32(16, 8)) == {"params/b": None, "params/w": None, "x": None}
    assert specs(PARAMS, f32(16, 8), in_shardings=(None, None)) == {"params/b": None, "params/w": None, "x": None}


def test_a_prefix_covers_everything_below_it() -> None:
    deep = {"a": {"w": f32(8, 8), "v": f32(8, 8)}, "b": f32(4)}
    requested = specs(deep, f32(16), in_shardings=({"a": P("data"), "b": None}, None))
    assert requested == {"params/a/v": P("data"), "params/a/w": P("data"), "params/b": None, "x": None}
    assert specs(deep, f32(16), in_shardings=P("data")) == {
        "params/a/v": P("data"),
        "params/a/w": P("data"),
        "params/b": P("data"),
        "x": P("data"),
    }


def test_a_rule_decides_each_argument_by_itself() -> None:
    """In `in_shardings` paths start in the argument; in a plan for all arguments, at the index of the argument."""
    assert specs(PARAMS, PARAMS, in_shardings=RULE) == {
        "params/b": P("model"),
        "params/w": P("data", "model"),
        "x/b": P("model"),
        "x/w": P("data", "model"),
    }


def test_arrays_keep_their_sharding_by_default() -> None:
    placed = jax.device_put(jnp.ones((8, 4)), NamedSharding(MESH, P("data", "model")))
    struct = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(SHAPE, P("data")))
    assert specs(placed, struct) == {"params": P("data", "model"), "x": P("data")}
    assert specs(placed, struct, in_shardings=(P(), None)) == {"params": P(), "x": P("data")}
    assert specs(placed, struct, plan=sr.ReplicateShardingRule()) == {"params": P(), "x": P()}


def test_host_memory_is_kept_and_device_memory_is_the_default() -> None:
    host, device = (NamedSharding(MESH, P("data"), memory_kind=kind) for kind in ("pinned_host", "device"))
    arguments = read_arguments(step, (f32(8), f32(8)), SHAPE, in_shardings=(host, device))
    assert [array.memory for array in arguments.arrays] == ["pinned_host", None]


@pytest.mark.parametrize("name", ["adam", "adafactor", "momentum"])
def test_state_mirrors_a_plan_of_the_first_argument(name: str) -> None:
    optim = {
        "adam": optax.adam(1e-3),
        "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
        "momentum": optax.sgd(1e-3, momentum=0.9),
    }[name]
    plan = RULE.plan(PARAMS, SHAPE)
    state = jax.eval_shape(optim.init, PARAMS)
    arguments = read_arguments(lambda params, state, x: None, (PARAMS, state, f32(16, 8)), SHAPE, plan)
    by_path = {array.path: array for array in arguments.arrays}
    for path, array in by_path.items():
        if path.startswith("state") and array.shape in ((8, 16), (16,)) and array.mirrors:
            last = path.rpartition("/")[2]
            if array.shape == PARAMS[last].shape:
                assert array.spec == by_path[f"params/{last}"].spec
    assert any(array.mirrors for array in arguments.arrays if array.path.startswith("state"))
    assert by_path["x"].spec is None
    assert not by_path["x"].planned
    assert by_path["params/w"].planned
    assert not by_path["params/w"].mirrors


# ---- refusals ----


def refused(*args: Any, **options: Any) -> tuple[sr.Finding, ...]:
    with pytest.raises(
        sr.errors.PlanError, match=r"the arguments: \d+ arrays? cannot be placed|the plan has \d+ errors?"
    ) as caught:
        read_arguments(step, args, SHAPE, **options)
    assert all(finding.severity == "error" for finding in findings_of(caught.value))
    assert all(finding.message in str(caught.value) for finding in findings_of(caught.value))
    return findings_of(caught.value)


def test_all_wrong_requests_are_listed_at_once() -> None:
    findings = refused(
        {"a": f32(10, 8), "b": f32(8), "c": f32(8, 8), "d": f32(8, 8)},
        f32(16, 8),
        in_shardings=({"a": P("data"), "b": P("dta"), "c": P("data", "data"), "d": P("data")}, P(None, None, "model")),
    )
    assert sorted((finding.path, finding.code) for finding in findings) == [
        ("params/a", "indivisible"),
        ("params/b", "unknown-axis"),
        ("params/c", "duplicate-axis"),
        ("x", "rank-overflow"),
    ]
    (rows,) = [finding for finding in findings if finding.code == "indivisible"]
    assert (rows.dim, rows.shape) == (0, (10, 8))
    assert "10" in rows.message
    assert "4" in rows.message


def test_equal_layers_are_one_finding() -> None:
    (finding,) = refused([f32(10, 4)] * 3, f32(8), in_shardings=(P("data"), None))
    assert (finding.path, finding.count) == ("params/*", 3)


@pytest.mark.parametrize(
    ("options", "axes"),
    [
        ({"plan": sr.RegexShardingRule([("w", P("dta")), ("b", P("modle"))]).plan(PARAMS, SHAPE)}, ["modle", "dta"]),
        ({"in_shardings": (sr.RegexShardingRule([("w", P("dta"))]), None)}, ["dta"]),
    ],
)
def test_plans_and_rules_with_typos_are_refused_with_their_findings(options: Any, axes: list[str]) -> None:
    findings = refused(PARAMS, f32(8), **options)
    assert [(finding.code, finding.axis) for finding in findings] == [("unknown-axis", axis) for axis in axes]
    assert "did you mean 'data'" in findings[-1].message


def test_an_array_on_another_mesh() -> None:
    placed = jax.device_put(jnp.ones((8, 4)), NamedSharding(OTHER, P("rows")))
    (finding,) = refused(PARAMS, placed)
    assert (finding.path, finding.code, finding.axis) == ("x", "unknown-axis", "rows")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_shardings": (P("data"),)}, "in_shardings has 1 items, but there are 2 arguments"),
        ({"in_shardings": ({"w": P()}, None)}, "in_shardings, params"),
        ({"in_shardings": ({"w": P(), "b": P(), "c": P()}, None)}, "in_shardings, params"),
        ({"in_shardings": ([P(), P()], None)}, "in_shardings, params"),
        ({"plan": RULE.plan({"other": f32(8, 8)}, SHAPE)}, "plan fits neither all arguments nor the first"),
        ({"in_shardings": (RULE.plan({"other": f32(8, 8)}, SHAPE), None)}, "other|structure|differ"),
    ],
)
def test_requests_must_fit_the_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TreeError, match=message):
        read_arguments(step, (PARAMS, f32(16, 8)), SHAPE, **options)


@pytest.mark.parametrize("plan", [P("data"), "fsdp"])
def test_plan_must_be_a_plan_or_a_rule(plan: Any) -> None:
    with pytest.raises(ConfigTypeError, match=re.escape(f"plan must be a ShardingPlan or a rule, got {plan!r}")):
        read_arguments(step, (PARAMS, f32(16, 8)), SHAPE, plan)


@pytest.mark.parametrize("entry", ["data", jax.devices()[0], SingleDeviceSharding(jax.devices()[0])], ids=str)
def test_only_specs_and_named_shardings_are_requests(entry: Any) -> None:
    expected = "expected a PartitionSpec, a NamedSharding or None, got"
    for finding in (*refused(PARAMS["w"], f32(16, 8), in_shardings=(entry, None)), *refused_results(f32(8), entry)):
        assert finding.code == "no-sharding"
        assert finding.message.startswith(expected)


# ---- what a jitted function has of its own ----


def by_index(*specs: P, memory: str | None = None) -> dict[int, NamedSharding]:
    mesh = sr.mesh_shape("data:2,model:2,rows:2")
    return {index: NamedSharding(mesh, spec, memory_kind=memory) for index, spec in enumerate(specs)}


def test_shardings_of_a_jitted_function_fill_gaps() -> None:
    arguments = read_arguments(step, (f32(8, 8), f32(8)), SHAPE, in_shardings=(P("data"), None))
    merged = arguments.with_shardings(by_index(P("data", None), P("model"), memory="pinned_host"), SHAPE)
    assert [array.spec for array in merged.arrays] == [P("data", None), P("model")]
    assert [array.memory for array in merged.arrays] == ["pinned_host", "pinned_host"]
    assert [array.spec for array in arguments.with_shardings({}, SHAPE).arrays] == [P("data"), None]


def test_shardings_of_a_jitted_function_must_not_differ() -> None:
    arguments = read_arguments(step, (f32(8, 8), f32(10)), SHAPE, in_shardings=(P("data"), None))
    with pytest.raises(sr.errors.PlanError, match="the jitted function has other shardings") as caught:
        arguments.with_shardings(by_index(P("model"), P("rows")), SHAPE)
    assert sorted((finding.path, finding.code) for finding in findings_of(caught.value)) == [
        ("params", "two-specs"),
        ("x", "unknown-axis"),
    ]
    assert "P('data')" in str(caught.value)
    assert "P('model')" in str(caught.value)


# ---- results ----


def result_specs(shapes: Any, out_shardings: Any) -> list[P | None]:
    return [sharding and sharding.spec for sharding in result_shardings(shapes, out_shardings, MESH)]


def refused_results(shapes: Any, out_shardings: Any) -> tuple[sr.Finding, ...]:
    with pytest.raises(sr.errors.PlanError, match=r"the results: \d+ arrays? cannot be placed") as caught:
        result_shardings(shapes, out_shardings, MESH)
    return findings_of(caught.value)


def test_results_without_requests() -> None:
    assert result_specs((f32(8), {"a": f32(4)}), None) == [None, None]


@pytest.mark.parametrize(
    ("shapes", "out_shardings", "specs"),
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
def test_results_have_the_requested_specs(shapes: Any, out_shardings: Any, specs: list[P | None]) -> None:
    assert result_specs(shapes, out_shardings) == specs


def test_all_wrong_results_are_listed_at_once() -> None:
    findings = refused_results((f32(10), f32(8), {"a": f32(8)}), (P("data"), P("dta"), {"a": P("data", "model")}))
    assert [(finding.path, finding.code) for finding in findings] == [
        ("result 0", "indivisible"),
        ("result 1", "unknown-axis"),
        ("result 2/a", "rank-overflow"),
    ]


@pytest.mark.parametrize(
    ("shapes", "out_shardings", "message"),
    [
        ((f32(8), f32(8)), (P(),), "out_shardings has 1 items, but the function returns 2"),
        ({"a": f32(8)}, {"b": P()}, "out_shardings, the result"),
        ((f32(8), {"a": f32(8)}), (P(), {"b": P()}), "out_shardings, result 1"),
    ],
)
def test_out_shardings_that_do_not_fit(shapes: Any, out_shardings: Any, message: str) -> None:
    with pytest.raises(TreeError, match=message):
        result_specs(shapes, out_shardings)
