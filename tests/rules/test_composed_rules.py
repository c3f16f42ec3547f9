"""The rules that contain others, and `ShapeBasedShardingRule`.

One file for `composite.py`, `fitted.py`, `stacked.py` and `shape_based.py`, and for what rules of users may return.
"""

from typing import Any

import attrs
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.zoo import f32

MESH = sr.mesh_shape("data:4,model:2")


def decided(rule: sr.ShardingRule, *shape: int) -> sr.Decision:
    return rule.plan({"w": f32(*shape)}, MESH).decision("w")


def codes(rule: sr.ShardingRule, *shape: int) -> list[str]:
    quiet = ("unused-axis", "unmatched", "large-replicated")
    return [finding.code for finding in rule.plan({"w": f32(*shape)}, MESH).findings if finding.code not in quiet]


# ---- ShapeBasedShardingRule ----

SHAPES = {(None, 1024): P("model", None), (1024, None): P("data", None), (8,): P("data"), (): P()}


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((32, 1024), P("model", None)),
        ((1024, 1024), P("model", None)),  # the first match, in order
        ((1024, 32), P("data", None)),
        ((8,), P("data")),
        ((8, 1024, 1), None),  # ranks are equal
        ((1024,), None),
        ((), P()),
    ],
)
def test_the_first_shape_that_matches_wins(shape: tuple[int, ...], spec: P | None) -> None:
    assert decided(sr.ShapeBasedShardingRule(SHAPES), *shape).spec == spec


# ---- CompositeShardingRule and the chain ----

ROWS, COLUMNS = sr.DimShardingRule("data", 0), sr.DimShardingRule("model", 1)
NONE = sr.RegexShardingRule([("nothing here", P())])


def test_the_first_opinion_wins_even_if_it_replicates() -> None:
    assert decided(sr.CompositeShardingRule(NONE, ROWS, COLUMNS), 8, 8).spec == P("data", None)
    assert decided(sr.CompositeShardingRule(sr.ReplicateShardingRule(), ROWS), 8, 8).spec == P()
    assert decided(sr.CompositeShardingRule(), 8, 8).spec is None
    literal = sr.CompositeShardingRule(sr.ReplicateShardingRule(), ROWS, empty_is_opinion=False)
    assert decided(literal, 8, 8).spec == P("data", None)


def test_a_composite_keeps_the_reasons_of_all_rules() -> None:
    tried = sr.CompositeShardingRule(sr.AutoShardingRule(min_shard_size=0), sr.FSDPShardingRule("model", 1))
    decision = decided(tried, 7, 9)
    assert decision.spec is None
    assert decision.reason == "no free axis divides a free dimension; at most 1 MiB"


def test_a_chain_refines_from_left_to_right() -> None:
    decision = decided(ROWS | NONE | COLUMNS, 8, 8)
    assert (decision.spec, decision.reason) == (P("data", "model"), "dim 0 over 'data'; dim 1 over 'model'")
    assert decided(ROWS | sr.FSDPShardingRule("model", 0), 8, 8).spec == P("data", "model")
    assert ROWS | (COLUMNS | NONE) == (ROWS | COLUMNS) | NONE


@pytest.mark.parametrize("make", [sr.CompositeShardingRule, sr.ChainShardingRule])
@pytest.mark.parametrize("part", ["fsdp('data')", P("data"), None, sr.FSDPShardingRule], ids=str)
def test_composites_and_chains_take_only_rules(make: Any, part: Any) -> None:
    with pytest.raises(TypeError, match=r"ShardingRule takes ShardingRules.*parse_rule"):
        make(ROWS, part)


def test_a_rule_with_only_apply_composes() -> None:
    @attrs.frozen
    class Odd(sr.ShardingRule):
        def apply(self, pytree: Any) -> Any:
            return jax.tree.map(lambda x: P("model") if x.shape[0] % 2 == 0 else P(), pytree)

    assert decided(sr.CompositeShardingRule(Odd(), sr.ReplicateShardingRule()), 8, 8).spec == P("model")
    assert decided(sr.CompositeShardingRule(Odd(), COLUMNS), 7, 8).spec == P(
        None, "model"
    )  # an empty spec is not an opinion
    assert decided(Odd() | sr.DimShardingRule("data", 1), 8, 8).spec == P("model", "data")


@attrs.frozen
class Delegates(sr.ShardingRule):
    """Returns the specs of another rule, and passes no mesh on."""

    inside: sr.ShardingRule = attrs.field(factory=lambda: sr.FSDPShardingRule("data", 0))
    mesh: Any = None

    def apply(self, pytree: Any) -> Any:
        return self.inside.apply(pytree)


