"""The benchmark of planning runs on toy trees, with every row. Its times are not checked here."""

import importlib.util
import json
import os
import runpy
from typing import Any

import jax
import pytest

from benchmarks.tests.smoke import BENCHMARKS, run

# In CI they may not be missing: the script exits with an error then.
PEERS = "CI" in os.environ or all(importlib.util.find_spec(name) is not None for name in ("eformer", "scalax"))


def test_smoke_run_gives_every_contestant_on_every_tree() -> None:
    done = run("plan_time.py", "--smoke", "--json", *([] if PEERS else ["--no-peers"]))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {"date", "processor", "python", "jax", "rows", "missed"} <= set(result)

    rows = {(row["tree"], row["name"], row["base"]) for row in result["rows"]}
    contestants = [("floor", "floor"), ("apply", "floor"), ("apply, new rule", "floor"), ("plan", "apply")]
    if PEERS:
        contestants += [("eformer", "apply"), ("scalax", "apply")]
    for tree in ("gpt2", "llama_405b", "deepseek_v3", "synthetic_200k"):
        assert {(tree, name, base) for name, base in contestants} <= rows
    for tree in ("llama_405b", "deepseek_v3"):
        for method in ("apply", "plan"):
            assert (tree, f"{method}, 65,536 devices", f"{method}, 8 devices") in rows

    for row in result["rows"]:  # toy sizes have no targets
        assert row["median_ms"] > 0
        assert row["ratio"] > 0
        assert row["rounds"] >= 2
        assert row["target"] is None
        assert row["met"] is None


def test_only_runs_one_part_and_prints_a_table() -> None:
    done = run("plan_time.py", "--smoke", "--no-peers", "--only", "gpt2")
    assert done.returncode == 0, done.stderr
    assert "gpt2" in done.stdout
    assert "apply" in done.stdout
    assert "llama_405b" not in done.stdout
    assert "devices" not in done.stdout


def test_trees_have_the_published_number_of_leaves() -> None:
    trees: list[Any] = runpy.run_path(str(BENCHMARKS / "trees.py"))["TREES"]
    assert [(tree.name, tree.leaves) for tree in trees] == [
        ("gpt2", 148),
        ("llama_405b", 1_137),
        ("deepseek_v3", 45_395),
        ("synthetic_200k", 200_000),
    ]
    for tree in trees:
        leaves = jax.tree_util.tree_leaves(tree.build())
        assert len({id(leaf) for leaf in leaves}) == tree.leaves
        assert len(tree.rules) == 12


@pytest.mark.parametrize(
    ("make", "parameters"),
    [("gpt2", 124_439_808), ("llama_405b", 405_853_388_800), ("deepseek_v3", 671_026_419_200)],
)
def test_trees_have_the_published_number_of_parameters(make: str, parameters: int) -> None:
    tree = runpy.run_path(str(BENCHMARKS / "trees.py"))[make]()
    assert sum(leaf.size for leaf in jax.tree_util.tree_leaves(tree)) == parameters


def test_a_tree_of_another_size_raises() -> None:
    names = runpy.run_path(str(BENCHMARKS / "trees.py"))
    wrong = names["Tree"]("gpt2", names["gpt2"], names["GPT2_RULES"], 147)
    with pytest.raises(ValueError, match="gpt2 has 148 leaves, not 147"):
        wrong.build()
