"""The rules that are put together from others, and the one that goes by shape."""

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr

MESH = sr.mesh_shape("data:4,model:2")


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def decided(rule: sr.ShardingRule, *shape: int) -> sr.Decision:
    return rule.plan({"w": f32(*shape)}, MESH).decision("w")


def codes(rule: sr.ShardingRule, *shape: int) -> list[str]:
    quiet = ("unused-axis", "unmatched", "large-replicated")
    return [found.code for found in rule.plan({"w": f32(*shape)}, MESH).findings if found.code not in quiet]


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
def test_shapes(shape: tuple[int, ...], spec: P | None) -> None:
    assert decided(sr.ShapeBasedShardingRule(SHAPES), *shape).spec == spec


# ---- CompositeShardingRule and the chain ----

ROWS, COLUMNS = sr.DimShardingRule("data", 0), sr.DimShardingRule("model", 1)
NONE = sr.RegexShardingRule([("nothing here", P())])


def test_the_first_opinion_wins_and_replicating_is_one() -> None:
    assert decided(sr.CompositeShardingRule(NONE, ROWS, COLUMNS), 8, 8).spec == P("data", None)
    assert decided(sr.CompositeShardingRule(sr.ReplicateShardingRule(), ROWS), 8, 8).spec == P()
    literal = sr.CompositeShardingRule(sr.ReplicateShardingRule(), ROWS, empty_is_opinion=False)
    assert decided(literal, 8, 8).spec == P("data", None)


def test_a_rule_that_could_not_leaves_it_to_the_next_and_all_reasons_are_kept() -> None:
    tried = sr.CompositeShardingRule(sr.AutoShardingRule(min_shard_size=0), sr.FSDPShardingRule("model", 1))
    decision = decided(tried, 7, 9)
    assert decision.spec is None
    assert decision.reason == "no free axis divides a free dimension; at most 1 MiB"


def test_composites_of_nothing() -> None:
    assert decided(sr.CompositeShardingRule(), 8, 8).spec is None
    assert sr.CompositeShardingRule(ROWS).apply({"w": f32(8, 8)}) == ROWS.apply({"w": f32(8, 8)})


def test_a_chain_refines_from_left_to_right() -> None:
    decision = decided(ROWS | NONE | COLUMNS, 8, 8)
    assert (decision.spec, decision.reason) == (P("data", "model"), "dim 0 over 'data'; dim 1 over 'model'")
    assert decided(ROWS | sr.FSDPShardingRule("model", 0), 8, 8).spec == P("data", "model")
    assert ROWS | (COLUMNS | NONE) == (ROWS | COLUMNS) | NONE
    assert repr(ROWS | COLUMNS) == f"{ROWS!r} | {COLUMNS!r}" or "ChainShardingRule" in repr(ROWS | COLUMNS)


@pytest.mark.parametrize("make", [sr.CompositeShardingRule, sr.ChainShardingRule])
@pytest.mark.parametrize("part", ["fsdp('data')", P("data"), None, sr.FSDPShardingRule], ids=str)
def test_what_is_no_rule_is_refused(make: Any, part: Any) -> None:
    with pytest.raises(TypeError, match=r"ShardingRule takes ShardingRules.*parse_rule"):
        make(ROWS, part)


def test_a_rule_of_ones_own_that_only_has_apply_stands_anywhere() -> None:
    @attrs.frozen
    class Odd(sr.ShardingRule):
        def apply(self, pytree: Any) -> Any:
            return jax.tree.map(lambda x: P("model") if x.shape[0] % 2 == 0 else P(), pytree)

    assert decided(sr.CompositeShardingRule(Odd(), sr.ReplicateShardingRule()), 8, 8).spec == P("model")
    assert decided(sr.CompositeShardingRule(Odd(), COLUMNS), 7, 8).spec == P(None, "model")  # empty is no opinion
    assert decided(Odd() | sr.DimShardingRule("data", 1), 8, 8).spec == P("model", "data")


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
    ],
)
def test_what_does_not_fit_is_dropped_each_time_with_a_finding(
    spec: P, shape: tuple[int, ...], fitted: P | None, count: int
) -> None:
    rule = sr.FittedShardingRule(sr.RegexShardingRule([(".*", spec)]))
    assert decided(rule, *shape).spec == fitted
    assert codes(rule, *shape) == ["fitted"] * count


def test_a_finding_of_what_was_dropped_has_all_its_parts() -> None:
    rule = sr.FittedShardingRule(sr.RegexShardingRule([(".*", P("data", "modle"))]))
    found = next(one for one in rule.plan({"w": f32(8, 8)}, MESH).findings if one.code == "fitted")
    assert (found.severity, found.path, found.shape, found.dim, found.axis) == ("warning", "w", (8, 8), 1, "modle")
    assert found.message == "the mesh has no axis 'modle' (did you mean 'model'?): dropped from dimension 1"
    assert "fitted from P('data', 'modle')" in decided(rule, 8, 8).reason


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
    ],
)
def test_a_rule_for_one_layer_on_layers_that_are_stacked(
    rule: sr.ShardingRule, shape: tuple[int, ...], spec: P | None
) -> None:
    found = decided(rule, *shape).spec
    assert found is None if spec is None else found is not None and sr.same(found, spec)


def test_the_rule_inside_sees_one_layer() -> None:
    seen: list[tuple[int, ...]] = []

    @attrs.frozen
    class Look(sr.LeafShardingRule):
        def decide(self, leaf: sr.Leaf) -> sr.Decision:
            seen.append((*leaf.shape, leaf.nbytes))
            return leaf.skip("looked")

    decided(sr.StackedShardingRule(Look()), 6, 8, 4)
    assert seen == [(8, 4, 128)]


@pytest.mark.parametrize("dims", [0, -1])
def test_a_stack_has_one_dimension_or_more(dims: int) -> None:
    with pytest.raises(sr.SpecError, match="dims is 1 or more, got"):
        sr.StackedShardingRule(ROWS, dims)


# ---- SpecTreeShardingRule ----


def test_a_tree_of_specs_pins_what_it_names() -> None:
    rule = sr.SpecTreeShardingRule({"a": P("data"), "b": None})
    plan = rule.plan({"a": np.ones(8), "b": np.ones(8)}, MESH)
    assert [plan.decision(path).spec for path in plan.paths] == [P("data"), None]