def test_a_rule_with_only_apply_gets_the_mesh_of_the_plan() -> None:
    tree = {"w": f32(8, 8), "key": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))}
    specs = {"w": P(None, "data"), "key": P("data")}
    other = jax.sharding.Mesh(np.array(jax.devices()), "x")
    explicit = jax.make_mesh((4, 2), ("data", "model"))
    for mesh in (MESH, explicit):
        assert Delegates().plan(tree, mesh).specs == specs
        with jax.set_mesh(other):
            assert Delegates().plan(tree, mesh).specs == specs
            assert jax.jit(lambda x, mesh=mesh: 0 * x + (Delegates().plan(tree, mesh).specs == specs))(1) == 1
    assert Delegates(mesh=MESH).plan(tree).specs == specs
    assert Delegates(mesh=MESH).plan(tree, sr.mesh_shape("data:16")).specs == specs  # the mesh of the rule comes first
    with jax.set_mesh(explicit):
        assert Delegates().plan(tree).specs == specs
    with pytest.raises(sr.errors.NoMeshError, match="this rule needs a mesh"):
        Delegates().plan(tree)


def test_invalid_specs_from_apply_raise_with_path_and_rule() -> None:
    @attrs.frozen
    class Wrong(sr.ShardingRule):
        spec: Any

        def apply(self, pytree: Any) -> Any:
            return jax.tree.map(lambda x: self.spec if x.ndim else P(), pytree)

    for spec in (P(3), "data", P("data", unreduced={"model"})):  # pyright: ignore[reportArgumentType]
        with pytest.raises(
            sr.errors.PlanError, match=r"(?s)2 leaves .*a \(8,\): apply returned an invalid spec.*\[.*Wrong.*b \(8, 8\)"
        ):
            Wrong(spec).plan({"a": f32(8), "b": f32(8, 8), "s": f32()}, MESH)


@attrs.frozen
class Returns(sr.LeafShardingRule):
    """Returns the same for every leaf, valid or not."""

    value: Any
    reads_index = "no"

    def decide(self, leaf: sr.Leaf) -> sr.Decision:
        del leaf
        return self.value


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (None, "decide returned None, not a Decision"),
        (P("data"), r"decide returned P\('data',?\), not a Decision"),
        (sr.Decision("data", "x"), "'data' is not a PartitionSpec"),  # pyright: ignore[reportArgumentType]
        (sr.Decision(P(3), "x"), "an entry of a PartitionSpec must be .* got 3"),  # pyright: ignore[reportArgumentType]
        (sr.Decision(P("data", reduced=frozenset({"model"})), "x"), r"P\(.*reduced=.* has reductions"),
    ],
    ids=str,
)
def test_invalid_decisions_raise_with_path_and_rule(value: Any, match: str) -> None:
    tree = {"layers": [{"w": f32(8)} for _ in range(3)]}
    for rule in (Returns(value), sr.ReplicateShardingRule() | Returns(value), sr.CompositeShardingRule(Returns(value))):
        with pytest.raises(sr.errors.PlanError, match=rf"3 leaves .*\n.*layers/\*/w \(8,\) x3: {match}.*\[.*Returns"):
            rule.plan(tree, MESH)


def test_decide_all_must_return_a_verdict() -> None:
    @attrs.frozen
    class Listed(sr.LeavesShardingRule):
        def decide_all(self, leaves: sr.Leaves) -> Any:
            return [leaf.skip("") for leaf in leaves.items]

    with pytest.raises(sr.errors.ConfigTypeError, match=r"decide_all returned \[.*, not a Verdict"):
        Listed().plan({"w": f32(8)}, MESH)


def test_decide_all_may_raise_an_error_about_a_leaf() -> None:
    @attrs.frozen
    class First(sr.LeavesShardingRule):
        axis: str

        def decide_all(self, leaves: sr.Leaves) -> sr.Verdict:
            return sr.Verdict(tuple(leaf.shard(0, self.axis) for leaf in leaves.items if leaf.fits(0, self.axis)))

    with pytest.raises(
        sr.errors.PlanError, match=r"1 leaf cannot .*\n.*w \(8,\): unknown axis 'x'; the mesh has .* \[.*First"
    ):
        First("x").plan({"w": f32(8)}, MESH)


