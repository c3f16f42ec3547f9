"""Rules named on the command line: a TOML file, a Python object, a plan, or a rule as text."""

import re
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.files import read_text
from shardrules.cli.models import read_plan
from shardrules.cli.objects import NamedObject, is_object_name, load_object
from shardrules.cli.rules_file import LoadedRules, read_rules_file
from shardrules.core.errors import ShardRulesError
from shardrules.core.rule import ShardingRule
from shardrules.rules.regex import RegexShardingRule
from shardrules.rules.text import parse_rule

_TEXT = re.compile(r"\s*\w+\s*(\(.*\))?\s*(\|.*)?", re.DOTALL)


def load_rules(text: str) -> LoadedRules:
    """Loads rules: a TOML file, `module:rules` or `file.py:rules`, a plan's JSON, or a rule as text."""
    path = Path(text).expanduser()
    if path.suffix == ".toml":
        return read_rules_file(path)
    if path.suffix == ".json":
        return LoadedRules(read_plan(path).as_rule(), is_for_step="shardrules_autoplan" in read_text(path)[:100])
    if not path.exists() and is_object_name(text):
        return LoadedRules(_from_code(load_object(text)))
    if path.exists() or _TEXT.fullmatch(text) is None:
        raise UsageError(
            f"--rules {text}: rules are a .toml file, module:rules, file.py:rules, a plan's JSON, or a text such as "
            "\"shard_dim('model', 0)|fsdp('data')\""
        )
    try:
        return LoadedRules(parse_rule(text))
    except ShardRulesError as error:
        raise UsageError(f"--rules: {one_line(error)}") from error


def _from_code(named: NamedObject) -> ShardingRule:
    # Rules and classes are callable, but neither is a function that returns rules.
    value: Any = named.value if isinstance(named.value, ShardingRule | type) else named.call()
    if isinstance(value, ShardingRule):
        return value
    if _is_pairs(value):
        try:
            return RegexShardingRule(value)
        except ShardRulesError as error:
            raise UsageError(f"--rules {named.text}: {one_line(error)}") from error
    if isinstance(value, type) and issubclass(value, ShardingRule):
        raise UsageError(f"--rules {named.text} is a class, not a rule: name an instance, or write its arguments")
    raise UsageError(f"--rules {named.text} is a {type(value).__name__}, not a ShardingRule or (pattern, spec) pairs")


def _is_pairs(value: Any) -> bool:
    """Whether it is what many models call their partition rules: a list of (pattern, spec) pairs."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and not isinstance(value, PartitionSpec)
        and all(isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in value)
    )
