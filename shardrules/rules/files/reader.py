"""Rules as TOML: every rule that comes with shardrules, and every way to compose them.

```toml
mesh = "data:16,model:4"          # optional, as is all but the rules
optimizer = "adamw(mu_dtype='bfloat16')"

[limits]                          # what `shardrules check` holds a plan against
budget = "70GiB"                  # the bytes that a device may use
golden = "plan.json"              # the expected plan
level = "warning"                 # the severity from which findings fail

[[rules]]                         # the first with an opinion wins
path = "norm|bias"                # searched in the paths of leaves, as RegexShardingRule does
spec = []

[[rules]]
path = "_proj/weight"
spec = ["model", "data"]          # "-" leaves a dimension whole, a list puts several axes on one

[[rules]]
type = "fsdp"                     # a rule by its name, with its arguments
axis = "data"
```

A rule is a table with a `type` and the arguments of that rule, or a text such as `"shard_dim('model', 0)"`. With a
`path` it applies to the leaves that match. Errors name the path of keys to the value.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, final, get_args

import attrs
from jax.sharding import AbstractMesh, PartitionSpec

from shardrules.core.axes import axis_tuple
from shardrules.core.errors import ConfigError, PlanError, RulesFileError, ShardRulesError, suggest
from shardrules.core.fields import read_bytes
from shardrules.core.finding import Severity
from shardrules.core.rule import (
    ChainShardingRule,
    MirrorShardingRule,
    ShardingPlan,
    ShardingRule,
    SpecTreeShardingRule,
)
from shardrules.core.spec import spec_from_json
from shardrules.core.storage.files import read_text
from shardrules.core.storage.records import read_toml
from shardrules.mesh.shape import mesh_shape
from shardrules.rules.auto import AutoShardingRule
from shardrules.rules.composite import CompositeShardingRule
from shardrules.rules.dim import DimShardingRule
from shardrules.rules.files.rules_file import Limits, RulesFile
from shardrules.rules.fitted import FittedShardingRule
from shardrules.rules.fsdp import FSDPShardingRule
from shardrules.rules.late import HUGGING_FACE
from shardrules.rules.logical import LogicalShardingRule
from shardrules.rules.memory import MemoryConstrainedShardingRule
from shardrules.rules.named_axes import named_axes
from shardrules.rules.regex import RegexShardingRule
from shardrules.rules.replicate import ReplicateShardingRule
from shardrules.rules.shape_based import ShapeBasedShardingRule
from shardrules.rules.stacked import StackedShardingRule
from shardrules.rules.text import is_object_name, parse_op, parse_rule

_T = TypeVar("_T")

KeyPath: TypeAlias = tuple[str | int, ...]
"""The keys and indices that lead to a value: `("rules", 0, "spec")`, which messages write `rules[0].spec`."""

WHOLE = "-"
"""The entry of a spec for a dimension that no axis splits."""

_KEYS = ("mesh", "optimizer", "limits", "rule", "rules")
_RULE_KEYS = ("path", "spec", "type", "rule")
"""The keys that a table for a rule may begin with; a `type` has further keys of its own."""

_FORMER_TYPES = {"dim": "shard_dim"}
"""Names of rules in files that were written before they changed, and the names now."""


def read_rules_file(file: Path) -> RulesFile:
    """Reads a TOML file of rules. The error lists all that is wrong, each with its key and a similar word."""
    try:
        text = read_text(file)
    except ConfigError as error:
        raise RulesFileError(str(error)) from error
    return read_rules_text(text, file)


def read_rules_text(text: str, file: Path) -> RulesFile:
    """Reads the text of a file of rules, which need not be written yet."""
    try:
        data = read_toml(text)
    except ValueError as error:
        raise RulesFileError(f"{file}: invalid TOML: {error}") from error
    try:
        return _Reader(file).read(data)
    except RecursionError as error:
        raise RulesFileError(f"{file}: its rules nest too deeply") from error


_Attempt: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Calls a function that reads, and does with its error what is to be done."""


def _raise_first(read: Callable[[], _T]) -> _T:
    return read()


def _joined(error: BaseException) -> str:
    return " ".join(str(error).split())