def test_a_chain_keeps_earlier_decisions() -> None:
    assert decided(ROWS | Returns(sr.Decision(P(None, "model"), "mine")), 8, 8).spec == P("data", "model")
    with pytest.raises(
        sr.errors.PlanError, match=r"w \(8, 8\): P\('model'\) and P\('data', None\), decided before, disagree"
    ):
        decided(ROWS | Returns(sr.Decision(P("model"), "mine")), 8, 8)
    with pytest.raises(sr.errors.PlanError, match="Inconsistent sharding instructions"):
        decided(ROWS | Returns(sr.Decision(P(), "mine")), 8, 8)


# ---- FittedShardingRule ----


@pytest.mark.parametrize(
    ("spec", "shape", "fitted", "count"),
    [
        (P("data", "model"), (8, 8), P("data", "model"), 0),
        (P("data", "modle"), (8, 8), P("data", None), 1),
        (P("data", "model"), (8, 7), P("data", None), 1),
        (P(("data", "model")), (4, 8), P("data"), 1),  # the prefix that divides stays
        (P(("model", "data")), (4, 8), P("model"), 1),
        (P(("expert", "data", "model")), (4,), P("data"), 2),
        (P("data", None, "model"), (8, 8), P("data", None), 1),
        (P("expert"), (8,), None, 1),
        (P("data"), (7,), None, 1),
        (P(), (7,), P(), 0),
        (P(None, P.UNCONSTRAINED), (7, 7), P(None, P.UNCONSTRAINED), 0),
        (P(None, None), (7,), P(None), 1),  # nothing is split before and after: still an opinion
    ],
)
def test_fitted_drops_what_does_not_fit_with_a_finding(
    spec: P, shape: tuple[int, ...], fitted: P | None, count: int
) -> None:
    rule = sr.FittedShardingRule(sr.RegexShardingRule([(".*", spec)]))
    assert decided(rule, *shape).spec == fitted
    assert codes(rule, *shape) == ["fitted"] * count


def test_fitted_says_what_it_drops_and_leaves_earlier_decisions_alone() -> None:
    rule = sr.FittedShardingRule(sr.RegexShardingRule([(".*", P("data", "modle"))]))
    finding = next(item for item in rule.plan({"w": f32(8, 8)}, MESH).findings if item.code == "fitted")
    assert (finding.severity, finding.path, finding.shape) == ("warning", "w", (8, 8))
    assert (finding.dim, finding.axis) == (1, "modle")
    assert finding.message == "unknown axis 'modle' (did you mean 'model'?): dropped from dimension 1"
    assert "fitted from P('data', 'modle')" in decided(rule, 8, 8).reason
    after = sr.RegexShardingRule([("w", P("expert"))]) | sr.FittedShardingRule(sr.DimShardingRule("data", 1))
    assert decided(after, 7, 8).spec == P("expert", "data")
    assert codes(after, 7, 8) == ["unknown-axis"]


@pytest.mark.parametrize(
    ("rule", "spec", "dims"),
    [
        (sr.FSDPShardingRule("expert", 0), None, [1]),
        (sr.FSDPShardingRule(("expert", "data"), 0), P(None, "data"), [1]),
        (sr.FSDPShardingRule("expert", 100), None, [None]),  # too small to split: the axis is reported all the same
        (sr.AutoShardingRule(axis_names=["expert", "data"]), P("data", None), [None]),
        (sr.MemoryConstrainedShardingRule(64, axis_names=["expert", "data"]), P("data", None), [None]),
        (sr.MemoryConstrainedShardingRule(64, axis_names=["expert", "data"], scope="tree"), P("data", None), [None]),
        (sr.parse_rule("shard_dim('model', 0)|fsdp('expert', 0)"), P("model", None), [1]),
        (sr.StackedShardingRule(sr.FSDPShardingRule("expert", 0), axis="data"), P("data", None), [1]),
        (
            sr.CompositeShardingRule(sr.FSDPShardingRule("expert", 0), sr.AutoShardingRule(axis_names=["stage"])),
            None,
            [None, 1],
        ),
    ],
    ids=repr,
)
def test_fitted_drops_missing_axes_of_rules_that_read_sizes(
    rule: sr.ShardingRule, spec: P | None, dims: list[int | None]
) -> None:
    with pytest.raises(sr.errors.PlanError, match="unknown axis 'expert'"):
        decided(rule, 8, 8)
    fitted = sr.FittedShardingRule(rule)
    assert decided(fitted, 8, 8).spec == spec
    findings = [finding for finding in fitted.plan({"w": f32(8, 8)}, MESH).findings if finding.code == "fitted"]
    assert sorted([finding.dim for finding in findings], key=str) == sorted(dims, key=str)
    for finding in findings:
        assert finding.axis in ("expert", "stage")
        assert f"unknown axis '{finding.axis}'" in finding.message
    assert "unknown axis" not in fitted.plan({"w": f32(8, 8)}, MESH).explain("w")


