"""Coming from big_vision: its sharding strategies and the tree helpers around them, on the engine of shardrules."""

import ast
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh, Axis
from shardrules.core.errors import ConfigError, NoMeshError, TreeError
from shardrules.core.patterns import compile_pattern
from shardrules.core.rule import ShardingRule
from shardrules.core.spec import pad
from shardrules.core.tree import leaf_paths
from shardrules.rules.fsdp import FSDPShardingRule
from shardrules.rules.logical import LogicalShardingRule
from shardrules.rules.pattern import check_beginning
from shardrules.rules.regex import RegexShardingRule
from shardrules.rules.text import DEFAULT_OPS, Ops, parse_call, parse_expression, parse_rule, register_op

__all__ = [
    "BIG_VISION_OPS",
    "check_and_compile_patterns",
    "infer_sharding",
    "make_mask_trees",
    "parse_name",
    "tree_broadcast",
    "tree_filter",
    "tree_flatten_with_names",
]


def _logical_partitioning() -> ShardingRule:
    """The op that uses the `flax.linen.logical_axis_rules` in force; without flax it has no opinion."""
    # If the program has not imported flax, it has set no rules.
    spmd = sys.modules.get("flax.core.spmd")
    return LogicalShardingRule([] if spmd is None else spmd.get_logical_axis_rules())


def _fsdp(axis: Axis, min_size_to_shard_mb: float = 4) -> ShardingRule:
    return FSDPShardingRule(axis, min_size_to_shard_mb)


BIG_VISION_OPS: Ops = register_op(
    register_op(DEFAULT_OPS, "logical_partitioning", _logical_partitioning), "fsdp", _fsdp, replace=True
)
"""The default ops with the names of big_vision: `fsdp` takes `min_size_to_shard_mb`, `logical_partitioning` uses the
flax logical axis rules in force."""


def infer_sharding(
    params: Any, strategy: Sequence[tuple[str, str]], mesh: AnyMesh | None = None, ops: Ops = BIG_VISION_OPS
) -> Any:
    """Returns the sharding of every array, from the tactic of the first pattern that matches its whole path.

    A tactic in `strategy` is a rule in text form, `"shard_dim('model', -1)|fsdp('data')"`, made of `ops`. Fields of
    named tuples occur in paths by position (`0/1/w`). The mesh is by default the one that the arrays are on, else the
    one in force. Specs have an entry for each dimension; what no pattern matches is replicated. A `PlanError` lists
    every leaf with a conflict or with dimensions that do not divide.

    ```python
    from shardrules.presets import big_vision

    params = {"w": np.ones((1024, 4096), np.float32)}
    strategy = [(".*", "shard_dim('model', -1)|fsdp('data')")]
    shardings = big_vision.infer_sharding(params, strategy, sr.mesh_shape("data:2,model:4"))
    assert shardings["w"].spec == P("data", "model")
    ```
    """
    if not strategy:
        raise ConfigError("infer_sharding needs a strategy: [('.*', 'replicate')] replicates everything")
    rules: list[tuple[str, ShardingRule]] = []
    for pattern, tactic in strategy:
        try:
            rules.append((pattern, parse_rule(tactic, ops)))
        except ConfigError as error:
            raise ConfigError(f"infer_sharding: the tactic for pattern {pattern!r}: {error}") from error
    # big_vision matches whole paths, and names the fields of named tuples by position.
    plan = RegexShardingRule(rules, match="fullmatch").plan(params, mesh, path_style="index").check()
    mesh = plan.mesh if mesh is None else mesh
    if mesh is None:
        raise NoMeshError("infer_sharding needs a mesh: pass one, or call inside jax.set_mesh(mesh)")
    specs = [
        pad(decision.spec or PartitionSpec(), leaf.ndim)
        for leaf, decision in zip(plan.kinds, plan.decisions, strict=True)
    ]
    return plan.survey.unflatten([NamedSharding(mesh, spec) for spec in specs], NamedSharding(mesh, PartitionSpec()))


