"""Reports of autoplans, written and read."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr

X = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
W = jax.ShapeDtypeStruct((64, 64), jnp.float32)


@pytest.fixture(scope="module")
def report() -> sr.reports.AutoPlanReport:
    planned = sr.autoplan(lambda w, x: x @ w, W, X, mesh=4)
    return sr.reports.AutoPlanReport.of(planned, frontier=2)


def test_a_report_comes_back_from_json(report: sr.reports.AutoPlanReport) -> None:
    assert report.candidates
    assert report.findings
    assert len(report.frontier) == 2
    assert sr.reports.AutoPlanReport.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shardrules_autoplan": 99}, "this autoplan report has format 99, and this version reads 2"),
        ({"cost": "much"}, "not an autoplan report: TypeError: cost"),
        ({"status": "good"}, "not an autoplan report: TypeError: status"),
        ({"candidates": [{"mesh": "data:4"}]}, "not an autoplan report: LookupError"),
        ({"plan": {}}, "not an autoplan report"),
    ],
)
def test_edited_reports_are_refused(report: sr.reports.AutoPlanReport, change: dict[str, Any], message: str) -> None:
    text = json.dumps({**json.loads(report.to_json()), **change})
    with pytest.raises(sr.errors.ReportError, match=message):
        sr.reports.AutoPlanReport.from_json(text)


def test_findings_may_lack_fields_with_defaults(report: sr.reports.AutoPlanReport) -> None:
    data = json.loads(report.to_json())
    assert not any("source" in finding for finding in data["findings"])
    for finding in data["findings"]:
        finding.pop("rule")
    assert sr.reports.AutoPlanReport.from_json(json.dumps(data)) == report


def test_a_report_without_a_field_has_to_be_saved_again(report: sr.reports.AutoPlanReport) -> None:
    data = json.loads(report.to_json())
    del data["price_of_memory"]
    with pytest.raises(sr.errors.ReportError, match=r"price_of_memory missing\. .*save it again with this version"):
        sr.reports.AutoPlanReport.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "1"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(sr.errors.ReportError, match="not an autoplan report"):
        sr.reports.AutoPlanReport.from_json(text)
