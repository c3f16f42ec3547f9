"""The report of an audit as a value: what it adds up to, how it prints, what it keeps, how two of them differ."""

import copy
import functools
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.analysis.audits.diff import ArrayChange, CollectivesChange, FigureChange
from shardrules.analysis.audits.memory import MemoryUse
from shardrules.analysis.audits.modules import ModuleCost
from shardrules.analysis.audits.report import AuditedArray, AuditReport
from shardrules.analysis.audits.roofline import StepTime
from shardrules.analysis.audits.text import count_text
from shardrules.analysis.machine.targets import Target
from shardrules.analysis.program.collectives import Collective
from shardrules.analysis.program.flow import Times
from shardrules.analysis.program.program import Source
from shardrules.analysis.program.text import ArrayType
from shardrules.core.errors import ReportError, ShardRulesError
from tests.analysis.programs import TARGETS, mesh_on

BLOCK = (Source(jax.__file__, 3), Source("/home/me/project/model.py", 12, "Block.__call__"))
LOSS = (Source("/home/me/project/train.py", 30, "loss"),)

GATHER = Collective(
    "all-gather",
    ("data",),
    ("data",),
    4,
    (ArrayType("bf16", (64, 256), 16),),
    32768,
    24576,
    Times(12),
    "body",
    "all-gather.1",
    "jit(step)/while/body/dot_general",
    BLOCK,
    ("params/layers/up",),
)
REDUCE = Collective(
    "all-reduce",
    ("data", "model"),
    ("data", "model"),
    8,
    (ArrayType("f32", (), 32), ArrayType("f32", (256,), 32)),
    1028,
    1799,
    Times(1),
    "main",
    "all-reduce.2",
    "jit(step)/reduce_sum",
    LOSS,
    ("", ""),
)
ALONE = attrs.evolve(REDUCE, axes=(), crossed=(), group_size=1, wire_bytes=0, name="all-reduce.3")
"""A collective of one device each: it is among those of a program and moves nothing."""

LAYERS = tuple(
    AuditedArray(f"params/layers/{layer}/up", (64, 256), "bfloat16", "parameters", "P('data')", "P('data')", 8192, True)
    for layer in range(2)
)
WARNING = sr.Finding(
    "warning",
    "gathered",
    "it is gathered",
    remedy="Do not split it",
    axis="data",
    source="/home/me/project/model.py:12",
)
NOTE = sr.Finding("note", "fsdp", "as it should be")

REPORT = AuditReport(
    "step",
    Target.parse("cuda:h100:8"),
    attrs.evolve(sr.Hardware.named("cpu"), name="a chip", memory_bytes=2**20),
    "data:4,model:2",
    8,
    (
        *LAYERS,
        AuditedArray("x", (32, 64), "int32", "batch", "P('data')", "P('data')", 2048),
        AuditedArray("result", (), "float32", "result", "", "P()", 4),
    ),
    (GATHER, REDUCE, ALONE),
    (ModuleCost("Block", 3 * 10**9, 12 * 24576, 12), ModuleCost("loss", 10**9, 1799, 1)),
    MemoryUse(16384, 32768, 2048, 0, 4, 65536),
    (("bf16", 3 * 10**9), ("f32", 10**9)),
    16 * 10**9,
    StepTime(0.012, 0.0051, 0.004),
    (WARNING, NOTE),
    1.5,
    "HloModule jit_step",
)


# ---- figures ----


def test_figures_add_up() -> None:
    assert REPORT.wire_bytes == 12 * 24576 + 1799
    assert REPORT.flops == 4 * 10**9
    assert REPORT.peak_bytes == 16384 + 32768 + 2048 + 4 + 65536
    assert REPORT.memory.shares() == {
        "parameters": 16384,
        "optimizer state": 32768,
        "batch": 2048,
        "padding": 0,
        "outputs": 4,
        "temporaries": 65536,
    }
    assert REPORT.problems == (WARNING,)


def test_totals() -> None:
    by_axes = REPORT.totals_by_axes()
    assert list(by_axes) == ["data", "data+model", "none"]
    assert (by_axes["data"].run_count, by_axes["data"].wire_bytes) == (12, 12 * 24576)
    assert by_axes["none"].wire_bytes == 0
    by_kind = REPORT.totals_by_kind()
    assert {kind: (total.op_count, total.run_count) for kind, total in by_kind.items()} == {
        "all-gather": (1, 12),
        "all-reduce": (2, 2),
    }


