"""Rules as text: read, never run."""

from typing import Any

import pytest

import shardrules as sr

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
        ("shard_dim('model', 2, ignore_ndim_error=True)", sr.DimShardingRule("model", 2, True)),
    ],
)
def test_a_text_is_the_call_it_looks_like(text: str, rule: sr.ShardingRule) -> None:
    assert sr.parse_rule(text) == rule


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        (
            "fspd('data')",
            sr.errors.UnknownOpError,
            r"no op 'fspd' \(did you mean 'fsdp'\?\).*known ops: auto, fsdp, logical",
        ),
        ("", sr.errors.SpecError, "cannot be read"),
        ("fsdp(", sr.errors.SpecError, "cannot be read at column"),
        ("fsdp('data'))", sr.errors.SpecError, "cannot be read at column"),
        ("fsdp('data') & auto", sr.errors.SpecError, "is no op; write op"),
        ("3", sr.errors.SpecError, "'3' is no op"),
        ("sr.fsdp('data')", sr.errors.SpecError, r"sr\.fsdp\('data'\)\" is no op"),
        ("fsdp('data')('x')", sr.errors.SpecError, "is no op"),
        ("fsdp(data)", sr.errors.SpecError, "arguments of fsdp must be literals"),
        ("fsdp(axis=__import__('os').name)", sr.errors.SpecError, "must be literals"),
        ("fsdp(*['data'])", sr.errors.SpecError, "must be literals"),
        ("fsdp(**{'axis': 'data'})", sr.errors.SpecError, r"must be literals, not \*\*mappings"),
        ("fsdp({[]: 1})", sr.errors.SpecError, "arguments of fsdp must be literals"),
        ("logical('ab')", sr.errors.SpecError, "mapped by a dictionary or by pairs.*got 'ab'"),
        ("auto(mesh='dp:2')", sr.errors.SpecError, "auto.* was called wrongly: a mesh is a Mesh or an AbstractMesh"),
        ("memory(8, 'dp:2')", sr.errors.SpecError, "memory.* was called wrongly: a mesh is a Mesh or an AbstractMesh"),
        ("fsdp()", sr.errors.SpecError, r"fsdp\(axis.*was called wrongly: .*axis"),
        ("shard_dim('model', -1, nope=1)", sr.errors.SpecError, "was called wrongly: .*nope"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        sr.parse_rule(text)
    assert repr(text) in str(caught.value) or "'ab'" in text  # what a rule refuses by itself knows no text


def test_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr("builtins.print", lambda *args: ran.append(args))
    with pytest.raises(sr.errors.SpecError, match="must be literals"):
        sr.parse_rule("fsdp(print('ran'))")
    assert ran == []


def test_an_op_of_ones_own() -> None:
    def rows(axis: str, *, dim: int = 0) -> sr.ShardingRule:
        return sr.DimShardingRule(axis, dim)

    ops = sr.register_op(sr.DEFAULT_OPS, "rows", rows)
    assert sr.parse_rule("rows('data', dim=1)|fsdp('model')", ops) == sr.DimShardingRule("data", 1) | (
        sr.FSDPShardingRule("model")
    )
    assert "rows" not in sr.DEFAULT_OPS
    with pytest.raises(sr.errors.UnknownOpError, match="no op 'rows'"):
        sr.parse_rule("rows('data')")
    with pytest.raises(sr.errors.SpecError, match=r"rows\(axis: str, \*, dim: int = 0\).* was called wrongly"):
        sr.parse_rule("rows()", ops)


def test_an_op_is_replaced_on_purpose_only() -> None:
    def mine() -> sr.ShardingRule:
        return sr.ReplicateShardingRule()

    with pytest.raises(sr.errors.UnknownOpError, match="there is an op 'fsdp' already"):
        sr.register_op(sr.DEFAULT_OPS, "fsdp", mine)
    assert sr.parse_rule("fsdp", sr.register_op(sr.DEFAULT_OPS, "fsdp", mine, replace=True)) == mine()
    with pytest.raises(sr.errors.UnknownOpError, match="'my op' is not"):
        sr.register_op(sr.DEFAULT_OPS, "my op", mine)


def test_the_ops_cannot_be_changed_in_place() -> None:
    ops: Any = sr.register_op(sr.DEFAULT_OPS, "mine", sr.ReplicateShardingRule)
    with pytest.raises(TypeError, match="does not support item assignment"):
        ops["x"] = sr.ReplicateShardingRule
