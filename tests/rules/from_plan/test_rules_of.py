"""The rules of a plan: equal on every leaf, for models as people name them and for trees that make it hard."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.axes import AnyMesh
from shardrules.rules.from_plan.patterns import joined
from shardrules.rules.regex import RegexShardingRule
from tests import zoo
from tests.zoo import TREES, f32

MESH = sr.mesh_shape("data:4,model:2")


def pairs(plan: sr.ShardingPlan) -> tuple[tuple[str, Any], ...]:
    """The patterns and values of the rules of a plan, which are equal to it on every leaf."""
    rule = plan.to_rules()
    assert isinstance(rule, RegexShardingRule)
    again = rule.plan(plan.survey.structs(plan.kinds, None), plan.mesh)
    assert again.paths == plan.survey.in_attr_style().paths()
    for path, planned, given_spec in zip(plan.paths, specs_of(plan), specs_of(again), strict=True):
        assert sr.specs.same(planned, given_spec), (path, planned, given_spec, rule)
    assert not [finding for finding in again.findings if "pattern" in finding.code]
    return rule.rules


def specs_of(plan: sr.ShardingPlan) -> list[P]:
    return [plan.kind_specs[kind] for kind in plan.kind_indices]


def plan_of(specs: Any, tree: Any, mesh: AnyMesh | None = MESH) -> sr.ShardingPlan:
    return sr.SpecTreeShardingRule(specs).plan(tree, mesh)


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        (["norm"], "norm"),
        (["norm", "bias"], "norm|bias"),
        (["q_proj/weight", "k_proj/weight", "norm"], "(q|k)_proj/weight|norm"),
        ([r"\bwq$", r"\bwk$"], r"\b(wq|wk)$"),
        ([r"\bup$", "bias"], r"\bup$|bias"),
        (["mu/.*up", "nu/.*up", "mu/.*down", "nu/.*down"], "(mu|nu)/.*(up|down)"),
        (["a/(0|1)/w", "a/(2|3)/w"], "a/(0|1|2|3)/w"),
        (["(a_b|c)/w", "(a_d|c)/w"], "(a_b|c|a_d)/w"),
        (["o_proj/w", "down/w", "norm"], "(o_proj|down)/w|norm"),
        (["q_proj/w", "k_proj/w", "up/w"], "(q|k)_proj/w|up/w"),
        (["^0/.*o_proj/w$", "^0/.*down/w$"], "^0/.*(o_proj|down)/w$"),
    ],
)
def test_several_patterns_are_one(patterns: list[str], text: str) -> None:
    assert joined(patterns) == text


def layer(wide: P, back: P) -> tuple[dict[str, Any], dict[str, Any]]:
    shapes = {
        "attention": {f"{name}_proj": {"weight": f32(16, 16), "bias": f32(16)} for name in "qkvo"},
        "mlp": {"up": {"weight": f32(16, 64)}, "down": {"weight": f32(64, 16)}},
        "input_norm": {"scale": f32(16)},
    }
    attention = {f"{name}_proj": {"weight": wide if name != "o" else back, "bias": P()} for name in "qkvo"}
    return shapes, {
        "attention": attention,
        "mlp": {"up": {"weight": wide}, "down": {"weight": back}},
        "input_norm": {"scale": P()},
    }


def test_patterns_are_as_a_person_writes_them() -> None:
    shapes, specs = layer(P("data", "model"), P("model", "data"))
    tree = {"embed": f32(64, 16), "layers": [shapes] * 3, "norm": {"scale": f32(16)}}
    planned = plan_of({"embed": P("model"), "layers": [specs] * 3, "norm": {"scale": P()}}, tree)
    assert pairs(planned) == (
        ("embed", P("model")),
        ("o_proj/weight|down", P("model", "data")),
        ("weight", P("data", "model")),
        (".*", P()),
    )


def test_rules_explain_themselves() -> None:
    shapes, specs = layer(P("data", "model"), P("model", "data"))
    rule = plan_of([specs] * 2, [shapes] * 2).to_rules()
    assert "matches 'o_proj/weight|down'" in rule.plan([shapes] * 2, MESH).explain("1/mlp/down/weight")


@pytest.mark.parametrize("specs", [P(), P("data"), P(("data", "model")), P(None, "model"), P(None, None)])
def test_one_leaf_takes_one_rule(specs: P) -> None:
    assert pairs(plan_of(specs, f32(8, 8))) == ((".*", sr.specs.canonical(specs)),)


@pytest.mark.parametrize("tree", [{}, [], None, {"f": jax.nn.relu, "n": 3}])
def test_a_tree_without_arrays_has_a_rule_too(tree: Any) -> None:
    plan = sr.ReplicateShardingRule().plan(tree, MESH)
    assert plan.to_rules().plan(tree, MESH).specs == plan.specs


def test_all_whole_and_no_opinion_is_one_rule() -> None:
    tree = {"w": f32(8, 8), "b": f32(8), "step": np.int32(0)}
    assert pairs(sr.ReplicateShardingRule().plan(tree, MESH)) == ((".*", P()),)
    assert pairs(sr.RegexShardingRule([("w", P())]).plan(tree, MESH)) == ((".*", P()),)


def test_names_that_read_as_patterns_are_names() -> None:
    names = ["a.b", "a+b", "(x)", "[0]", "x|y", "^", "$", "*", "a\\d", "{2}", "?", "a b", " ", "é", "中", "'", '"', "#"]
    names += ["-", "a\nb", "b\n", "\t", "\0", "\ud800", "a/b", "."]
    tree = {name: f32(8, 8) for name in names}
    specs = {name: P("data") if index % 2 else P("model") for index, name in enumerate(names)}
    pairs(plan_of(specs, tree))


def test_names_with_spaces_and_dots() -> None:
    tree = {f"model.layers.{index}.self attn.{name}": f32(8, 8) for index in range(12) for name in ("q", "o w")}
    specs = {path: P("model") if path.endswith("q") else P("data") for path in tree}
    written = pairs(plan_of(specs, tree))
    assert len(written) == 2
    assert not any(char.isdigit() for pattern, _ in written for char in pattern)


def test_layers_that_differ_are_told_apart_by_their_index() -> None:
    tree = {"layers": [{"w": f32(8, 8), "b": f32(8)} for _ in range(12)]}
    specs = {"layers": [{"w": P("model") if index in (0, 11) else P("data"), "b": P()} for index in range(12)]}
    assert pairs(plan_of(specs, tree)) == (
        (r"layers/(0|11)/w", P("model")),
        (r"\bw$", P("data")),
        (".*", P()),
    )


def test_uneven_layers_are_told_apart_by_what_they_have() -> None:
    def block(index: int) -> dict[str, Any]:
        return {"experts": {"up": f32(4, 8, 8)}} if index % 2 else {"up": f32(8, 8)}

    tree = {"layers": [block(index) for index in range(6)]}
    specs = {
        "layers": [{"experts": {"up": P("model", "data")}} if index % 2 else {"up": P("data")} for index in range(6)]
    }
    written = pairs(plan_of(specs, tree))
    assert len(written) == 2
    assert written[0][0] in ("experts", r"experts/up", "experts/")


def test_same_path_with_different_specs_is_an_error() -> None:
    tree = {"a": {"b": f32(8, 8)}, "a/b": f32(4, 8)}
    plan = sr.ShapeBasedShardingRule({(8, 8): P("data"), (4, 8): P("model")}).plan(tree, MESH)
    with pytest.raises(
        sr.errors.PlanError, match=r"a/b.*several arrays have this path, with the specs P\('data'\) and"
    ):
        plan.to_rules()


def test_same_path_with_equal_specs_is_none() -> None:
    pairs(sr.ReplicateShardingRule().plan({"a": {"b": f32(8, 8)}, "a/b": f32(4, 8)}, MESH))


def test_fully_sharded_plans_are_one_rule() -> None:
    tree = {"a": f32(2048, 1024), "b": f32(1024, 2048), "c": f32(8), "d": f32(8, 1024, 512)}
    assert pairs(sr.FSDPShardingRule("data").plan(tree, MESH)) == ((".*", sr.FSDPShardingRule("data")),)
    every = sr.FSDPShardingRule(("data", "model"), min_size_mb=0)
    assert pairs(every.plan(tree, MESH)) == ((".*", every),)


def test_a_dimension_from_the_end_is_one_rule_for_stacked_and_single_layers() -> None:
    tree = {"stack": {"up": f32(6, 8, 16)}, "first": {"up": f32(64, 16)}, "last": {"up": f32(32, 16)}, "bias": f32(16)}
    last = {"up": P(None, "model")}
    specs = {"stack": {"up": P(None, None, "model")}, "first": last, "last": last, "bias": P("model")}
    assert pairs(plan_of(specs, tree)) == ((".*", sr.DimShardingRule("model", -1)),)


def test_what_is_left_is_whole_where_something_is() -> None:
    shapes, specs = layer(P("data", "model"), P("model", "data"))
    tree = {"layers": [shapes] * 3, "norm": {"scale": f32(16)}}
    written = pairs(plan_of({"layers": [specs] * 3, "norm": {"scale": P()}}, tree))
    assert written[-1] == (".*", P())
    later = sr.RegexShardingRule(written).plan({**tree, "steps": f32(), "ema_norm": {"scale": f32(3)}}, MESH).check()
    assert later.decision("steps").applied_spec == P()


@pytest.mark.parametrize("count", [3, 4, 12])
def test_a_layer_that_differs_is_named_and_not_all_the_others(count: int) -> None:
    last = count - 1
    tree = {"layers": [{"weight": f32(16, 16), "bias": f32(16)} for _ in range(count)], "out": f32(16, 16)}
    layers = [{"weight": P("model"), "bias": P() if index == last else P("data")} for index in range(count)]
    written = pairs(plan_of({"layers": layers, "out": P()}, tree))
    assert (f"layers/{last}/bias", P()) in written
    assert not any("|" in pattern for pattern, _ in written)


def test_numbers_and_single_letters_are_whole_names() -> None:
    tree = {"layers": [{"blocks": [f32(8, 8), f32(8, 8)], "v": {"norm": f32(8, 8)}, "mv": {"norm": f32(8, 8)}}] * 2}
    specs = {"blocks": [P("data"), P("model")], "v": {"norm": P("model")}, "mv": {"norm": P()}}
    written = sr.RegexShardingRule(pairs(plan_of({"layers": [specs] * 2}, tree)))
    longer = {"layers": [{"blocks": [f32(8, 8)] * 12, "conv": {"norm": f32(8, 8)}}] * 2}
    again = written.plan(longer, MESH)
    assert again.decision("layers/0/blocks/1").applied_spec != again.decision("layers/0/blocks/11").applied_spec
    assert again.decision("layers/0/conv/norm").applied_spec == P()


class Moments(NamedTuple):
    mu: Any
    nu: Any
    count: Any


def test_optimizer_state_needs_no_rules_of_its_own() -> None:
    shapes, specs = layer(P("data", "model"), P("model", "data"))
    params, param_specs = {"layers": [shapes] * 3}, {"layers": [specs] * 3}
    alone = pairs(plan_of(param_specs, params))
    state = Moments(params, params, f32())
    both = plan_of((param_specs, Moments(param_specs, param_specs, P())), (params, state))
    assert pairs(both) == alone
    params_plan = both.to_rules().plan(params, MESH)
    assert params_plan.mirror(state).specs == Moments(param_specs, param_specs, P())


def test_state_that_is_split_further_takes_rules_of_its_own() -> None:
    params = {"layers": [{"wq": f32(64, 64), "wo": f32(64, 64), "norm": f32(64)} for _ in range(3)]}
    specs = {"layers": [{"wq": P(None, "model"), "wo": P("model"), "norm": P()} for _ in range(3)]}
    zero = sr.SpecTreeShardingRule(specs) | sr.FSDPShardingRule("data", min_size_mb=0)
    split = zero.plan(params, MESH).specs
    both = plan_of((specs, Moments(split, split, P())), (params, Moments(params, params, f32())))
    written = pairs(both)
    assert len(written) == 6
    assert ("^1/.*norm$", P("data")) in written


def test_parameters_come_below_the_state_that_is_split_further() -> None:
    shapes, specs = layer(P(None, "model"), P("model"))
    params, param_specs = (
        {"layers": [shapes] * 3, "head": f32(16, 64)},
        {"layers": [specs] * 3, "head": P(None, "model")},
    )
    zero = sr.SpecTreeShardingRule(param_specs) | sr.FSDPShardingRule("data", min_size_mb=0)
    split = zero.plan(params, MESH).specs
    both = plan_of((param_specs, Moments(split, split, P())), (params, Moments(params, params, f32())))
    written = pairs(both)
    assert len(written) <= 7
    assert all(len(pattern) < 40 for pattern, _ in written)


def test_fields_of_named_tuples_are_named_in_any_path_style() -> None:
    tree = Moments(f32(8, 8), f32(8, 8), f32())
    rule = sr.RegexShardingRule([("^0", P("data")), (".*", P())])
    plan = rule.plan(tree, MESH, path_style="index")
    assert pairs(plan) == (("^mu$", P("data")), (".*", P())) or pairs(plan)[0][0] == r"\bmu$"


def test_plans_with_a_repair_or_without_a_mesh() -> None:
    tree = {"layers": [{"w": f32(size, 8)} for size in (8, 6, 8, 5)]}
    pairs(sr.FittedShardingRule(sr.RegexShardingRule([("w", P("data", "model"))])).plan(tree, MESH))
    pairs(sr.RegexShardingRule([("2/w", P("data")), ("w", P(None, "data"))]).plan(tree))


def test_tied_leaves_and_modules_of_other_libraries() -> None:
    shared = f32(64, 16)
    pairs(
        plan_of(
            {"embed": P("model"), "head": P("model"), "w": P("data")}, {"embed": shared, "head": shared, "w": f32(8)}
        )
    )
    model = nnx.split(nnx.eval_shape(zoo.nnx_model))[1]
    pairs(sr.AutoShardingRule(MESH).plan(model, MESH))
    pairs(sr.RegexShardingRule([("kernel", P(None, "model"))]).plan(model, MESH))
    mlp = eqx.filter_eval_shape(lambda: eqx.nn.MLP(8, 8, 64, 3, key=jax.random.key(0)))
    pairs(sr.RegexShardingRule([("layers/1/weight", P("model")), ("weight", P(None, "model"))]).plan(mlp, MESH))


def test_axes_left_to_the_compiler_stay_so() -> None:
    tree = {"a": f32(8, 8), "b": f32(8, 8)}
    assert len(pairs(plan_of({"a": P(P.UNCONSTRAINED, "data"), "b": P()}, tree))) == 2


def test_a_plan_from_json_needs_no_tree() -> None:
    shapes, specs = layer(P("data", "model"), P("model", "data"))
    plan = plan_of([specs] * 2, [shapes] * 2)
    assert sr.ShardingPlan.from_json(plan.to_json()).to_rules() == plan.to_rules()


@pytest.mark.parametrize("name", TREES)
def test_rules_of_every_tree(name: str) -> None:
    tree = TREES[name]()
    for rule in (sr.AutoShardingRule(MESH), sr.FSDPShardingRule("data", 0), sr.DimShardingRule("model", 0, True)):
        try:
            plan = rule.plan(tree, MESH)
        except sr.errors.PlanError:
            continue
        if plan.survey.has_slashes:
            continue
        pairs(plan)


NAMES = st.sampled_from(
    ["w", "wq", "up", "down", "norm", "q_proj", "k_proj", "a.b", "x 1", "layer_1", "layer_2", "(", "0"]
)
SPECS = st.sampled_from([P(), P("data"), P(None, "data"), P("model", "data"), P(("data", "model")), P("data", None)])
SHAPES = st.sampled_from([(8, 8), (16, 8), (8, 64)])
LEAVES = st.tuples(SHAPES, SPECS)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def inner(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.dictionaries(NAMES, children, max_size=4) | st.lists(children, max_size=4)

    return st.recursive(leaves, inner, max_leaves=24)


def is_pair(node: Any) -> bool:
    return isinstance(node, tuple)


@given(trees(LEAVES))
def test_rules_of_random_plans_are_equal_to_them(tree: Any) -> None:
    shapes = jax.tree.map(lambda pair: jax.ShapeDtypeStruct(pair[0], jnp.float32), tree, is_leaf=is_pair)
    specs = jax.tree.map(lambda pair: pair[1], tree, is_leaf=is_pair)
    pairs(plan_of(specs, shapes))


@given(st.lists(st.tuples(SPECS, SPECS), min_size=1, max_size=30))
def test_rules_of_layers_by_chance_are_equal_to_them(layers: list[tuple[P, P]]) -> None:
    tree = {"layers": [{"up": f32(8, 8), "down": f32(8, 8)} for _ in layers]}
    pairs(plan_of({"layers": [{"up": up, "down": down} for up, down in layers]}, tree))


def test_layers_by_the_thousand_are_told_apart() -> None:
    random = np.random.default_rng(0).integers(0, 2, (60, 50))
    tree = {"layers": [[f32(8, 8)] * 50] * 60}
    assert len(pairs(plan_of({"layers": [[P("model") if bit else P() for bit in row] for row in random]}, tree))) > 1000
    by_layer = [[P("model") if row[0] else P()] * 50 for row in random]
    assert len(pairs(plan_of({"layers": by_layer}, tree))) == 2