def test_times_with_and_without_overlap() -> None:
    assert REPORT.step_time() == pytest.approx(0.0171)
    assert REPORT.step_time(overlap=True) == 0.012
    sends = attrs.evolve(REPORT, time=StepTime(0.001, 0.005))
    assert sends.step_time(overlap=True) == 0.005


@pytest.mark.parametrize(("memory_bytes", "fits"), [(116740, True), (116739, False)])
def test_it_fits_to_the_byte(memory_bytes: int, fits: bool) -> None:
    assert REPORT.peak_bytes == 116740
    assert attrs.evolve(REPORT, hardware=attrs.evolve(REPORT.hardware, memory_bytes=memory_bytes)).fits is fits


# ---- a value ----


def test_reports_are_values() -> None:
    twin = attrs.evolve(REPORT)
    assert (twin, hash(twin)) == (REPORT, hash(REPORT))
    assert twin is not REPORT
    assert attrs.evolve(REPORT, compile_seconds=9.0, hlo_text="") == REPORT  # neither is about the compiled program
    for change in ({"name": "other"}, {"findings": ()}, {"collectives": (GATHER,)}, {"model_flops": None}):
        assert attrs.evolve(REPORT, **change) != REPORT
    with pytest.raises(attrs.exceptions.FrozenInstanceError, match="can't set attribute"):
        REPORT.name = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_reports_pickle_whole() -> None:
    again = pickle.loads(pickle.dumps(REPORT))
    assert (again, hash(again)) == (REPORT, hash(REPORT))
    assert (again.hlo_text, again.compile_seconds) == (REPORT.hlo_text, REPORT.compile_seconds)
    assert copy.deepcopy(REPORT) == REPORT


def test_the_repr_is_short_enough_to_print() -> None:
    assert "HloModule" not in repr(REPORT)
    assert "all-gather" not in repr(REPORT)


# ---- JSON ----


def test_json_keeps_everything() -> None:
    again = AuditReport.from_json(REPORT.to_json())
    assert (again, hash(again), str(again)) == (REPORT, hash(REPORT), str(REPORT))
    assert again.compile_seconds == 1.5
    assert again.hlo_text == ""
    assert AuditReport.from_json(REPORT.to_json(hlo=True)).hlo_text == "HloModule jit_step"
    assert again.to_json() == REPORT.to_json()
    assert not REPORT.diff(again)


def test_json_has_totals_for_other_programs() -> None:
    data = json.loads(REPORT.to_json())
    assert data["shardrules_audit"] == 1
    assert data["totals"] == {
        "wire_bytes": REPORT.wire_bytes,
        "flops": REPORT.flops,
        "peak_bytes": REPORT.peak_bytes,
        "serial_seconds": REPORT.step_time(),
        "overlapped_seconds": REPORT.step_time(overlap=True),
    }
    assert data["target"] == "cuda:h100:8"


@pytest.mark.parametrize("axes", [None, ()])
def test_json_keeps_no_axes_apart_from_unknown_axes(axes: Any) -> None:
    report = attrs.evolve(REPORT, collectives=(attrs.evolve(GATHER, axes=axes),), model_flops=None)
    again = AuditReport.from_json(report.to_json())
    assert again == report
    assert again.collectives[0].axes == axes


@functools.cache
def compiled(target: str) -> AuditReport:
    """A report of a real compiler, with all that a page can have."""

    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), x.sum()

    w, x = jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return sr.ShardingAnalyzer(mesh_on(target, "data:8")).audit(
        step,
        w,
        x,
        in_shardings=(P("data"), P("data")),
        out_shardings=(P("data"), None),
        donate_argnums=0,
        target=target,
    )


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_reports_survive_json_and_pickle(target: str) -> None:
    report = compiled(target)
    for keep in (AuditReport.from_json(report.to_json()), pickle.loads(pickle.dumps(report))):
        assert (keep, hash(keep), str(keep)) == (report, hash(report), str(report))
        assert keep.arrays_text() == report.arrays_text()
        assert not report.diff(keep)
    assert report.hlo_text.startswith("HloModule")
    assert AuditReport.from_json(report.to_json(hlo=True)).hlo_text == report.hlo_text


BROKEN = (
    "",
    "{}",
    "[]",
    "null",
    "3",
    '"text"',
    "not json",
    '{"shardrules_audit": 1}',
    '{"shardrules": 1, "leaves": []}',  # a plan
)


@pytest.mark.parametrize("text", BROKEN)
def test_other_texts_are_no_reports(text: str) -> None:
    with pytest.raises(ReportError, match="this text is not an audit report: "):
        AuditReport.from_json(text)