@final
@attrs.define
class _Reader:
    """Turns tables into rules, and remembers which axes they use where."""

    file: Path
    axes: list[tuple[str, str]] = attrs.Factory(list)
    problems: list[str] = attrs.Factory(list)

    def read(self, data: Mapping[str, Any]) -> RulesFile:
        self._attempt(lambda: self._check_keys(data, _KEYS, (), "a file of rules"))
        mesh, optimizer, limits = None, None, Limits()
        if "mesh" in data:
            mesh = self._attempt(lambda: self.mesh(data["mesh"], ("mesh",)))
        if "optimizer" in data:
            optimizer = self._attempt(lambda: self.optimizer(data["optimizer"], ("optimizer",)))
        if "limits" in data:
            limits = self._attempt(lambda: self.limits(data["limits"], ("limits",))) or limits
        rule = self._attempt(lambda: self._rule_or_rules(data))
        if self.problems or rule is None:
            count = len(self.problems)
            listing = "".join(f"\n  {problem}" for problem in self.problems)
            raise RulesFileError(self.problems[0] if count == 1 else f"{self.file} has {count} problems:{listing}")
        return RulesFile(rule, mesh, optimizer, limits, self.file, tuple(self.axes))

    def _rule_or_rules(self, data: Mapping[str, Any]) -> ShardingRule | None:
        if isinstance(data.get("rule"), list):
            self._note(self.error(("rule",), "unknown list of tables [[rule]] (did you mean [[rules]]?)"))
            # What is wrong with its tables is listed, too.
            self._attempt(lambda: self.rules(data["rule"], ("rule",), self._attempt))
        elif "rule" in data:
            if "rules" in data:
                self._note(self.error(("rule",), "the file has [[rules]] too: write one of the two"))
            rule = self._attempt(lambda: self.rule(data["rule"], ("rule",)))
            if "rules" not in data:
                return rule
        if "rules" in data:
            rules = self.rules(data["rules"], ("rules",), self._attempt)
            # A composite of one rule would only lengthen every explanation.
            return CompositeShardingRule(*rules) if len(rules) > 1 else rules[0] if rules else None
        # An unknown key above may be a misspelt [[rules]].
        if not self.problems:
            raise self.error((), "the file has no rules: write tables under [[rules]], or one rule = ...")
        return None

    def error(self, path: KeyPath, message: str) -> RulesFileError:
        return RulesFileError(f"{self.place(path)}: {message}")

    def place(self, path: KeyPath) -> str:
        """The file and the key path."""
        keys = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
        return f"{self.file}: {keys}" if keys else f"{self.file}"

    def _attempt(self, read: Callable[[], _T]) -> _T | None:
        """The result of `read`; an error becomes one of the problems, so that all of them are listed."""
        try:
            return read()
        except RulesFileError as error:
            self._note(error)
            return None

    def _note(self, error: RulesFileError) -> None:
        self.problems.append(str(error))

    def _values(
        self,
        check: Callable[[], None],
        readers: Mapping[str, Callable[[Any, KeyPath], Any]],
        table: Mapping[str, Any],
        path: KeyPath,
    ) -> dict[str, Any]:
        """The values that the readers return for their keys of a table; `check` refuses the other keys."""
        keys = [key for key in table if key in readers]
        reads = [functools.partial(readers[key], table[key], (*path, key)) for key in keys]
        return dict(zip(keys, self._each(check, *reads)[1:], strict=True))

    def _each(self, *reads: Callable[[], Any]) -> list[Any]:
        """The results of `reads`. All are called: of several errors the last is raised, the others are noted."""
        values: list[Any] = []
        errors: list[RulesFileError] = []
        for read in reads:
            try:
                values.append(read())
            except RulesFileError as error:
                errors.append(error)
        for error in errors[:-1]:
            self._note(error)
        if errors:
            raise errors[-1]
        return values

    def _guard(self, make: Callable[[], Any], path: KeyPath) -> Any:
        """The result of `make`; errors of the library get the location."""
        try:
            return make()
        except RulesFileError:
            raise
        except (ShardRulesError, TypeError) as error:
            raise self.error(path, _joined(error)) from error

    def _check_keys(
        self, table: Mapping[str, Any], keys: Sequence[str], path: KeyPath, owner: str, similar: Sequence[str] = ()
    ) -> None:
        def check(key: str) -> None:
            if key not in keys:
                near = suggest(key, [*keys, *similar])
                raise self.error((*path, key), f"unknown key{near}; {owner} has {', '.join(keys)}")

        self._each(*[functools.partial(check, key) for key in table])

    def optimizer(self, value: Any, path: KeyPath) -> str:
        """An optimizer of optax with its arguments, `"adamw(mu_dtype='bfloat16')"`, or the name of an object."""
        if not isinstance(value, str):
            raise self.error(path, f"must be a string such as 'adamw', got {value!r:.60}")
        if not is_object_name(value):
            self._guard(lambda: parse_op(value), path)
        return value

    def limits(self, value: Any, path: KeyPath) -> Limits:
        """The limits that `shardrules check` holds a plan against."""
        if not isinstance(value, dict):
            raise self.error(path, f'must be a table, [limits] with budget = "16GiB"; got {value!r:.60}')
        readers: Mapping[str, Callable[[Any, KeyPath], Any]] = {
            "budget": self.bytes,
            "golden": self.golden,
            "level": self.level,
        }
        check = functools.partial(self._check_keys, value, tuple(readers), path, "[limits]")
        return Limits(**self._values(check, readers, value, path))

    def golden(self, value: Any, path: KeyPath) -> Path:
        """The name of a golden plan, relative to the folder of this file."""
        if not isinstance(value, str):
            raise self.error(path, f"must be the name of a file, got {value!r:.60}")
        return self.file.parent / value

    def level(self, value: Any, path: KeyPath) -> Severity:
        """The severity from which findings fail."""
        if value not in get_args(Severity):
            levels = ", ".join(map(repr, get_args(Severity)))
            raise self.error(path, f"must be one of {levels}; got {value!r:.60}")
        return value

    def rules(self, value: Any, path: KeyPath, attempt: "_Attempt | None" = None) -> list[ShardingRule]:
        """A list of rules. Rules with a path that follow each other become one rule, which reports unused patterns.

        `attempt` keeps the errors of single rules, so that all are listed; by default the first is raised.
        """
        if isinstance(value, dict):
            raise self.error(path, "must be a list of rules (did you mean [[rules]]?)")
        if not isinstance(value, list) or not value:
            raise self.error(path, f"must be a list of at least one rule; got {value!r:.60}")
        attempt = _raise_first if attempt is None else attempt
        rules: list[ShardingRule | None] = []
        pairs: list[tuple[KeyPath, tuple[str, Any]]] = []
        for index, item in enumerate(value):
            item_path = (*path, index)
            if isinstance(item, dict) and "path" in item:
                pair = attempt(functools.partial(self.pair, item, item_path))
                pairs += [] if pair is None else [(item_path, pair)]
                continue
            rules += self._regex(pairs, attempt)
            pairs = []
            rules.append(attempt(functools.partial(self.rule, item, item_path)))
        rules += self._regex(pairs, attempt)
        return [rule for rule in rules if rule is not None]

    def _regex(self, pairs: list[tuple[KeyPath, tuple[str, Any]]], attempt: "_Attempt") -> list[ShardingRule]:
        """One rule for pairs, each with its key path; none where there are none, or where a pattern is invalid."""
        if not pairs:
            return []
        try:
            return [RegexShardingRule([pair for _, pair in pairs])]
        except ShardRulesError:
            # Each is made alone only now: compiling 10,000 patterns twice would double the time.
            for path, pair in pairs:
                attempt(functools.partial(self._guard, functools.partial(RegexShardingRule, [pair]), (*path, "path")))
            return []

    def pair(self, item: Mapping[str, Any], path: KeyPath) -> tuple[str, Any]:
        """A path pattern, and the spec or rule for the leaves that match."""
        pattern = item["path"]
        if not isinstance(pattern, str):
            raise self.error((*path, "path"), f"a pattern must be a string, got {pattern!r:.60}")
        rest = {key: value for key, value in item.items() if key != "path"}
        # A spec and a rule cannot both decide a leaf.
        if "spec" in rest:
            check = functools.partial(self._check_keys, item, ("path", "spec"), path, "a path with a spec")
            return pattern, self._values(check, {"spec": self.spec}, item, path)["spec"]
        if not rest:
            raise self.error(path, f"{pattern!r} decides nothing: add a spec, a type, or a rule")
        if rest == {"type": "skip"}:
            return pattern, None
        return pattern, self.rule(rest, path)

    def rule(self, value: Any, path: KeyPath) -> ShardingRule:
        """One rule: a string, or a table."""
        if isinstance(value, str):
            rule = self._guard(lambda: parse_rule(value), path)
            # The axes of a rule as text are known only once it is parsed.
            self.axes.extend((name, self.place(path)) for name in named_axes(rule))
            return rule
        if not isinstance(value, dict):
            raise self.error(path, f"a rule is a string such as \"fsdp('data')\", or a table; got {value!r:.60}")
        if "path" in value:
            return self._regex([(path, self.pair(value, path))], _raise_first)[0]
        if "type" not in value:
            return self._rule_without_type(value, path)
        name = value["type"]
        if not isinstance(name, str) or name not in TYPES:
            near = suggest(_FORMER_TYPES.get(name, name), TYPES) if isinstance(name, str) else ""
            raise self.error((*path, "type"), f"unknown rule {name!r}{near}; the rules are {', '.join(TYPES)}")
        return self._typed_rule(TYPES[name], name, value, path)

    def _rule_without_type(self, table: Mapping[str, Any], path: KeyPath) -> ShardingRule:
        # `paht` and `spek` are not the arguments of a rule whose type is missing.
        misspelt = {key: suggest(key, _RULE_KEYS) for key in table if key not in _RULE_KEYS}

        def refuse(key: str) -> None:
            raise self.error(
                (*path, key), f"unknown key{misspelt[key]}; a rule has a path with a spec, a type, or a rule"
            )

        self._each(*[functools.partial(refuse, key) for key, near in misspelt.items() if near])
        if "rule" in table:
            self._check_keys(table, ("rule",), path, "a table with a rule and no type")
            return self.rule(table["rule"], (*path, "rule"))
        if "spec" in table:
            raise self.error(path, "a spec needs a path, the pattern of the leaves that get it")
        keys = ", ".join(table) or "nothing"
        raise self.error(path, f"a rule needs a type or a path, but this has {keys}; types are {', '.join(TYPES)}")

    def _typed_rule(self, rule_type: "_RuleType", name: str, table: Mapping[str, Any], path: KeyPath) -> ShardingRule:
        keys = ["type", *rule_type.fields]
        check = functools.partial(self._check_keys, table, keys, path, f"the rule {name!r}", similar=["path"])
        readers = {key: functools.partial(read, self) for key, read in rule_type.fields.items()}
        args = self._values(check, readers, table, path)
        missing = [key for key in rule_type.required if key not in args]
        if missing:
            raise self.error(path, f"the rule {name!r} needs {' and '.join(missing)}")
        try:
            return rule_type.make(**args)
        except (ShardRulesError, TypeError) as error:
            # Messages of rules name their argument, which is the key in the file.
            key = next((key for key in args if re.search(rf"\b{key}\b", str(error))), None)
            raise self.error(path if key is None else (*path, key), _joined(error)) from error

    def plain(self, value: Any, path: KeyPath) -> Any:
        """A value that the rule itself checks, with tuples for lists."""
        return tuple(self.plain(item, path) for item in value) if isinstance(value, list) else value

    def axis(self, value: Any, path: KeyPath) -> Any:
        """An axis, or several that split one dimension."""
        for name in value if isinstance(value, list) and value else [value]:
            if not isinstance(name, str) or not name:
                raise self.error(path, f"must be an axis or a list of axes; got {value!r:.60}")
            self.axes.append((name, self.place(path)))
        return self.plain(value, path)

    def axis_list(self, value: Any, path: KeyPath) -> Any:
        """The axes that a rule may use, each an axis or several as one."""
        if not isinstance(value, list):
            raise self.error(path, f"must be a list of axes, got {value!r:.60}")
        return tuple(self.axis(axis, (*path, index)) for index, axis in enumerate(value))

    def flag(self, value: Any, path: KeyPath) -> bool:
        if not isinstance(value, bool):
            raise self.error(path, f"must be true or false, got {value!r:.60}")
        return value

    def number(self, value: Any, path: KeyPath) -> int | float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(path, f"must be a number, got {value!r:.60}")
        return value

    def fitted(self, value: Any, path: KeyPath) -> ShardingRule:
        """A rule whose axes the mesh may lack: they are not checked."""
        # This rule drops what the mesh lacks, so its axes need not exist.
        count = len(self.axes)
        rule = self.rule(value, path)
        del self.axes[count:]
        return rule

    def spec(self, value: Any, path: KeyPath) -> PartitionSpec:
        """`["model", "-", ["data", "fsdp"]]`."""
        if not isinstance(value, list):
            raise self.error(
                path,
                f"a spec is a list with an axis, a list of axes or '{WHOLE}' for each dimension; got {value!r:.60}",
            )
        entries = self._each(
            *[functools.partial(self._entry, entry, (*path, index)) for index, entry in enumerate(value)]
        )
        names = [name for entry in entries if entry not in (None, "?") for name in axis_tuple(entry)]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise self.error(path, f"axis {repeated!r} is repeated: an axis can split only one dimension")
        return self._guard(lambda: spec_from_json(entries), path)

    def _entry(self, entry: Any, path: KeyPath) -> Any:
        names = entry if isinstance(entry, list) else [entry]
        is_names = bool(names) and all(isinstance(name, str) and name for name in names)
        if not is_names or (isinstance(entry, list) and WHOLE in entry):
            raise self.error(path, f"{entry!r} is not an axis, a list of axes, or '{WHOLE}'")
        # Left to the compiler, as in the JSON of plans.
        if entry == "?":
            return entry
        return None if entry == WHOLE else self.axis(entry, path)

    def mesh(self, value: Any, path: KeyPath) -> AbstractMesh:
        """Axes and their sizes, `"data:16,model:4"`."""
        mesh = self._guard(lambda: mesh_shape(value), path)
        if not mesh.axis_names:
            raise self.error(path, "the mesh is empty: write axes and sizes, data:16,model:4")
        return mesh

    def bytes(self, value: Any, path: KeyPath) -> int:
        """Bytes, such as `"16GiB"`."""
        if isinstance(value, float) and not value.is_integer():
            raise self.error(path, f"must be a whole number of bytes, or a string like '16GiB'; got {value!r}")
        return self._guard(lambda: read_bytes(str(path[-1]), value), path)

    def patterns(self, value: Any, path: KeyPath) -> list[tuple[str, Any]]:
        """Tables with a path each."""
        if not isinstance(value, list) or not all(isinstance(item, dict) and "path" in item for item in value):
            raise self.error(path, 'must be a list of tables with a path each: {path = "norm", spec = []}')
        return self._each(*[functools.partial(self.pair, item, (*path, index)) for index, item in enumerate(value)])

    def shapes(self, value: Any, path: KeyPath) -> tuple[Any, ...]:
        """Tables with a shape and a spec each; `"*"` is any size."""
        shapes = []
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            item_path = (*path, index) if isinstance(value, list) else path
            if not isinstance(item, dict) or not isinstance(item.get("shape"), list) or "spec" not in item:
                example = '{shape = ["*", 1024], spec = ["model", "-"]}'
                raise self.error(item_path, f"must have a shape and a spec: {example}")
            self._check_keys(item, ("shape", "spec"), item_path, "a shape with a spec")
            sizes = tuple(None if size == "*" else size for size in item["shape"])
            if not all(size is None or (isinstance(size, int) and not isinstance(size, bool)) for size in sizes):
                raise self.error((*item_path, "shape"), f"must be sizes, or '*' for any; got {item['shape']!r:.60}")
            shapes.append((sizes, self.spec(item["spec"], (*item_path, "spec"))))
        return tuple(shapes)

    def names(self, value: Any, path: KeyPath) -> tuple[tuple[str, Any], ...]:
        """Logical names and their axes, as a table or as pairs."""
        if isinstance(value, dict):
            return tuple((name, self._entry(axis, (*path, name))) for name, axis in value.items())
        if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
            raise self.error(path, f"must be names and their axes, {{embed = 'data', norm = '{WHOLE}'}}")
        return tuple((name, self._entry(axis, (*path, index))) for index, (name, axis) in enumerate(value))

    def specs(self, value: Any, path: KeyPath) -> tuple[tuple[str, PartitionSpec], ...]:
        """A table from path to spec."""
        if not isinstance(value, dict):
            raise self.error(path, 'must be a table from path to spec: {"layers/0/up" = ["model"]}')
        return tuple((leaf_path, self.spec(spec, (*path, leaf_path))) for leaf_path, spec in value.items())

    def plan(self, value: Any, path: KeyPath) -> ShardingPlan:
        """A plan in a file, whose name is relative to the folder of this one."""
        if not isinstance(value, str):
            raise self.error(path, f"must be the name of a plan's JSON file, got {value!r:.60}")
        try:
            # Relative to the rules file, so that both can move together.
            return ShardingPlan.from_json(read_text(self.file.parent / value))
        except (ConfigError, PlanError) as error:
            raise self.error(path, _joined(error)) from error


