"""Rules as the text of a file that `load_rules` reads."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from shardrules.core.axes import Axis
from shardrules.core.errors import ConfigError
from shardrules.core.rule import ChainShardingRule, ShardingRule
from shardrules.core.spec import UNCONSTRAINED, entries
from shardrules.core.storage.records import toml_string
from shardrules.rules.dim import DimShardingRule
from shardrules.rules.files.reader import WHOLE, read_rules_text
from shardrules.rules.fsdp import FSDPShardingRule
from shardrules.rules.regex import RegexShardingRule


def spec_text(spec_entries: Sequence[Any]) -> str:
    """Returns the entries of a spec as a list of TOML."""
    return f"[{', '.join(map(_entry, spec_entries))}]"


def _entry(axes: Any) -> str:
    if axes is UNCONSTRAINED:
        return '"?"'
    if not axes:
        return toml_string(WHOLE)
    if {WHOLE, "?"} & set(axes):
        raise ConfigError(f"a file of rules cannot name the axis {axes!r}: {WHOLE!r} and '?' have meanings there")
    names = ", ".join(map(toml_string, axes))
    return names if len(axes) == 1 else f"[{names}]"


def rules_text(rule: RegexShardingRule, comments: Iterable[Sequence[str]] = ()) -> Iterator[str]:
    """Yields the lines of the tables of a rule, each pattern below the lines of its comment."""
    each = iter(comments)
    for pattern, value in rule.rules:
        yield ""
        for line in next(each, ()):
            yield f"# {line}"
        yield "[[rules]]"
        yield f"path = {toml_string(pattern)}"
        yield _value_text(value)


def _value_text(value: Any) -> str:
    if isinstance(value, PartitionSpec):
        return f"spec = {spec_text(entries(value))}"
    return f"rule = {toml_string(_rule_text(value))}"


def _rule_text(rule: ShardingRule) -> str:
    if isinstance(rule, ChainShardingRule):
        return " | ".join(map(_rule_text, rule.rules))
    if isinstance(rule, DimShardingRule) and not rule.ignore_ndim_error:
        return f"shard_dim({_axis(rule.axis)}, {rule.dim})"
    if isinstance(rule, FSDPShardingRule):
        return f"fsdp({_axis(rule.axis)}, min_size_mb={rule.min_size_mb:g})"
    raise ConfigError(f"{rule!r} has no text for a file of rules yet; write it by hand, as a table with a type")


def _axis(axis: Axis) -> str:
    return repr(axis)


def proved_text(lines: Iterable[str], rule: RegexShardingRule, file: Path) -> str:
    """Returns lines as the text of a file, which reads as `rule`."""
    text = "".join(f"{line}\n" for line in lines)
    again = read_rules_text(text, file).rules
    if again != rule:
        raise ConfigError(f"{file}: the rules would be read as {again!r:.400}, and are {rule!r:.400}")
    return text
