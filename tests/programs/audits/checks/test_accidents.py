"""Every accident is a finding with array, line, bytes, cost and remedy, and its twin without it has none."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.programs.audits.audited import Program
from tests.programs.audits.checks import accidents
from tests.programs.audits.checks.accidents import ACCIDENTS
from tests.programs.examples import CPU, CUDA, TPU

COST = re.compile(r"modelled [\d.,]+ (ms|µs), [\d.e+-]+ % of the step")

COMPILERS: dict[Any, tuple[str, ...]] = {
    accidents.narrow: (TPU,),  # GPUs scatter rows of any size, and CPUs have no reduce-scatter.
    accidents.float8: (CUDA,),  # CPUs compute in float32 what is written in 8 bits,
    accidents.quantised: (CUDA,),
    accidents.bfloat16: (TPU,),
    accidents.table: (CUDA,),  # and move tables out of loops.
    accidents.kernel: (CPU, CUDA),  # a call of a library, and of Pallas
    accidents.regathered: (CPU, CUDA),  # GPUs combine gathers,
    accidents.microbatches: (CPU, TPU),  # and TPUs start a sum from zero by a choice in the first round.
}
"""The compilers that write an accident in ways of their own, the cheapest first. The others are compiled for CPUs."""

CASES = [(fn, target) for fn in ACCIDENTS for target in COMPILERS.get(fn, (CPU,))]


def ids(value: object) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.slow
@pytest.mark.parametrize(("fn", "target"), CASES, ids=ids)
def test_an_accident_is_a_warning_and_its_twin_has_none(fn: Callable[[bool, str], Program], target: str) -> None:
    code = ACCIDENTS[fn]
    report = fn(True, target).audit(target)
    findings = [finding for finding in report.findings if finding.code == code and finding.severity == "warning"]
    assert findings, report.findings
    for finding in findings:
        assert finding.source, "it has a line of code"
        assert re.search(r"\d (B|KiB|MiB)|FLOPs", finding.message), "it has bytes"
        assert COST.search(finding.message), "it has a cost"
        assert finding.remedy
        assert "None" not in finding.message
        assert re.search(r"\[[\d,]+\]|'hiden'", finding.message) or finding.shape, "it has an array"
    twin = fn(False, target).audit(target)
    assert [finding for finding in twin.problems if finding.code == code] == []