_ReadField: TypeAlias = Callable[[_Reader, Any, KeyPath], Any]


@final
@attrs.frozen
class _RuleType:
    """A rule in TOML: how it is made, how each of its arguments is read, and which it needs."""

    make: Callable[..., ShardingRule]
    fields: Mapping[str, _ReadField]
    required: tuple[str, ...] = ()


def _rule_type(rule_class: type[ShardingRule], **readers: _ReadField) -> _RuleType:
    """A rule with the arguments of its class, each read by its reader or, without one, passed on."""
    parameters = inspect.signature(rule_class).parameters.values()
    fields = {parameter.name: readers.get(parameter.name, _Reader.plain) for parameter in parameters}
    required = tuple(parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty)
    return _RuleType(rule_class, fields, required)


TYPES: Mapping[str, _RuleType] = MappingProxyType(
    {
        "auto": _rule_type(
            AutoShardingRule,
            mesh=_Reader.mesh,
            axis_names=_Reader.axis_list,
            min_shard_size=_Reader.number,
            reverse=_Reader.flag,
        ),
        "chain": _RuleType(lambda rules: ChainShardingRule(*rules), {"rules": _Reader.rules}, ("rules",)),
        "composite": _RuleType(
            lambda rules, **options: CompositeShardingRule(*rules, **options),
            {"rules": _Reader.rules, "empty_is_opinion": _Reader.flag},
            ("rules",),
        ),
        "fitted": _rule_type(FittedShardingRule, rule=_Reader.fitted),
        "fsdp": _rule_type(FSDPShardingRule, axis=_Reader.axis),
        "hf": _RuleType(
            HUGGING_FACE,
            {"tensor": _Reader.axis, "fsdp": _Reader.axis, "head_dim": _Reader.number, "roles": _Reader.plain},
        ),
        "logical": _rule_type(LogicalShardingRule, mapping=_Reader.names),
        "memory": _rule_type(
            MemoryConstrainedShardingRule,
            max_memory_per_device=_Reader.bytes,
            mesh=_Reader.mesh,
            axis_names=_Reader.axis_list,
        ),
        "mirror": _RuleType(lambda file: MirrorShardingRule(plan=file), {"file": _Reader.plan}, ("file",)),
        "plan": _RuleType(lambda file: file.as_rule(), {"file": _Reader.plan}, ("file",)),
        "regex": _rule_type(RegexShardingRule, rules=_Reader.patterns, min_size=_Reader.number),
        "replicate": _rule_type(ReplicateShardingRule),
        "shape": _RuleType(
            lambda patterns: ShapeBasedShardingRule(shape_patterns=patterns),
            {"patterns": _Reader.shapes},
            ("patterns",),
        ),
        "shard_dim": _rule_type(DimShardingRule, axis=_Reader.axis, dim=_Reader.number, ignore_ndim_error=_Reader.flag),
        "specs": _rule_type(SpecTreeShardingRule, specs=_Reader.specs),
        "stacked": _rule_type(StackedShardingRule, rule=_Reader.rule, dims=_Reader.number, axis=_Reader.axis),
    }
)
"""The rules by their names in files."""
