"""The axes that a rule names, before there is a tree or a mesh."""

from collections.abc import Iterator

from jax.sharding import PartitionSpec

from shardrules.core.axes import axis_tuple
from shardrules.core.rule import ShardingRule
from shardrules.core.spec import axis_names
from shardrules.rules.fitted import FittedShardingRule


def named_axes(rule: ShardingRule) -> Iterator[str]:
    """Yields the axes that a rule and its parts name and that a mesh must have.

    ```python
    from shardrules.rules.named_axes import named_axes

    rule = sr.RegexShardingRule([("up", P("data", ("model", "seq")))]) | sr.FSDPShardingRule("fsdp")
    assert list(named_axes(rule)) == ["data", "model", "seq", "fsdp"]
    ```
    """
    # A rule with a mesh is for the axes of that one, and `fitted` drops what a mesh lacks.
    if rule.mesh is not None or isinstance(rule, FittedShardingRule):
        return
    for entry in rule.named_axes:
        if entry is not None:
            yield from axis_names(entry) if isinstance(entry, PartitionSpec) else axis_tuple(entry)
    for part in rule.parts:
        yield from named_axes(part)
