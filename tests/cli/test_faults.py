"""The findings of `check`: one for each fault, with the arrays counted."""

import attrs
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.cli.faults import faults
from shardrules.core.finding import Finding

MESH = sr.mesh_shape("data:4,model:8")
RULES = sr.RegexShardingRule(
    [("embed", P("model")), ("up", P(None, "model")), ("down", P("model")), ("bias", P(("data", "model")))]
)


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def model(layers: int = 12) -> dict[str, object]:
    """A model with two wrong sizes, 1001 and 250."""
    layer = {"up": shape(64, 250), "down": shape(250, 64), "bias": shape(64)}
    return {"embed": shape(1001, 64), "blocks": [dict(layer) for _ in range(layers)]}


def state_findings(optimizer: optax.GradientTransformation) -> list[Finding]:
    plan = RULES.plan(model(), MESH)
    findings = sr.MirrorShardingRule(plan).plan(jax.eval_shape(optimizer.init, model()), MESH).findings
    return [attrs.evolve(finding, path=f"optimizer/{finding.path}") for finding in findings]


def test_two_wrong_sizes_are_two_findings() -> None:
    findings = RULES.plan(model(), MESH).findings
    assert len(findings) > 2
    down, embed = faults(findings, state_findings(optax.adam(1e-3)))
    assert (down.path, down.count, embed.path, embed.count) == ("blocks/*/down", 3 * 2 * 12, "embed", 3)
    assert "dimension 0 is 250" in down.message
    assert "; also dimension 1 of blocks/*/up (64, 250)" in down.message
    assert "weakened" not in (down.code, embed.code)


def test_one_size_over_two_axes_is_two_faults() -> None:
    tree = {"a": shape(250, 8), "b": shape(8, 250)}
    rule = sr.RegexShardingRule([("a", P("model")), ("b", P(None, "data"))])
    assert len(faults(rule.plan(tree, MESH).findings)) == 2


def test_only_some_arrays_are_named() -> None:
    tree = {f"layer_{name}": shape(250) for name in "abcdef"}
    fault = faults(sr.RegexShardingRule([("layer", P("model"))]).plan(tree, MESH).findings)[0]
    assert fault.count == 6
    assert fault.message.endswith("dimension 0 of layer_d (250,), 2 more")


@pytest.mark.parametrize("code", ["unused-axis", "unmatched"])
def test_what_a_state_repeats_is_said_once(code: str) -> None:
    path = "" if code == "unused-axis" else "w"
    finding = Finding("warning", code, "message", path)
    copy = attrs.evolve(finding, path=f"optimizer/0/mu/{path}" if path else "optimizer")
    other = attrs.evolve(finding, path="optimizer/0/mu/v")
    assert faults([finding], [copy]) == (attrs.evolve(finding, count=2 if path else 1),)
    assert faults([finding], [other]) == (finding, other)


def test_moments_of_a_model_that_is_one_array_count_with_it() -> None:
    weight = shape(6)
    plan = sr.DimShardingRule("model", 0).plan(weight, MESH)
    state = sr.MirrorShardingRule(plan).plan(jax.eval_shape(optax.adam(1e-3).init, weight), MESH).findings
    moments = [attrs.evolve(finding, path=f"optimizer/{finding.path}") for finding in state if finding.path]
    assert [(fault.code, fault.count) for fault in faults(plan.findings, moments)] == [
        ("indivisible", 3),
        ("unused-axis", 1),
    ]
