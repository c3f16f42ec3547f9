"""Rules as the text of a file."""

import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import ConfigError
from shardrules.rules.files.writer import proved_text, rules_text, toml_string
from tests.zoo import f32


@pytest.mark.parametrize(
    "text", ["a/b$", r"\d+/w", "it's", r"it's \d", 'a"b', "a\nb\x1b\x7f", "naïve/ü", "\u202e", "", "😀"]
)
def test_strings_are_valid_toml(text: str) -> None:
    assert tomllib.loads(f"x = {toml_string(text)}") == {"x": text}
    assert toml_string(text).isprintable()


NAMES = st.sampled_from(["w", "up", "norm", "q_proj", "k_proj", "a.b", "x 1", "(", "'", '"', "\\", "é\x1b", "\n"])
VALUES = st.sampled_from([P(), P("data"), P(None, "data"), P(("data", "model")), P(P.UNCONSTRAINED, "model")])


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=4), max_size=4))
def test_rules_of_plans_read_as_they_were_written(specs: dict[str, dict[str, P]]) -> None:
    tree = {name: dict.fromkeys(inner, f32(64, 8)) for name, inner in specs.items()}
    mesh = sr.mesh_shape("data:4,model:2")
    plan = sr.SpecTreeShardingRule(specs).plan(tree, mesh)
    rule = plan.to_rules()
    assert isinstance(rule, sr.RegexShardingRule)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rules.toml")
        file.write_text(proved_text(rules_text(rule), rule, file), "utf-8")
        again = sr.load_rules(file).rules.plan(tree, mesh)
    assert all(sr.specs.same(a, b) for a, b in zip(again.kind_specs, plan.kind_specs, strict=True))


def test_rules_that_say_several_specs_are_written_in_their_text_form() -> None:
    rule = sr.RegexShardingRule(
        [
            ("a", sr.FSDPShardingRule(("data", "model"), 0)),
            ("b", sr.DimShardingRule("model", -1) | sr.FSDPShardingRule("data")),
            (".*", P()),
        ]
    )
    text = proved_text(rules_text(rule, [("All.",)]), rule, Path("rules.toml"))
    assert "# All.\n[[rules]]\npath = \"a\"\nrule = \"fsdp(('data', 'model'), min_size_mb=0)\"\n" in text
    assert "rule = \"shard_dim('model', -1) | fsdp('data', min_size_mb=4)\"" in text


def test_an_axis_with_a_meaning_in_files_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot name the axis \('-',\)"):
        list(rules_text(sr.RegexShardingRule([("w", P("-"))])))


def test_a_rule_without_a_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ReplicateShardingRule.*has no text for a file of rules yet"):
        list(rules_text(sr.RegexShardingRule([("w", sr.ReplicateShardingRule())])))
