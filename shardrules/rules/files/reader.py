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

import contextlib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, final, get_args

import attrs
from jax.sharding import AbstractMesh, PartitionSpec

from shardrules.core.axes import axis_tuple
from shardrules.core.errors import ConfigError, RulesFileError, ShardRulesError, suggest
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
from shardrules.core.storage.files import as_path, read_text
from shardrules.core.storage.records import read_toml
from shardrules.mesh.shape import mesh_shape
from shardrules.rules.auto import AutoShardingRule
from shardrules.rules.composite import CompositeShardingRule
from shardrules.rules.dim import DimShardingRule
from shardrules.rules.files.rules_file import Limits, RulesFile
from shardrules.rules.fitted import FittedShardingRule
from shardrules.rules.fsdp import FSDPShardingRule
from shardrules.rules.logical import LogicalShardingRule
from shardrules.rules.memory import MemoryConstrainedShardingRule
from shardrules.rules.named_axes import named_axes
from shardrules.rules.regex import RegexShardingRule
from shardrules.rules.replicate import ReplicateShardingRule
from shardrules.rules.shape_based import ShapeBasedShardingRule
from shardrules.rules.stacked import StackedShardingRule
from shardrules.rules.text import hugging_face_rule, is_object_name, parse_op, parse_rule

_T = TypeVar("_T")

WHOLE = "-"
"""The entry of a spec for a dimension that no axis splits."""

_RULE_KEYS = ("path", "spec", "type", "rule")
"""The keys that a table for a rule may begin with; a `type` has further keys of its own."""


def load_rules(path: Any) -> RulesFile:
    """Loads rules from a TOML file, the same that `shardrules check` reads.

    [The command line](../how-to/the-command-line.md#write-rules-as-toml) has the format.

    **Arguments:**

    - `path`: the file.

    **Returns:**

    A `RulesFile`: its `rules` are a rule like any other. `mesh`, `optimizer` and `limits` (`budget`, `golden`, `level`)
    are there if the file has them.

    **Raises:**

    `RulesFileError`, listing everything that is wrong with the file, each with its key and the most similar word; also
    when a rule uses an axis that the mesh of the file lacks. `ConfigTypeError` when `path` is not a path.

    ```python
    from pathlib import Path

    Path("rules.toml").write_text('''
    mesh = "data:4,model:2"
    optimizer = "adamw"

    [limits]
    budget = "16GiB"

    [[rules]]
    path = "norm|bias"
    spec = []

    [[rules]]
    rule = "shard_dim('model', 0) | fsdp('data', min_size_mb=0)"
    ''')
    file = sr.load_rules("rules.toml")
    mesh = sr.create_mesh(file.mesh)
    model = sr.filter_shard({"w": np.ones((8, 8)), "bias": np.ones(8)}, file.rules, mesh)
    assert model["w"].sharding.spec == P("model", "data")
    assert file.limits.budget == 16 * 2**30
    ```
    """
    rules = read_rules_file(as_path(path, "load_rules"))
    if rules.mesh is not None:
        rules.check_axes(rules.mesh)
    return rules


def read_rules_file(file: Path) -> RulesFile:
    """Reads a TOML file of rules, whose axes are not checked. The error lists all that is wrong."""
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


@final
class _NotedError(Exception):
    """Leaves a value out; its problems are noted already."""