def test_fitted_keeps_other_errors_of_the_inner_rule() -> None:
    with pytest.raises(sr.errors.PlanError, match=r"^1 leaf .*\n.*Cannot shard_dim\(data, 5\)"):
        decided(sr.FittedShardingRule(sr.FSDPShardingRule("expert", 0) | sr.DimShardingRule("data", 5)), 8, 8)
    # The rule has its own mesh, and that lacks the axis.
    with_mesh = sr.AutoShardingRule(sr.mesh_shape("x:2"), axis_names=["y"])
    with pytest.raises(sr.errors.PlanError, match="unknown axis 'y'"):
        sr.FittedShardingRule(with_mesh).plan({"w": f32(8, 8)})


# ---- StackedShardingRule ----


@pytest.mark.parametrize(
    ("rule", "shape", "spec"),
    [
        (sr.StackedShardingRule(COLUMNS), (6, 8, 8), P(None, None, "model")),
        (sr.StackedShardingRule(ROWS, dims=2), (6, 3, 8), P(None, None, "data")),
        (sr.StackedShardingRule(ROWS, axis="model"), (6, 8, 8), P("model", "data", None)),
        (sr.StackedShardingRule(NONE, axis="model"), (6, 8), P("model", None)),
        (sr.StackedShardingRule(sr.ReplicateShardingRule()), (6, 8), P()),
        (sr.StackedShardingRule(NONE), (6, 8), None),
        (sr.StackedShardingRule(ROWS, dims=2), (6,), None),
        # A limit is for one layer: this one has 256 bytes.
        (sr.StackedShardingRule(sr.MemoryConstrainedShardingRule(256)), (6, 8, 8), P()),
        (sr.StackedShardingRule(sr.MemoryConstrainedShardingRule(255)), (6, 8, 8), P(None, "data", None)),
    ],
)
def test_stacked_applies_the_rule_to_each_layer(rule: sr.ShardingRule, shape: tuple[int, ...], spec: P | None) -> None:
    actual = decided(rule, *shape).spec
    assert actual is None if spec is None else actual is not None and sr.specs.same(actual, spec)


@pytest.mark.parametrize(
    ("rule", "spec"),
    [
        (sr.StackedShardingRule(sr.AutoShardingRule(), axis="data"), P("data", "model", None)),
        (sr.StackedShardingRule(sr.FSDPShardingRule("data", 0), axis="data"), P("data")),
        (sr.StackedShardingRule(sr.MemoryConstrainedShardingRule(8), axis="data"), P("data", "model", None)),
        (
            sr.StackedShardingRule(sr.MemoryConstrainedShardingRule(128, scope="tree"), axis="data"),
            P("data", "model", None),
        ),
        (ROWS | sr.StackedShardingRule(sr.FSDPShardingRule("data", 0)), P("data", None, None)),
        (ROWS | sr.StackedShardingRule(sr.ReplicateShardingRule(), axis="data"), P("data", None, None)),
        (ROWS | sr.StackedShardingRule(sr.ReplicateShardingRule()), P("data", None, None)),
        (COLUMNS | sr.StackedShardingRule(NONE, axis="data"), P("data", "model", None)),
        (
            sr.StackedShardingRule(sr.StackedShardingRule(sr.AutoShardingRule(), axis="model"), axis="data"),
            P("data", "model", None),
        ),
    ],
    ids=repr,
)
def test_axes_of_stacked_dims_are_in_use_inside(rule: sr.ShardingRule, spec: P) -> None:
    actual = decided(rule, 8, 8, 8).spec
    assert actual is not None
    assert sr.specs.same(actual, spec)


