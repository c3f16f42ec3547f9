"""Rules of MaxText's YAML files, on parameters and specs that its own code gave, all at commit e591f30."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import yaml
from flax import nnx
from flax.linen.spmd import logical_to_mesh_axes, logical_to_mesh_sharding
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.presets import maxtext

RECORDED = Path(__file__).parent / "recorded"
RULES: dict[str, Any] = json.loads((RECORDED / "maxtext_rules.json").read_text())
BASE = RULES["base.yml"]
CONFIGS = {"llama": (BASE, RULES["models/llama2-7b.yml"]), "mixtral": (BASE,)}
AXES = ("data", "stage", "fsdp", "fsdp_transpose", "context", "context_usp_ulysses", "tensor", "tensor_sequence")
MESH = sr.mesh_shape(",".join([f"{axis}:2" for axis in AXES]) + ",expert:1,autoregressive:1")


def recorded(model: str) -> dict[str, Any]:
    """Shape, names and spec of each parameter by path."""
    return json.loads((RECORDED / f"maxtext_{model}.json").read_text())


def boxed(shape: list[int], names: list[str | None], kind: str) -> Any:
    array = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    return (
        nnx.Param(array, out_sharding=tuple(names)) if kind == "nnx" else nn.LogicallyPartitioned(array, tuple(names))
    )


def tree_of(rows: dict[str, Any], kind: str = "linen", renamed: Mapping[str, str] = MappingProxyType({})) -> Any:
    """A tree of boxes of flax by path, with some logical axes renamed."""
    return {
        path: boxed(shape, [renamed.get(name, name) for name in names], kind)
        for path, (shape, names, _) in rows.items()
    }


@pytest.mark.parametrize("name", RULES)
def test_rules_of_every_file_come_back_exactly(name: str) -> None:
    rule = maxtext.from_logical_axis_rules(RULES[name])
    assert maxtext.to_logical_axis_rules(rule) == RULES[name]
    assert yaml.safe_load(yaml.safe_dump(maxtext.to_logical_axis_rules(rule))) == RULES[name]
    assert maxtext.from_logical_axis_rules({"logical_axis_rules": RULES[name]}) == rule


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("model", CONFIGS)
@nnx.use_eager_sharding(False)
def test_parameters_get_the_specs_of_maxtext(model: str, kind: str) -> None:
    rows = recorded(model)
    plan = maxtext.from_logical_axis_rules(*CONFIGS[model]).plan(tree_of(rows, kind), MESH)
    assert not [finding for finding in plan.findings if finding.code.endswith("logical-axis")]
    assert sorted(plan.paths) == sorted(rows)
    for path, (_, _, entries) in rows.items():
        expected = P(*[tuple(entry) if isinstance(entry, list) else entry for entry in entries])
        assert sr.specs.same(plan.decision(path).spec or P("none"), expected), path


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize(
    ("name", "wrong"), [("embed", "embd"), ("mlp", "mlps"), ("mlp_moe", "mlpmoe"), ("norm", "nrom")]
)
def test_a_renamed_axis_is_an_error_with_the_nearest_name(model: str, name: str, wrong: str) -> None:
    rows = recorded(model)
    paths = [path for path, (_, names, _) in rows.items() if name in names]
    plan = maxtext.from_logical_axis_rules(*CONFIGS[model]).plan(tree_of(rows, renamed={name: wrong}), MESH)
    errors = [finding for finding in plan.findings if finding.code == "unknown-logical-axis"]
    assert (len(errors), {finding.severity for finding in errors}) == (len(paths), {"error"} if paths else set())
    if paths:
        with pytest.raises(sr.errors.PlanError, match=rf"logical axis '{wrong}' \(did you mean '{name}'\?\)"):
            plan.check()


def test_a_saved_plan_names_a_renamed_parameter() -> None:
    rows = recorded("llama")
    plan = maxtext.from_logical_axis_rules(*CONFIGS["llama"]).plan(tree_of(rows), MESH)
    rows["params/decoder/final_norm/scale"] = rows.pop("params/decoder/decoder_norm/scale")
    with pytest.raises(sr.errors.TreeError, match=r"(?s)decoder_norm/scale.*final_norm/scale|final_norm.*decoder_norm"):
        sr.ShardingPlan.from_json(plan.to_json(), tree_of(rows))


def test_rules_of_a_model_replace_those_of_the_same_name_and_come_last() -> None:
    base = [["a", "x"], ["b", ["y"]], ["a", []]]
    model = {"logical_axis_rules": [["c", []], ["a", "z"]]}
    assert maxtext.to_logical_axis_rules(maxtext.from_logical_axis_rules(base, model)) == [
        ["b", ["y"]],
        ["c", []],
        ["a", "z"],
    ]
    override = model | {"override_logical_axis_rules": True}
    assert maxtext.to_logical_axis_rules(maxtext.from_logical_axis_rules(base, override)) == model["logical_axis_rules"]


def test_a_configuration_without_rules_is_refused() -> None:
    with pytest.raises(sr.errors.ConfigError, match=r"has no logical_axis_rules; its keys are \['mesh_axes'\]"):
        maxtext.from_logical_axis_rules({"mesh_axes": ["data"]})
    with pytest.raises(sr.errors.ConfigError, match="a mesh axis must be a name"):
        maxtext.from_logical_axis_rules([["embed", 3]])


NAMES = st.sampled_from("abcdef")
MESH_AXES = st.lists(st.sampled_from("xyz"), unique=True, max_size=3) | st.sampled_from("xyz")
PAIRS = st.lists(st.tuples(NAMES, MESH_AXES).map(list), max_size=8)


@given(rules=PAIRS)
def test_random_rules_come_back_exactly(rules: list[Any]) -> None:
    rule = maxtext.from_logical_axis_rules(rules)
    assert maxtext.to_logical_axis_rules(rule) == rules
    assert eval(repr(rule), {"LogicalShardingRule": sr.LogicalShardingRule}) == rule
    plain = [(name, None if not axis else axis[0] if len(axis) == 1 else tuple(axis)) for name, axis in rules]
    assert sr.LogicalShardingRule(plain, unknown="error") == rule  # rules are compared by what they mean
    assert hash(sr.LogicalShardingRule(plain, unknown="error")) == hash(rule)


@given(rules=PAIRS, names=st.lists(NAMES | st.none(), max_size=4, unique_by=lambda name: name or object()))
def test_random_names_get_the_specs_of_flax(rules: list[Any], names: list[str | None]) -> None:
    as_tuples = tuple([(name, tuple(axis) if isinstance(axis, list) else axis) for name, axis in rules])
    mesh: Any = sr.mesh_shape("x:2,y:2,z:2")
    decision = maxtext.from_logical_axis_rules(rules).decide(
        sr.Leaf("w", (8,) * len(names), jnp.float32, mesh, axes=tuple(names))
    )
    expected = logical_to_mesh_axes(tuple(names), as_tuples) or P()
    assert sr.specs.same(decision.spec or P(), expected)
    assert sr.specs.same(decision.spec or P(), logical_to_mesh_sharding(P(*names), mesh, as_tuples).spec)
    unknown = [name for name in names if name and name not in dict(rules)]
    errors = [finding for finding in decision.findings if finding.severity == "error"]
    assert [names[finding.dim or 0] for finding in errors] == unknown
