"""The benchmark of saving and loading runs on a toy tree, with every row. Its times are not checked here."""

import itertools
import json

from benchmarks.save_time import FORMATS, LAYOUTS, WORK
from benchmarks.tests.smoke import run


def test_smoke_run_gives_every_layout_format_and_kind_of_work() -> None:
    done = run("save_time.py", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    *rows, _, _, _ = results = json.loads(done.stdout)["rows"]
    assert [(row["layout"], row["format"], row["work"]) for row in rows] == list(
        itertools.product(LAYOUTS, FORMATS, WORK)
    )
    assert [(row["format"], row["work"]) for row in results[-3:]] == [(name, "memory") for name in FORMATS]
    for row in rows:
        assert min(row["ours"], row["theirs"], row["ratio"], row["processor"]) > 0
    assert all(row["met"] is None for row in results)  # toy sizes have no limits
