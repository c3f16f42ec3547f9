"""Rules as TOML: every rule and composition, and the errors of invalid files."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import RulesFileError
from shardrules.core.rule import ShardingRule
from shardrules.presets.huggingface import HuggingFaceShardingRule
from shardrules.rules.files.reader import TYPES, read_rules_file

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
    "hf": (
        """rule = {type = "hf", tensor = "tp", fsdp = ["data", "fsdp"], head_dim = 64, roles = {up = "columns"}}""",
        HuggingFaceShardingRule("tp", ("data", "fsdp"), 64, {"up": "columns"}),
    ),
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
    return read_rules_file(file).rules


@pytest.mark.parametrize("name", RULES)
def test_every_type_makes_its_rule(name: str, tmp_path: Path) -> None:
    text, rule = RULES[name]
    assert read(tmp_path, text) == rule


def test_every_rule_has_a_type_and_every_type_is_tested() -> None:
    public = [
        value
        for value in (getattr(sr, name) for name in sr.__all__)
        if isinstance(value, type) and issubclass(value, ShardingRule)
    ]
    final = {rule_class for rule_class in public if not getattr(rule_class, "__abstractmethods__", ())}
    assert {type(rule) for _, rule in RULES.values()} == {*final, HuggingFaceShardingRule}
    assert list(RULES) == sorted(TYPES)


@pytest.mark.parametrize("name", RULES)
def test_every_argument_is_tested(name: str) -> None:
    text, _ = RULES[name]
    assert [key for key in TYPES[name].fields if f"{key} =" not in text] in ([], ["mesh"])


def test_a_rule_that_is_imported_late_has_the_arguments_of_its_class() -> None:
    assert [*TYPES["hf"].fields] == [*inspect.signature(HuggingFaceShardingRule).parameters]


def test_consecutive_paths_become_one_rule(tmp_path: Path) -> None:
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


def test_a_single_rule_is_not_composed(tmp_path: Path) -> None:
    assert read(tmp_path, '[[rules]]\ntype = "replicate"') == sr.ReplicateShardingRule()
    assert read(tmp_path, "rule = \"fsdp('data')\"") == sr.FSDPShardingRule("data")


def test_files_may_name_a_mesh(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('mesh = "data:4, model:2"\nrule = "auto"\n')
    mesh = read_rules_file(file).mesh
    assert mesh is not None
    assert mesh.shape == {"data": 4, "model": 2}


WRONG = {
    "a misspelt spec": (
        '[[rules]]\npath = "a"\nspek = ["data"]',
        "rules.toml: rules[0].spek: unknown key (did you mean 'spec'?); a rule has a path with a",
    ),
    "a misspelt path": (
        '[[rules]]\npaht = "a"\nspec = ["data"]',
        "rules.toml: rules[0].paht: unknown key (did you mean 'path'?); a rule has a path with a spec",
    ),
    "a misspelt path beside a type": (
        '[[rules]]\npaht = "a"\ntype = "replicate"',
        "rules.toml: rules[0].paht: unknown key (did you mean 'path'?); the rule 'replicate' has type",
    ),
    "a misspelt type": (
        '[[rules]]\ntpye = "fsdp"\naxis = "data"',
        "rules.toml: rules[0].tpye: unknown key (did you mean 'type'?)",
    ),
    "a misspelt type beside a path": (
        '[[rules]]\npath = "a"\ntyp = "replicate"',
        "rules.toml: rules[0].typ: unknown key (did you mean 'type'?)",
    ),
    "a spec without a path": (
        '[[rules]]\nspec = ["data"]',
        "rules.toml: rules[0]: a spec needs a path, the pattern of the leaves that get it",
    ),
    "rule as a list": (
        'mesh = "data:4"\n[[rule]]\npath = "a"\nspec = []',
        "rules.toml: rule: unknown list of tables [[rule]] (did you mean [[rules]]?)",
    ),
    "rules as a table": (
        '[rules]\npath = "a"\nspec = []',
        "rules.toml: rules: must be a list of rules (did you mean [[rules]]?)",
    ),
    "another name for rules": (
        '[[rulez]]\npath = "a"\nspec = []',
        "rules.toml: rulez: unknown key (did you mean 'rule'?); a file of rules has mesh",
    ),
    "limits": ("limits = 3", 'rules.toml: limits: must be a table, [limits] with budget = "16GiB"; got 3'),
    "an unknown limit": (
        '[limits]\nbudgte = "1GiB"',
        "rules.toml: limits.budgte: unknown key (did you mean 'budget'?); [limits] has budget, golden, level",
    ),
    "a bad budget": ('[limits]\nbudget = "16 Gb"', "rules.toml: limits.budget: budget must be a number of bytes"),
    "a bad golden": ("[limits]\ngolden = 3", "rules.toml: limits.golden: must be the name of a file, got 3"),
    "a bad level": (
        '[limits]\nlevel = "warn"',
        "rules.toml: limits.level: must be one of 'error', 'warning', 'note'",
    ),
    "a bad optimizer": ('optimizer = "adamw(lr)"', "rules.toml: optimizer: "),
    "an optimizer as a table": ("optimizer = {name = 1}", "rules.toml: optimizer: must be a string such as 'adamw'"),
    "no toml": ("\nmesh = data", "rules.toml: invalid TOML: Invalid value (at line 2, column 8)"),
    "no end": ("mesh = [", "rules.toml: invalid TOML: "),
    "empty": ("", "rules.toml: the file has no rules: write tables under [[rules]], or one rule = ..."),
    "no rules": ("rules = []", "rules.toml: rules: must be a list of at least one rule; got []"),
    "an unknown key": (
        '\nmash = "data:4"',
        "rules.toml: mash: unknown key (did you mean 'mesh'?); a file of rules has mesh, optimizer, limits, rule",
    ),
    "a bad mesh": (
        '\n\nmesh = "data4"\nrule = "auto"',
        "rules.toml: mesh: mesh shape 'data4': 'data4' is not name:size",
    ),
    "an unknown type": (
        '[[rules]]\n\ntype = "fdsp"',
        "rules.toml: rules[0].type: unknown rule 'fdsp' (did you mean 'fsdp'?); the rules are auto, chain, composite",
    ),
    "the former name of a type": (
        '[[rules]]\ntype = "dim"',
        "rules.toml: rules[0].type: unknown rule 'dim' (did you mean 'shard_dim'?); the rules are auto",
    ),
    "an unknown argument": (
        '[[rules]]\ntype = "fsdp"\naxsi = "data"',
        "rules.toml: rules[0].axsi: unknown key (did you mean 'axis'?); the rule 'fsdp' has type, axis, min_size_mb",
    ),
    "an argument is missing": (
        '[[rules]]\ntype = "shard_dim"\naxis = "data"',
        "rules.toml: rules[0]: the rule 'shard_dim' needs dim",
    ),
    "a bad argument": (
        '[[rules]]\ntype = "fsdp"\naxis = "data"\nmin_size_mb = "big"',
        "rules.toml: rules[0].min_size_mb: min_size_mb must be a number of MiB, 0 or more; got 'big'",
    ),
    "bytes": (
        '[[rules]]\ntype = "memory"\nmax_memory_per_device = "16 Gb"',
        "rules.toml: rules[0].max_memory_per_device: max_memory_per_device must be a number of bytes",
    ),
    "a bad pattern": ('[[rules]]\npath = "(norm"\nspec = []', "rules.toml: rules[0].path: "),
    "a pattern is not a string": (
        "[[rules]]\npath = 3\nspec = []",
        "rules.toml: rules[0].path: a pattern must be a string, got 3",
    ),
    "a path alone": (
        '[[rules]]\npath = "norm"',
        "rules.toml: rules[0]: 'norm' decides nothing: add a spec, a type, or a rule",
    ),
    "a spec is not a list": (
        '[[rules]]\npath = "norm"\nspec = "data"',
        "rules.toml: rules[0].spec: a spec is a list with an axis, a list of axes or '-' for each dimension; got 'd",
    ),
    "an axis is not a string": (
        '[[rules]]\npath = "a"\nspec = ["data", 1]',
        "rules.toml: rules[0].spec[1]: 1 is not an axis, a list of axes",
    ),
    "an axis twice": (
        '[[rules]]\npath = "a"\nspec = ["data", "data"]',
        "rules.toml: rules[0].spec: axis 'data' is repeated",
    ),
    "a spec beside more": (
        '[[rules]]\npath = "a"\nspec = []\ntype = "fsdp"',
        "rules.toml: rules[0].type: unknown key; a path with a spec has path, spec",
    ),
    "a bad text": (
        '[[rules]]\npath = "a"\nrule = "fsdp(data)"',
        "rules.toml: rules[0].rule: rule text 'fsdp(data)': the arguments of fsdp must be literals",
    ),
    "an op that is not known": ("rule = \"fdsp('data')\"", "rules.toml: rule: rule text"),
    "a rule is a number": ("rule = 7", "rules.toml: rule: a rule is a string such as"),
    "no type": ('[[rules]]\naxis = "data"', "rules.toml: rules[0]: a rule needs a type or a path, but this has axis"),
    "inside of others": (
        'rule = {type = "chain", rules = [\n"auto",\n{type = "fitted", rule = {type = "shard_dmi"}}]}',
        "rules.toml: rule.rules[1].rule.type: unknown rule 'shard_dmi' (did you mean 'shard_dim'?)",
    ),
    "no such plan": (
        'rule = {type = "plan", file = "plans.json"}',
        "rules.toml: rule.file: file plans.json does not exist (did you mean 'plan.json'?)",
    ),
    "both kinds": (
        'rule = "auto"\n[[rules]]\nrule = "auto"',
        "rules.toml: rule: the file has [[rules]] too: write one of the two",
    ),
    "no flag": (
        'rule = {type = "shard_dim", axis = "data", dim = 0, ignore_ndim_error = "no"}',
        "rules.toml: rule.ignore_ndim_error: must be true or false, got 'no'",
    ),
    "no number": (
        'rule = {type = "shard_dim", axis = "data", dim = true}',
        "rules.toml: rule.dim: must be a number, got True",
    ),
    "no axis": (
        'rule = {type = "shard_dim", axis = [3], dim = 0}',
        "rules.toml: rule.axis: must be an axis or a list of axes; got [3]",
    ),
    "no axes": (
        'rule = {type = "auto", axis_names = {data = 1}}',
        "rules.toml: rule.axis_names: must be a list of axes",
    ),
    "a size": (
        'rule = {type = "shape", patterns = [{shape = [true], spec = []}]}',
        "rules.toml: rule.patterns[0].shape: must be sizes, or '*' for any",
    ),
    "half a byte": (
        'rule = {type = "memory", max_memory_per_device = 1.5}',
        "rules.toml: rule.max_memory_per_device: must be a whole number of bytes",
    ),
    "an empty list for an axis": (
        'rule = {type = "regex", rules = [{path = "a", spec = [[], "data"]}]}',
        "rules.toml: rule.rules[0].spec[0]: [] is not an axis",
    ),
    "an item": (
        '[[rules]]\npath = "a"\nspec = [\n  "data",\n  3,\n]',
        "rules.toml: rules[0].spec[1]: 3 is not an axis, a list of axes, or '-'",
    ),
    "a name": (
        '[rule]\ntype = "logical"\n[rule.mapping]\nembed = "data"\nmlp = 3',
        "rules.toml: rule.mapping.mlp: 3 is not an axis",
    ),
    "a plan that is none": (
        'rule = {type = "plan", file = "rules.toml"}',
        "rules.toml: rule.file: this text is not a plan",
    ),
    "shapes": (
        'rule = {type = "shape", patterns = [\n{shape = [1], spec = []},\n{shape = 2, spec = []}]}',
        "rules.toml: rule.patterns[1]: must have a shape and a spec",
    ),
    "names": (
        'rule = {type = "logical", mapping = "embed"}',
        "rules.toml: rule.mapping: must be names and their axes",
    ),
    "pins": ('rule = {type = "specs", specs = []}', "rules.toml: rule.specs: must be a table from path to spec"),
    "patterns": ('rule = {type = "regex", rules = ["a"]}', "rules.toml: rule.rules: must be a list of tables"),
    "a mode": (
        'rule = {type = "regex", rules = [{path = "a", spec = []}], match = "find"}',
        "rules.toml: rule.match: match must be one of 'search', 'fullmatch', 'match'; got 'find'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_key_and_nearest_word(name: str, tmp_path: Path) -> None:
    text, message = WRONG[name]
    with pytest.raises(RulesFileError, match=r".") as raised:
        read(tmp_path, text)
    assert message in str(raised.value).replace(f"{tmp_path}/", "")
    assert "\n" not in str(raised.value)


SEVERAL = {
    "limits": (
        '[limits]\nbudgte = 1\ngolden = 3\nlevel = "warn"\nbudget = "16 Gb"\n[[rules]]\nrule = "auto"',
        ("limits.budgte:", "limits.golden:", "limits.level:", "limits.budget:"),
    ),
    "both lists": (
        '[[rule]]\npath = "a"\nspek = []\n[[rules]]\npaht = "a"\nspec = []',
        ("rule: unknown list of tables", "rule[0].spek:", "rules[0].paht:"),
    ),
    "a rule beside the list": (
        'rule = {type = "atuo"}\n[[rules]]\npaht = "a"\nspec = []',
        ("rule: the file has [[rules]] too", "rule.type:", "rules[0].paht:"),
    ),
    "two keys of a rule": ('[[rules]]\npaht = "a"\nspek = []', ("rules[0].paht:", "rules[0].spek:")),
    "two arguments": (
        '[[rules]]\ntype = "shard_dim"\naxis = 3\ndim = "x"\nnow = 1',
        ("rules[0].axis:", "rules[0].dim:", "rules[0].now:"),
    ),
    "two entries": ('[[rules]]\npath = "a"\nspec = [1, 2]\ntype = "x"', ("spec[0]:", "spec[1]:", "rules[0].type:")),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_errors_list_all_that_is_wrong(name: str, tmp_path: Path) -> None:
    text, parts = SEVERAL[name]
    with pytest.raises(RulesFileError, match=f"rules.toml has {len(parts)} problems:") as raised:
        read(tmp_path, text)
    assert [part for part in parts if part not in str(raised.value)] == []


@pytest.mark.parametrize("name", ["opts.py:make", "sub-dir/opts.py:make(1, rate=0.1)", "adamw(b1=0.8)"])
def test_optimizers_are_named_as_on_the_command_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(f'optimizer = "{name}"\nrule = "auto"\n')
    assert read_rules_file(tmp_path / "rules.toml").optimizer == name


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


def test_unknown_axes_are_located_unless_fitted(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(AXES)
    rules = read_rules_file(file)
    message = r"rules.toml: rules\[0\]\.spec\[1\]: unknown axis 'modle' \(did you mean 'model'\?\); the mesh is data:4,"
    with pytest.raises(RulesFileError, match=message):
        rules.check_axes(sr.mesh_shape("data:4,model:2"))
    rules.check_axes(sr.mesh_shape("data:4,model:2,modle:2"))


INLINE = """\
mesh = "data:4"
rule = {type = "regex", rules = [
  {path = "a", spec = ["data"]},
  {path = "b", spec = ["modle"]},
]}
"""


def test_an_unknown_axis_inside_a_value_has_its_key_path(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(INLINE)
    with pytest.raises(RulesFileError, match=r"rules.toml: rule\.rules\[1\]\.spec\[0\]: unknown axis 'modle'"):
        read_rules_file(file).check_axes(sr.mesh_shape("data:4"))


@pytest.mark.parametrize(
    "text",
    [
        "hf(tensor='modle')",
        "hf(fsdp=('data', 'modle'))",
        "auto(axis_names=['data', 'modle'])",
        "memory(1e9, axis_names=[('data', 'modle')])",
        "logical({'embed': 'modle', 'norm': None})",
        "replicate|hf()|shard_dim('modle', 0)",
    ],
)
def test_an_unknown_axis_in_a_rule_as_text_is_located(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(f'mesh = "data:4,model:2"\nrule = "{text}"\n')
    with pytest.raises(RulesFileError, match=r"rules.toml: rule: unknown axis 'modle' \(did you mean 'model'"):
        sr.load_rules(file)
    file.write_text(file.read_text().replace("modle", "model"))
    assert sr.load_rules(file).rules == sr.parse_rule(text.replace("modle", "model"))


def test_strings_that_look_like_keys_lead_nowhere(tmp_path: Path) -> None:
    text = 'rule = """\n[[rules]]\nspec = 3\n"""\n[x]\ny = 1\n'
    with pytest.raises(RulesFileError, match=r"rules.toml: x: unknown key"):
        read(tmp_path, text)
