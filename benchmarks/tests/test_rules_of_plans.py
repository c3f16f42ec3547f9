"""The benchmark of the rules of plans runs on toys, and all rules are equal to their plans."""

import json

from benchmarks.tests.smoke import run


def test_smoke_run_writes_plans_as_rules() -> None:
    done = run("rules_of_plans.py", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    names = [row["name"].split(",")[0] for row in rows]
    assert list(dict.fromkeys(names)) == ["vit_l16", "llama_405b", "deepseek_v3", "llama", "decode"]
    for row in rows:
        assert row["is_equal"]
        assert 0 < row["rules"] <= 12
        assert row["seconds"] > 0