@pytest.mark.parametrize(
    ("rule", "match"),
    [
        (
            ROWS | sr.StackedShardingRule(sr.ReplicateShardingRule(), axis="model"),
            r"P\('model'\) and P\('data', None, None\), decided before, disagree on dimension 0",
        ),
        (COLUMNS | sr.StackedShardingRule(NONE, axis="model"), "decided before, disagree on dimension 0"),
        (
            sr.StackedShardingRule(sr.DimShardingRule("data", 0), axis="data"),
            "cannot use axis 'data': it splits another one, 'data' on a stacked dimension",
        ),
        (
            ROWS | sr.StackedShardingRule(sr.RegexShardingRule([("w", P("data"))])),
            r"P\('data'\) and P\(None, None\) and 'data' on a stacked dimension, decided before, disagree",
        ),
    ],
    ids=repr,
)
def test_stacked_reports_conflicts(rule: sr.ShardingRule, match: str) -> None:
    with pytest.raises(sr.errors.PlanError, match=rf"1 leaf .*\n.*w \(8, 8, 8\): .*{match}"):
        decided(rule, 8, 8, 8)


def test_findings_inside_a_stack_are_about_the_whole_array() -> None:
    inside = sr.FittedShardingRule(sr.RegexShardingRule([("w", P("data", "modle"))]))
    plan = sr.StackedShardingRule(inside, dims=2).plan({"w": f32(6, 5, 7, 8)}, MESH)
    findings = [finding for finding in plan.findings if finding.code == "fitted"]
    assert [finding.shape for finding in findings] == [(6, 5, 7, 8)] * 2
    assert [(finding.dim, finding.axis) for finding in findings] == [(2, "data"), (3, "modle")]
    assert findings[0].message.startswith("in one layer, (7, 8): axis 'data' of size 4 does not divide")
    with pytest.raises(
        sr.errors.PlanError, match=r"w \(6, 8\): in one layer, \(8,\): Cannot shard_dim\(model, 1\)"
    ) as caught:
        decided(sr.StackedShardingRule(COLUMNS), 6, 8)
    (finding,) = caught.value.findings
    assert isinstance(finding, sr.Finding)
    assert finding.shape == (6, 8)


# ---- SpecTreeShardingRule ----


def test_a_tree_of_shardings_is_accepted() -> None:
    named = jax.sharding.NamedSharding(MESH, P("data"))
    specs = {"a": named, "b": None, "f": jax.nn.relu}
    for rule in (sr.SpecTreeShardingRule(specs), sr.SpecTreeShardingRule((("a", named), ("b", None)))):  # pyright: ignore[reportArgumentType]
        assert rule.apply({"a": f32(8), "b": f32(8), "f": jax.nn.relu}) == {"a": P("data"), "b": P(), "f": jax.nn.relu}
    pairs = [("a", P("data"))]
    assert sr.SpecTreeShardingRule(pairs) == sr.SpecTreeShardingRule(tuple(pairs))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("specs", "match"),
    [
        ({"w": "data"}, r"\n  w: 'data' is not a PartitionSpec"),
        ({"w": ("data", None)}, r"\n  w/0: 'data' is not"),
        ({"w": [P("data"), 3]}, r"\n  w/1: 3 is not"),
        ({"w": np.ones(3)}, r"\n  w: array\(.* is not"),
        ("data", r"\n  the tree: 'data' is not"),
        ({"w": jax.sharding.SingleDeviceSharding(jax.devices()[0])}, r"\n  w: SingleDeviceSharding.* is not"),
        ((("w", "data"),), r"\n  w: 'data' is not"),
        ({"a": "x", "b": P(3), "c": P("data")}, r"\n  a: 'x' is not .*\n  b: an entry of a PartitionSpec .* got 3$"),  # pyright: ignore[reportArgumentType]
    ],
    ids=str,
)
def test_an_invalid_spec_tree_raises_with_each_path(specs: Any, match: str) -> None:
    with pytest.raises(sr.errors.SpecError, match=match):
        sr.SpecTreeShardingRule(specs)


def test_pins_name_fields_in_either_path_style() -> None:
    state = jax.eval_shape(optax.adam(1e-3).init, {"w": f32(8, 8)})
    rule = sr.DimShardingRule("data", 0, ignore_ndim_error=True)
    named, placed = rule.plan(state, MESH), rule.plan(state, MESH, path_style="index")
    assert placed.as_rule().specs == named.as_rule().specs
    for plan in (named, placed):
        for style in ("attr", "index"):
            again = plan.as_rule().plan(state, MESH, path_style=style)
            assert again.specs == named.specs
            assert "dead-pin" not in [finding.code for finding in again.findings]