@final
@attrs.define
class _Reader:
    """Turns tables into rules, and remembers which axes they use where.

    A method reads the value that `keys` lead to. Whatever it raises becomes one of the problems there, and what stands
    beside the value is read all the same, so that one error lists all that is wrong with a file.
    """

    file: Path
    keys: list[str | int] = attrs.Factory(list)
    axes: list[tuple[str, str]] = attrs.Factory(list)
    problems: list[str] = attrs.Factory(list)

    def read(self, data: Mapping[str, Any]) -> RulesFile:
        def rule(value: Any) -> ShardingRule:
            if isinstance(value, list):
                self._note("unknown list of tables [[rule]] (did you mean [[rules]]?)")
                return self.rules(value)[0]  # what is wrong with its tables is listed, too
            if "rules" in data:
                self._note("the file has [[rules]] too: write one of the two")
            return self.rule(value)

        readers = {"mesh": self.mesh, "optimizer": self.optimizer, "limits": self.limits, "rule": rule}
        values: dict[str, Any] = {}
        with self._at():
            values = self._table(data, "a file of rules", {**readers, "rules": self.rules})
            if "rule" not in values and "rules" not in values:
                raise ConfigError("the file has no rules: write tables under [[rules]], or one rule = ...")
        if self.problems:
            count = len(self.problems)
            listing = "".join(f"\n  {problem}" for problem in self.problems)
            raise RulesFileError(self.problems[0] if count == 1 else f"{self.file} has {count} problems:{listing}")
        rules = values.pop("rules", None) or [values.pop("rule")]
        # A composite of one rule would only lengthen every explanation.
        values["rules"] = CompositeShardingRule(*rules) if len(rules) > 1 else rules[0]
        return RulesFile(**values, file=self.file, axes=tuple(self.axes))

    def _place(self, *keys: str | int) -> str:
        """The file and the keys to the value that is read, or to one below it: `rules.toml: rules[0].spec`."""
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in (*self.keys, *keys))
        return f"{self.file}: {path.removeprefix('.')}" if path else f"{self.file}"

    def _note(self, message: str, *keys: str | int) -> _NotedError:
        """Notes a problem. Its value is left out by raising what this returns."""
        self.problems.append(f"{self._place(*keys)}: {' '.join(message.split())}")
        return _NotedError()

    @contextlib.contextmanager
    def _at(self, *keys: str | int) -> Iterator[None]:
        """A context for the value under `keys`, in which errors become problems."""
        self.keys += keys
        try:
            yield
        except _NotedError:
            pass
        except (ShardRulesError, TypeError) as error:
            self._note(str(error))
        finally:
            del self.keys[len(self.keys) - len(keys) :]

    def _each(self, items: Iterable[tuple[Any, Any]], read: Callable[[Any], _T]) -> list[_T]:
        """The results of `read` for each value under its key; `()` is for a value without one."""
        count = len(self.problems)
        results: list[_T] = []
        for key, value in items:
            with self._at(*([] if key == () else [key])):
                results.append(read(value))
        if len(self.problems) > count:
            raise _NotedError
        return results

    def _table(
        self, table: Mapping[str, Any], owner: str, readers: Mapping[str, Callable[[Any], Any]], similar: str = ""
    ) -> dict[str, Any]:
        """The results of the readers for their keys of a table, which has no others."""

        def read(key: str) -> Any:
            if key not in readers:
                near = suggest(key, [*readers, similar])
                raise ConfigError(f"unknown key{near}; {owner} has {', '.join(readers)}")
            return readers[key](table[key])

        return dict(zip(table, self._each(zip(table, table, strict=True), read), strict=True))

    def optimizer(self, value: Any) -> str:
        """An optimizer of optax with its arguments, `"adamw(mu_dtype='bfloat16')"`, or the name of an object."""
        if not isinstance(value, str):
            raise ConfigError(f"must be a string such as 'adamw', got {value!r:.60}")
        if not is_object_name(value):
            parse_op(value)
        return value

    def limits(self, value: Any) -> Limits:
        if not isinstance(value, dict):
            raise ConfigError(f'must be a table, [limits] with budget = "16GiB"; got {value!r:.60}')
        readers = {"budget": self.bytes, "golden": self.golden, "level": self.level}
        return Limits(**self._table(value, "[limits]", readers))

    def golden(self, value: Any) -> Path:
        """The name of a golden plan, relative to the folder of this file."""
        if not isinstance(value, str):
            raise ConfigError(f"must be the name of a file, got {value!r:.60}")
        return self.file.parent / value

    def level(self, value: Any) -> Severity:
        if value not in get_args(Severity):
            levels = ", ".join(map(repr, get_args(Severity)))
            raise ConfigError(f"must be one of {levels}; got {value!r:.60}")
        return value

    def rules(self, value: Any) -> list[ShardingRule]:
        if isinstance(value, dict):
            raise ConfigError("must be a list of rules (did you mean [[rules]]?)")
        if not isinstance(value, list) or not value:
            raise ConfigError(f"must be a list of at least one rule; got {value!r:.60}")
        # Neighbouring tables with a `path` are one rule, in which the first pattern that matches wins.
        runs = itertools.groupby(enumerate(value), lambda item: isinstance(item[1], dict) and "path" in item[1])
        read = {True: lambda items: [self._regex(items)], False: lambda items: self._each(items, self.rule)}
        results = self._each(
            [((), (has_path, list(items))) for has_path, items in runs], lambda run: read[run[0]](run[1])
        )
        return list(itertools.chain.from_iterable(results))

    def _regex(self, items: list[tuple[Any, Mapping[str, Any]]]) -> ShardingRule:
        """Returns one rule for tables with a path, each under its key: it reports unused patterns."""
        pairs: list[tuple[Any, tuple[str, Any]]] = []
        with self._at():
            self._each(
                [(key, (key, item)) for key, item in items], lambda item: pairs.append((item[0], self.pair(item[1])))
            )
        try:
            rule = RegexShardingRule([pair for _, pair in pairs])
        except ShardRulesError:
            # Each is made alone only now: compiling 10,000 patterns twice would double the time.
            self._each(pairs, lambda pair: self._each([("path", [pair])], RegexShardingRule))
            raise
        if len(pairs) < len(items):
            raise _NotedError
        return rule

    def pair(self, item: Mapping[str, Any]) -> tuple[str, Any]:
        """A path pattern, and the spec or rule for the leaves that match."""
        pattern = item["path"]
        if not isinstance(pattern, str):
            raise self._note(f"a pattern must be a string, got {pattern!r:.60}", "path")
        rest = {key: value for key, value in item.items() if key != "path"}
        # A spec and a rule cannot both decide a leaf.
        if "spec" in rest:
            return pattern, self._table(item, "a path with a spec", {"path": self.plain, "spec": self.spec})["spec"]
        if not rest:
            raise ConfigError(f"{pattern!r} decides nothing: add a spec, a type, or a rule")
        if rest == {"type": "skip"}:
            return pattern, None
        return pattern, self.rule(rest)

    def rule(self, value: Any) -> ShardingRule:
        """One rule: a string, or a table."""
        if isinstance(value, str):
            rule = parse_rule(value)
            self.axes.extend((name, self._place()) for name in named_axes(rule))
            return rule
        if not isinstance(value, dict):
            raise ConfigError(f"a rule is a string such as \"fsdp('data')\", or a table; got {value!r:.60}")
        if "path" in value:
            return self._regex([((), value)])
        if "type" not in value:
            return self._rule_without_type(value)
        name = value["type"]
        if not isinstance(name, str) or name not in TYPES:
            near = suggest({"dim": "shard_dim"}.get(name, name), TYPES) if isinstance(name, str) else ""
            raise self._note(f"unknown rule {name!r}{near}; the rules are {', '.join(TYPES)}", "type")
        return self._typed_rule(name, value)

    def _rule_without_type(self, table: Mapping[str, Any]) -> ShardingRule:
        # `paht` and `spek` are not the arguments of a rule whose type is missing.
        misspelt = [(key, suggest(key, _RULE_KEYS)) for key in table if key not in _RULE_KEYS]
        notes = [
            self._note(f"unknown key{near}; a rule has a path with a spec, a type, or a rule", key)
            for key, near in misspelt
            if near
        ]
        if notes:
            raise notes[0]
        if "rule" in table:
            return self._table(table, "a table with a rule and no type", {"rule": self.rule})["rule"]
        if "spec" in table:
            raise ConfigError("a spec needs a path, the pattern of the leaves that get it")
        keys = ", ".join(table) or "nothing"
        raise ConfigError(f"a rule needs a type or a path, but this has {keys}; types are {', '.join(TYPES)}")

    def _typed_rule(self, name: str, table: Mapping[str, Any]) -> ShardingRule:
        parameters = inspect.signature(TYPES[name]).parameters
        readers = {
            key: _READERS.get(f"{name}.{key}", _READERS.get(key, _Reader.plain)) for key in ("type", *parameters)
        }
        bound = {key: functools.partial(read, self) for key, read in readers.items()}
        args = self._table(table, f"the rule {name!r}", bound, similar="path")
        del args["type"]
        missing = [key for key, value in parameters.items() if value.default is value.empty and key not in args]
        if missing:
            raise ConfigError(f"the rule {name!r} needs {' and '.join(missing)}")
        try:
            return TYPES[name](**args)
        except (ShardRulesError, TypeError) as error:
            # Messages of rules name their argument, which is the key in the file.
            keys = [key for key in args if re.search(rf"\b{key}\b", str(error))]
            raise self._note(str(error), *keys[:1]) from error

    def plain(self, value: Any) -> Any:
        """A value that the rule itself checks, with tuples for lists."""
        return tuple(self.plain(item) for item in value) if isinstance(value, list) else value

    def axis(self, value: Any) -> Any:
        """An axis, or several that split one dimension."""
        # An empty list stays whole here, and is refused as an invalid axis.
        for name in value if isinstance(value, list) and value else [value]:
            if not isinstance(name, str) or not name:
                raise ConfigError(f"must be an axis or a list of axes; got {value!r:.60}")
            self.axes.append((name, self._place()))
        return self.plain(value)

    def axis_list(self, value: Any) -> Any:
        """The axes that a rule may use, each an axis or several as one."""
        if not isinstance(value, list):
            raise ConfigError(f"must be a list of axes, got {value!r:.60}")
        return tuple(self._each(enumerate(value), self.axis))

    def flag(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ConfigError(f"must be true or false, got {value!r:.60}")
        return value

    def number(self, value: Any) -> int | float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"must be a number, got {value!r:.60}")
        return value

    def fitted(self, value: Any) -> ShardingRule:
        # This rule drops what the mesh lacks, so its axes need not exist.
        count = len(self.axes)
        rule = self.rule(value)
        del self.axes[count:]
        return rule

    def spec(self, value: Any) -> PartitionSpec:
        """`["model", "-", ["data", "fsdp"]]`."""
        if not isinstance(value, list):
            raise ConfigError(
                f"a spec is a list with an axis, a list of axes or '{WHOLE}' for each dimension; got {value!r:.60}"
            )
        entries = self._each(enumerate(value), self._entry)
        names = [name for entry in entries if entry not in (None, "?") for name in axis_tuple(entry)]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ConfigError(f"axis {repeated!r} is repeated: an axis can split only one dimension")
        return spec_from_json(entries)

    def _entry(self, entry: Any) -> Any:
        names = entry if isinstance(entry, list) else [entry]
        is_names = bool(names) and all(isinstance(name, str) and name for name in names)
        if not is_names or (isinstance(entry, list) and WHOLE in entry):
            raise ConfigError(f"{entry!r} is not an axis, a list of axes, or '{WHOLE}'")
        # Left to the compiler, as in the JSON of plans.
        if entry == "?":
            return entry
        return None if entry == WHOLE else self.axis(entry)

    def mesh(self, value: Any) -> AbstractMesh:
        """Axes and their sizes, `"data:16,model:4"`."""
        mesh = mesh_shape(value)
        if not mesh.axis_names:
            raise ConfigError("the mesh is empty: write axes and sizes, data:16,model:4")
        return mesh

    def bytes(self, value: Any) -> int:
        """Bytes, such as `"16GiB"`."""
        if isinstance(value, float) and not value.is_integer():
            raise ConfigError(f"must be a whole number of bytes, or a string like '16GiB'; got {value!r}")
        return read_bytes(str(self.keys[-1]), value)

    def patterns(self, value: Any) -> list[tuple[str, Any]]:
        """Tables with a path each."""
        if not isinstance(value, list) or not all(isinstance(item, dict) and "path" in item for item in value):
            raise ConfigError('must be a list of tables with a path each: {path = "norm", spec = []}')
        return self._each(enumerate(value), self.pair)

    def shapes(self, value: Any) -> tuple[Any, ...]:
        """Tables with a shape and a spec each; `"*"` is any size."""
        return tuple(self._each(enumerate(value) if isinstance(value, list) else [((), value)], self._shape))

    def _shape(self, item: Any) -> tuple[Any, PartitionSpec]:
        if not isinstance(item, dict) or not isinstance(item.get("shape"), list) or "spec" not in item:
            raise ConfigError('must have a shape and a spec: {shape = ["*", 1024], spec = ["model", "-"]}')
        values = self._table(item, "a shape with a spec", {"shape": self._sizes, "spec": self.spec})
        return values["shape"], values["spec"]

    def _sizes(self, value: list[Any]) -> tuple[Any, ...]:
        sizes = tuple(None if size == "*" else size for size in value)
        # A bool is an int in Python, and no size.
        if not all(size is None or (isinstance(size, int) and not isinstance(size, bool)) for size in sizes):
            raise ConfigError(f"must be sizes, or '*' for any; got {value!r:.60}")
        return sizes

    def names(self, value: Any) -> tuple[tuple[str, Any], ...]:
        """Logical names and their axes, as a table or as pairs."""
        # Pairs may have a name twice, as an alternative where its first axis is used; a table cannot.
        is_table = isinstance(value, dict)
        if not is_table and not (isinstance(value, list) and all(isinstance(p, list) and len(p) == 2 for p in value)):
            raise ConfigError(f"must be names and their axes, {{embed = 'data', norm = '{WHOLE}'}}")
        pairs = list(value.items()) if is_table else value
        items = pairs if is_table else enumerate(axis for _, axis in pairs)
        return tuple(zip([name for name, _ in pairs], self._each(items, self._entry), strict=True))

    def specs(self, value: Any) -> tuple[tuple[str, PartitionSpec], ...]:
        """A table from path to spec."""
        if not isinstance(value, dict):
            raise ConfigError('must be a table from path to spec: {"layers/0/up" = ["model"]}')
        return tuple(zip(value, self._each(value.items(), self.spec), strict=True))

    def plan(self, value: Any) -> ShardingPlan:
        """A plan in a file, whose name is relative to the folder of this one, so that both can move together."""
        if not isinstance(value, str):
            raise ConfigError(f"must be the name of a plan's JSON file, got {value!r:.60}")
        return ShardingPlan.from_json(read_text(self.file.parent / value))


