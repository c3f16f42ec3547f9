"""Rules as TOML: every rule and composition there is, and what is said of files that cannot be meant."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.cli.errors import UsageError
from shardrules.cli.rules_file import TYPES, read_rules_file
from shardrules.core.rule import ShardingRule

TREE = {
    "layers": [{"up": jax.ShapeDtypeStruct((64, 32), jnp.float32), "norm": jax.ShapeDtypeStruct((64,), jnp.float32)}]
}
PLAN = sr.DimShardingRule("data", 0).plan(TREE, sr.mesh_shape("data:4,model:2"))

RULES: dict[str, tuple[str, ShardingRule]] = {
    "auto": (
        'rule = {type = "auto", mesh = "data:4", axis_names = ["data"], min_shard_size = 8, reverse = true}',
        sr.AutoShardingRule(sr.mesh_shape("data:4"), ["data"], 8, True),
    ),
    "chain": (
        """rule = {type = "chain", rules = ["shard_dim('model', 0)", {type = "fsdp", axis = "data"}]}""",
        sr.DimShardingRule("model", 0) | sr.FSDPShardingRule("data"),
    ),
    "composite": (
        'rule = {type = "composite", rules = ["auto", "replicate"], empty_is_opinion = false}',
        sr.CompositeShardingRule(sr.AutoShardingRule(), sr.ReplicateShardingRule(), empty_is_opinion=False),
    ),
    "fitted": (
        'rule = {type = "fitted", rule = {type = "shard_dim", axis = "expert", dim = 0}}',
        sr.FittedShardingRule(sr.DimShardingRule("expert", 0)),
    ),
    "fsdp": ('rule = {type = "fsdp", axis = "data", min_size_mb = 0.5}', sr.FSDPShardingRule("data", 0.5)),
    "logical": (
        'rule = {type = "logical", mapping = {embed = "data", heads = ["data", "model"], norm = "-"}}',
        sr.LogicalShardingRule([("embed", "data"), ("heads", ("data", "model")), ("norm", None)]),
    ),
    "memory": (
        'rule = {type = "memory", max_memory_per_device = "16 GiB", scope = "tree", axis_names = ["data", "model"]}',
        sr.MemoryConstrainedShardingRule(16 * 2**30, axis_names=["data", "model"], scope="tree"),
    ),
    "mirror": ('rule = {type = "mirror", file = "plan.json"}', sr.MirrorShardingRule(PLAN)),
    "plan": ('rule = {type = "plan", file = "plan.json"}', PLAN.as_rule()),
    "regex": (
        """
        [rule]
        type = "regex"
        match = "fullmatch"
        unmatched = "error"
        min_size = 16
        rules = [
            {path = ".*norm", spec = []},
            {path = ".*up", spec = ["model", ["data"]]},
            {path = ".*lora.*", type = "skip"},
            {path = ".*", rule = "fsdp('data')"},
            {path = ".*", type = "shard_dim", axis = "data", dim = 0},
        ]
        """,
        sr.RegexShardingRule(
            [
                (".*norm", P()),
                (".*up", P("model", ("data",))),
                (".*lora.*", None),
                (".*", sr.FSDPShardingRule("data")),
                (".*", sr.DimShardingRule("data", 0)),
            ],
            match="fullmatch",
            unmatched="error",
            min_size=16,
        ),
    ),
    "replicate": ('rule = {type = "replicate"}', sr.ReplicateShardingRule()),
    "shape": (
        'rule = {type = "shape", patterns = [{shape = ["*", 1024], spec = ["model", "-"]}, {shape = [8], spec = []}]}',
        sr.ShapeBasedShardingRule({(None, 1024): P("model", None), (8,): P()}),
    ),
    "shard_dim": (
        'rule = {type = "shard_dim", axis = ["data", "model"], dim = -1, ignore_ndim_error = true}',
        sr.DimShardingRule(("data", "model"), -1, ignore_ndim_error=True),
    ),
    "specs": (
        'rule = {type = "specs", specs = {"layers/0/up" = ["model"], "layers" = ["-"]}}',
        sr.SpecTreeShardingRule((("layers/0/up", P("model")), ("layers", P(None)))),
    ),
    "stacked": (
        """rule = {type = "stacked", rule = "shard_dim('model', 0)", dims = 2, axis = "data"}""",
        sr.StackedShardingRule(sr.DimShardingRule("model", 0), 2, "data"),
    ),
}
"""Each type of rule as TOML, with every argument that it has."""


def read(tmp_path: Path, text: str) -> sr.ShardingRule:
    (tmp_path / "plan.json").write_text(PLAN.to_json())
    file = tmp_path / "rules.toml"
    file.write_text(text)
    return read_rules_file(file).rule


@pytest.mark.parametrize("name", RULES)
def test_every_type_says_what_its_class_does(name: str, tmp_path: Path) -> None:
    text, rule = RULES[name]
    assert read(tmp_path, text) == rule


def test_every_rule_has_a_type_and_every_type_is_tested() -> None:
    public = [value for value in vars(sr).values() if isinstance(value, type) and issubclass(value, ShardingRule)]
    final = {one for one in public if not getattr(one, "__abstractmethods__", ())}
    assert {type(rule) for _, rule in RULES.values()} == final
    assert list(RULES) == sorted(TYPES)


@pytest.mark.parametrize("name", RULES)
def test_every_argument_stands_in_some_file(name: str) -> None:
    text, _ = RULES[name]
    assert [key for key in TYPES[name].fields if f"{key} =" not in text] in ([], ["mesh"])


def test_paths_in_a_row_are_one_rule_and_the_first_with_an_opinion_wins(tmp_path: Path) -> None:
    rule = read(
        tmp_path,
        """
        [[rules]]
        path = "norm"
        spec = []
        [[rules]]
        path = "up"
        type = "stacked"
        rule = "shard_dim('model', 0)"
        [[rules]]
        rule = "fsdp('data')|shard_dim('model', -1)"
        [[rules]]
        path = "rest"
        spec = ["?", "data"]
        """,
    )
    assert rule == sr.CompositeShardingRule(
        sr.RegexShardingRule([("norm", P()), ("up", sr.StackedShardingRule(sr.DimShardingRule("model", 0)))]),
        sr.FSDPShardingRule("data") | sr.DimShardingRule("model", -1),
        sr.RegexShardingRule([("rest", P(P.UNCONSTRAINED, "data"))]),
    )


def test_one_rule_alone_is_no_composite(tmp_path: Path) -> None:
    assert read(tmp_path, '[[rules]]\ntype = "replicate"') == sr.ReplicateShardingRule()
    assert read(tmp_path, "rule = \"fsdp('data')\"") == sr.FSDPShardingRule("data")


def test_the_mesh_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('mesh = "data:4, model:2"\nrule = "auto"\n')
    mesh = read_rules_file(file).mesh
    assert mesh is not None
    assert mesh.shape == {"data": 4, "model": 2}


WRONG = {
    "no toml": ("\nmesh = data", "rules.toml:2: this is no TOML: Invalid value (at line 2, column 8)"),
    "no end": ("mesh = [", "rules.toml:1: this is no TOML: "),
    "empty": ("", "rules.toml: it needs rules: tables under [[rules]], or one rule = ..."),
    "no rules": ("rules = []", "rules.toml:1: rules: a list of rules is wanted, with one at least; got []"),
    "an unknown key": (
        '\nmash = "data:4"',
        "rules.toml:2: mash: a file of rules has no such key (did you mean 'mesh'?)",
    ),
    "a bad mesh": (
        '\n\nmesh = "data4"\nrule = "auto"',
        "rules.toml:3: mesh: mesh shape 'data4': 'data4' is not name:size",
    ),
    "an unknown type": (
        '[[rules]]\n\ntype = "fdsp"',
        "rules.toml:3: type: there is no rule 'fdsp' (did you mean 'fsdp'?); there are auto, chain, composite",
    ),
    "an unknown argument": (
        '[[rules]]\ntype = "fsdp"\naxsi = "data"',
        "rules.toml:3: axsi: the rule 'fsdp' has no such key (did you mean 'axis'?); it has type, axis, min_size_mb",
    ),
    "an argument is missing": (
        '[[rules]]\ntype = "shard_dim"\naxis = "data"',
        "rules.toml:1: rules: the rule 'shard_dim' needs dim",
    ),
    "a bad argument": (
        '[[rules]]\ntype = "fsdp"\naxis = "data"\nmin_size_mb = "big"',
        "rules.toml:4: min_size_mb: min_size_mb must be a number of MiB, 0 or more; got 'big'",
    ),
    "bytes": (
        '[[rules]]\ntype = "memory"\nmax_memory_per_device = "16 Gb"',
        "rules.toml:3: max_memory_per_device: max_memory_per_device must be a number of bytes, or a string like '80GB'",
    ),
    "a bad pattern": ('[[rules]]\npath = "(norm"\nspec = []', "rules.toml:2: path: "),
    "a pattern is no text": (
        "[[rules]]\npath = 3\nspec = []",
        "rules.toml:2: path: a pattern for paths is a text, got 3",
    ),
    "a path alone": (
        '[[rules]]\npath = "norm"',
        "rules.toml:1: rules: 'norm' stands for nothing: add a spec, a type, or a rule",
    ),
    "a spec is no list": (
        '[[rules]]\npath = "norm"\nspec = "data"',
        "rules.toml:3: spec: a spec is a list with an axis, a list of axes or '-' for each dimension; got 'data'",
    ),
    "an axis is no text": (
        '[[rules]]\npath = "a"\nspec = ["data", 1]',
        "rules.toml:3: spec: 1 is no axis, no list of axes",
    ),
    "an axis twice": ('[[rules]]\npath = "a"\nspec = ["data", "data"]', "rules.toml:3: spec: axis 'data' comes twice"),
    "a spec beside more": (
        '[[rules]]\npath = "a"\nspec = []\ntype = "fsdp"',
        "rules.toml:4: type: a path with a spec has no such key; it has path, spec",
    ),
    "a bad text": (
        '[[rules]]\npath = "a"\nrule = "fsdp(data)"',
        "rules.toml:3: rule: rule text 'fsdp(data)': the arguments of fsdp must be literals",
    ),
    "an op that is not known": ("rule = \"fdsp('data')\"", "rules.toml:1: rule: rule text"),
    "a rule is a number": ("rule = 7", "rules.toml:1: rule: a rule is a text such as"),
    "no type": ('[[rules]]\naxis = "data"', "rules.toml:1: rules: a rule needs a type or a path, this one has axis"),
    "inside of others": (
        'rule = {type = "chain", rules = [\n"auto",\n{type = "fitted", rule = {type = "shard_dmi"}}]}',
        "rules.toml:3: type: there is no rule 'shard_dmi' (did you mean 'shard_dim'?)",
    ),
    "no such plan": (
        'rule = {type = "plan", file = "plans.json"}',
        "rules.toml:1: file: there is no file plans.json (did you mean 'plan.json'?)",
    ),
    "both kinds": (
        'rule = "auto"\n[[rules]]\nrule = "auto"',
        "rules.toml:1: rule: there are [[rules]] too: write one of both",
    ),
    "no flag": (
        'rule = {type = "shard_dim", axis = "data", dim = 0, ignore_ndim_error = "no"}',
        "rules.toml:1: ignore_ndim_error: true or false is wanted, got 'no'",
    ),
    "no number": (
        'rule = {type = "shard_dim", axis = "data", dim = true}',
        "rules.toml:1: dim: a number is wanted, got True",
    ),
    "no axis": (
        'rule = {type = "shard_dim", axis = [3], dim = 0}',
        "rules.toml:1: axis: an axis is wanted, or a list of them; got [3]",
    ),
    "no axes": (
        'rule = {type = "auto", axis_names = {data = 1}}',
        "rules.toml:1: axis_names: a list of axes is wanted",
    ),
    "a size": (
        'rule = {type = "shape", patterns = [{shape = [true], spec = []}]}',
        "shape: sizes are wanted, or '*' for any",
    ),
    "half a byte": (
        'rule = {type = "memory", max_memory_per_device = 1.5}',
        "max_memory_per_device: a whole number of bytes",
    ),
    "an empty list for an axis": (
        'rule = {type = "regex", rules = [{path = "a", spec = [[], "data"]}]}',
        "spec: [] is no axis",
    ),
    "an item on a line of its own": (
        '[[rules]]\npath = "a"\nspec = [\n  "data",\n  3,\n]',
        "rules.toml:5: spec: 3 is no axis, no list of axes, and not '-'",
    ),
    "a name on a line of its own": (
        '[rule]\ntype = "logical"\n[rule.mapping]\nembed = "data"\nmlp = 3',
        "rules.toml:5: mlp: 3 is no axis",
    ),
    "a plan that is none": (
        'rule = {type = "plan", file = "rules.toml"}',
        "rules.toml:1: file: this text is not a plan",
    ),
    "shapes": (
        'rule = {type = "shape", patterns = [\n{shape = [1], spec = []},\n{shape = 2, spec = []}]}',
        "rules.toml:3: patterns: a shape and a spec are wanted",
    ),
    "names": ('rule = {type = "logical", mapping = "embed"}', "rules.toml:1: mapping: names and their axes are wanted"),
    "pins": ('rule = {type = "specs", specs = []}', "rules.toml:1: specs: a table from path to spec is wanted"),
    "patterns": ('rule = {type = "regex", rules = ["a"]}', "rules.toml:1: rules: a list of tables is wanted"),
    "a mode": (
        'rule = {type = "regex", rules = [{path = "a", spec = []}], match = "find"}',
        "rules.toml:1: match: match must be one of 'search', 'fullmatch', 'match'; got 'find'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_meant_is_told_with_line_key_and_the_nearest_word(name: str, tmp_path: Path) -> None:
    text, message = WRONG[name]
    with pytest.raises(UsageError, match=r".") as raised:
        read(tmp_path, text)
    assert message in str(raised.value).replace(f"{tmp_path}/", "")
    assert "\n" not in str(raised.value)


AXES = """\
mesh = "data:4,model:2"
[[rules]]
path = "a"
spec = ["data", ["model", "modle"]]
[[rules]]
type = "fitted"
rule = {type = "fsdp", axis = "expert"}
[[rules]]
type = "fsdp"
axis = "data"
"""


def test_axes_that_the_mesh_lacks_are_told_with_their_line_but_where_they_may_be_dropped(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(AXES)
    found = read_rules_file(file)
    with pytest.raises(
        UsageError, match=r"rules.toml:4: the mesh data:4,model:2 has no axis 'modle' \(did you mean 'model"
    ):
        found.check_axes(sr.mesh_shape("data:4,model:2"))
    found.check_axes(sr.mesh_shape("data:4,model:2,modle:2"))
