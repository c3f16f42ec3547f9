"""Rules as the page shows them."""

import json
import re

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.page.rules import code_text, rules_text

RULE = sr.CompositeShardingRule(
    sr.RegexShardingRule([(f"layer_{index}/weight", P("data", "model")) for index in range(8)]),
    sr.DimShardingRule("data", 0) | sr.FSDPShardingRule("model"),
)
PLAN = sr.RegexShardingRule([("a", P("data")), ("b", "fsdp('data', min_size_mb=0)")]).plan(
    {"a": np.ones(8), "b": np.ones(8), "c": [np.ones(8)] * 3}, sr.mesh_shape("data:4,model:2")
)


def test_only_rules_and_commands_have_lines() -> None:
    plan = sr.RegexShardingRule([(".", P("da\nta"))]).plan({"one\ntwo": np.ones(8)}, sr.mesh_shape("data:4"))
    page = sr.report_page(plan, title="a\nb", rules="first\nsecond", command="c\nd")
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert (data["rules"], data["command"]) == ("first\nsecond", "c\nd")
    others = json.dumps({name: value for name, value in data.items() if name not in ("rules", "command", "drawings")})
    assert '"one\\\\ntwo"' in others
    assert not re.search(r"(?<!\\)\\n", others)
    assert "<title>a\\nb" in page


def test_long_rules_have_a_line_for_each_part() -> None:
    text = rules_text(PLAN, RULE)
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) > 8
    assert eval(text, {name: getattr(sr, name) for name in sr.__all__} | {"P": P}) == RULE


def test_files_are_shown_as_they_are() -> None:
    assert rules_text(PLAN, "\n# a comment\n[[rules]]\n") == "# a comment\n[[rules]]"


def test_without_rules_those_that_decided_are_shown() -> None:
    text = rules_text(PLAN, None)
    assert text.count("RegexShardingRule(") == 1
    # In JSON a plan has only the names of its rules.
    assert rules_text(sr.ShardingPlan.from_json(PLAN.to_json()), None) == "RegexShardingRule\nFSDPShardingRule"
    assert rules_text(sr.ShardingPlan.from_json(sr.ReplicateShardingRule().plan({}).to_json()), None) == ""


def test_what_is_cut_off_says_so() -> None:
    assert rules_text(PLAN, "x" * 200_007).endswith("\n... and 7 more characters")


@pytest.mark.parametrize("text", ["<rule at 0x7f>", "f(", "a" * 120, "f(*rest)", "{**" + "a" * 120 + ", 'b': 1}"])
def test_what_is_no_expression_stays(text: str) -> None:
    assert code_text(text).replace("\n    ", "").replace(",\n}", "}").replace(",'b'", ", 'b'") == text
