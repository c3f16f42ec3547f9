"""Which uses of a gathered array need its width, from hand-made text."""

from types import SimpleNamespace
from typing import Any

import pytest

import shardrules as sr
from shardrules.analysis.audits.checks.dtypes import check_wire_dtypes
from shardrules.analysis.machine.targets import Target
from shardrules.analysis.program.collectives import find_collectives
from shardrules.analysis.program.flow import Value
from shardrules.analysis.program.program import read_program
from shardrules.analysis.program.uses import uses

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


@pytest.mark.parametrize(("size", "count"), [("1024", 1), ("1024,512", 0)])
def test_statistics_in_stages_need_no_wide_array(size: str, count: int) -> None:
    program = read_program(GATHERED.replace("SIZE", size))
    target = Target.parse("cpu:8")
    facts: Any = SimpleNamespace(
        program=program,
        collectives=find_collectives(program, sr.create_mesh("data:8"), target),
        hardware=target.hardware,
        is_on_cpu=False,
        sizes={"data": 8},
        time=SimpleNamespace(seconds=1.0),
        paths_of=lambda names: (),
        results_of=lambda collective: ((Value(collective.computation, collective.name),),),
        uses_of=lambda values, passes_on: tuple(uses(program, values, passes_on)),
    )
    assert len(list(check_wire_dtypes(facts))) == count
