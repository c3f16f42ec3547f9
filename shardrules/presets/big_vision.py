"""Coming from big_vision: its sharding strategies and the tree helpers around them, on the engine of shardrules."""

import ast
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh, Axis
from shardrules.core.errors import NoMeshError, SpecError, TreeError
from shardrules.core.rule import ShardingRule
from shardrules.core.spec import pad
from shardrules.core.tree import leaf_paths
from shardrules.rules.fsdp import FSDPShardingRule
from shardrules.rules.logical.rule import LogicalShardingRule
from shardrules.rules.pattern import check_beginning, compile_pattern
from shardrules.rules.regex import RegexShardingRule
from shardrules.rules.text import DEFAULT_OPS, Ops, parse_call, parse_rule, register_op

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
    """The op that reads the `flax.linen.logical_axis_rules` in force; without flax there can be none."""
    spmd = sys.modules.get("flax.core.spmd")
    return LogicalShardingRule([] if spmd is None else spmd.get_logical_axis_rules())


def _fsdp(axis: Axis, min_size_to_shard_mb: float = 4) -> ShardingRule:
    return FSDPShardingRule(axis, min_size_to_shard_mb)


BIG_VISION_OPS: Ops = register_op(
    register_op(DEFAULT_OPS, "logical_partitioning", _logical_partitioning), "fsdp", _fsdp, replace=True
)
"""The default ops under the names of big_vision: `fsdp` takes `min_size_to_shard_mb`, `logical_partitioning` reads the
flax logical axis rules in force."""


def infer_sharding(
    params: Any, strategy: Sequence[tuple[str, str]], mesh: AnyMesh | None = None, ops: Ops = BIG_VISION_OPS
) -> Any:
    """Returns the sharding of every array: that of the first pattern that matches its whole path.

    **Arguments:**

    - `params`: any pytree; fields of named tuples stand in paths by position (`0/1/w`).
    - `strategy`: (pattern, tactic) pairs. A tactic is a rule in text form, `"shard_dim('model', -1)|fsdp('data')"`.
    - `mesh`: the mesh; by default the one that the arrays are on, else the one in force.
    - `ops`: the known ops.

    **Returns:**

    A tree of `NamedSharding`s whose specs have an entry for each dimension. What no pattern matches is replicated.

    **Raises:**

    `PlanError`, listing every leaf with a conflict or with dimensions that do not divide; `UnknownOpError`;
    `PatternError`; `NoMeshError`.

    ```python
    from shardrules.presets import big_vision

    params = {"w": np.ones((1024, 4096), np.float32)}
    strategy = [(".*", "shard_dim('model', -1)|fsdp('data')")]
    found = big_vision.infer_sharding(params, strategy, sr.mesh_shape("data:2,model:4"))
    assert found["w"].spec == P("data", "model")
    ```
    """
    if not strategy:
        raise SpecError("infer_sharding needs a strategy: [('.*', 'replicate')] replicates everything")
    rules: list[tuple[str, ShardingRule]] = []
    for pattern, tactic in strategy:
        try:
            rules.append((pattern, parse_rule(tactic, ops)))
        except SpecError as error:
            raise SpecError(f"the tactic for pattern {pattern!r}: {error}") from error
    plan = RegexShardingRule(rules, match="fullmatch").plan(params, mesh, path_style="index").check()
    where = plan.mesh if mesh is None else mesh
    if where is None:
        raise NoMeshError("infer_sharding needs a mesh: pass one, or call inside jax.set_mesh(mesh)")
    specs = [
        pad(decision.spec or PartitionSpec(), leaf.ndim)
        for leaf, decision in zip(plan.kinds, plan.decisions, strict=True)
    ]
    return plan.survey.unflatten([NamedSharding(where, spec) for spec in specs], NamedSharding(where, PartitionSpec()))


