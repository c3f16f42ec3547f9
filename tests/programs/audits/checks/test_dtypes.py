"""Uses of a gathered array that need its width, from hand-made text."""

from types import SimpleNamespace
from typing import Any

import pytest

import shardrules as sr
from shardrules.programs.audits.checks.dtypes import check_wire_dtypes
from shardrules.programs.audits.timing import Timing
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.flow import Value
from shardrules.programs.compiled.program import read_program
from shardrules.programs.compiled.text import ArrayType
from shardrules.programs.compiling.roundings import Rounding
from shardrules.programs.machine.targets import Target

GATHERED = """HloModule m, num_partitions=8

%largest (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %maximum = f32[] maximum(%a, %b)
}

ENTRY %e (w: f32[128,1024]) -> (bf16[1024,1024], f32[SIZE]) {
  %w = f32[128,1024] parameter(0)
  %all = f32[1024,1024] all-gather(%w), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %zero = f32[] constant(0)
  %stage = f32[SIZE] reduce(%all, %zero), dimensions={1}, to_apply=%largest
  %cast = bf16[1024,1024] convert(%all)
  ROOT %t = (bf16[1024,1024], f32[SIZE]) tuple(%cast, %stage)
}
"""


def findings(text: str, *roundings: Rounding) -> list[sr.Finding]:
    program = read_program(text)
    target = Target.parse("cpu:8")
    collectives = find_collectives(program, sr.create_mesh("data:8"), target)
    movement: Any = SimpleNamespace(
        program=program,
        collectives=collectives,
        arguments=SimpleNamespace(is_on_cpu=False, sizes={"data": 8}, paths_of=lambda names: ()),
        function=SimpleNamespace(roundings=roundings),
        timing=Timing(program, collectives, (), target.hardware),
        results_of=lambda collective: ((Value(collective.computation, collective.name),),),
    )
    return list(check_wire_dtypes(movement))


@pytest.mark.parametrize(("size", "count"), [("1024", 1), ("1024,512", 0)])
def test_statistics_in_stages_need_no_wide_array(size: str, count: int) -> None:
    assert len(findings(GATHERED.replace("SIZE", size))) == count


WIDENED = """HloModule m, num_partitions=8

%quantised (w: bf16[128,1024], s: bf16[1024], v: bf16[128,1024]) -> bf16[128,1024] {
  %w = bf16[128,1024] parameter(0)
  %s = bf16[1024] parameter(1)
  %v = bf16[128,1024] parameter(2)
  %narrow = NARROW[128,1024] convert(%w)
  %wide = bf16[128,1024] convert(%narrow)
  %scales = bf16[128,1024] broadcast(%s), dimensions={1}
  ROOT %scaled = bf16[128,1024] multiply(%wide, %FACTOR)
}

ENTRY %e (w: bf16[128,1024], s: bf16[1024], x: bf16[64,1024]) -> bf16[64,1024] {
  %w = bf16[128,1024] parameter(0)
  %s = bf16[1024] parameter(1)
  %x = bf16[64,1024] parameter(2)
  %made = bf16[128,1024] fusion(%w, %s, %w), kind=kLoop, calls=%quantised
  %all = bf16[1024,1024] all-gather(%made), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  ROOT %y = bf16[64,1024] dot(%x, %all), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.mark.parametrize(
    ("narrow", "factor", "count"),
    [
        ("f8e4m3fn", "scales", 1),
        ("s8", "scales", 1),
        ("f16", "scales", 0),  # it takes as many bytes
        ("f8e4m3fn", "v", 0),  # it is made of another array, too
    ],
)
def test_what_was_quantised_is_sent_quantised(narrow: str, factor: str, count: int) -> None:
    problems = findings(WIDENED.replace("NARROW", narrow).replace("FACTOR", factor))
    assert len(problems) == count
    for finding in problems:
        assert (
            f"sends bf16, which the function rounds to {narrow} before: 896.0 KiB more on the wire" in finding.message
        )
        assert f"Move the {narrow} array and its scale, and cast to bf16 after that" in str(finding.remedy)


DROPPED = WIDENED.replace("NARROW[128,1024] convert(%w)", "bf16[128,1024] copy(%w)").replace("FACTOR", "scales")


AT_LINE = '%scales), metadata={op_name="mul" source_file="/user.py" source_line=7}\n'


def test_what_compilers_do_not_round_has_a_line_and_is_one_array() -> None:
    assert not findings(DROPPED, Rounding(ArrayType("f8e4m3fn", (1024, 1024), 8), ""))
    text = DROPPED.replace("%scales)\n", AT_LINE)
    rounding = Rounding(ArrayType("f8e4m3fn", (1024, 1024), 8), "/user.py:7")
    assert findings(text, rounding)
    assert not findings(text.replace("copy(%w)", "add(%w, %v)"), rounding)


def test_masks_are_not_rounded() -> None:
    text = WIDENED.replace("NARROW[128,1024] convert(%w)", "pred[128,1024] compare(%w, %v), direction=GT")
    assert not findings(text.replace("FACTOR", "scales"))


@pytest.mark.parametrize(("line", "size", "count"), [(7, 1024, 1), (8, 1024, 0), (7, 999, 0)])
def test_what_compilers_do_not_round_is_told_by_its_line(line: int, size: int, count: int) -> None:
    """XLA for GPUs leaves out a cast to 8 bits and back."""
    text = DROPPED.replace("%scales)\n", AT_LINE)
    rounding = Rounding(ArrayType("f8e4m3fn", (1024, size), 8), f"/user.py:{line}")
    problems = findings(text, rounding)
    assert [finding.source for finding in problems] == ["/user.py:7"] * count
