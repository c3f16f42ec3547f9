"""Rules as TOML: every rule that comes with shardrules, and every way to compose them.

```toml
mesh = "data:16,model:4"          # optional

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
`path` it speaks of the leaves that have such a path.
"""

import inspect
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, final

import attrs
from jax.sharding import AbstractMesh, PartitionSpec

from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.files import read_text
from shardrules.cli.toml_lines import Place, toml_lines
from shardrules.core.axes import axis_tuple, mesh_text
from shardrules.core.errors import PlanError, ShardRulesError, suggest
from shardrules.core.fields import read_bytes
from shardrules.core.rule import (
    ChainShardingRule,
    MirrorShardingRule,
    ShardingPlan,
    ShardingRule,
    SpecTreeShardingRule,
)
from shardrules.core.spec import spec_from_json
from shardrules.mesh.shape import mesh_shape
from shardrules.rules.auto import AutoShardingRule
from shardrules.rules.composite import CompositeShardingRule
from shardrules.rules.dim import DimShardingRule
from shardrules.rules.fitted import FittedShardingRule
from shardrules.rules.fsdp import FSDPShardingRule
from shardrules.rules.logical.rule import LogicalShardingRule
from shardrules.rules.memory import MemoryConstrainedShardingRule
from shardrules.rules.regex import RegexShardingRule
from shardrules.rules.replicate import ReplicateShardingRule
from shardrules.rules.shape_based import ShapeBasedShardingRule
from shardrules.rules.stacked import StackedShardingRule
from shardrules.rules.text import parse_rule

WHOLE = "-"
"""What stands in a spec for a dimension that no axis splits."""


@final
@attrs.frozen
class RulesFile:
    """What a file of rules says.

    **Arguments:**

    - `rule`: the rule.
    - `mesh`: the mesh, if the file names one.
    - `axes`: the axes that it speaks of, each with file and line.
    - `is_for_step`: whether it is for all arguments of a step, and not for a model: what autoplan found is.
    """

    rule: ShardingRule
    mesh: AbstractMesh | None = None
    axes: tuple[tuple[str, str], ...] = ()
    is_for_step: bool = False

    def check_axes(self, mesh: AbstractMesh) -> None:
        """Refuses a mesh that lacks an axis of which the file speaks.

        **Arguments:**

        - `mesh`: the mesh.

        **Raises:**

        `UsageError` with the line, and the axis that comes nearest.
        """
        for name, where in self.axes:
            if name not in mesh.axis_names:
                near = suggest(name, mesh.axis_names)
                raise UsageError(
                    f"{where}: the mesh {mesh_text(mesh)} has no axis {name!r}{near}; correct it, or let a rule of "
                    'type "fitted" drop what the mesh lacks'
                )


def read_rules_file(file: Path) -> RulesFile:
    """Reads a file of rules.

    **Arguments:**

    - `file`: a TOML file.

    **Returns:**

    What it says.

    **Raises:**

    `UsageError` with the line, the key and, for a word that is not known, the one that comes nearest.
    """
    text = read_text(file)
    try:
        data = tomllib.loads(text)
    except RecursionError as error:
        raise UsageError(f"{file}: this is no TOML that somebody wrote: it nests too deeply") from error
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        line = found[1] if found else text.count("\n") + 1  # at the end of the document
        raise UsageError(f"{file}:{line}: this is no TOML: {error}") from error
    return _Reader(file, toml_lines(text)).read(data)