def test_few_of_many_dead_pins_get_a_suggestion() -> None:
    def tree(name: str) -> dict[str, Any]:
        return {f"{name}_{index}_weight": f32(8) for index in range(600)}

    plan = ROWS.plan(tree("layer"), MESH)
    findings = [item for item in plan.as_rule().plan(tree("lyer"), MESH).findings if item.code == "dead-pin"]
    assert len(findings) == 600
    # A suggestion for each would take 13 s.
    assert sum(1 for finding in findings if "did you mean" in finding.message) == 8


# ---- what rules derive from their fields ----

LAYERS = {"layers": [{"w": np.ones((8, 4))} for _ in range(4)]}


def layer_specs(rule: sr.ShardingRule) -> list[P]:
    return [layer["w"] for layer in rule.plan(LAYERS, sr.mesh_shape("data:4")).specs["layers"]]


def test_leaf_rules_with_rules_in_fields_read_indices_unless_they_say_otherwise() -> None:
    @attrs.frozen
    class FirstWhole(sr.LeafShardingRule):
        rule: sr.LeafShardingRule

        def decide(self, leaf: sr.Leaf) -> sr.Decision:
            return leaf.replicate("first") if leaf.path.startswith("layers/0") else self.rule.decide(leaf)

    assert layer_specs(FirstWhole(sr.DimShardingRule("data", 0))) == [P(), *[P("data", None)] * 3]


def test_a_rule_that_asks_one_outside_its_fields_must_read_as_much() -> None:
    by_index = sr.RegexShardingRule([("layers/0", P("data")), (".*", P())])

    @attrs.frozen
    class Asks(sr.LeavesShardingRule):
        rule: sr.ShardingRule = ROWS

        def decide_all(self, leaves: sr.Leaves) -> sr.Verdict:
            return sr.decide(by_index, leaves)

    @attrs.frozen
    class SaysSo(Asks):
        reads_index = "value"

    message = r"RegexShardingRule.* \(reads_index is 'value'\).*reads_index 'no'"
    with pytest.raises(sr.errors.ConfigError, match=message):
        Asks().apply({"layers": [{"w": np.ones(4)}] * 2})
    assert layer_specs(SaysSo()) == [P("data"), P(), P(), P()]


class Around(sr.LeavesShardingRule):
    """A rule of a user around another one, in an attribute that can be assigned."""

    def __init__(self, rule: sr.ShardingRule, *others: Any) -> None:
        self.rule = rule
        self.others = list(others)

    def decide_all(self, leaves: sr.Leaves) -> sr.Verdict:
        return sr.decide(self.rule, leaves)


BY_INDEX = sr.RegexShardingRule([("layers/0", P("data"))])
BUDGET = sr.MemoryConstrainedShardingRule(8, scope="tree", axis_names=("data",))


def test_rules_for_many_leaves_read_as_much_as_the_rules_in_their_attributes() -> None:
    assert Around(ROWS, Around(ROWS)).reads_index == "no"
    assert Around(ROWS, Around(BY_INDEX)).reads_index == "value"
    assert Around(ROWS, "x", (BUDGET, 3)).parts == (ROWS, BUDGET)
    assert Around(ROWS, BUDGET).tree_budgets == (8,)
    first, second, third = (sr.MemoryConstrainedShardingRule(n, scope="tree", axis_names=("data",)) for n in (1, 2, 3))
    assert Around(Around(first, Around(second)), third).tree_budgets == (1, 2, 3)
    rule = Around(ROWS)
    assert layer_specs(rule) == [P("data", None)] * 4
    rule.rule = BY_INDEX
    assert rule.parts == (BY_INDEX,)
    assert layer_specs(rule) == [P("data"), P(), P(), P()]


def test_rules_and_lists_may_refer_to_what_is_around_them_and_are_visited_once() -> None:
    rule = Around(ROWS, BUDGET)
    rule.others += [rule.others, Around(rule)]
    assert rule.parts[:2] == (ROWS, BUDGET)
    assert rule.tree_budgets == (8,)
    assert layer_specs(rule) == [P("data", None)] * 4
    nested: sr.ShardingRule = BUDGET
    for _ in range(60):
        nested = sr.CompositeShardingRule(nested, nested)
    assert (nested.tree_budgets, nested.reads_index) == ((8,), "value")


def test_a_field_that_has_no_value_yet_holds_no_rule() -> None:
    @attrs.define
    class Late(sr.LeafShardingRule):
        memo: dict[str, int] = attrs.field(init=False)

        def decide(self, leaf: sr.Leaf) -> sr.Decision:
            return leaf.shard(0, "data")

    assert Late().parts == ()
    assert decided(Late(), 4).spec == P("data")
