"""Loops that only add up what they get from all devices, from hand-made text."""

from types import SimpleNamespace
from typing import Any

import pytest

import shardrules as sr
from shardrules.programs.audits.checks.accumulation import check_accumulation
from shardrules.programs.audits.timing import Timing
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.flow import Value
from shardrules.programs.compiled.program import read_program
from shardrules.programs.machine.targets import Target

MEAN = """
  %scale = f32[64] broadcast(%count), dimensions={}
  %difference = f32[64] subtract(%all, %carried)
  %part = f32[64] divide(%difference, %scale)
  %sum = f32[64] add(%carried, %part)
"""

SQUARE = """
  %difference = f32[64] subtract(%all, %carried)
  %part = f32[64] multiply(%difference, %carried)
  %sum = f32[64] add(%carried, %part)
"""

PLUS = """%plus (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}
"""

STACK = """HloModule m, num_partitions=8

PLUS
%most (a.1: f32[], b.1: f32[]) -> f32[] {
  %a.1 = f32[] parameter(0)
  %b.1 = f32[] parameter(1)
  ROOT %maximum = f32[] maximum(%a.1, %b.1)
}

%body (s: (s32[], f32[4,64], f32[64])) -> (s32[], f32[4,64], f32[64]) {
  %s = (s32[], f32[4,64], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %carried = f32[4,64] get-tuple-element(%s), index=1
  %x = f32[64] get-tuple-element(%s), index=2
  %one = s32[] constant(1)
  %zero.1 = s32[] constant(0)
  %next = s32[] add(%i, %one)
  %gradient = f32[64] sine(%x)
  %all = f32[64] all-reduce(%gradient), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%plus
  %row = f32[1,64] bitcast(%all)
  %stack = f32[4,64] dynamic-update-slice(%carried, %row, %i, %zero.1)
  ROOT %t = (s32[], f32[4,64], f32[64]) tuple(%next, %stack, %x)
}

%test (s.1: (s32[], f32[4,64], f32[64])) -> pred[] {
  %s.1 = (s32[], f32[4,64], f32[64]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %end = s32[] constant(4)
  ROOT %less = pred[] compare(%i.1, %end), direction=LT
}

ENTRY %e (x.2: f32[64]) -> f32[64] {
  %x.2 = f32[64] parameter(0)
  %zero = s32[] constant(0)
  %none = f32[] constant(0)
  %start = f32[4,64] broadcast(%none), dimensions={}
  %init = (s32[], f32[4,64], f32[64]) tuple(%zero, %start, %x.2)
  %loop = (s32[], f32[4,64], f32[64]) while(%init), condition=%test, body=%body
  %stacked = f32[4,64] get-tuple-element(%loop), index=1
END
}
"""

SUM = "  ROOT %result = f32[64] reduce(%stacked, %none), dimensions={0}, to_apply=%plus"

LOOP = """HloModule m, num_partitions=8

PLUS
%body (s: (s32[], f32[64], f32[64])) -> (s32[], f32[64], f32[64]) {
  %s = (s32[], f32[64], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %carried = f32[64] get-tuple-element(%s), index=1
  %x = f32[64] get-tuple-element(%s), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %count = f32[] convert(%next)
  %gradient = f32[64] sine(%x)
  %all = f32[64] all-reduce(%gradient), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%plus
BODY
  ROOT %t = (s32[], f32[64], f32[64]) tuple(%next, %sum, %x)
}

%test (s.1: (s32[], f32[64], f32[64])) -> pred[] {
  %s.1 = (s32[], f32[64], f32[64]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %end = s32[] constant(4)
  ROOT %less = pred[] compare(%i.1, %end), direction=LT
}

ENTRY %e (x.2: f32[64]) -> f32[64] {
  %x.2 = f32[64] parameter(0)
  %zero = s32[] constant(0)
  %none = f32[] constant(0)
  %start = f32[64] broadcast(%none), dimensions={}
  %init = (s32[], f32[64], f32[64]) tuple(%zero, %start, %x.2)
  %loop = (s32[], f32[64], f32[64]) while(%init), condition=%test, body=%body
  ROOT %result = f32[64] get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(("body", "count"), [(MEAN, 1), (SQUARE, 0), ("  %sum = f32[64] add(%carried, %all)", 1)])
def test_running_means_are_totals(body: str, count: int) -> None:
    assert len(findings(LOOP.replace("BODY", body))) == count


@pytest.mark.parametrize(
    ("end", "count"),
    [
        (SUM, 1),
        (SUM.replace("%plus", "%most"), 0),
        (SUM.replace("{0}", "{1}").replace("f32[64] r", "f32[4] r"), 0),
        ("  %root = f32[4,64] sqrt(%stacked)\n" + SUM.replace("%stacked", "%root"), 0),
    ],
)
def test_stacks_of_which_only_the_sum_is_used_are_totals(end: str, count: int) -> None:
    stacked = findings(STACK.replace("END", end))
    assert len(stacked) == count
    assert all("in each of the 4 rounds which are stacked and only added up" in each.message for each in stacked)


def findings(text: str) -> list[sr.Finding]:
    program = read_program(text.replace("PLUS\n", PLUS))
    target = Target.parse("cpu:8")
    collectives = find_collectives(program, sr.create_mesh("data:8"), target)
    movement: Any = SimpleNamespace(
        program=program,
        collectives=collectives,
        arguments=SimpleNamespace(sizes={"data": 8}),
        timing=Timing(program, collectives, (), target.hardware),
        has_room_for=lambda nbytes: True,
        parameters_like=lambda *_: (),
        results_of=lambda collective: ((Value(collective.computation, collective.name),),),
    )
    return list(check_accumulation(movement))
