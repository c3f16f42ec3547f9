"""The report of an audit as a value: what it adds up to, and how it is saved and read."""

import copy
import json
import pickle
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import shardrules as sr
from shardrules.core.errors import ReportError, ShardRulesError
from shardrules.programs.audits.report import AuditReport
from shardrules.programs.costs.timeline import Event, Timeline
from tests.programs.audits.audited import closed
from tests.programs.audits.sample_report import GATHER, REPORT, WARNING
from tests.programs.examples import TARGETS

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
    assert REPORT.step_time() == pytest.approx(0.0131) == sum(line.seconds for line in REPORT.lines)


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


def test_json_has_the_timeline_if_requested() -> None:
    event = Event("fusion.1", "model.py:12", "compute", 0.0, 0.001, "compute")
    report = attrs.evolve(REPORT, timeline=Timeline("step", (event,)))
    assert AuditReport.from_json(report.to_json(timeline=True)).timeline == report.timeline
    assert AuditReport.from_json(report.to_json()).timeline == Timeline("")


def test_json_names_the_tables_of_ready_sheets() -> None:
    report = attrs.evolve(REPORT, hardware=sr.Hardware.named("cuda:h100"))
    assert json.loads(report.to_json())["hardware"]["matmul_rates"] == "cuda:h100"
    assert AuditReport.from_json(report.to_json()) == report
    with pytest.raises(ReportError, match="unknown sheet 'cuda:h10'"):
        AuditReport.from_json(report.to_json().replace('"cuda:h100"', '"cuda:h10"'))


def test_json_has_totals_for_other_programs() -> None:
    data = json.loads(REPORT.to_json())
    assert data["shardrules_audit"] == 2
    assert data["totals"] == {
        "wire_bytes": REPORT.wire_bytes,
        "flops": REPORT.flops,
        "peak_bytes": REPORT.peak_bytes,
        "seconds": REPORT.step_time(),
    }
    assert data["target"] == "cuda:h100:8"


@pytest.mark.parametrize("axes", [None, ()])
def test_json_keeps_no_axes_apart_from_unknown_axes(axes: Any) -> None:
    report = attrs.evolve(REPORT, collectives=(attrs.evolve(GATHER, axes=axes),), model_flops=None)
    again = AuditReport.from_json(report.to_json())
    assert again == report
    assert again.collectives[0].axes == axes


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_reports_survive_json_and_pickle(target: str) -> None:
    report = closed("fully sharded", target)
    for keep in (AuditReport.from_json(report.to_json()), pickle.loads(pickle.dumps(report))):
        assert (keep, hash(keep), str(keep)) == (report, hash(report), str(report))
        assert keep.arrays_text() == report.arrays_text()
        assert not report.diff(keep)
    assert report.hlo_text.startswith("HloModule")
    assert AuditReport.from_json(report.to_json(hlo=True)).hlo_text == report.hlo_text


@pytest.mark.parametrize("text", ["", "[]", "not json", '{"shardrules_audit": 2}', '{"shardrules": 1, "leaves": []}'])
def test_other_texts_are_no_reports(text: str) -> None:
    with pytest.raises(ReportError, match="this text is not an audit report: "):
        AuditReport.from_json(text)


def test_another_format_is_named() -> None:
    text = REPORT.to_json().replace('"shardrules_audit": 2', '"shardrules_audit": 1')
    with pytest.raises(ReportError, match="this audit report has format 1, and this version reads 2"):
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


OPTIONAL = ("flags", "totals", "compile_seconds", "hlo_text", "kernel_seconds", "timeline")
"""Parts that a report may lack. Totals are for other programs: here they are added up again."""


@pytest.mark.parametrize("part", [part for part in json.loads(REPORT.to_json()) if part not in OPTIONAL])
def test_a_report_that_lacks_a_part_is_refused(part: str) -> None:
    with pytest.raises(ReportError, match=part):
        AuditReport.from_json(edited(part, lacks=True))


@pytest.mark.parametrize("path", [(part,) for part in OPTIONAL] + [("findings", 0, "rule"), ("arrays", 0, "donated")])
def test_fields_with_defaults_may_be_missing(path: tuple[Any, ...]) -> None:
    assert AuditReport.from_json(edited(*path, lacks=True)) is not None


def test_a_finding_without_a_source_is_written_without_it() -> None:
    report = attrs.evolve(REPORT, findings=(attrs.evolve(WARNING, source=""), WARNING))
    with_empty_source, with_source = json.loads(report.to_json())["findings"]
    assert "source" not in with_empty_source
    assert with_source["source"] == WARNING.source != ""
    assert AuditReport.from_json(report.to_json()) == report


def test_a_report_with_other_fields_has_to_be_saved_again() -> None:
    text = REPORT.to_json().replace('"requested"', '"asked"')
    message = r"arrays\[0\] has other fields: requested missing; asked unknown\. .*save it again with this version"
    with pytest.raises(ReportError, match=message):
        AuditReport.from_json(text)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("target",), "cuda:h900:8"),
        (("arrays", 0, "extra"), 3),
        (("memory", "extra"), 1024),
        (("findings", 0, "severity"), "bad"),
        (("hardware", "memory_bytes"), -1),
        *((("flags",), flags) for flags in (0.0, None, [1], "x", {"a": 1}, {"a": {}})),
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
        with pytest.raises(ReportError, match=r"this text is not an audit report|this audit report has format"):
            AuditReport.from_json(edited(*path, value=other))


def test_json_nested_too_deeply_is_refused() -> None:
    for read, error in ((AuditReport.from_json, ReportError), (sr.ShardingPlan.from_json, sr.errors.PlanError)):
        with pytest.raises(error, match="it nests too deeply"):
            read("[" * 100_000 + "]" * 100_000)


def test_a_report_error_is_a_value_error() -> None:
    assert issubclass(ReportError, ShardRulesError)
    assert issubclass(ReportError, ValueError)
    error = ReportError("a text")
    assert str(pickle.loads(pickle.dumps(error))) == "a text"
