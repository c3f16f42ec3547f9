"""The changes between two reports."""

from collections.abc import Callable
from typing import Any

import attrs
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.audits.diff import ArrayChange, CollectivesChange, FigureChange
from shardrules.programs.audits.memory import MemoryUse
from shardrules.programs.audits.report import AuditReport
from shardrules.programs.compiled.flow import Times
from shardrules.programs.machine.targets import Target
from tests.programs.audits.audited import Program, f32
from tests.programs.audits.sample_report import ALONE, GATHER, NOTE, REPORT, WARNING
from tests.programs.examples import CPU


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

    square = f32(64, 64)
    whole, split = (
        Program(loss, (square, square), (spec, P("data")), "data:8").audit(CPU) for spec in (P(), P("data"))
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
