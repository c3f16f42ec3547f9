"""The page of a report: its tables, in the order of what costs most."""

import attrs
import pytest

from shardrules.core.source import Source
from shardrules.programs.audits.modules import ModuleCost
from shardrules.programs.audits.text import count_text, lines_table
from shardrules.programs.costs.schedule import LineTime
from tests.programs.audits.sample_report import GATHER, REDUCE, REPORT

PAGE = """\
step on cuda:h100:8 (a chip), mesh data:4,model:2: 8 devices
per device and call:
  matmuls   4.0 GFLOP (bf16 3.0 G, f32 1.0 G), 2.00 times the function's own
  wire      289.8 KiB in 13 collectives
  memory    114.0 KiB of 1.0 MiB (parameters 16.0 KiB, optimizer state 32.0 KiB, batch 2.0 KiB, outputs 4 B, \
temporaries 64.0 KiB)
  time      13.1 ms: compute 12 ms (4 ms of it memory-bound), communication 5.1 ms (1 ms of it exposed), copies 100 µs

mesh axis   runs    payload       wire  kinds
----------  ----  ---------  ---------  ----------
data          12  384.0 KiB  288.0 KiB  all-gather
data+model     1    1.0 KiB    1.8 KiB  all-reduce

module  FLOPs            wire
------  -----  ---  ---------  ---
Block   3.0 G  75%  288.0 KiB  99%
loss    1.0 G  25%    1.8 KiB   1%

     wire  runs  collective  over        array              line
---------  ----  ----------  ----------  -----------------  -------------------
288.0 KiB    12  all-gather  data        params/layers/up   project/model.py:12
  1.8 KiB     1  all-reduce  data+model  f32[256] and 1 more  project/train.py:30

  time       critical  compute   sends  exposed  copies  line                 hidden by
------  ---  --------  -------  ------  -------  ------  -------------------  -------------------
 10 ms  76%       95%     9 ms    5 ms     1 ms          project/model.py:12  project/train.py:30
  3 ms  23%        4%     3 ms  100 µs                   project/train.py:30
100 µs   1%        1%                            100 µs  (unknown)

findings: 1 warning, 1 note
  warning gathered: it is gathered
      at project/model.py:12
      -> Do not split it"""


def squeezed(page: str) -> list[list[str]]:
    """The words of each line, whatever the widths of the columns."""
    return [line.split() for line in page.splitlines() if line.strip("- ")]


def test_the_page_of_a_report() -> None:
    assert squeezed(str(REPORT)) == squeezed(PAGE)
    widths = {len(line) for line in str(REPORT).splitlines() if set(line) <= {"-", " "} and line}
    assert len(widths) > 1


def test_the_page_of_a_report_without_anything() -> None:
    bare = attrs.evolve(
        REPORT,
        collectives=(),
        modules=(),
        findings=(),
        flops_by_dtype=(),
        model_flops=0,
        arrays=(),
        lines=(),
        hlo_text="",
    )
    page = str(bare)
    assert "matmuls   0 FLOP\n" in page
    assert "wire      0 B in 0 collectives" in page
    assert page.endswith("no findings")
    assert "module" not in page
    assert "mesh axis" not in page


def test_equal_layers_are_one_row() -> None:
    table = REPORT.arrays_text()
    assert squeezed(table) == [
        ["array", "shape", "dtype", "role", "requested", "compiled", "donated"],
        ["params/layers/*/up", "x2", "(64,", "256)", "bfloat16", "parameters", "P('data')", "P('data')", "yes"],
        ["x", "(32,", "64)", "int32", "batch", "P('data')", "P('data')"],
        ["result", "()", "float32", "result", "-", "P()"],
    ]


def test_collectives_of_one_line_and_array_are_one_row() -> None:
    twice = attrs.evolve(REPORT, collectives=(GATHER, attrs.evolve(GATHER, name="all-gather.9"), REDUCE))
    (row,) = [line for line in str(twice).splitlines() if "params/layers/up" in line]
    assert row.split()[:3] == ["576.0", "KiB", "24"]


def test_the_ten_largest_groups_are_shown() -> None:
    many = tuple(
        attrs.evolve(GATHER, wire_bytes=size, stack=(Source("/home/me/project/model.py", size),))
        for size in range(1000, 1025)
    )
    page = str(attrs.evolve(REPORT, collectives=many))
    lines = [line.rpartition("project/")[2] for line in page.splitlines() if "all-gather  data" in line]
    assert lines == [f"model.py:{size}" for size in range(1024, 1014, -1)]


def test_modules_that_are_not_shown_are_added_up() -> None:
    many = tuple(ModuleCost(f"m{index}", 100, 10, 1) for index in range(20))
    page = str(attrs.evolve(REPORT, modules=many))
    (row,) = [line for line in page.splitlines() if line.startswith("8 more")]
    assert row.split() == ["8", "more", "800", "40%", "80", "B", "40%"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 "),
        (999, "999 "),
        (1000, "1.0 k"),
        (65_536, "65.5 k"),
        (123_456, "123 k"),
        (4.5e6, "4.5 M"),
        (74.9e9, "74.9 G"),
        (2e12, "2.0 T"),
        (3.2e15, "3,200 T"),
        (999_950, "1.0 M"),
        (99.96e3, "100 k"),
    ],
)
def test_counts_as_people_read_them(count: float, text: str) -> None:
    assert count_text(count) == text


def test_lines_of_code_beyond_a_screen_are_added_up() -> None:
    lines = [
        LineTime(f"/home/me/project/model.py:{line}", 0.001 * (30 - line), critical_seconds=0.001 * (30 - line))
        for line in range(30)
    ]
    table = lines_table(lines)
    assert [row.split() for row in (table[0], table[2], table[-1])] == [
        ["time", "compute", "line"],
        ["30", "ms", "6%", "30", "ms", "project/model.py:0"],
        ["210", "ms", "45%", "210", "ms", "20", "more"],
    ]
    assert lines_table([]) == []
