"""Names of parameters with dots: equal layers are decided once and are one row, other keys with dots stay apart."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.finding import common_path, template
from shardrules.core.tree import survey

MESH = sr.mesh_shape("data:4,model:2")


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def flat(layers: int, experts: int) -> dict[str, Any]:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.up.weight" for layer in range(layers) for expert in range(experts)
    ]
    return {"model.embed.weight": bf16(64, 8), **{name: bf16(8, 16) for name in names}}


def nested(layers: int, experts: int) -> dict[str, Any]:
    layer = {"mlp": {"experts": [{"up": {"weight": bf16(8, 16)}} for _ in range(experts)]}}
    return {"model": {"embed": {"weight": bf16(64, 8)}, "layers": [layer] * layers}}


def test_equal_layers_are_one_kind_and_one_row() -> None:
    plan = sr.DimShardingRule("model", 0).plan(flat(12, 11), MESH)
    assert len(plan.kinds) == 2
    assert [(row.path, row.count) for row in plan.rows] == [
        ("model.embed.weight", 1),
        ("model.layers.*.mlp.experts.*.up.weight", 132),
    ]
    assert plan.paths == tuple(sorted(flat(12, 11)))


def test_the_table_is_that_of_the_tree() -> None:
    rule = sr.DimShardingRule("model", 0)
    dotted, slashed = rule.plan(flat(12, 11), MESH), rule.plan(nested(12, 11), MESH)
    assert str(dotted).replace(".", "/") == str(slashed).replace(".", "/")


@pytest.mark.parametrize(("reads", "kinds"), [("no", 2), ("width", 5), ("value", 133)])
def test_kinds_follow_from_what_rules_read(reads: Any, kinds: int) -> None:
    assert len(survey(flat(12, 11), None, reads_index=reads).kinds) == kinds


def test_a_pattern_for_one_layer_wins_that_layer_only() -> None:
    rule = sr.RegexShardingRule([(r"layers\.3\.", P("model")), (".*", P())])
    specs = rule.plan(flat(12, 2), MESH).specs
    assert [name for name, spec in specs.items() if spec == P("model")] == [
        f"model.layers.3.mlp.experts.{expert}.up.weight" for expert in range(2)
    ]


def test_layers_of_other_shapes_stay_apart() -> None:
    tree = {**flat(4, 1), "model.layers.2.mlp.experts.0.up.weight": bf16(8, 32)}
    rows = sr.DimShardingRule("model", 0).plan(tree, MESH).rows
    assert [(row.leaf.shape, row.count) for row in rows] == [((64, 8), 1), ((8, 16), 3), ((8, 32), 1)]


def test_findings_of_equal_layers_are_one() -> None:
    findings = sr.DimShardingRule("data", 1).plan({f"h.{i}.w": bf16(8, 6) for i in range(20)}, MESH).findings
    assert [(finding.path, finding.count) for finding in findings if finding.code == "indivisible"] == [("h.*.w", 20)]


def test_plans_come_back_from_json() -> None:
    plan = sr.DimShardingRule("model", 0).plan(flat(12, 2), MESH)
    assert sr.ShardingPlan.from_json(plan.to_json()) == plan
    assert sr.ShardingPlan.from_json(plan.to_json(), flat(12, 2)).specs == plan.specs


@pytest.mark.parametrize(
    "names", [["0.5", "0.25"], ["v1.2.3", "v1.3.3"], ["1.0", "2.0"], ["w.1", "w.2"], ["a#.b", "a.b"]]
)
def test_other_keys_with_dots_stay_apart(names: list[str]) -> None:
    rows = sr.DimShardingRule("model", 0).plan({name: bf16(8, 4) for name in names}, MESH).rows
    assert [row.path for row in rows] == sorted(names)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model.layers.11.mlp.up", "model.layers.*.mlp.up"),
        ("blocks.0.1.weight", "blocks.*.*.weight"),
        ("layers/3/model.layers.11.w", "layers/*/model.layers.*.w"),
        ("h.1.0", "h.1.0"),
        ("temperature/0.5", "temperature/0.5"),
        ("v1.2.3/w", "v1.2.3/w"),
    ],
)
def test_templates_of_names_with_dots(path: str, expected: str) -> None:
    assert template(path) == expected


def test_names_have_a_path_in_common() -> None:
    assert common_path("h.1.x.3.w", "h.2.x.3.w") == "h.*.x.3.w"
    assert common_path("a/h.1.w", "b/h.2.w") == "*/h.*.w"
    assert common_path("h.1.w", "g.1.w") == "*"
