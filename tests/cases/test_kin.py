"""The acceptance cases that are known by description only: the tests' names describe them, inputs are chosen here."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.spec import same
from shardrules.presets import big_vision, eformer

DP_TP = sr.mesh_shape("dp:2,tp:4")
DATA_MODEL = sr.mesh_shape("data:2,model:4")


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def on_devices() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))


def specs_of(shardings: Any) -> Any:
    """The specs of a tree of shardings."""
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def messages(plan: sr.ShardingPlan, path_or_pattern: str) -> list[str]:
    """The findings of `plan` that name `path_or_pattern`, lower case."""
    return [f"{f.code} {f.message}".lower() for f in plan.findings if path_or_pattern in f"{f.path} {f.message}"]


# ---- E ----


def test_e07_patterns_are_searched_not_anchored() -> None:
    tree = {"mlp": {"down": f32(128, 128)}, "up": f32(128, 128)}
    specs = eformer.match_partition_rules([("w", P("dp")), (".*", P())], tree)
    assert specs == {"mlp": {"down": P("dp")}, "up": P()}


def test_e08_first_rule_wins_and_the_shadowed_one_is_reported() -> None:
    rules = [("a", P("dp")), ("a/b", P("tp"))]
    tree = {"a": {"b": f32(256, 256)}}
    assert eformer.match_partition_rules(rules, tree) == {"a": {"b": P("dp")}}
    plan = sr.RegexShardingRule(rules).plan(tree, DP_TP)
    assert plan.specs == {"a": {"b": P("dp")}}
    assert any("shadow" in message for message in messages(plan, "a/b"))


def test_e08_a_pattern_that_matches_nothing_is_reported_as_dead() -> None:
    rules = [("a", P("dp")), ("zebra", P("tp"))]
    plan = sr.RegexShardingRule(rules).plan({"a": {"b": f32(256, 256)}}, DP_TP)
    assert any("dead" in message for message in messages(plan, "zebra"))


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("attention", P("data")),
        ("layer/attention/q", P("data")),
        ("mlp", P("data")),
        ("hidden", P("model")),
        ("other", P()),
    ],
)
def test_e28_pattern_text_gives_a_function_of_the_name(name: str, spec: P) -> None:
    spec_of = eformer.create_pattern_based_partition_spec("attention|mlp->data,hidden->model", DATA_MODEL)
    assert spec_of(name, f32(8, 8)) == spec


def test_e29_pattern_text_needs_no_mesh_and_dots_separate_dimensions() -> None:
    spec_of = eformer.create_pattern_based_partition_spec("mlp->data.model", default_spec=P("data"))
    assert spec_of("mlp", f32(8, 8)) == P("data", "model")
    assert spec_of("other", f32(8, 8)) == P("data")


def test_e32_an_entry_of_two_axes_divides_by_both() -> None:
    analysis = eformer.analyze_sharding_strategy({"a": f32(8, 16)}, {"a": P(("dp", "tp"))}, DP_TP)
    assert analysis["memory_per_device"] == 64
    assert (analysis["total_parameters"], analysis["sharded_parameters"]) == (128, 128)


@pytest.mark.parametrize("extract", [sr.specs.extract_sharding_structure, eformer.get_shardings_with_structure])
def test_e33_named_shardings_are_kept_and_all_else_is_none(extract: Callable[[Any], Any]) -> None:
    sharding = NamedSharding(on_devices(), P("dp", "tp"))
    tree = {"a": jax.device_put(np.zeros((8, 16)), sharding), "b": jnp.zeros(3), "c": 1, "d": np.zeros(3)}
    assert extract(tree) == {"a": sharding, "b": None, "c": None, "d": None}


def test_e35_specs_are_read_from_arrays_and_numbers_are_replicated() -> None:
    sharding = NamedSharding(on_devices(), P("dp", "tp"))
    tree = {"a": jax.device_put(np.zeros((8, 16)), sharding), "b": 1, "c": 2.0, "d": True}
    assert sr.specs.get_partition_spec(tree) == {"a": P("dp", "tp"), "b": P(), "c": P(), "d": P()}


def test_e37_partition_axis_defaults_follow_the_mesh_dimensions() -> None:
    axes = eformer.PartitionAxis()
    assert axes.batch_axis == ("fsdp", "dp")
    for name in ("sequence_axis", "query_sequence_axis", "key_sequence_axis", "generation_key_sequence_axis"):
        assert getattr(axes, name) == "sp", name
    for name in ("head_axis", "hidden_state_axis", "mlp_intermediate_axis", "vocab_axis", "generation_head_axis"):
        assert getattr(axes, name) == "tp", name
    assert axes.expert_axis == "ep"
    for name in (
        *("expert_gate_axis", "attention_dim_axis", "bias_head_sequence_axis", "bias_key_sequence_axis"),
        *("generation_query_sequence_axis", "generation_attention_dim_axis"),
    ):
        assert getattr(axes, name) is None, name


def test_e37_the_generation_batch_is_not_split_by_default() -> None:
    assert eformer.PartitionAxis().generation_batch_axis is None


# ---- H ----


def test_h03_reverse_serves_the_smallest_dimension_first() -> None:
    tree = {"a": f32(8, 16)}
    both = sr.AutoShardingRule(DP_TP, axis_names=["dp", "tp"], min_shard_size=1, reverse=True)
    assert both.apply(tree) == {"a": P("dp", "tp")}
    one_axis = sr.AutoShardingRule(DP_TP, axis_names=["tp"], min_shard_size=1, reverse=True)
    assert same(one_axis.apply(tree)["a"], P("tp", None))


def test_h04_no_dimension_divides() -> None:
    spec = sr.AutoShardingRule(DP_TP, min_shard_size=1).apply({"a": f32(7, 9)})["a"]
    assert spec == P(None, None)


def test_h07_the_first_shape_pattern_wins_and_the_covered_one_is_reported() -> None:
    rule = sr.ShapeBasedShardingRule({(None, 1024): P("tp", None), (1024, 1024): P("dp", None)})
    plan = rule.plan({"a": f32(1024, 1024), "e": f32(32000, 1024)}, DP_TP)
    assert same(plan.specs["a"], P("tp", None))
    assert any("shadow" in message for message in messages(plan, "(1024, 1024)"))


def test_h09_a_limit_that_cannot_be_met_gives_the_best_there_is_and_a_finding() -> None:
    rule = sr.MemoryConstrainedShardingRule(16, DP_TP)
    plan = rule.plan({"a": f32(32, 32)})
    assert plan.specs == {"a": P("tp", "dp")}
    # 32 * 32 * 4 bytes over 8 devices: 512 bytes, where 16 were asked for.
    assert any("budget" in message and "512" in message and "16" in message for message in messages(plan, "a"))


# ---- U ----


def test_u09_none_and_the_empty_token_leave_a_dimension_whole() -> None:
    assert eformer.PartitionAxis().resolve_spec([None, eformer.EMPTY, eformer.HEAD], eformer.MODE_TRAIN) == P(
        None, None, "tp"
    )


def test_u10_a_composite_of_a_tuple_and_a_name_is_flat() -> None:
    assert eformer.PartitionAxis().resolve_spec([[eformer.BATCH, eformer.SP]], eformer.MODE_TRAIN) == P(
        ("fsdp", "dp", "sp")
    )


def test_u10_the_empty_token_inside_a_composite_adds_no_axis() -> None:
    spec = eformer.PartitionAxis().resolve_spec([[eformer.DP, eformer.EMPTY]], eformer.MODE_TRAIN)
    assert same(spec, P("dp"))


def test_u15_not_strict_means_no_test_of_shapes_at_all() -> None:
    tree = {"a": f32(2, 2), "s": f32()}
    assert eformer.match_partition_rules([(".*", P("tp"))], tree, strict=False) == {
        "a": P("tp"),
        "s": P("tp"),
    }
    with pytest.raises(ValueError, match="Partition rule not found for param: a"):
        eformer.match_partition_rules([("x", P("tp"))], {"a": f32()}, strict=False)


def test_u15_not_strict_means_python_numbers_too() -> None:
    assert eformer.match_partition_rules([(".*", P("tp"))], {"n": 3}, strict=False) == {"n": P("tp")}


# ---- B ----


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        pytest.param((1024, 2048), P(None, "data"), id="8 MiB"),
        pytest.param((1024, 1024), P(None, None), id="exactly 4 MiB"),
        pytest.param((1026, 1024), P("data", None), id="just over 4 MiB"),
    ],
)
def test_b02_fsdp_leaves_four_mebibytes_alone(shape: tuple[int, int], spec: P) -> None:
    shardings = big_vision.infer_sharding({"a": f32(*shape)}, [(".*", 'fsdp(axis="data")')], DATA_MODEL)
    assert specs_of(shardings) == {"a": spec}


def test_b17_patterns_match_whole_paths_and_the_rest_is_replicated() -> None:
    shardings = big_vision.infer_sharding({"a": {"k": f32(4, 8)}}, [("k", 'shard_dim("model", 0)')], DATA_MODEL)
    assert specs_of(shardings) == {"a": {"k": P(None, None)}}


def test_b19_an_op_of_ones_own_is_passed_in_and_nothing_global_changes() -> None:
    ops = sr.register_op(sr.DEFAULT_OPS, "first_dim", lambda axis: sr.DimShardingRule(axis, 0))
    strategy = [(".*", 'first_dim("model")')]
    shardings = big_vision.infer_sharding({"a": f32(4, 8)}, strategy, DATA_MODEL, ops=ops)
    assert specs_of(shardings) == {"a": P("model", None)}
    with pytest.raises(KeyError, match="first_dim"):
        big_vision.infer_sharding({"a": f32(4, 8)}, strategy, DATA_MODEL)


def test_b22_a_bar_inside_quotes_is_no_separator() -> None:
    ops = sr.register_op(sr.DEFAULT_OPS, "note", lambda text: sr.ReplicateShardingRule())
    shardings = big_vision.infer_sharding(
        {"a": f32(4, 8)}, [(".*", 'note("a|b")|shard_dim("model", 0)')], DATA_MODEL, ops=ops
    )
    assert specs_of(shardings) == {"a": P("model", None)}


def test_b25_fsdp_splits_the_moments_of_an_optimizer() -> None:
    state = jax.eval_shape(optax.adam(1e-3).init, {"w": {"kernel": f32(1024, 2048)}})
    specs = specs_of(big_vision.infer_sharding(state, [(".*", 'fsdp(axis="data")')], DATA_MODEL))
    assert specs[0].count == P()
    assert specs[0].mu == {"w": {"kernel": P(None, "data")}}
    assert specs[0].nu == {"w": {"kernel": P(None, "data")}}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    """A layer of a model that is a plain dataclass."""

    kernel: Any
    bias: Any


def test_b26_names_are_fields_keys_and_positions_and_none_is_skipped() -> None:
    tree = {"layers": [Block(kernel=1, bias=2), None, (3, None)], "head": None}
    named, treedef = big_vision.tree_flatten_with_names(tree)
    assert [(name, leaf) for name, leaf in named] == [("layers/0/kernel", 1), ("layers/0/bias", 2), ("layers/2/0", 3)]
    assert jax.tree.unflatten(treedef, [leaf for _, leaf in named]) == tree


def test_b27_each_leaf_is_in_the_mask_of_the_first_pattern_that_matches_it_whole() -> None:
    tree = {"a": {"k": 1, "b": 2}, "c": 3}
    first, second = big_vision.make_mask_trees(tree, ["a/k", "a/.*"])
    assert first == {"a": {"k": True, "b": False}, "c": False}
    assert second == {"a": {"k": False, "b": True}, "c": False}


def refuse_op(op: str, strategy: bool = True) -> Callable[[], Any]:
    return lambda: big_vision.infer_sharding({"kernel": f32(4, 8)}, [(".*", op)] if strategy else [], DATA_MODEL)


def refuse_axis(name: str) -> Callable[[], Any]:
    fields: dict[str, Any] = {name: ...}
    return lambda: eformer.PartitionAxis(**fields)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "e29 a rule without an arrow": (
        lambda: eformer.create_pattern_based_partition_spec("attention,mlp->data", DATA_MODEL),
        "attention",
    ),
    "e39 an open field without a default": (refuse_axis("data_parallel_axis"), "data_parallel_axis"),
    "e39 an open field of biases": (refuse_axis("bias_key_sequence_axis"), "bias_key_sequence_axis"),
    "u09 an unknown logical axis": (
        lambda: eformer.PartitionAxis().resolve_spec(["__NOPE__"], eformer.MODE_TRAIN),
        "__NOPE__",
    ),
    "b10 a dimension out of range": (refuse_op('shard_dim("model", 2)'), r"kernel(?s:.*)\(4, 8\)"),
    "b10 a negative dimension out of range": (refuse_op('shard_dim("model", -3)'), r"kernel(?s:.*)\(4, 8\)"),
    "b14 replicate after a split": (refuse_op('shard_dim("model", 0)|replicate'), "kernel"),
    "b19 arguments of ops that are not literals": (
        refuse_op("shard_dim(axis_name, 0)"),
        r"shard_dim\(axis_name, 0\)",
    ),
    "b21 an empty strategy": (refuse_op("", strategy=False), r"strategy(?s:.*)replicate"),
    "b22 a text that does not parse": (refuse_op('shard_dim("model", 0'), re.escape('shard_dim("model", 0')),
    "b27 a pattern with a leading slash": (
        lambda: big_vision.make_mask_trees({"a": 1}, ["/a"]),
        "never start with '/'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused_by_name(name: str) -> None:
    call, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        call()
