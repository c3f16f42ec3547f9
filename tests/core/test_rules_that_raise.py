"""Rules that raise name themselves and the leaf; axes that a mesh lacks are errors of every leaf that needs them."""

from collections.abc import Callable
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr

MESH = sr.mesh_shape("data:4")


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


TREE = {"embed": f32(64, 32), "layers": [{"w": f32(8, 8), "b": f32(8)} for _ in range(3)]}


class ModelError(Exception):
    """An error of a user's own."""


@final
@attrs.frozen
class Failing(sr.LeafShardingRule):
    """Raises for every leaf whose path has `part`."""

    part: str
    error: type[Exception] = ModelError

    def decide(self, leaf: sr.Leaf) -> sr.Decision:
        if self.part in leaf.path:
            raise self.error("no table for this leaf")
        return leaf.skip("not mine")


@final
@attrs.frozen
class FailingTogether(sr.LeavesShardingRule):
    """Raises before it looks at any leaf."""

    def decide_all(self, leaves: sr.Leaves) -> sr.Verdict:
        raise ModelError("no table at all")


class FailingApply(sr.ShardingRule):
    """Raises in `apply`."""

    def __repr__(self) -> str:
        return "FailingApply()"

    def apply(self, pytree: Any) -> Any:
        raise ModelError("no table for the tree")


AROUND: dict[str, Callable[[sr.ShardingRule], sr.ShardingRule]] = {
    "alone": lambda rule: rule,
    "composite": lambda rule: sr.CompositeShardingRule(sr.RegexShardingRule([("embed", P())]), rule),
    "chain": lambda rule: sr.ReplicateShardingRule() | rule,
    "pattern": lambda rule: sr.RegexShardingRule([("layers", rule)]),
    "fitted stack": lambda rule: sr.FittedShardingRule(sr.StackedShardingRule(rule)),
}


def notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", []) if note.startswith("raised by the rule")]


@pytest.mark.parametrize("error", [ModelError, KeyError, ZeroDivisionError])
@pytest.mark.parametrize("around", AROUND)
def test_an_error_in_a_rule_names_the_rule_and_the_leaf(around: str, error: type[Exception]) -> None:
    rule = Failing("layers/0/b", error)
    with pytest.raises(error, match="no table for this leaf") as caught:
        AROUND[around](rule).plan(TREE, MESH)
    shape = "()" if around == "fitted stack" else "(8,)"  # inside a stack, that of one layer
    assert notes(caught.value) == [f"raised by the rule {rule!r} for layers/0/b {shape}"]


@pytest.mark.parametrize("rule", [FailingTogether(), FailingApply()], ids=repr)
@pytest.mark.parametrize("around", [name for name in AROUND if name != "fitted stack"])
def test_an_error_about_the_whole_tree_names_the_rule(around: str, rule: sr.ShardingRule) -> None:
    with pytest.raises(ModelError, match="no table") as caught:
        AROUND[around](rule).plan(TREE, MESH)
    assert notes(caught.value) == [f"raised by the rule {rule!r}"]


@pytest.mark.parametrize(
    ("error", "message"),
    [(ModelError, "no table for this leaf"), (None, "no rule for w")],
)
def test_a_rule_without_a_text_keeps_its_own_error(error: type[Exception] | None, message: str) -> None:
    class Unprintable(sr.LeafShardingRule):
        def __repr__(self) -> str:
            raise AttributeError("no text")

        def decide(self, leaf: sr.Leaf) -> sr.Decision:
            if error is None:
                raise leaf.error(self, "no rule for w")
            raise error("no table for this leaf")

    with pytest.raises(error or sr.errors.PlanError) as raised:
        Unprintable().plan({"w": f32(8)}, MESH).check()
    text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert message in text
    assert "Unprintable" in text


def test_an_error_of_a_rule_with_many_specs_stays_short() -> None:
    specs = sr.SpecTreeShardingRule(tuple((f"layers/{index}/w", P()) for index in range(1000)))

    @final
    @attrs.frozen
    class Pinned(sr.LeafShardingRule):
        specs: sr.ShardingRule

        def decide(self, leaf: sr.Leaf) -> sr.Decision:
            raise ModelError("no table for this leaf")

    with pytest.raises(ModelError, match="no table") as caught:
        Pinned(specs).plan({"w": f32(8)}, MESH)
    (note,) = notes(caught.value)
    assert len(note) < 300
    assert note.endswith("for w (8,)")


LACKING: dict[str, sr.ShardingRule] = {
    "fsdp": sr.FSDPShardingRule("tp"),
    "dim": sr.DimShardingRule("tp", 0),
    "dim of several axes": sr.DimShardingRule(("data", "tp"), 0),
    "auto": sr.AutoShardingRule(axis_names=("tp",)),
    "patterns": sr.RegexShardingRule([("w|embed", P("tp")), ("b", "shard_dim('tp', 0)")]),
    "shapes": sr.ShapeBasedShardingRule({(None, None): P("tp"), (None,): P("tp")}),
    "chain": sr.RegexShardingRule([("embed", P(None, "data"))]) | sr.FSDPShardingRule("tp", min_size_mb=0),
    "limit": sr.MemoryConstrainedShardingRule(2**20, axis_names=("tp",)),
    "limit of the tree": sr.MemoryConstrainedShardingRule(2**30, axis_names=("tp",), scope="tree"),
    "specs": sr.SpecTreeShardingRule(jax.tree.map(lambda _: P("tp"), TREE)),
}


@pytest.mark.parametrize("name", LACKING)
def test_each_leaf_without_its_axis_is_listed(name: str) -> None:
    with pytest.raises(sr.errors.PlanError, match="unknown axis 'tp'") as caught:
        LACKING[name].plan(TREE, MESH).check()
    findings = [finding for finding in caught.value.findings if isinstance(finding, sr.Finding)]
    assert {finding.code for finding in findings} == {"unknown-axis"}
    assert {finding.path: finding.count for finding in findings} == {"embed": 1, "layers/*/b": 3, "layers/*/w": 3}
    for finding in findings:
        assert finding.axis == "tp"
        assert "unknown axis 'tp'; the mesh has data" in finding.message
        assert "FittedShardingRule" in finding.remedy


@pytest.mark.parametrize("name", LACKING)
def test_the_rule_around_it_is_the_way_out(name: str) -> None:
    plan = sr.FittedShardingRule(LACKING[name]).plan(TREE, MESH).check()
    assert any(finding.code == "fitted" and finding.axis == "tp" for finding in plan.findings)


def test_conflicts_and_missing_axes_are_raised_together() -> None:
    rule = sr.DimShardingRule("tp", 1)
    with pytest.raises(sr.errors.PlanError, match="3 leaves cannot be decided, and there are 4 other errors") as caught:
        rule.plan(TREE, MESH)
    codes = {finding.path: finding.code for finding in caught.value.findings if isinstance(finding, sr.Finding)}
    assert codes == {"layers/*/b": "conflict", "embed": "unknown-axis", "layers/*/w": "unknown-axis"}


def test_an_explanation_shows_the_missing_axis() -> None:
    rule = sr.CompositeShardingRule(sr.RegexShardingRule([(".*", P())]), sr.FSDPShardingRule("tp"))
    assert "unknown axis 'tp'" in rule.plan(TREE, MESH).explain("embed")
