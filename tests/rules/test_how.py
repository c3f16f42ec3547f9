"""`how`: rules, plans, specs, shardings, devices and functions, read in one place."""

import re
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.rules.how import by_leaf, checked_plan, refuse_leaves, resolve, spec_errors

MESH = sr.create_mesh("data:4,model:2")
SHAPE = sr.mesh_shape("data:4,model:2")
OTHER = sr.mesh_shape("data:2,model:4")
TREE = {"w": np.ones((8, 8)), "b": np.ones(8), "act": np.tanh}
RULE = sr.DimShardingRule("model", 0)


@pytest.mark.parametrize(
    ("how", "meshes"),
    [
        (RULE, (SHAPE, SHAPE)),
        (RULE.plan(TREE, OTHER), (SHAPE, OTHER)),
        (lambda tree: RULE, (SHAPE, SHAPE)),
        (RULE.plan(TREE, OTHER).mirror, (SHAPE, OTHER)),
    ],
    ids=["rule", "plan", "function to a rule", "mirror"],
)
def test_rules_and_plans_resolve_to_a_plan_for_the_tree(how: Any, meshes: Any) -> None:
    resolved = resolve(how, TREE, SHAPE, "me")
    assert resolved.plan is not None
    assert resolved.plan.specs == {"w": P("model", None), "b": P("model"), "act": np.tanh}
    assert resolved.entries == []
    assert resolved.meshes == meshes


@pytest.mark.parametrize("entry", [P("data"), None, jax.devices()[0], NamedSharding(MESH, P())], ids=str)
def test_entries_cover_everything_below_them(entry: Any) -> None:
    resolved = resolve({"a": entry, "b": P("model")}, {"a": [1, 2], "b": 3}, None, "me")
    assert resolved.plan is None
    assert resolved.entries == [entry, entry, P("model")]
    assert resolve(lambda tree: entry, {"a": [1, 2]}, None, "me").entries == [entry, entry]


def test_the_structure_must_fit() -> None:
    with pytest.raises(sr.errors.TreeError, match="me: the specs do not have the structure of the tree"):
        resolve({"w": P()}, TREE, None, "me")
    with pytest.raises(sr.errors.TreeError, match="extra: in the plan, not in"):
        resolve(RULE.plan({**TREE, "extra": np.ones(8)}, SHAPE), TREE, None, "me")


def test_values_of_kinds_go_to_leaves() -> None:
    plan = RULE.plan({"layers": [np.ones((8, 8))] * 2, "b": np.ones(8), "act": np.tanh}, SHAPE)
    assert by_leaf(plan, [str(leaf.shape) for leaf in plan.kinds], 4, "me") == [None, "(8,)", "(8, 8)", "(8, 8)"]
    with pytest.raises(sr.errors.TreeError, match="me: a box in the tree holds several arrays or none; unbox it first"):
        by_leaf(plan, [str(leaf.shape) for leaf in plan.kinds], 5, "me")


def test_plans_move_to_the_mesh_and_raise_their_errors() -> None:
    plan = RULE.plan({"w": np.ones((6, 8))}, SHAPE)
    assert checked_plan(plan, SHAPE, "me") is plan
    with pytest.raises(sr.errors.PlanError, match=r"the plan has 1 error \(mesh data:2,model:4\)") as caught:
        checked_plan(plan, OTHER, "me")
    assert caught.value.__notes__ == ["from me"]


@pytest.mark.parametrize(
    ("spec", "code", "remedy"),
    [
        (P("data", "modle"), "unknown-axis", "Correct the name, or use a mesh that has this axis"),
        (P(None, "data"), "indivisible", "Split another dimension, or make this one a multiple"),
        (P(None, None, "data"), "rank-overflow", "Give it at most one entry per dimension"),
    ],
)
def test_remedies_for_written_specs_name_no_rule(spec: P, code: str, remedy: str) -> None:
    (finding,) = spec_errors((8, 6), spec, SHAPE, "w")
    assert (finding.path, finding.code, finding.remedy) == ("w", code, remedy)


def test_one_error_lists_all_leaves() -> None:
    findings = [(index, finding) for index in (0, 2) for finding in spec_errors((6,), P("data"), SHAPE)]
    refuse_leaves("me", [1.0, 2.0, 3.0], [])
    with pytest.raises(sr.errors.PlanError, match=re.escape("me: 2 arrays cannot be placed:")) as caught:
        refuse_leaves("me", {"a": 1.0, "b": 2.0, "c": 3.0}, findings)
    assert "a (6,)" in str(caught.value)
    assert "c (6,)" in str(caught.value)


def test_boxes_that_hold_no_array_are_refused() -> None:
    boxed = {"w": nn.Partitioned({"a": np.ones(8), "b": np.ones(8)}, ("embed",))}
    with pytest.raises(sr.errors.TreeError, match="unbox it first"):
        sr.filter_shard(boxed, RULE, MESH)