def tree_flatten_with_names(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Returns (name, leaf) pairs in the order in which JAX flattens, with fields of named tuples by position.

    The second value is the treedef. `None` is not a leaf.

    ```python
    from shardrules.presets import big_vision

    assert big_vision.tree_flatten_with_names({"a": [1.0, None, 2.0]})[0] == [("a/0", 1.0), ("a/2", 2.0)]
    ```
    """
    leaves, treedef = jtu.tree_flatten(tree)
    return list(zip(leaf_paths(tree, "index"), leaves, strict=True)), treedef


def check_and_compile_patterns(patterns: str | Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """Compiles one pattern or several. A pattern must not begin with a slash."""
    pattern_list = [patterns] if isinstance(patterns, str) else patterns
    regexes = tuple(compile_pattern(pattern, "check_and_compile_patterns") for pattern in pattern_list)
    for regex in regexes:
        check_beginning(regex.pattern, "check_and_compile_patterns")
    return regexes


def make_mask_trees(tree: Any, patterns: str | Sequence[str]) -> list[Any]:
    """Returns a tree of booleans for each pattern: whether it is the first that matches a leaf's whole name.

    ```python
    from shardrules.presets import big_vision

    masks = big_vision.make_mask_trees({"a": 1.0, "b": 2.0}, ["a", ".*"])
    assert masks == [{"a": True, "b": False}, {"a": False, "b": True}]
    ```
    """
    regexes = check_and_compile_patterns(patterns)
    named_leaves, treedef = tree_flatten_with_names(tree)
    names = [name for name, _ in named_leaves]
    first_matches = [
        next((index for index, regex in enumerate(regexes) if regex.fullmatch(name)), None) for name in names
    ]
    return [jtu.tree_unflatten(treedef, [match == index for match in first_matches]) for index in range(len(regexes))]


def tree_broadcast(prefix: Any, target: Any) -> Any:
    """Returns a tree of the structure of `target`, with each leaf of `prefix` repeated for the leaves below it.

    ```python
    from shardrules.presets import big_vision

    assert big_vision.tree_broadcast({"x": 10}, {"x": {"a": 1, "b": 2}}) == {"x": {"a": 10, "b": 10}}
    ```
    """
    try:
        return jtu.tree_map(lambda leaf, subtree: jtu.tree_map(lambda _: leaf, subtree), prefix, target)
    except ValueError as error:
        raise TreeError(f"tree_broadcast: the first tree is not a prefix of the second: {error}") from error


def tree_filter(tree: Any, mask: Any) -> Any:
    """Returns the part of nested dictionaries where `mask`, booleans in dictionaries with the same keys, is true.

    A boolean may stand for a whole subtree.

    ```python
    from shardrules.presets import big_vision

    assert big_vision.tree_filter({"a": 1, "b": {"c": 2}}, {"a": False, "b": {"c": True}}) == {"b": {"c": 2}}
    ```
    """
    # Below a dictionary only `True` gets here. A bare `False` keeps the tree, as it does in big_vision.
    if isinstance(mask, bool):
        return tree
    if not isinstance(tree, dict) or not isinstance(mask, dict) or tree.keys() != mask.keys():
        raise TreeError(f"tree_filter: the mask must hold booleans under the keys of the tree, got {mask!r}")
    return {key: tree_filter(subtree, mask[key]) for key, subtree in tree.items() if mask[key] is not False}


def parse_name(string_to_parse: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Returns the name and the literal arguments of `"name"` or `"name(1, key='value')"`; a name may have dots.

    ```python
    from shardrules.presets import big_vision

    assert big_vision.parse_name("resnet50(9, width=4)") == ("resnet50", [9], {"width": 4})
    ```
    """
    node = parse_expression(string_to_parse)
    name, parts = node.func if isinstance(node, ast.Call) else node, []
    while isinstance(name, ast.Attribute):
        parts.append(name.attr)
        name = name.value
    # The name of an op has no dots, so the parts become one name.
    if parts and isinstance(name, ast.Name):
        dotted = ast.Name(".".join([name.id, *reversed(parts)]))
        node = ast.Call(dotted, node.args, node.keywords) if isinstance(node, ast.Call) else dotted
    return parse_call(node, string_to_parse)
