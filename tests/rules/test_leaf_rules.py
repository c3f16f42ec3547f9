"""The rules that look at one leaf: each parameter, each boundary, each tie, each error.

One file for `auto.py`, `dim.py`, `fsdp.py`, `replicate.py` and `logical/rule.py`, which share the cases at the end.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.spmd import logical_to_mesh_axes
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.presets import big_vision

MESH = sr.mesh_shape("data:4,model:2,one:1")


def leaf(*shape: int, dtype: Any = jnp.float32, spec: P | None = None, axes: Any = None) -> sr.Leaf:
    return sr.Leaf("a/w", shape, dtype, MESH, spec, axes)


def refusal(rule: sr.LeafShardingRule, leaf: sr.Leaf) -> str:
    with pytest.raises(sr.errors.RuleError, match=r"a/w \(") as caught:
        rule.decide(leaf)
    return str(caught.value)


# ---- AutoShardingRule ----


@pytest.mark.parametrize(
    ("shape", "options", "spec"),
    [
        ((8, 16), {}, P("model", "data")),  # the largest dimension takes the first axis
        ((8, 16), {"reverse": True}, P("data", "model")),
        ((16, 16), {}, P("data", "model")),  # ties: the lowest dimension first
        ((16, 16), {"reverse": True}, P("data", "model")),
        ((8, 16), {"axis_names": ["model", "data"]}, P("data", "model")),
        ((8, 16), {"axis_names": [("data", "model")]}, P(None, ("data", "model"))),
        ((8, 16), {"axis_names": [("data", "model"), "data"]}, P(None, ("data", "model"))),  # each axis once
        ((8, 16), {"axis_names": [("data", "model"), "model"]}, P(None, ("data", "model"))),
        ((6, 6), {}, P("model", None)),  # 4 does not divide 6, and 2 is used once
        ((2, 4, 8), {}, P(None, "model", "data")),
        ((7, 9), {"min_shard_size": 0}, None),
        ((7,), {}, None),
        ((8,), {}, P("data")),  # 8 elements for 8 devices are not fewer
        ((7,), {"min_shard_size": 7}, None),
        ((4,), {"min_shard_size": 4}, P("data")),
        ((4,), {"min_shard_size": 5}, None),
        ((), {"min_shard_size": 0}, None),
        ((0, 8), {"min_shard_size": 0}, P("model", "data")),
        ((0, 8), {}, None),
    ],
)
def test_auto_splits_the_largest_dimensions_first(shape: tuple[int, ...], options: Any, spec: P | None) -> None:
    assert sr.AutoShardingRule(**options).decide(leaf(*shape)).spec == spec


# ---- FSDPShardingRule ----


@pytest.mark.parametrize(
    ("shape", "axis", "spec"),
    [
        ((8, 16), "data", P(None, "data")),
        ((16, 16), "data", P(None, "data")),  # ties: the last dimension
        ((16, 6), "data", P("data", None)),
        ((6, 6), "data", None),
        ((8, 24), ("data", "model"), P(None, ("data", "model"))),
        ((8, 12), ("data", "model"), P(("data", "model"), None)),
        ((), "data", None),
        ((8, 4), "one", P("one", None)),
    ],
)
def test_fsdp_splits_the_largest_dimension(shape: tuple[int, ...], axis: Any, spec: P | None) -> None:
    assert sr.FSDPShardingRule(axis, 0).decide(leaf(*shape)).spec == spec


MIB_OF_FLOATS = (512, 512)


@pytest.mark.parametrize(
    ("limit", "dtype", "split"),
    [(1, jnp.float32, False), (0.999, jnp.float32, True), (0.5, jnp.bfloat16, False), (0.125, jnp.int4, False)],
)
def test_fsdp_skips_arrays_of_few_bytes(limit: float, dtype: Any, split: bool) -> None:
    decision = sr.FSDPShardingRule("data", limit).decide(leaf(*MIB_OF_FLOATS, dtype=dtype))
    assert (decision.spec is not None) == split
    assert split or decision.reason == f"at most {limit} MiB"


# ---- DimShardingRule ----


@pytest.mark.parametrize(
    ("dim", "axis", "spec"),
    [
        (0, "data", P("data", None, None)),
        (-1, "model", P(None, None, "model")),
        (-3, "data", P("data", None, None)),
        (1, ("data", "model"), P(None, ("data", "model"), None)),
        (2, ["model"], P(None, None, "model")),
    ],
)
def test_dim_splits_the_dimension(dim: int, axis: Any, spec: P) -> None:
    assert sr.specs.same(sr.DimShardingRule(axis, dim).decide(leaf(8, 8, 8)).spec or P(), spec)


@pytest.mark.parametrize("dim", [2, -3])
def test_dim_refuses_a_missing_dimension(dim: int) -> None:
    message = refusal(sr.DimShardingRule("data", dim), leaf(8, 8))
    assert f"Cannot shard_dim(data, {dim}): name=a/w cur_spec=(None, None): it has 2 dimensions" in message
    assert "ignore_ndim_error=True" in message
    lenient = sr.DimShardingRule("data", dim, ignore_ndim_error=True).decide(leaf(8, 8))
    assert lenient.spec is None
    assert [(finding.severity, finding.code, finding.path) for finding in lenient.findings] == [
        ("warning", "no-such-dim", "a/w")
    ]


# ---- LogicalShardingRule ----

NAMES = {"embed": "data", "mlp": ("model",), "heads": None, "batch": ("data", "model")}
TWICE = sr.LogicalShardingRule([("a", "data"), ("a", "model")])
U = P.UNCONSTRAINED


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        (("embed", "mlp"), P("data", "model")),
        (("heads", "embed"), P(None, "data")),
        ((None, "mlp"), P(None, "model")),
        (("batch", None), P(("data", "model"))),
        (("heads", None), P()),
        (None, None),
    ],
)
def test_logical_maps_names_to_axes(axes: Any, spec: P | None) -> None:
    actual = sr.LogicalShardingRule(NAMES).decide(leaf(8, 8, axes=axes)).spec
    assert actual is None if spec is None else sr.specs.same(actual or P("none"), spec)


def test_a_name_takes_the_first_of_its_axes_that_is_free() -> None:
    rule = sr.LogicalShardingRule([("embed", "data"), ("mlp", "data"), ("mlp", "model")])
    assert rule.decide(leaf(8, 8, axes=("embed", "mlp"))).spec == P("data", "model")
    assert rule.decide(leaf(8, 8, axes=("mlp", None))).spec == P("data", None)


def test_of_two_names_on_an_axis_the_earlier_pair_wins() -> None:
    rule = sr.LogicalShardingRule({"b": "data", "a": "data"})
    decision = rule.decide(leaf(8, 8, axes=("a", "b")))
    assert (decision.spec, decision.reason) == (P(None, "data"), "logical axes a->whole, b->data")
    (finding,) = decision.findings
    assert (finding.severity, finding.code, finding.path) == ("warning", "lost-logical-axis", "a/w")
    assert (finding.shape, finding.dim, finding.axis) == ((8, 8), 0, "data")
    assert "logical axes 'b' and 'a' both map to mesh axis 'data', and 'b' comes first" in finding.message
    on_purpose = sr.LogicalShardingRule([("b", "data"), ("a", "data"), ("a", None)])
    assert on_purpose.decide(leaf(8, 8, axes=("a", "b"))).findings == ()


LOGICAL = st.sampled_from(["a", "b", "c", "d"])
MESH_AXES = st.sampled_from([None, "x", "y", "z", ("x", "y"), ("y", "z"), ("z",)])


@given(
    rules=st.lists(st.tuples(LOGICAL, MESH_AXES), max_size=8),
    axes=st.lists(LOGICAL | st.none(), max_size=4).filter(
        lambda names: len([name for name in names if name]) == len({name for name in names if name})
    ),
)
def test_logical_agrees_with_flax(rules: Any, axes: list[str | None]) -> None:
    shape, mesh = (8,) * len(axes), sr.mesh_shape("x:2,y:2,z:2")
    decision = sr.LogicalShardingRule(rules).decide(sr.Leaf("w", shape, jnp.float32, mesh, None, tuple(axes)))
    assert sr.specs.same(decision.spec or P(), logical_to_mesh_axes(axes, rules) or P())
    box = nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), tuple(axes))
    with nn.logical_axis_rules(rules):
        placed = big_vision.infer_sharding({"w": box}, [(".*", "logical_partitioning")], mesh)
    assert sr.specs.same(placed["w"].spec, decision.spec or P())


# ---- after an earlier rule, and what is refused ----


@pytest.mark.parametrize(
    ("rule", "array", "spec", "reason"),
    [
        (sr.AutoShardingRule(), leaf(8, 16, spec=P(None, "data")), P("model", "data"), "largest dims first"),
        (sr.AutoShardingRule(), leaf(16, 8, spec=P(("data", "model"))), None, "no free axis"),
        (sr.FSDPShardingRule("data", 0), leaf(8, 16, spec=P(None, "model")), P("data", "model"), "largest free dim"),
        (sr.FSDPShardingRule("data", 0), leaf(8, 16, spec=P(None, "data")), None, "no free dimension is a multiple of"),
        (sr.LogicalShardingRule(NAMES), leaf(8, 8, axes=("embed", "mlp"), spec=P(U)), P(U, "model"), "logical axes"),
        (sr.LogicalShardingRule({"a": None}), leaf(8, 8, axes=("a", "a")), P(None, None), "logical axes a->whole"),
        (TWICE, leaf(8, 8, axes=("a", "a")), P("data", "model"), "logical axes a->data, a->model"),
        (sr.ReplicateShardingRule(), leaf(8, 8), P(), ""),
    ],
    ids=repr,
)
def test_earlier_decisions_are_refined(rule: sr.LeafShardingRule, array: sr.Leaf, spec: P | None, reason: str) -> None:
    decision = rule.decide(array)
    assert (decision.spec, decision.findings) == (spec, ())
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("rule", "array", "message"),
    [
        (
            sr.AutoShardingRule(axis_names=["modle"]),
            leaf(8, 8),
            "unknown axis 'modle' (did you mean 'model'?); the mesh",
        ),
        (sr.FSDPShardingRule("dta"), leaf(2), "unknown axis 'dta' (did you mean 'data'?)"),
        (
            sr.DimShardingRule("model", 1),
            leaf(8, 8, spec=P(None, "data")),
            "Already sharded: shard_dim(model, 1): name=",
        ),
        (sr.DimShardingRule("data", 0), leaf(8, 8, spec=P(U)), "cur_spec=(UNCONSTRAINED, None)"),
        (sr.DimShardingRule("data", 0), leaf(8, 8, spec=P(None, "data")), "'data'"),
        (
            sr.LogicalShardingRule({"a": "data"}),
            leaf(8, 8, axes=("a", None), spec=P(None, "data")),
            "an earlier rule uses",
        ),
        (sr.LogicalShardingRule(NAMES), leaf(8, 8, axes=("embed",)), "1 logical names ('embed',) for 2 dimensions"),
        (sr.ReplicateShardingRule(), leaf(8, 8, spec=P("data")), "'data'"),
    ],
    ids=repr,
)
def test_what_does_not_fit_an_earlier_decision_is_refused(
    rule: sr.LeafShardingRule, array: sr.Leaf, message: str
) -> None:
    assert message in refusal(rule, array)


def test_repeating_an_earlier_decision_is_not_a_conflict() -> None:
    array = leaf(8, 8, spec=P("data"))
    assert array.refine(P("data", "model"), "").spec == P("data", "model")
    assert array.refine(P("data"), "").spec == P("data", None)


UNTYPED: Any = sr
"""The package, for calls that a type checker would refuse."""

UNREDUCED = P("a", unreduced=frozenset({"b"}))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: UNTYPED.DimShardingRule("data", "x"), "dim must be an integer, got 'x'"),
        (lambda: UNTYPED.DimShardingRule("data", 1.0), "dim must be an integer, got 1.0"),
        (lambda: UNTYPED.DimShardingRule(None, 0), "a mesh axis must be a name"),
        (lambda: UNTYPED.FSDPShardingRule("data", "4"), "min_size_mb must be a number of MiB, 0 or more; got '4'"),
        (lambda: UNTYPED.FSDPShardingRule("data", float("nan")), "0 or more; got nan"),
        (lambda: UNTYPED.AutoShardingRule(min_shard_size=-1), "min_shard_size must be 0 or more, got -1"),
        (lambda: UNTYPED.AutoShardingRule("data:4"), "a mesh must be a Mesh or an AbstractMesh, got 'data:4'"),
        (lambda: UNTYPED.FSDPShardingRule("data", -1), "0 or more; got -1"),
        (lambda: UNTYPED.LogicalShardingRule(3), "must be a dictionary or pairs.*; got 3"),
        (lambda: UNTYPED.MemoryConstrainedShardingRule(8, "data:4"), "a mesh must be a Mesh or an AbstractMesh"),
        (lambda: UNTYPED.MemoryConstrainedShardingRule("1GB"), "max_memory_per_device must be a number of bytes"),
        (lambda: UNTYPED.MemoryConstrainedShardingRule(-1), "0 or more; got -1"),
        (lambda: UNTYPED.MemoryConstrainedShardingRule(8, scope="all"), "scope must be one of 'array', 'tree'; got"),
        (lambda: UNTYPED.MemoryConstrainedShardingRule(8, axis_names=[3]), "a mesh axis must be a name"),
        (lambda: UNTYPED.RegexShardingRule([], min_size=-1), "min_size must be 0 or more"),
        (lambda: UNTYPED.RegexShardingRule([("w", P(3))]), r"'w': an entry of a PartitionSpec must be .* got 3"),
        (lambda: UNTYPED.RegexShardingRule([("w", UNREDUCED)]), r"'w': P\('a', unreduced=.*reductions"),
        (lambda: UNTYPED.ShapeBasedShardingRule({8: P()}), "takes shapes and specs"),
        (lambda: UNTYPED.ShapeBasedShardingRule({(8,): "data"}), r"\(8,\): 'data' is not a shape"),
        (lambda: UNTYPED.ShapeBasedShardingRule({(8,): UNREDUCED}), r"\(8,\): P\('a', unreduced=.*reductions"),
        (lambda: UNTYPED.SpecTreeShardingRule({"w": UNREDUCED}), r"\n  w: P\('a', unreduced=.*reductions"),
        (lambda: UNTYPED.LogicalShardingRule({"a": 3}), "a mesh axis must be a name"),
        (lambda: UNTYPED.LogicalShardingRule("ab"), "must be a dictionary or pairs.*; got 'ab'"),
        (lambda: UNTYPED.FittedShardingRule("fsdp('data')"), r"FittedShardingRule takes ShardingRules.*parse_rule"),
        (lambda: UNTYPED.StackedShardingRule(P("data")), "StackedShardingRule takes ShardingRules"),
        (lambda: UNTYPED.StackedShardingRule(sr.ReplicateShardingRule(), 0), "dims must be 1 or more, got 0"),
    ],
)
def test_invalid_arguments_raise(make: Any, match: str) -> None:
    with pytest.raises(sr.errors.ShardRulesError, match=match):
        make()


def test_numbers_of_other_types_are_accepted() -> None:
    assert UNTYPED.MemoryConstrainedShardingRule(16e9).max_memory_per_device == 16_000_000_000
    assert UNTYPED.MemoryConstrainedShardingRule(np.int64(1024)) == sr.MemoryConstrainedShardingRule(1024)
    for half in (np.float32(0.5), np.float64(0.5)):
        assert repr(UNTYPED.FSDPShardingRule("data", half)) == "FSDPShardingRule(axis='data', min_size_mb=0.5)"
    assert UNTYPED.FSDPShardingRule("data", np.int8(2)) == sr.FSDPShardingRule("data", 2)
    assert sr.AutoShardingRule(axis_names="data") == sr.AutoShardingRule(axis_names=["data"])
    assert sr.DimShardingRule("data", np.int64(-1)) == sr.DimShardingRule("data", -1)


@pytest.mark.parametrize("mesh", ["data:4", 8, ("data", "model")], ids=str)
def test_plan_needs_a_mesh(mesh: Any) -> None:
    with pytest.raises(sr.errors.AxisTypeError, match=r"a mesh must be a Mesh or an AbstractMesh, got .*mesh_shape"):
        sr.AutoShardingRule().plan({"w": np.ones(8)}, mesh)


# ---- after a rule that leaves a dimension unconstrained, or has too many entries ----


@pytest.mark.parametrize("spec", [P(P.UNCONSTRAINED, None), P(None, None, None)], ids=str)
@pytest.mark.parametrize(
    "rule",
    [
        sr.DimShardingRule("data", 1),
        sr.FSDPShardingRule("data", 0),
        sr.AutoShardingRule(axis_names=["data"]),
        sr.MemoryConstrainedShardingRule(64, axis_names=["data"]),
        sr.MemoryConstrainedShardingRule(64, axis_names=["data"], scope="tree"),
        sr.LogicalShardingRule({"embed": None, "mlp": "data"}),
        sr.StackedShardingRule(sr.FSDPShardingRule("data", 0)),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_earlier_decisions_stay(rule: sr.ShardingRule, spec: P) -> None:
    tree = {"w": nn.LogicallyPartitioned(jax.ShapeDtypeStruct((8, 8), jnp.float32), ("embed", "mlp"))}
    plan = (sr.RegexShardingRule([("w", spec)]) | rule).plan(tree, MESH)
    entries = plan.specs["w"].partitions
    assert entries.count("data") == 1
    assert len(entries) == len(spec.partitions)
    assert all(new == old for old, new in zip(spec.partitions, entries, strict=True) if old is not None)
    assert ("rank-overflow" in [finding.code for finding in plan.findings]) == (len(entries) > 2)