def test_another_format_is_named() -> None:
    text = REPORT.to_json().replace('"shardrules_audit": 1', '"shardrules_audit": 2')
    with pytest.raises(ReportError, match="this report has format 2, this version reads 1"):
        AuditReport.from_json(text)


def edited(*path: Any, value: Any = None, lacks: bool = False) -> str:
    data = json.loads(REPORT.to_json())
    inner = data
    for part in path[:-1]:
        inner = inner[part]
    if lacks:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize("part", [part for part in json.loads(REPORT.to_json()) if part != "totals"])
def test_a_report_that_lacks_a_part_is_refused(part: str) -> None:
    """Totals are for other programs: here they are added up again."""
    with pytest.raises(ReportError, match=part):
        AuditReport.from_json(edited(part, lacks=True))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("target",), "cuda:h900:8"),
        (("target",), 3),
        (("arrays",), [3]),
        (("arrays", 0, "shape"), 3),
        (("arrays", 0, "extra"), 3),
        (("collectives", 0, "times"), 12),
        (("collectives", 0, "stack"), ["model.py:3"]),
        (("modules",), None),
        (("memory",), 1024),
        (("memory", "extra"), 1024),
        (("flops_by_dtype",), 3),
        (("time",), 0.3),
        (("findings", 0, "severity"), "bad"),
        (("findings", 0, "message"), None),
        (("hardware",), {}),
        (("hardware", "memory_bytes"), -1),
    ],
)
def test_a_report_that_was_edited_wrongly_is_refused(path: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(ReportError, match="this text is not an audit report: "):
        AuditReport.from_json(edited(*path, value=value))


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every string and number in the JSON of a report, with its path; of lists only the first item."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from fields(each, (*path, name))
    elif isinstance(value, list):
        for each in value[:1]:
            yield from fields(each, (*path, 0))
    elif value is not None:
        yield path, value


FIELDS = tuple((path, value) for path, value in fields(json.loads(REPORT.to_json())) if path[0] != "totals")


@pytest.mark.parametrize("path", [path for path, _ in FIELDS], ids=lambda path: ".".join(map(str, path)))
def test_a_field_of_another_type_is_refused(path: tuple[Any, ...]) -> None:
    """People edit such files: a number in quotes shows where it is read, and not where it is printed."""
    value = dict(FIELDS)[path]
    others = [[], {}, [3]] + ([3.5] if isinstance(value, str) else ["3"])
    for other in others:
        with pytest.raises(ReportError, match=r"this text is not an audit report|this report has format"):
            AuditReport.from_json(edited(*path, value=other))


def test_a_report_error_is_a_value_error() -> None:
    assert issubclass(ReportError, ShardRulesError)
    assert issubclass(ReportError, ValueError)
    error = ReportError("a text")
    assert str(pickle.loads(pickle.dumps(error))) == "a text"


# ---- pages ----

PAGE = """\
step on cuda:h100:8 (a chip), mesh data:4,model:2: 8 devices
per device and call:
  matmuls   4.0 GFLOP (bf16 3.0 G, f32 1.0 G), 2.00 times the function's own
  wire      289.8 KiB in 13 collectives
  memory    114.0 KiB of 1.0 MiB (parameters 16.0 KiB, optimizer state 32.0 KiB, batch 2.0 KiB, outputs 4 B, \
temporaries 64.0 KiB)
  time      12 ms to 17.1 ms: compute 12 ms (4 ms of it at memory), communication 5.1 ms

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
        REPORT, collectives=(), modules=(), findings=(), flops_by_dtype=(), model_flops=0, arrays=(), hlo_text=""
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


# ---- differences ----


def changed(**change: Any) -> Any:
    return REPORT.diff(attrs.evolve(REPORT, **change))


def test_nothing_differs() -> None:
    same = REPORT.diff(attrs.evolve(REPORT))
    assert not same
    assert str(same) == "no difference"


def test_figures_that_differ() -> None:
    difference = changed(
        flops_by_dtype=(("bf16", 3 * 10**9),), memory=attrs.evolve(REPORT.memory, temporaries_bytes=131072)
    )
    assert difference.figures == (
        FigureChange("FLOPs", 4 * 10**9, 3 * 10**9),
        FigureChange("memory: temporaries", 65536, 131072),
        FigureChange("peak bytes", 116740, 182276),
    )
    assert str(difference).splitlines() == [
        "FLOPs: 4.0 G -> 3.0 G (-25.0%)",
        "memory: temporaries: 64.0 KiB -> 128.0 KiB (+100.0%)",
        "peak bytes: 114.0 KiB -> 178.0 KiB (+56.1%)",
    ]
    assert difference


def test_a_change_from_zero_has_no_percentage() -> None:
    assert str(FigureChange("wire bytes", 0, 2048)) == "wire bytes: 0 B -> 2.0 KiB"


def test_collectives_that_differ() -> None:
    permute = attrs.evolve(GATHER, kind="collective-permute", times=Times(2))
    difference = changed(collectives=(GATHER, GATHER, permute, ALONE))
    assert difference.collectives == (
        CollectivesChange("all-gather", "data", 12, 24, 12 * 24576, 24 * 24576),
        CollectivesChange("collective-permute", "data", 0, 2, 0, 2 * 24576),
        CollectivesChange("all-reduce", "data+model", 1, 0, 1799, 0),
    )
    assert str(difference.collectives[1]) == "collective-permute over data: 0 runs, 0 B -> 2 runs, 48.0 KiB"
    assert [figure.name for figure in difference.figures] == ["wire bytes"]


def test_arrays_that_differ() -> None:
    first, second, x, result = REPORT.arrays
    moved = [attrs.evolve(change, compiled="P(None, 'data')") for change in (first, second)]
    difference = changed(arrays=(*moved, attrs.evolve(x, path="y"), result))
    assert difference.arrays == (
        *(
            ArrayChange(change.path, "(64, 256) bfloat16 P('data')", "(64, 256) bfloat16 P(None, 'data')")
            for change in (first, second)
        ),
        ArrayChange("x", "(32, 64) int32 P('data')", ""),
        ArrayChange("y", "", "(32, 64) int32 P('data')"),
    )
    assert str(difference).splitlines() == [
        "params/layers/*/up x2: (64, 256) bfloat16 P('data') -> (64, 256) bfloat16 P(None, 'data')",
        "x: (32, 64) int32 P('data') -> absent",
        "y: absent -> (32, 64) int32 P('data')",
    ]


def test_findings_that_come_and_go() -> None:
    other = sr.Finding("warning", "resharding", "it is moved")
    difference = changed(findings=(other, NOTE))
    assert (difference.appeared, difference.vanished) == ((other,), (WARNING,))
    text = str(difference)
    assert "new findings:\n  warning resharding: it is moved" in text
    assert "findings that are gone:\n  warning gathered: it is gathered" in text


@pytest.mark.parametrize(
    "change", [{"name": "train"}, {"mesh": "data:8"}, {"target": Target.parse("tpu:v5e:4x2")}], ids=str
)
def test_other_functions_targets_and_meshes(change: dict[str, Any]) -> None:
    difference = changed(**change)
    assert difference
    old = "step on cuda:h100:8, mesh data:4,model:2"
    assert str(difference).startswith(f"{old} -> ")
    (value,) = change.values()
    assert str(value) in str(difference)


DIFFERENT: tuple[Callable[[AuditReport], AuditReport], ...] = (
    lambda report: attrs.evolve(report, flops_by_dtype=()),
    lambda report: attrs.evolve(report, findings=()),
    lambda report: attrs.evolve(report, arrays=()),
    lambda report: attrs.evolve(report, collectives=()),
    lambda report: attrs.evolve(report, memory=MemoryUse(0, 0, 0, 0, 0, 0)),
)


@pytest.mark.parametrize("change", DIFFERENT)
def test_diff_is_symmetric(change: Callable[[AuditReport], AuditReport]) -> None:
    forward, back = REPORT.diff(change(REPORT)), change(REPORT).diff(REPORT)
    assert forward
    assert back
    assert [(figure.new, figure.old) for figure in forward.figures] == [
        (figure.old, figure.new) for figure in back.figures
    ]
    assert (forward.appeared, forward.vanished) == (back.vanished, back.appeared)
    assert {array.path for array in forward.arrays} == {array.path for array in back.arrays}


def test_two_plans_differ_in_collectives() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w))

    analyzer = sr.ShardingAnalyzer(sr.mesh_shape("data:8"))
    w, x = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    whole, split = (
        analyzer.audit(loss, w, x, in_shardings=(spec, P("data")), target="cpu:8") for spec in (P(), P("data"))
    )
    difference = whole.diff(split)
    assert [(change.kind, change.axes, change.old_runs, change.new_runs) for change in difference.collectives] == [
        ("all-gather", "data", 0, 1)
    ]
    assert difference.collectives[0].new_bytes == 64 * 64 * 4 * 7 // 8
    assert [(change.path, change.old, change.new) for change in difference.arrays] == [
        ("w", "(64, 64) float32 P()", "(64, 64) float32 P('data')")
    ]
    assert [finding.code for finding in difference.appeared] == ["fsdp"]