def tree_flatten_with_names(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Returns (name, leaf) pairs in the order in which JAX flattens, and the structure.

    **Arguments:**

    - `tree`: any pytree.

    **Returns:**

    The pairs, with fields of named tuples by position, and the treedef. `None` is no leaf.

    ```python
    from shardrules.presets import big_vision

    assert big_vision.tree_flatten_with_names({"a": [1.0, None, 2.0]})[0] == [("a/0", 1.0), ("a/2", 2.0)]
    ```
    """
    leaves, treedef = jtu.tree_flatten(tree)
    return list(zip(leaf_paths(tree, "index"), leaves, strict=True)), treedef


def check_and_compile_patterns(patterns: str | Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """Returns patterns compiled.

    **Arguments:**

    - `patterns`: one, or several.

    **Returns:**

    A tuple of compiled patterns.

    **Raises:**

    `PatternError`, an `AssertionError`, when one begins with a slash or does not compile.

    ```python
    from shardrules.presets import big_vision

    assert [found.pattern for found in big_vision.check_and_compile_patterns("a/.*")] == ["a/.*"]
    ```
    """
    several = [patterns] if isinstance(patterns, str) else patterns
    compiled = tuple(compile_pattern(pattern, "check_and_compile_patterns") for pattern in several)
    for found in compiled:
        check_beginning(found.pattern, "check_and_compile_patterns")
    return compiled


def make_mask_trees(tree: Any, patterns: str | Sequence[str]) -> list[Any]:
    """Returns a tree of booleans for each pattern: whether it is the first that matches a leaf's whole name.

    **Arguments:**

    - `tree`: any pytree.
    - `patterns`: one, or several.

    **Returns:**

    As many trees as patterns.

    ```python
    from shardrules.presets import big_vision

    masks = big_vision.make_mask_trees({"a": 1.0, "b": 2.0}, ["a", ".*"])
    assert masks == [{"a": True, "b": False}, {"a": False, "b": True}]
    ```
    """
    compiled = check_and_compile_patterns(patterns)
    named, treedef = tree_flatten_with_names(tree)
    firsts = [next((at for at, one in enumerate(compiled) if one.fullmatch(name)), None) for name, _ in named]
    return [jtu.tree_unflatten(treedef, [first == at for first in firsts]) for at in range(len(compiled))]


def tree_broadcast(prefix: Any, target: Any) -> Any:
    """Returns a tree of the structure of `target` with the leaves of `prefix` repeated below where they stand.

    **Arguments:**

    - `prefix`: a tree that is a prefix of `target`.
    - `target`: any pytree.

    **Returns:**

    The broadcast tree.

    **Raises:**

    `TreeError`, a `ValueError`, when `prefix` is no prefix of `target`.

    ```python
    from shardrules.presets import big_vision

    assert big_vision.tree_broadcast({"x": 10}, {"x": {"a": 1, "b": 2}}) == {"x": {"a": 10, "b": 10}}
    ```
    """
    try:
        return jtu.tree_map(lambda leaf, below: jtu.tree_map(lambda _: leaf, below), prefix, target)
    except ValueError as error:
        raise TreeError(f"tree_broadcast: the first tree is no prefix of the second: {error}") from error


def tree_filter(tree: Any, mask: Any) -> Any:
    """Returns the part of nested dictionaries that a mask of booleans keeps.

    **Arguments:**

    - `tree`: nested dictionaries.
    - `mask`: dictionaries of the same keys; `False` takes out what stands there, `True` keeps it whole.

    **Returns:**

    A new tree.

    **Raises:**

    `TreeError` when the keys differ, or a leaf of the mask is no boolean.

    ```python
    from shardrules.presets import big_vision

    assert big_vision.tree_filter({"a": 1, "b": {"c": 2}}, {"a": False, "b": {"c": True}}) == {"b": {"c": 2}}
    ```
    """
    if isinstance(mask, bool):
        return tree
    if not isinstance(tree, dict) or not isinstance(mask, dict) or tree.keys() != mask.keys():
        raise TreeError(f"tree_filter: a mask of booleans with the keys of the tree is wanted, got {mask!r}")
    return {key: tree_filter(below, mask[key]) for key, below in tree.items() if mask[key] is not False}


def parse_name(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Returns name and literal arguments of `"name"` or `"name(1, key='value')"`; the name may have dots in it.

    **Arguments:**

    - `text`: the text.

    **Returns:**

    The name, the positional and the named arguments.

    **Raises:**

    `SpecError` when it has another form.

    ```python
    from shardrules.presets import big_vision

    assert big_vision.parse_name("resnet50(9, width=4)") == ("resnet50", [9], {"width": 4})
    ```
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise SpecError(f"{text!r} is not a name with literal arguments") from error
    name = node.func if isinstance(node, ast.Call) else node
    dotted = ast.unparse(name)
    if not isinstance(name, ast.Attribute) or not all(part.isidentifier() for part in dotted.split(".")):
        return parse_call(node, text)
    plain = ast.Name("name")
    _, args, named = parse_call(
        ast.Call(plain, node.args, node.keywords) if isinstance(node, ast.Call) else plain, text
    )
    return dotted, args, named
