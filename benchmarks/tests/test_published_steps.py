"""The benchmark of published steps rebuilds toys, reads rows of others, and holds its limits."""

import json
import runpy
from pathlib import Path

import pytest

from benchmarks.tests.smoke import BENCHMARKS, run

ROW = """
[[rows]]
name = "mine"
target = "{target}"
model = "{model}"
mesh = "{mesh}"
batch = 1
length = 2048
remat = "{remat}"
seconds = 1.0
source = "me"
"""
FIGURE = {"order": "", "chip": "tpu:v5e", "seconds": 60.0}


def test_smoke_run_rebuilds_toys_and_keeps_their_programs(tmp_path: Path) -> None:
    done = run("published_steps.py", "--smoke", "--json", "--texts", str(tmp_path))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert [row["name"] for row in figures["rows"]] == ["toy", "toy, eager"]
    assert all(row["predicted"] > 0 and row["communication"] > 0 for row in figures["rows"])
    assert (figures["summary"]["rows"], figures["missed"]) == (1, [])
    assert all(file.read_text().startswith("HloModule") for file in tmp_path.iterdir())
    again = run("published_steps.py", "--smoke", "--json", "--texts", str(tmp_path))
    times = [
        [(row["name"], row["predicted"]) for row in json.loads(text)["rows"]] for text in (again.stdout, done.stdout)
    ]
    assert times[0] == times[1]


def test_rows_that_cannot_be_rebuilt_are_all_listed(tmp_path: Path) -> None:
    good = {"target": "tpu:v5e:16x16", "model": "16B", "mesh": "fsdp:256", "remat": "full"}
    wrong = [
        {"model": "17B"},
        {"mesh": "fsdp:128"},
        {"mesh": "expert:256"},
        {"remat": "some"},
        {"target": "tpu:v9:16x16"},
        {"target": "cuda:h100:96", "mesh": "fsdp:1,tensor:96"},
    ]
    rows = [ROW.format(**{**good, **change}).replace("mine", f"mine {index}") for index, change in enumerate(wrong)]
    (tmp_path / "rows.toml").write_text("".join(rows))
    done = run("published_steps.py", "--rows", str(tmp_path / "rows.toml"))
    assert done.returncode == 2
    for text in (
        "mine 0: unknown model '17B'; known are 16B, 32B",
        "mine 1: mesh {'data': 1, 'fsdp': 128, 'tensor': 1} has 128 devices, target tpu:v5e:16x16 256",
        "mine 2: mesh 'expert:256' has 'expert:256', which is not the size of one of data, fsdp, tensor",
        "mine 3: unknown remat 'some'; known are none, full, minimal",
        "mine 4: no recipe 'tpu:v9' or 'tpu'",
        "mine 5: heads 64 is not divisible by 96",
    ):
        assert text in done.stderr


def test_published_rows_are_read() -> None:
    done = run("published_steps.py", "--row", "99")
    assert done.returncode == 2
    assert "no row 99; the rows are 13; 17; 18, 2 slices" in done.stderr


@pytest.mark.parametrize(
    ("ratios", "limits"),
    [
        ([1.04, 0.97, 1.02], []),
        ([1.07, 0.93, 1.02], ["median"]),
        ([1.01, 1.01, 1.21], ["90th", "worst"]),
        ([1.1, 0.9, 1.1], ["median", "median"]),
    ],
)
def test_limits_hold_for_the_median_the_tail_and_each_chip(ratios: list[float], limits: list[str]) -> None:
    names = runpy.run_path(str(BENCHMARKS / "published_steps.py"))
    figures = [{**FIGURE, "name": str(index), "ratio": ratio} for index, ratio in enumerate(ratios)]
    assert [line.split()[0] for line in names["missed"](figures)] == limits


def test_orders_are_compared_within_their_set() -> None:
    names = runpy.run_path(str(BENCHMARKS / "published_steps.py"))
    times = {"a": (1.0, 1.5), "b": (2.0, 1.4), "c": (3.0, 2.0)}
    figures = [
        {**FIGURE, "order": "R", "name": name, "ratio": 0.5, "measured": measured, "predicted": predicted}
        for name, (measured, predicted) in times.items()
    ]
    assert names["missed"](figures) == ["R: predicted b < a < c, measured a < b < c"]
    late = {**FIGURE, "name": "late", "ratio": 1.0, "seconds": 301.0}
    assert names["missed"]([late]) == ["late: rebuilt in 301 s, at most 300 s"]
