"""Every instruction that a trace may name has what is modelled for it."""

import pytest

import shardrules as sr
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.flops import find_matmuls
from shardrules.programs.compiled.kernels import find_kernels
from shardrules.programs.compiled.program import read_program
from shardrules.programs.costs.kernels import kernel_seconds
from shardrules.programs.costs.tasks import collective_seconds
from shardrules.programs.profiles.modelled import model_program
from tests.programs.profiles.planes import PROGRAM, TEXTS

V5E = sr.Hardware.named("tpu:v5e")

FUSED = """\
HloModule jit_step, num_partitions=4

%fused (p: f32[16]) -> f32[64] {
  %p = f32[16]{0} parameter(0)
  %all-gather.3 = f32[64]{0} all-gather(%p), channel_id=1, dimensions={0}, async_collective_fusion_config={}
  ROOT %start = f32[64]{0} custom-call(%all-gather.3), custom_call_target="AsyncCollectiveStart"
}

%waiting (r: f32[64]) -> f32[64] {
  %r = f32[64]{0} parameter(0)
  %all-gather.5 = f32[64]{0} all-gather(%r), channel_id=1, dimensions={0}, async_collective_fusion_config={}
  ROOT %done.5 = f32[64]{0} custom-call(%r, %all-gather.5), custom_call_target="AsyncCollectiveDone"
}

%wrapped (q: f32[64]) -> f32[64] {
  %q = f32[64]{0} parameter(0)
  ROOT %all-reduce.4 = f32[64]{0} all-reduce(%q), channel_id=2, replica_groups=[1,4]<=[4], to_apply=%sum
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x: f32[16]) -> f32[64] {
  %x = f32[16]{0} parameter(0)
  %fusion.3 = f32[64]{0} fusion(%x), kind=kCustom, calls=%fused
  %done.3 = f32[64]{0} custom-call(%fusion.3), custom_call_target="AsyncCollectiveDone"
  %tuple.3 = (f32[64]{0}) tuple(%fusion.3)
  %element.3 = f32[64]{0} get-tuple-element(%tuple.3), index=0
  %fusion.5 = f32[64]{0} fusion(%element.3), kind=kCustom, calls=%waiting
  %async-start.4 = ((f32[64]{0}), f32[64]{0}) async-start(%fusion.5), calls=%wrapped
  ROOT %async-done.4 = f32[64]{0} async-done(%async-start.4), calls=%wrapped
}
"""


def test_parts_add_up_to_all_kernels_and_collectives() -> None:
    program = read_program(PROGRAM)
    collectives = find_collectives(program)
    seconds = {"kernel": 0.0, "collective": 0.0, "copy": 0.0, "control": 0.0}
    for part in model_program(program, collectives, V5E).all_parts:
        seconds[part.kind] += part.seconds
    kernels = find_kernels(program, find_matmuls(program))
    assert seconds == {
        "kernel": pytest.approx(sum(kernel_seconds(kernel, V5E) * kernel.times.count for kernel in kernels)),
        "collective": sum(collective_seconds(collective, V5E) for collective in collectives),
        "copy": 0,
        "control": 0,
    }


def test_parts_have_their_lines_and_counts() -> None:
    program = read_program(PROGRAM)
    collectives = find_collectives(program)
    parts = model_program(program, collectives, V5E).parts
    assert (parts["dot.2"].count, parts["dot.2"].line, parts["dot.2"].label) == (3, "me/model.py:30", "dot")
    assert parts["while.1"].kind == "control"
    assert {"less", "dot.2"} <= set(parts["while.1"].inside)
    assert parts["all-gather-start.1"] is parts["all-gather-done.1"]
    assert parts["all-gather-start.1"].seconds == collective_seconds(collectives[0], V5E)
    # What is known of a kernel counts in each of its runs.
    parts_with_times = model_program(program, collectives, V5E, {"dot.2": 2.0}).parts
    assert (parts_with_times["dot.2"].seconds, parts_with_times["dot.2"].count) == (6.0, 3)
    assert parts_with_times["dot.1"] == parts["dot.1"]


def test_collectives_in_fusions_and_wrappers_have_the_names_around_them() -> None:
    program = read_program(FUSED)
    parts = model_program(program, find_collectives(program), V5E).parts
    assert {parts[name].name for name in ("all-gather.3", "start", "fusion.3", "done.3", "fusion.5")} == {
        "all-gather.3"
    }
    assert {parts[name].name for name in ("all-reduce.4", "async-start.4", "async-done.4")} == {"all-reduce.4"}


def test_an_instruction_of_another_type_is_not_found() -> None:
    modelled = model_program(read_program(PROGRAM), (), V5E)

    def find(name: str, text: str) -> bool:
        return modelled.find(name, text) is not None

    assert all(find(name, text) for name, text in TEXTS.items() if name in modelled.parts)
    assert find("dot.1", "")
    assert not find("dot.1", TEXTS["dot.1"].replace("1024,1024", "512,1024", 1))
    assert not find("dot.9", "")
    # Of a text that is cut off, the type counts as far as it goes.
    for name, operation in (("dot.1", " dot("), ("all-gather-start.1", " all-gather-start("), ("while.1", " while(")):
        end = TEXTS[name].index(operation)
        assert all(find(name, TEXTS[name][:cut]) for cut in (end, end + 1, end + 4, end + 12))
        assert not any(find(name, TEXTS[name][:cut]) for cut in (1, len(name), end - 10))
