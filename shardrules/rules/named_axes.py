"""The axes that a rule names, before there is a tree or a mesh."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from shardrules.core.axes import axis_tuple
from shardrules.core.rule import ShardingRule, SpecTreeShardingRule
from shardrules.core.spec import axis_names
from shardrules.rules.auto import AutoShardingRule
from shardrules.rules.dim import DimShardingRule
from shardrules.rules.fitted import FittedShardingRule
from shardrules.rules.fsdp import FSDPShardingRule
from shardrules.rules.huggingface.rule import HuggingFaceShardingRule
from shardrules.rules.logical.rule import LogicalShardingRule
from shardrules.rules.memory import MemoryConstrainedShardingRule
from shardrules.rules.regex import RegexShardingRule
from shardrules.rules.shape_based import ShapeBasedShardingRule
from shardrules.rules.stacked import StackedShardingRule


def named_axes(rule: ShardingRule) -> Iterator[str]:
    """Yields the axes that a rule and its parts name and that a mesh must have; of rules of users none.

    ```python
    from shardrules.rules.named_axes import named_axes

    rule = sr.RegexShardingRule([("up", P("data", ("model", "seq")))]) | sr.FSDPShardingRule("fsdp")
    assert list(named_axes(rule)) == ["data", "model", "seq", "fsdp"]
    ```
    """
    # A rule with a mesh is for the axes of that one, and `fitted` drops what a mesh lacks.
    if rule.mesh is not None or isinstance(rule, FittedShardingRule):
        return
    axes: Sequence[Any] = ()
    specs: Sequence[Any] = ()
    match rule:
        case AutoShardingRule() | MemoryConstrainedShardingRule():
            axes = rule.axis_names or ()
        case DimShardingRule() | FSDPShardingRule() | StackedShardingRule():
            axes = (rule.axis,)
        case HuggingFaceShardingRule():
            axes = [axis for axis in (rule.tensor, rule.fsdp) if axis != "auto"]
        case LogicalShardingRule():
            axes = [axis for _, axis in rule.mapping]
        case RegexShardingRule():
            specs = [value for _, value in rule.rules]
        case ShapeBasedShardingRule():
            specs = [spec for _, spec in rule.shape_patterns]
        case SpecTreeShardingRule():
            specs = [spec for _, spec in rule.specs]
    for spec in specs:
        yield from axis_names(spec) if isinstance(spec, PartitionSpec) else ()
    for axis in axes:
        yield from () if axis is None else axis_tuple(axis)
    for part in rule.parts:
        yield from named_axes(part)