_READERS: Mapping[str, Callable[[_Reader, Any], Any]] = MappingProxyType(
    {
        **dict.fromkeys(("axis", "tensor", "fsdp"), _Reader.axis),
        **dict.fromkeys(("min_shard_size", "min_size", "dim", "dims", "head_dim"), _Reader.number),
        **dict.fromkeys(("reverse", "empty_is_opinion", "ignore_ndim_error"), _Reader.flag),
        "axis_names": _Reader.axis_list,
        "fitted.rule": _Reader.fitted,
        "file": _Reader.plan,
        "mapping": _Reader.names,
        "max_memory_per_device": _Reader.bytes,
        "mesh": _Reader.mesh,
        "patterns": _Reader.shapes,
        "regex.rules": _Reader.patterns,
        "rule": _Reader.rule,
        "rules": _Reader.rules,
        "specs": _Reader.specs,
    }
)
"""The readers of the arguments of rules, by the name of the argument, or of the rule too."""


TYPES: Mapping[str, Callable[..., ShardingRule]] = MappingProxyType(
    {
        "auto": AutoShardingRule,
        "chain": lambda rules: ChainShardingRule(*rules),
        "composite": lambda rules, empty_is_opinion=True: CompositeShardingRule(
            *rules, empty_is_opinion=empty_is_opinion
        ),
        "fitted": FittedShardingRule,
        "fsdp": FSDPShardingRule,
        "hf": hugging_face_rule,
        "logical": LogicalShardingRule,
        "memory": MemoryConstrainedShardingRule,
        "mirror": lambda file: MirrorShardingRule(plan=file),
        "plan": lambda file: file.as_rule(),
        "regex": RegexShardingRule,
        "replicate": ReplicateShardingRule,
        "shape": lambda patterns: ShapeBasedShardingRule(shape_patterns=patterns),
        "shard_dim": DimShardingRule,
        "specs": SpecTreeShardingRule,
        "stacked": StackedShardingRule,
    }
)
"""The rules by their names in files."""
