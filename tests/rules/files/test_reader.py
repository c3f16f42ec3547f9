"""Rules as TOML: every rule and composition, the errors of invalid files, and `load_rules`."""

import inspect
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import ConfigTypeError, RulesFileError
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
        """
        [rule]
        type = "logical"
        mapping = {embed = "data", heads = ["data", "model"], norm = "-"}
        unknown = "error"
        lost = "error"
        """,
        sr.LogicalShardingRule(
            [("embed", "data"), ("heads", ("data", "model")), ("norm", None)], unknown="error", lost="error"
        ),
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


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "rules.toml"
    file.write_text(text)
    return file


def read(tmp_path: Path, text: str) -> sr.ShardingRule:
    (tmp_path / "plan.json").write_text(PLAN.to_json())
    return read_rules_file(write(tmp_path, text)).rules


@pytest.mark.parametrize("name", RULES)
def test_every_type_makes_its_rule(name: str, tmp_path: Path) -> None:
    text, rule = RULES[name]
    assert read(tmp_path, text) == rule
    assert [key for key in inspect.signature(TYPES[name]).parameters if f"{key} =" not in text] in ([], ["mesh"])


def test_every_rule_has_a_type_and_every_type_is_tested() -> None:
    public = [
        value
        for value in (getattr(sr, name) for name in sr.__all__)
        if isinstance(value, type) and issubclass(value, ShardingRule)
    ]
    final = {rule_class for rule_class in public if not getattr(rule_class, "__abstractmethods__", ())}
    assert {type(rule) for _, rule in RULES.values()} == {*final, HuggingFaceShardingRule}
    assert list(RULES) == sorted(TYPES)


def test_a_rule_that_is_imported_late_has_the_arguments_of_its_class() -> None:
    by_class = inspect.signature(HuggingFaceShardingRule).parameters.values()
    by_name = inspect.signature(TYPES["hf"]).parameters.values()
    assert [(value.name, value.default) for value in by_name] == [(value.name, value.default) for value in by_class]


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


