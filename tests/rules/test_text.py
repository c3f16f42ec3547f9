"""Rules as text: parsed, never run."""

from typing import Any

import pytest

import shardrules as sr
from shardrules.presets.huggingface import HuggingFaceShardingRule

SHARD, FSDP = sr.DimShardingRule("model", -1), sr.FSDPShardingRule("data")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("replicate", sr.ReplicateShardingRule()),
        ("replicate()", sr.ReplicateShardingRule()),
        (" fsdp( 'data' ) ", FSDP),
        ("fsdp(axis='data')", FSDP),
        ('fsdp(axis=("data", "model"), min_size_mb=0.5)', sr.FSDPShardingRule(("data", "model"), 0.5)),
        ("fsdp(['data'])", FSDP),
        ("shard_dim('model', -1)|fsdp('data')", SHARD | FSDP),
        ("shard_dim('model', -1) | (fsdp('data'))", SHARD | FSDP),
        (
            "(replicate|auto)|memory(1024)",
            sr.ReplicateShardingRule() | sr.AutoShardingRule() | sr.MemoryConstrainedShardingRule(1024),
        ),
        ("logical({'embed': 'data'})", sr.LogicalShardingRule({"embed": "data"})),
        ("auto(axis_names=['model', 'data'], reverse=True)", sr.AutoShardingRule(None, ["model", "data"], None, True)),
        ("hf", HuggingFaceShardingRule()),
        ("hf(fsdp=None, head_dim=64)", HuggingFaceShardingRule(fsdp=None, head_dim=64)),
        ("shard_dim('model', 2, ignore_ndim_error=True)", sr.DimShardingRule("model", 2, True)),
    ],
)
def test_a_text_means_the_rules_that_it_calls(text: str, rule: sr.ShardingRule) -> None:
    assert sr.parse_rule(text) == rule


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        (
            "fspd('data')",
            sr.errors.UnknownOpError,
            r"unknown op 'fspd' \(did you mean 'fsdp'\?\).*known ops: auto, fsdp, hf, logical",
        ),
        ("", sr.errors.ConfigError, "invalid rule text"),
        ("fsdp(", sr.errors.ConfigError, "invalid rule text .* at column"),
        ("fsdp('data'))", sr.errors.ConfigError, "invalid rule text .* at column"),
        ("fsdp('data') & auto", sr.errors.ConfigError, "is not an op; write op"),
        ("3", sr.errors.ConfigError, "'3' is not an op"),
        ("sr.fsdp('data')", sr.errors.ConfigError, r"sr\.fsdp\('data'\)\" is not an op"),
        ("fsdp('data')('x')", sr.errors.ConfigError, "is not an op"),
        ("fsdp(data)", sr.errors.ConfigError, "arguments of fsdp must be literals"),
        ("fsdp(axis=__import__('os').name)", sr.errors.ConfigError, "must be literals"),
        ("fsdp(print('ran'))", sr.errors.ConfigError, "must be literals"),
        ("memory(8, 'dp:2')", sr.errors.ConfigError, "invalid call of memory.*: a mesh must be a Mesh"),
        ("fsdp(*['data'])", sr.errors.ConfigError, "must be literals"),
        ("fsdp(**{'axis': 'data'})", sr.errors.ConfigError, r"must be literals, not \*\*mappings"),
        ("fsdp(axis='a', axis='b')", sr.errors.ConfigError, "fsdp gets axis more than once"),
        ("fsdp({[]: 1})", sr.errors.ConfigError, "arguments of fsdp must be literals"),
        ("logical('ab')", sr.errors.ConfigError, "must be a dictionary or pairs.*got 'ab'"),
        (
            "auto(mesh='dp:2')",
            sr.errors.ConfigError,
            "invalid call of auto.*: a mesh must be a Mesh or an AbstractMesh",
        ),
        ("fsdp()", sr.errors.ConfigError, r"invalid call of fsdp\(axis.*: .*axis"),
        ("shard_dim('model', -1, nope=1)", sr.errors.ConfigError, "invalid call of shard_dim.*: .*nope"),
    ],
)
def test_an_invalid_text_raises(text: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        sr.parse_rule(text)
    assert repr(text) in str(caught.value) or "'ab'" in text  # a rule that refuses its arguments does not know the text


def test_a_registered_op_can_be_called() -> None:
    def rows(axis: str, *, dim: int = 0) -> sr.ShardingRule:
        return sr.DimShardingRule(axis, dim)

    ops = sr.register_op(sr.DEFAULT_OPS, "rows", rows)
    assert sr.parse_rule("rows('data', dim=1)|fsdp('model')", ops) == sr.DimShardingRule("data", 1) | (
        sr.FSDPShardingRule("model")
    )
    assert "rows" not in sr.DEFAULT_OPS
    with pytest.raises(sr.errors.UnknownOpError, match="unknown op 'rows'"):
        sr.parse_rule("rows('data')")
    with pytest.raises(sr.errors.ConfigError, match=r"invalid call of rows\(axis: str, \*, dim: int = 0\)"):
        sr.parse_rule("rows()", ops)


def test_an_op_is_replaced_only_on_request() -> None:
    def mine() -> sr.ShardingRule:
        return sr.ReplicateShardingRule()

    with pytest.raises(sr.errors.UnknownOpError, match="op 'fsdp' already exists"):
        sr.register_op(sr.DEFAULT_OPS, "fsdp", mine)
    assert sr.parse_rule("fsdp", sr.register_op(sr.DEFAULT_OPS, "fsdp", mine, replace=True)) == mine()
    with pytest.raises(sr.errors.UnknownOpError, match="must be an identifier, got 'my op'"):
        sr.register_op(sr.DEFAULT_OPS, "my op", mine)
    ops: Any = sr.register_op(sr.DEFAULT_OPS, "mine", mine)
    with pytest.raises(TypeError, match="does not support item assignment"):
        ops["x"] = mine
