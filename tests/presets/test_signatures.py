"""The functions that other libraries have, too, take their arguments by the same names and in the same order."""

import inspect
import operator
from collections.abc import Callable
from typing import Any

import pytest

import shardrules as sr
from shardrules import meshes, specs
from shardrules.presets import big_vision, eformer, pathways

# From eformer 0.0.101 (`escale`).
ESCALE: dict[str, str] = {
    "AutoShardingRule": "mesh, axis_names, min_shard_size, reverse",
    "AutoShardingRule.apply": "self, pytree",
    "CompositeShardingRule": "*rules",
    "MemoryConstrainedShardingRule": "max_memory_per_device, mesh, axis_names",
    "PartitionAxis.register": "self, semantic_axis, axis_rule, *, generation_axis_rule, override",
    "PartitionAxis.resolve_axis": "self, axes, mode",
    "PartitionAxis.resolve_spec": "self, axes, mode",
    "PartitionAxis.unregister": "self, semantic_axis, *, missing_ok",
    "PartitionManager": "paxis",
    "PartitionManager.resolve": "self, axes, mode, dynamic_axes, shape",
    "DynamicShardingAxes": "axes, mode",
    "ShapeBasedShardingRule": "shape_patterns",
    "ShardingAnalyzer": "mesh",
    "ShardingAnalyzer.estimate_memory_usage": "self, pytree, partition_specs",
    "ShardingAnalyzer.validate_partition_specs": "self, pytree, partition_specs",
    "ShardingRule.apply": "self, pytree",
    "analyze_sharding_strategy": "pytree, partition_specs, mesh",
    "auto_partition_spec": "x, mesh, names, min_sharding_size, reverse",
    "barrier_sync": "timeout",
    "calculate_host_mesh_shape": "global_mesh_shape, total_devices, num_processes",
    "cpu_context": "",
    "create_cpu_mesh": "axis_dims, axis_names",
    "create_mesh": (
        "axis_dims, axis_names, dcn_mesh_dims, should_sort_granules_by_key, allow_split_physical_axes, "
        "backend, use_jax, axis_types"
    ),
    "create_monitored_function": "fn, partition_specs, analyzer",
    "create_pattern_based_partition_spec": "pattern, mesh, default_spec",
    "extract_sharding_structure": "pytree",
    "extract_shardings": "tree, mesh",
    "force_cpu": "",
    "get_axes_size_in_mesh": "axis_names, mesh",
    "get_incontext_mesh": "raise_error",
    "get_mesh_axis_names": "mesh",
    "get_mesh_axis_size": "axis_names",
    "get_names_from_partition_spec": "partition_specs",
    "get_partition_spec": "tree",
    "get_shardings_with_structure": "pytree",
    "get_submesh_device_index": "axis_names",
    "make_shard_and_gather_fns": "partition_specs, mesh",
    "match_partition_rules": "rules, tree, min_size, strict",
    "names_in_current_mesh": "*names",
    "parse_mesh_from_string": "axis_dims, names",
    "with_sharding_constraint": "arr, sharding",
}

# From big_vision at commit 346536f, without what only logs (`log` of `make_mask_trees`).
BIG_VISION: dict[str, str] = {
    "check_and_compile_patterns": "patterns",
    "create_device_mesh": "config_mesh, *, allow_split_physical_axes",
    "infer_sharding": "params, strategy, mesh",
    "make_mask_trees": "tree, patterns",
    "parse_name": "string_to_parse",
    "tree_broadcast": "prefix, target",
    "tree_filter": "tree, mask",
    "tree_flatten_with_names": "tree",
}

# From pathways-utils 0.1.13.
PATHWAYS: dict[str, str] = {
    "concatenate_by_mesh_axis": "array_trees, mesh_axis",
    "find_intermediate_sharding": "in_sharding, out_sharding",
    "reshard": "x, sharding, *, donate, may_alias, cache_resharding_plans",
    "reshard_with_intermediate_sharding": "x, in_sharding, out_sharding, *, donate, may_alias, cache_resharding_plans",
    "reshard_with_intermediate_sharding_generic": (
        "x, in_sharding, out_sharding, *, jax_array_reshard_fn, donate, may_alias, **kwargs"
    ),
    "split_by_mesh_axis": "arrays, mesh_axis, mesh_axis_indices_or_sections, *, donate",
}

_POSITIONAL = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)

TABLE = {**ESCALE, **BIG_VISION, **PATHWAYS}


def ours(name: str) -> Callable[..., Any]:
    """The function or method of this name, in the package or in the first of its rooms that has it."""
    rooms = (sr, eformer, big_vision, pathways, meshes, specs)
    return operator.attrgetter(name)(next(room for room in rooms if name.partition(".")[0] in room.__all__))


def missing_arguments(fn: Callable[..., Any], theirs: str) -> list[str]:
    """The arguments of a signature of another library that `fn` does not take in the same way."""
    parameters = inspect.signature(fn).parameters.values()
    spelled = [_spelled(parameter) for parameter in parameters]
    by_position = [_spelled(parameter) for parameter in parameters if parameter.kind in _POSITIONAL]
    positional, _, keywords = theirs.partition("*, ")
    names = [name for name in positional.strip(", ").split(", ") if name]
    wrong = [name for name, ours in zip(names, [*by_position, *[""] * len(names)], strict=False) if name != ours]
    return [*wrong, *(name for name in keywords.split(", ") if name and name not in spelled)]


def _spelled(parameter: inspect.Parameter) -> str:
    return str(parameter.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty))


@pytest.mark.parametrize("name", TABLE)
def test_arguments_have_the_names_that_others_know(name: str) -> None:
    assert missing_arguments(ours(name), TABLE[name]) == []


def test_an_argument_that_is_missing_is_found() -> None:
    def fn(a: int, *, b: int = 0, **kwargs: int) -> None: ...

    assert missing_arguments(fn, "a, *, b, **kwargs") == []
    assert missing_arguments(fn, "x, *, b, c") == ["x", "c"]
    assert missing_arguments(fn, "a, b") == ["b"]
    assert missing_arguments(fn, "*a") == ["*a"]


def test_fields_of_partition_axes_have_the_names_that_others_know() -> None:
    fields = inspect.signature(eformer.PartitionAxis).parameters
    # Both versions of eformer have these; the later one says decode for generation.
    parallelism = ("data", "fully_sharded_data", "tensor", "sequence", "expert")
    logical = ("batch", "sequence", "query_sequence", "head", "kv_head", "key_sequence", "hidden_state")
    logical += ("mlp_intermediate", "vocab", "expert", "expert_gate", "attention_dim", "attention_kv_dim")
    logical += ("bias_head_sequence", "bias_key_sequence")
    generation = ("batch", "query_sequence", "head", "kv_head", "key_sequence", "attention_dim", "attention_kv_dim")
    names = [f"{name}_parallel_axis" for name in parallelism] + [f"{name}_axis" for name in logical]
    names += [f"{phase}_{name}_axis" for phase in ("generation", "decode") for name in generation]
    assert set(fields) == {*names, "registered"}
