"""Rules named on the command line: a TOML file, a Python object, a plan, or a rule as text."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import attrs
from jax.sharding import AbstractMesh, PartitionSpec

from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.files import named_path, read_text
from shardrules.cli.models import is_of_arguments, read_plan
from shardrules.cli.objects import NamedObject, load_object
from shardrules.core.errors import RulesFileError, ShardRulesError, suggest
from shardrules.core.rule import ShardingRule
from shardrules.rules.files.reader import read_rules_file
from shardrules.rules.files.rules_file import RulesFile
from shardrules.rules.named_axes import named_axes
from shardrules.rules.regex import RegexShardingRule
from shardrules.rules.text import is_object_name, parse_rule

_NAME = re.compile(r"\s*\w+\s*")


@final
@attrs.frozen
class LoadedRules:
    """Rules that the command line named."""

    file: RulesFile
    """The rules, and what else their file says, if they come from one."""
    is_for_step: bool = False
    """The rules are for all arguments of a step, as a plan from autoplan is, and not for a model."""

    def check_axes(self, mesh: AbstractMesh) -> None:
        """Raises a `UsageError` with the line and the key path of each axis in the file that a mesh lacks."""
        try:
            self.file.check_axes(mesh)
        except RulesFileError as error:
            raise UsageError(str(error)) from error

    def check_axis_names(self, names: Sequence[str], reason: str) -> None:
        """Raises a `UsageError` for axes that are not among `names`, with their places in the file, if there is one."""
        try:
            self.file.check_axis_names(names, reason)
        except RulesFileError as error:
            raise UsageError(str(error)) from error
        unknown = [name for name in dict.fromkeys(named_axes(self.file.rules)) if name not in names]
        if unknown:
            listing = ", ".join(f"{name!r}{suggest(name, names)}" for name in unknown)
            raise UsageError(f"unknown axis {listing}; {reason}. Correct the rules, or drop it with FittedShardingRule")


def load_rules(text: str) -> LoadedRules:
    """Loads rules: a TOML file, `module:rules` or `file.py:rules`, a plan's JSON, or a rule as text."""
    path = named_path(text)
    if path.suffix == ".toml":
        return _from_file(path)
    if path.suffix == ".json":
        return LoadedRules(RulesFile(read_plan(path).as_rule()), is_for_step=is_of_arguments(read_text(path)))
    # A folder, or a file of another kind, can never be rules: one of this name hides no object and no rule.
    if is_object_name(text) and (path.is_dir() or not path.exists()):
        return LoadedRules(RulesFile(_from_code(load_object(text))))
    if any(char in text for char in "('|") or _NAME.fullmatch(text):
        try:
            return LoadedRules(RulesFile(parse_rule(text)))
        except ShardRulesError as error:
            # A file of this name is reported instead: it was probably meant.
            if not path.exists():
                raise UsageError(f"--rules: {one_line(error)}") from error
    kind = "a folder" if path.is_dir() else "a file of another kind" if path.exists() else "not a file"
    cause = f"--rules {text}: this is {kind}" if text.strip() else "--rules is empty"
    raise UsageError(
        f"{cause}; rules are a .toml file, module:rules, file.py:rules, a plan's JSON, or a text such as "
        "\"shard_dim('model', 0)|fsdp('data')\""
    )


def _from_file(path: Path) -> LoadedRules:
    try:
        return LoadedRules(read_rules_file(path))
    except RulesFileError as error:
        raise UsageError(str(error)) from error


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
    """It is a list of (pattern, spec) pairs, which many models call their partition rules."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and not isinstance(value, PartitionSpec)
        and all(isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in value)
    )
