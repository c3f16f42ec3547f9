"""The script that runs other libraries' tests: on a checkout made on the spot, and without any."""

import json
from pathlib import Path

from benchmarks.tests.smoke import run

TESTS = """
import equinox as eqx
import shardrules as sr

def test_ours_is_in_place():
    assert eqx.filter_jit is sr.filter_jit and eqx.filter_shard is sr.filter_shard

def test_speed_of_loops():
    assert False

def test_that_fails():
    assert eqx.filter_jit is None
"""


def test_counts_come_from_tests_with_our_functions_in_place(tmp_path: Path) -> None:
    folder = tmp_path / "equinox" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_sharding.py").write_text(TESTS)
    done = run("others_tests.py", str(tmp_path), "--smoke", "--json", "--only", "equinox")
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["passed"], row["unsupported"], row["skips"]) == (1, 1, 0)
    assert row["failed"] == ["tests.test_sharding::test_that_fails"]
    assert done.returncode == 1


def test_libraries_that_are_missing_are_skipped_with_the_reason() -> None:
    done = run("others_tests.py", "--json", SHARDRULES_OTHERS="")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in rows] == ["equinox", "eformer", "pathwaysutils"]
    assert all("no checkout at" in row["skipped"] or "needs" in row["skipped"] for row in rows)