@final
@attrs.frozen
class _Reader:
    """Reads tables, and knows on which line each of them stands."""

    path: Path
    lines: Mapping[Place, int]
    axes: list[tuple[str, str]] = attrs.Factory(list)

    def read(self, data: Mapping[str, Any]) -> RulesFile:
        self._known(data, ("mesh", "rule", "rules"), (), "a file of rules")
        mesh = None
        if "mesh" in data:
            mesh = self.mesh(data["mesh"], ("mesh",))
        if "rule" in data and "rules" in data:
            raise self.error(("rule",), "there are [[rules]] too: write one of both")
        if "rule" not in data and "rules" not in data:
            raise self.error((), "it needs rules: tables under [[rules]], or one rule = ...")
        if "rule" in data:
            rule = self.rule(data["rule"], ("rule",))
        else:
            rules = self.rules(data["rules"], ("rules",))
            rule = rules[0] if len(rules) == 1 else CompositeShardingRule(*rules)
        return RulesFile(rule, mesh, tuple(self.axes))

    def error(self, place: Place, message: str) -> UsageError:
        """An error that names the nearest line there is, and the key."""
        key = next((str(part) for part in reversed(place) if isinstance(part, str)), "")
        return UsageError(f"{self.where(place)}: {f'{key}: ' if key else ''}{message}")

    def where(self, place: Place) -> str:
        """File and line of a place, or of the nearest one around it."""
        known = next((place[:cut] for cut in range(len(place), 0, -1) if place[:cut] in self.lines), None)
        return f"{self.path}:{self.lines[known]}" if known else str(self.path)

    def _guard(self, make: Callable[[], Any], place: Place) -> Any:
        """What `make` returns; what it refuses becomes an error at the place."""
        try:
            return make()
        except UsageError:
            raise
        except (ShardRulesError, TypeError) as error:
            raise self.error(place, one_line(error)) from error

    def _known(self, table: Mapping[str, Any], keys: Sequence[str], place: Place, owner: str) -> None:
        for key in table:
            if key not in keys:
                near = suggest(key, keys)
                raise self.error((*place, key), f"{owner} has no such key{near}; it has {', '.join(keys)}")

    def rules(self, value: Any, place: Place) -> list[ShardingRule]:
        """A list of rules. Those in a row that have a path become one rule, which sees patterns that never win."""
        if not isinstance(value, list) or not value:
            raise self.error(place, f"a list of rules is wanted, with one at least; got {value!r:.60}")
        found: list[ShardingRule] = []
        aimed: list[tuple[str, Any]] = []
        for number, item in enumerate(value):
            if isinstance(item, dict) and "path" in item:
                aimed.append(self.aimed(item, (*place, number)))
                continue
            if aimed:
                found.append(self._regex(aimed, place))
                aimed = []
            found.append(self.rule(item, (*place, number)))
        return [*found, *([self._regex(aimed, place)] if aimed else [])]

    def _regex(self, pairs: list[tuple[str, Any]], place: Place, **options: Any) -> ShardingRule:
        return self._guard(lambda: RegexShardingRule(pairs, **options), place)

    def aimed(self, item: Mapping[str, Any], place: Place) -> tuple[str, Any]:
        """A pattern for paths, and what it stands for."""
        pattern = item["path"]
        if not isinstance(pattern, str):
            raise self.error((*place, "path"), f"a pattern for paths is a text, got {pattern!r:.60}")
        self._guard(lambda: RegexShardingRule([(pattern, None)]), (*place, "path"))
        rest = {key: value for key, value in item.items() if key != "path"}
        if "spec" in rest:
            self._known(item, ("path", "spec"), place, "a path with a spec")
            spec = self.spec(rest["spec"], (*place, "spec"))
            return pattern, self._guard(lambda: RegexShardingRule([(pattern, spec)]).rules[0][1], (*place, "spec"))
        if not rest:
            raise self.error(place, f"{pattern!r} stands for nothing: add a spec, a type, or a rule")
        if rest == {"type": "skip"}:
            return pattern, None
        return pattern, self.rule(rest, place)

    def rule(self, value: Any, place: Place) -> ShardingRule:
        """One rule: a text, or a table."""
        if isinstance(value, str):
            rule = self._guard(lambda: parse_rule(value), place)
            for part in rule.rules if isinstance(rule, ChainShardingRule) else (rule,):
                if isinstance(part, DimShardingRule | FSDPShardingRule):
                    self.axes.extend((name, self.where(place)) for name in axis_tuple(part.axis))
            return rule
        if not isinstance(value, dict):
            raise self.error(place, f"a rule is a text such as \"fsdp('data')\", or a table; got {value!r:.60}")
        if "path" in value:
            return self._regex([self.aimed(value, place)], place)
        if "type" not in value:
            if "rule" in value:
                self._known(value, ("rule",), place, "a table with a rule and no type")
                return self.rule(value["rule"], (*place, "rule"))
            near = ", ".join(key for key in value) or "nothing"
            raise self.error(place, f"a rule needs a type or a path, this one has {near}; types are {', '.join(TYPES)}")
        name = value["type"]
        if not isinstance(name, str) or name not in TYPES:
            near = suggest(name, TYPES) if isinstance(name, str) else ""
            raise self.error((*place, "type"), f"there is no rule {name!r}{near}; there are {', '.join(TYPES)}")
        return self._typed(TYPES[name], name, value, place)

    def _typed(self, kind: "_Type", name: str, table: Mapping[str, Any], place: Place) -> ShardingRule:
        keys = ["type", *kind.fields]
        self._known(table, keys, place, f"the rule {name!r}")
        given = {key: kind.fields[key](self, value, (*place, key)) for key, value in table.items() if key != "type"}
        missing = [key for key in kind.needed if key not in given]
        if missing:
            raise self.error(place, f"the rule {name!r} needs {' and '.join(missing)}")
        try:
            return kind.make(**given)
        except (ShardRulesError, TypeError) as error:
            key = next((key for key in given if re.search(rf"\b{key}\b", str(error))), None)
            raise self.error(place if key is None else (*place, key), one_line(error)) from error

    def plain(self, value: Any, place: Place) -> Any:
        """A value that the rule itself checks; lists are tuples for it."""
        return tuple(self.plain(one, place) for one in value) if isinstance(value, list) else value

    def axis(self, value: Any, place: Place) -> Any:
        """An axis, or several that split one dimension."""
        for name in value if isinstance(value, list) and value else [value]:
            if not isinstance(name, str) or not name:
                raise self.error(place, f"an axis is wanted, or a list of them; got {value!r:.60}")
            self.axes.append((name, self.where(place)))
        return self.plain(value, place)

    def axis_list(self, value: Any, place: Place) -> Any:
        """The axes that a rule may use, each an axis or several as one."""
        if not isinstance(value, list):
            raise self.error(place, f"a list of axes is wanted, got {value!r:.60}")
        return tuple(self.axis(one, (*place, number)) for number, one in enumerate(value))

    def flag(self, value: Any, place: Place) -> bool:
        """`true` or `false`."""
        if not isinstance(value, bool):
            raise self.error(place, f"true or false is wanted, got {value!r:.60}")
        return value

    def number(self, value: Any, place: Place) -> int | float:
        """A number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(place, f"a number is wanted, got {value!r:.60}")
        return value

    def fitted(self, value: Any, place: Place) -> ShardingRule:
        """A rule that may speak of axes which the mesh lacks."""
        known = len(self.axes)
        rule = self.rule(value, place)
        del self.axes[known:]
        return rule

    def spec(self, value: Any, place: Place) -> PartitionSpec:
        """`["model", "-", ["data", "fsdp"]]`."""
        if not isinstance(value, list):
            raise self.error(
                place,
                f"a spec is a list with an axis, a list of axes or '{WHOLE}' for each dimension; got {value!r:.60}",
            )
        entries = [self._entry(one, (*place, number)) for number, one in enumerate(value)]
        names = [
            name for one in value for name in (one if isinstance(one, list) else [one]) if name not in (WHOLE, "?")
        ]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise self.error(place, f"axis {twice!r} comes twice: an axis can split one dimension only")
        return self._guard(lambda: spec_from_json(entries), place)

    def _entry(self, one: Any, place: Place) -> Any:
        names = one if isinstance(one, list) else [one]
        if (
            not names
            or not all(isinstance(name, str) and name for name in names)
            or (isinstance(one, list) and WHOLE in one)
        ):
            raise self.error(place, f"{one!r} is no axis, no list of axes, and not '{WHOLE}'")
        if one == "?":  # left to the compiler, as in the JSON of plans
            return one
        return None if one == WHOLE else self.axis(one, place)

    def mesh(self, value: Any, place: Place) -> AbstractMesh:
        """Axes and their sizes, `"data:16,model:4"`."""
        mesh = self._guard(lambda: mesh_shape(value), place)
        if not mesh.axis_names:
            raise self.error(place, "it is empty: write axes and sizes, data:16,model:4")
        return mesh

    def count(self, value: Any, place: Place) -> int:
        """Bytes, `"16GiB"` for instance."""
        if isinstance(value, float) and not value.is_integer():
            raise self.error(place, f"a whole number of bytes is wanted, or a text like '16GiB'; got {value!r}")
        return self._guard(lambda: read_bytes(str(place[-1]), value), place)

    def patterns(self, value: Any, place: Place) -> list[tuple[str, Any]]:
        """Tables with a path each."""
        if not isinstance(value, list) or not all(isinstance(one, dict) and "path" in one for one in value):
            raise self.error(place, 'a list of tables is wanted, each with a path: {path = "norm", spec = []}')
        return [self.aimed(one, (*place, number)) for number, one in enumerate(value)]

    def shapes(self, value: Any, place: Place) -> tuple[Any, ...]:
        """Tables with a shape and a spec each; `"*"` is any size."""
        found = []
        for number, one in enumerate(value if isinstance(value, list) else [value]):
            here = (*place, number) if isinstance(value, list) else place
            if not isinstance(one, dict) or not isinstance(one.get("shape"), list) or "spec" not in one:
                raise self.error(here, 'a shape and a spec are wanted: {shape = ["*", 1024], spec = ["model", "-"]}')
            self._known(one, ("shape", "spec"), here, "a shape with a spec")
            sizes = tuple(None if size == "*" else size for size in one["shape"])
            if not all(size is None or (isinstance(size, int) and not isinstance(size, bool)) for size in sizes):
                raise self.error((*here, "shape"), f"sizes are wanted, or '*' for any; got {one['shape']!r:.60}")
            found.append((sizes, self.spec(one["spec"], (*here, "spec"))))
        return tuple(found)

    def names(self, value: Any, place: Place) -> tuple[tuple[str, Any], ...]:
        """Logical names and the axes they go to, as a table or as pairs."""
        if isinstance(value, dict):
            return tuple((name, self._entry(axis, (*place, name))) for name, axis in value.items())
        pairs = value
        if not isinstance(pairs, list) or not all(isinstance(one, list) and len(one) == 2 for one in pairs):
            raise self.error(place, f"names and their axes are wanted, {{embed = 'data', norm = '{WHOLE}'}}")
        return tuple((name, self._entry(axis, place)) for name, axis in pairs)

    def pins(self, value: Any, place: Place) -> tuple[tuple[str, PartitionSpec], ...]:
        """A table from path to spec."""
        if not isinstance(value, dict):
            raise self.error(place, 'a table from path to spec is wanted: {"layers/0/up" = ["model"]}')
        return tuple((path, self.spec(one, (*place, path))) for path, one in value.items())

    def plan(self, value: Any, place: Place) -> ShardingPlan:
        """A plan in a file, which is named from the folder of this one."""
        if not isinstance(value, str):
            raise self.error(place, f"the name of a plan's JSON file is wanted, got {value!r:.60}")
        try:
            return ShardingPlan.from_json(read_text(self.path.parent / value))
        except (UsageError, PlanError) as error:
            raise self.error(place, one_line(error)) from error


_Read: TypeAlias = Callable[[_Reader, Any, Place], Any]


@final
@attrs.frozen
class _Type:
    """A rule as TOML has it: how it is made, how each of its arguments is read, and which it needs."""

    make: Callable[..., ShardingRule]
    fields: Mapping[str, _Read]
    needed: tuple[str, ...] = ()


def _type(kind: type[ShardingRule], **other: _Read) -> _Type:
    """A rule whose arguments are those of its class; `other` are those that are not read as they stand."""
    parameters = inspect.signature(kind).parameters.values()
    fields = {one.name: other.get(one.name, _Reader.plain) for one in parameters}
    return _Type(kind, fields, tuple(one.name for one in parameters if one.default is inspect.Parameter.empty))


TYPES: Mapping[str, _Type] = MappingProxyType(
    {
        "auto": _type(
            AutoShardingRule,
            mesh=_Reader.mesh,
            axis_names=_Reader.axis_list,
            min_shard_size=_Reader.number,
            reverse=_Reader.flag,
        ),
        "chain": _Type(lambda rules: ChainShardingRule(*rules), {"rules": _Reader.rules}, ("rules",)),
        "composite": _Type(
            lambda rules, **options: CompositeShardingRule(*rules, **options),
            {"rules": _Reader.rules, "empty_is_opinion": _Reader.flag},
            ("rules",),
        ),
        "fitted": _type(FittedShardingRule, rule=_Reader.fitted),
        "fsdp": _type(FSDPShardingRule, axis=_Reader.axis),
        "logical": _type(LogicalShardingRule, mapping=_Reader.names),
        "memory": _type(
            MemoryConstrainedShardingRule,
            max_memory_per_device=_Reader.count,
            mesh=_Reader.mesh,
            axis_names=_Reader.axis_list,
        ),
        "mirror": _Type(lambda file: MirrorShardingRule(plan=file), {"file": _Reader.plan}, ("file",)),
        "plan": _Type(lambda file: file.as_rule(), {"file": _Reader.plan}, ("file",)),
        "regex": _type(RegexShardingRule, rules=_Reader.patterns, min_size=_Reader.number),
        "replicate": _type(ReplicateShardingRule),
        "shape": _type(ShapeBasedShardingRule, patterns=_Reader.shapes),
        "shard_dim": _type(DimShardingRule, axis=_Reader.axis, dim=_Reader.number, ignore_ndim_error=_Reader.flag),
        "specs": _type(SpecTreeShardingRule, specs=_Reader.pins),
        "stacked": _type(StackedShardingRule, rule=_Reader.rule, dims=_Reader.number, axis=_Reader.axis),
    }
)
"""The rules by the names that they have in files."""