WRONG = [
    (
        '[[rules]]\npath = "a"\nspek = ["data"]',
        "rules[0].spek: unknown key (did you mean 'spec'?); a rule has a path w",
    ),
    (
        '[[rules]]\npaht = "a"\nspec = ["data"]',
        "rules[0].paht: unknown key (did you mean 'path'?); a rule has a path w",
    ),
    (
        '[[rules]]\npaht = "a"\ntype = "replicate"',
        "rules[0].paht: unknown key (did you mean 'path'?); the rule 'replic",
    ),
    ('[[rules]]\ntpye = "fsdp"\naxis = "data"', "rules[0].tpye: unknown key (did you mean 'type'?)"),
    ('[[rules]]\npath = "a"\ntyp = "replicate"', "rules[0].typ: unknown key (did you mean 'type'?)"),
    ('[[rules]]\nspec = ["data"]', "rules[0]: a spec needs a path, the pattern of the leaves that get it"),
    (
        'mesh = "data:4"\n[[rule]]\npath = "a"\nspec = []',
        "rule: unknown list of tables [[rule]] (did you mean [[rules]",
    ),
    ('[rules]\npath = "a"\nspec = []', "rules: must be a list of rules (did you mean [[rules]]?)"),
    ('[[rulez]]\npath = "a"\nspec = []', "rulez: unknown key (did you mean 'rule'?); a file of rules has mesh"),
    ("limits = 3", 'limits: must be a table, [limits] with budget = "16GiB"; got 3'),
    (
        '[limits]\nbudgte = "1GiB"',
        "limits.budgte: unknown key (did you mean 'budget'?); [limits] has budget, golden, l",
    ),
    ('[limits]\nbudget = "16 Gb"', "limits.budget: budget must be a number of bytes"),
    ("[limits]\ngolden = 3", "limits.golden: must be the name of a file, got 3"),
    ('[limits]\nlevel = "warn"', "limits.level: must be one of 'error', 'warning', 'note'"),
    ('optimizer = "adamw(lr)"', "optimizer: "),
    ("optimizer = {name = 1}", "optimizer: must be a string such as 'adamw'"),
    ("\nmesh = data", "invalid TOML: Invalid value (at line 2, column 8)"),
    ("", "the file has no rules: write tables under [[rules]], or one rule = ..."),
    ("rules = []", "rules: must be a list of at least one rule; got []"),
    ('mash = "data:4"', "mash: unknown key (did you mean 'mesh'?); a file of rules has mesh, optimizer, limits, rule"),
    ('mesh = "data4"\nrule = "auto"', "mesh: mesh shape 'data4': 'data4' is not name:size"),
    ('[[rules]]\ntype = "dim"', "rules[0].type: unknown rule 'dim' (did you mean 'shard_dim'?); the rules are auto"),
    (
        '[[rules]]\n\ntype = "fdsp"',
        "rules[0].type: unknown rule 'fdsp' (did you mean 'fsdp'?); the rules are auto, cha",
    ),
    (
        '[[rules]]\ntype = "memory"\nmax_memory_per_device = "16 Gb"',
        "rules[0].max_memory_per_device: max_memory_per_device must be a number of bytes",
    ),
    ("rule = \"fdsp('data')\"", "rule: rule text"),
    (
        '[[rules]]\ntype = "fsdp"\naxsi = "data"',
        "rules[0].axsi: unknown key (did you mean 'axis'?); the rule 'fsdp' ha",
    ),
    ('[[rules]]\ntype = "shard_dim"\naxis = "data"', "rules[0]: the rule 'shard_dim' needs dim"),
    (
        '[[rules]]\ntype = "fsdp"\naxis = "data"\nmin_size_mb = "big"',
        "rules[0].min_size_mb: min_size_mb must be a number of MiB, 0",
    ),
    ('[[rules]]\npath = "(norm"\nspec = []', "rules[0].path: "),
    ("[[rules]]\npath = 3\nspec = []", "rules[0].path: a pattern must be a string, got 3"),
    ('[[rules]]\npath = "norm"', "rules[0]: 'norm' decides nothing: add a spec, a type, or a rule"),
    (
        '[[rules]]\npath = "norm"\nspec = "data"',
        "rules[0].spec: a spec is a list with an axis, a list of axes or '-' f",
    ),
    ('[[rules]]\npath = "a"\nspec = ["data", 1]', "rules[0].spec[1]: 1 is not an axis, a list of axes"),
    ('[[rules]]\npath = "a"\nspec = ["data", "data"]', "rules[0].spec: axis 'data' is repeated"),
    (
        '[[rules]]\npath = "a"\nspec = []\ntype = "fsdp"',
        "rules[0].type: unknown key; a path with a spec has path, spec",
    ),
    (
        '[[rules]]\npath = "a"\nrule = "fsdp(data)"',
        "rules[0].rule: rule text 'fsdp(data)': the arguments of fsdp must ",
    ),
    ("rule = 7", "rule: a rule is a string such as"),
    ('[[rules]]\naxis = "data"', "rules[0]: a rule needs a type or a path, but this has axis"),
    (
        'rule = {type = "chain", rules = [\n"auto",\n{type = "fitted", rule = {type = "shard_dmi"}}]}',
        "rule.rules[1].rule.type: unknown rule 'shard_dmi' (did you m",
    ),
    (
        'rule = {type = "plan", file = "plans.json"}',
        "rule.file: file plans.json does not exist (did you mean 'plan.jso",
    ),
    ('rule = "auto"\n[[rules]]\nrule = "auto"', "rule: the file has [[rules]] too: write one of the two"),
    (
        'rule = {type = "shard_dim", axis = "data", dim = 0, ignore_ndim_error = "no"}',
        "rule.ignore_ndim_error: must be true or false, got 'no'",
    ),
    ('rule = {type = "shard_dim", axis = "data", dim = true}', "rule.dim: must be a number, got True"),
    ('rule = {type = "shard_dim", axis = [3], dim = 0}', "rule.axis: must be an axis or a list of axes; got [3]"),
    ('rule = {type = "auto", axis_names = {data = 1}}', "rule.axis_names: must be a list of axes"),
    (
        'rule = {type = "shape", patterns = [{shape = [true], spec = []}]}',
        "rule.patterns[0].shape: must be sizes, or '*' for any",
    ),
    (
        'rule = {type = "memory", max_memory_per_device = 1.5}',
        "rule.max_memory_per_device: must be a whole number of bytes",
    ),
    (
        'rule = {type = "regex", rules = [{path = "a", spec = [[], "data"]}]}',
        "rule.rules[0].spec[0]: [] is not an axis",
    ),
    ('[rule]\ntype = "logical"\n[rule.mapping]\nembed = "data"\nmlp = 3', "rule.mapping.mlp: 3 is not an axis"),
    ('rule = {type = "plan", file = "rules.toml"}', "rule.file: this text is not a plan"),
    (
        'rule = {type = "shape", patterns = [\n{shape = [1], spec = []},\n{shape = 2, spec = []}]}',
        "rule.patterns[1]: must have a shape and a spec",
    ),
    ('rule = {type = "logical", mapping = "embed"}', "rule.mapping: must be names and their axes"),
    ('rule = {type = "specs", specs = []}', "rule.specs: must be a table from path to spec"),
    ('rule = {type = "regex", rules = ["a"]}', "rule.rules: must be a list of tables"),
    (
        'rule = {type = "regex", rules = [{path = "a", spec = []}], match = "find"}',
        "rule.match: match must be one of 'search', 'fullmatch', 'mat",
    ),
]
"""Texts of invalid files, and the beginnings of their errors."""


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message for _, message in WRONG])
def test_errors_name_key_and_nearest_word(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RulesFileError, match=r".") as raised:
        read(tmp_path, text)
    assert str(raised.value).replace(f"{tmp_path}/", "").startswith(f"rules.toml: {message}")
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
[[rules]]
path = "a"
spec = ["data", ["model", "modle"]]
[[rules]]
type = "fitted"
rule = {type = "fsdp", axis = "expert"}
[[rules]]
type = "regex"
rules = [{path = "a", spec = ["data"]}, {path = "b", spec = ["madel"]}]
[[rules]]
type = "fsdp"
axis = "data"
"""


def test_unknown_axes_are_located_unless_fitted(tmp_path: Path) -> None:
    rules = read_rules_file(write(tmp_path, AXES))
    with pytest.raises(RulesFileError, match=r"unknown axes:\n") as caught:
        rules.check_axes(sr.mesh_shape("data:4,model:2"))
    first, second = str(caught.value).splitlines()[1:]
    assert first.endswith("rules.toml: rules[0].spec[1]: unknown axis 'modle' (did you mean 'model'?)")
    assert "rules.toml: rules[2].rules[1].spec[0]: unknown axis 'madel' (did you mean 'model'?); the mesh is" in second
    rules.check_axes(sr.mesh_shape("data:4,model:2,modle:2,madel:2"))


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


# ---- load_rules ----

TEXT = """\
mesh = "data:4,model:2"
optimizer = "adamw(mu_dtype='bfloat16')"

