"""`RegexShardingRule`: which pattern wins, and what its value does."""

import re
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.zoo import f32

MESH = sr.mesh_shape("data:4,model:2")


TREE = {"a": {"w": f32(8, 8), "b": f32(8)}, "layers": [{"w": f32(8, 8)}, {"w": f32(8, 8)}]}


def spec_of(rule: sr.ShardingRule, path: str) -> P | None:
    return sr.ShardingPlan.decision(rule.plan(TREE, MESH), path).spec


@pytest.mark.parametrize(
    ("pattern", "match", "paths"),
    [
        ("w", "search", ["a/w", "layers/0/w", "layers/1/w"]),
        ("/w", "search", ["a/w", "layers/0/w", "layers/1/w"]),
        ("/0/", "search", ["layers/0/w"]),
        ("^a", "search", ["a/b", "a/w"]),
        ("a/.", "fullmatch", ["a/b", "a/w"]),
        ("w", "fullmatch", []),
        (".*/[0-9]+/w", "fullmatch", ["layers/0/w", "layers/1/w"]),
        ("a", "match", ["a/b", "a/w"]),
        ("w", "match", []),
        ("(?i)LAYERS", "search", ["layers/0/w", "layers/1/w"]),
        ("", "search", ["a/b", "a/w", "layers/0/w", "layers/1/w"]),
    ],
)
def test_patterns_match_by_the_chosen_function(pattern: str, match: Any, paths: list[str]) -> None:
    plan = sr.RegexShardingRule([(pattern, P("data"))], match).plan(TREE, MESH)
    assert [path for path in plan.paths if plan.decision(path).spec is not None] == paths


@pytest.mark.parametrize(
    ("rule", "path", "spec", "reason"),
    [
        (sr.RegexShardingRule([("w", P("data"))], min_size=64), "a/w", P("data"), "matches 'w'"),
        (sr.RegexShardingRule([("w", P("data"))], min_size=65), "a/w", P(), "fewer than 65 elements"),
        (sr.RegexShardingRule([("w", P("data"))]), "a/b", None, "no pattern matches"),
        (sr.RegexShardingRule([("w", P("data"))], unmatched="replicate"), "a/b", P(), "no pattern matches"),
        (sr.RegexShardingRule([(re.compile("w"), P())]), "a/w", P(), "matches 'w'"),
    ],
    ids=repr,
)
def test_small_and_unmatched_arrays(rule: sr.RegexShardingRule, path: str, spec: P | None, reason: str) -> None:
    decision = rule.plan(TREE, MESH).decision(path)
    assert (decision.spec, decision.reason) == (spec, reason)


def test_the_first_pattern_wins_and_none_stops_the_search() -> None:
    rule = sr.RegexShardingRule([("a/w", None), ("w", P("data")), ("w", P("model"))])
    assert (spec_of(rule, "a/w"), spec_of(rule, "layers/0/w"), spec_of(rule, "a/b")) == (None, P("data"), None)
    assert rule.plan(TREE, MESH).decision("a/w").reason == "'a/w' leaves it to other rules"


def test_a_value_is_a_spec_a_rule_a_chain_or_a_text() -> None:
    chain = sr.DimShardingRule("model", -1) | sr.FSDPShardingRule("data", 0)
    for value in (P("data", "model"), chain, "shard_dim('model', -1)|fsdp('data', 0)"):
        assert spec_of(sr.RegexShardingRule([("a/w", value)]), "a/w") == P("data", "model")


def test_an_inner_rule_decides_only_what_its_pattern_won() -> None:
    rule = sr.RegexShardingRule([("a/w", P()), (".*w", sr.DimShardingRule("data", 1))])
    plan = rule.plan(TREE, MESH)
    assert plan.specs["layers"][0]["w"] == P(None, "data")
    assert plan.specs["a"]["w"] == P()
    assert plan.decision("layers/0/w").reason == "'.*w': dim 1 over 'data'"


def test_unmatched_leaves_may_be_errors() -> None:
    with pytest.raises(
        sr.errors.PlanError, match=r"(?s)3 leaves.*a/w.*layers/\*/w \(8, 8\) x2: no pattern matches"
    ) as caught:
        sr.RegexShardingRule([("b", P("data"))], unmatched="error").plan(TREE, MESH)
    assert len(caught.value.findings) == 2


def test_a_spec_after_another_rule_refines_and_may_conflict() -> None:
    after = sr.DimShardingRule("model", 1) | sr.RegexShardingRule([("a/w", P("data"))])
    assert after.plan({"a": {"w": f32(8, 8)}}, MESH).specs == {"a": {"w": P("data", "model")}}
    clash = sr.DimShardingRule("model", 0) | sr.RegexShardingRule([("a/w", P("data"))])
    with pytest.raises(sr.errors.PlanError, match=r"a/w \(8, 8\): .*dim"):
        clash.plan({"a": {"w": f32(8, 8)}}, MESH)


@pytest.mark.parametrize(
    ("rules", "options", "match"),
    [
        (None, {}, r"takes \(pattern, value\) pairs in order.*; got None"),
        ({"a": P()}, {}, r"takes \(pattern, value\) pairs"),
        ([("(", P())], {}, r"pattern '\(' is not a regular expression"),
        ([("w|(a+)+$", P())], {}, r"pattern 'w\|\(a\+\)\+\$' may backtrack for years"),
        ([(3, P())], {}, "a pattern must be a string, got 3"),
        ([(re.compile("w", re.IGNORECASE), P())], {}, "Flags go into it"),
        ([("w", 3)], {}, "'w' has the value 3, which is not"),
        ([("/w", P())], {"match": "fullmatch"}, "'/w' cannot match any path, since paths never start with '/'"),
        ([("/w", P())], {"match": "match"}, "never start with '/'"),
        ([("w", P())], {"match": "find"}, "must be one of .*; got 'find'"),
        ([("w", P())], {"unmatched": "drop"}, "must be one of .*; got 'drop'"),
    ],
)
def test_invalid_rules_raise(rules: Any, options: Any, match: str) -> None:
    with pytest.raises(sr.errors.ShardRulesError, match=match):
        sr.RegexShardingRule(rules, **options)


def test_a_compiled_pattern_equals_its_text() -> None:
    assert sr.RegexShardingRule([(re.compile("w"), P())]) == sr.RegexShardingRule([("w", P())])
