"""Where values are used: through copies, fusions and loops, to the operation that does something with them."""

from collections.abc import Callable

from shardrules.programs.compiled.flow import Value
from shardrules.programs.compiled.program import read_program
from shardrules.programs.compiled.text import Instruction
from shardrules.programs.compiled.uses import is_elementwise, is_move, uses

TEXT = """HloModule m

%fused (p: f32[8], q: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  %q = f32[8] parameter(1)
  %b = f32[8] bitcast(%p)
  ROOT %sum = f32[8] add(%b, %q)
}

%body (s: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {
  %s = (s32[], f32[8], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8] get-tuple-element(%s), index=1
  %total = f32[8] get-tuple-element(%s), index=2
  %f = f32[8] fusion(%x, %total), kind=kLoop, calls=%fused
  ROOT %t = (s32[], f32[8], f32[8]) tuple(%i, %x, %f)
}

%cond (s.1: (s32[], f32[8], f32[8])) -> pred[] {
  %s.1 = (s32[], f32[8], f32[8]) parameter(0)
  ROOT %p.1 = pred[] constant(false)
}

ENTRY %main (a: f32[8], n: s32[], z: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  %n = s32[] parameter(1)
  %z = f32[8] parameter(2)
  %copied = f32[8] copy(%a)
  %init = (s32[], f32[8], f32[8]) tuple(%n, %copied, %z)
  %loop = (s32[], f32[8], f32[8]) while(%init), condition=%cond, body=%body
  %same = f32[8] get-tuple-element(%loop), index=1
  %result = f32[8] get-tuple-element(%loop), index=2
  ROOT %last = f32[8] multiply(%same, %result)
}
"""


def users(name: str, passes_on: Callable[[Instruction], bool] = is_move) -> list[str]:
    program = read_program(TEXT)
    return sorted({use.instruction.name for use in uses(program, [Value("main", name)], passes_on)})


def test_a_value_is_followed_into_loops_and_fusions() -> None:
    assert users("a") == ["last", "sum"]


def test_only_the_element_of_a_tuple_is_followed() -> None:
    assert users("n") == []
    assert users("z") == ["sum"]


def test_results_of_operations_that_pass_on_are_followed() -> None:
    assert users("z", lambda user: is_move(user) or is_elementwise(user)) == ["last"]