[limits]
budget = "1.5GiB"
golden = "golden/plan.json"
level = "error"

[[rules]]
path = "norm"
spec = []

[[rules]]
rule = "shard_dim('model', 0) | fsdp('data', min_size_mb=0)"
"""


def test_a_file_gives_rules_mesh_optimizer_and_limits(tmp_path: Path) -> None:
    file = sr.load_rules(str(write(tmp_path, TEXT)))
    assert file.rules == sr.CompositeShardingRule(
        sr.RegexShardingRule([("norm", P())]), sr.DimShardingRule("model", 0) | sr.FSDPShardingRule("data", 0)
    )
    assert file.mesh == sr.mesh_shape("data:4,model:2")
    assert file.optimizer == "adamw(mu_dtype='bfloat16')"
    assert file.limits == sr.reports.Limits(3 * 2**29, tmp_path / "golden/plan.json", "error")


def test_what_a_file_lacks_is_none(tmp_path: Path) -> None:
    file = sr.load_rules(write(tmp_path, 'rule = "auto"'))
    assert (file.mesh, file.optimizer, file.limits) == (None, None, sr.reports.Limits())


def test_all_problems_are_in_one_error(tmp_path: Path) -> None:
    text = TEXT.replace('path = "norm"', 'paht = "norm"').replace("level", "levle").replace("fsdp(", "fdsp(")
    with pytest.raises(RulesFileError, match="has 5 problems") as raised:
        sr.load_rules(write(tmp_path, f'{text}[[rules]]\npath = "(a"\nspec = []\n[[rules]]\npath = "b)"\nspec = []\n'))
    first, *lines = str(raised.value).replace(f"{tmp_path}/", "").splitlines()
    assert first == "rules.toml has 5 problems:"
    starts = ["rules.toml: limits.levle: ", "rules.toml: rules[0].paht: ", "rules.toml: rules[1].rule: "]
    starts += ["rules.toml: rules[2].path: ", "rules.toml: rules[3].path: "]
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(f"  {start}"), line


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, TEXT)
    with pytest.raises(RulesFileError, match=r"rule.toml does not exist \(did you mean 'rules.toml'\?\)"):
        sr.load_rules(tmp_path / "rule.toml")


def test_thousands_of_rules_are_read_in_order(tmp_path: Path) -> None:
    count = 2000
    text = "".join(f'[[rules]]\npath = "layers/{index}/up$"\nspec = ["data"]\n' for index in range(count))
    rules = sr.load_rules(write(tmp_path, text)).rules
    assert isinstance(rules, sr.RegexShardingRule)
    assert [pattern for pattern, _ in rules.rules] == [f"layers/{index}/up$" for index in range(count)]


@pytest.mark.parametrize("path", [None, 3, b"rules.toml", ["rules.toml"]])
def test_what_is_not_a_path_is_refused(path: Any) -> None:
    with pytest.raises(ConfigTypeError, match="load_rules: expected the path of a file, got"):
        sr.load_rules(path)


def test_rules_may_come_through_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "rules.toml"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(pipe.write_text, '[[rules]]\npath = "up"\nspec = ["model"]\n')
        rules = sr.load_rules(pipe).rules
        written.result()
    assert isinstance(rules, sr.RegexShardingRule)


def test_rules_and_mesh_place_a_model(tmp_path: Path) -> None:
    file = sr.load_rules(write(tmp_path, TEXT))
    assert file.mesh is not None
    mesh = sr.create_mesh(file.mesh)
    assert mesh is sr.create_mesh("data:4,model:2")
    placed = sr.filter_shard({"up": jnp.ones((8, 8)), "norm": jnp.ones(8)}, file.rules, mesh)
    assert [placed[name].sharding.spec for name in ("up", "norm")] == [P("model", "data"), P()]


def test_strings_that_look_like_tables_are_strings(tmp_path: Path) -> None:
    with pytest.raises(RulesFileError, match=r"rules.toml: x: unknown key"):
        read(tmp_path, 'rule = """\n[[rules]]\nspec = 3\n"""\n[x]\ny = 1\n')
