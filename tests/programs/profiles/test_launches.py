"""Kernels of GPUs get the names of the instructions that launched them, by their order and their names."""

import itertools
from collections.abc import Iterable, Sequence
from typing import cast

import attrs
import pytest

from shardrules.programs.profiles.launches import with_instructions
from shardrules.programs.profiles.modelled import KernelFamily, ModelledPart, ModelledProgram
from shardrules.programs.profiles.trace import Activity, DeviceTrace, ProfiledProgram, ProfileTrace

NVJET = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"


def program(*parts: tuple[str, str, float]) -> ModelledProgram:
    """A program of kernels that run one after the other, with their microseconds."""
    kernels = {
        name: ModelledPart(
            name,
            "collective" if family == "collective" else "kernel",
            microseconds * 1e-6,
            1,
            "",
            "fusion",
            family=cast(KernelFamily, family),
        )
        for name, family, microseconds in parts
    }
    return ModelledProgram("jit_step", kernels, {}, tuple(kernels))


def graph(kernels: Iterable[tuple[str, float]], *, launch: int = 7, name: str = "command_buffer_1") -> list[Activity]:
    """The events of a CUDA graph."""
    events, now = [], 1000.0 * launch
    for kernel, microseconds in kernels:
        ns = microseconds * 1e3
        step = ProfiledProgram("jit_step", "3")
        events.append(Activity(name, step, now, now + ns, ns, kernel=kernel, launch=launch))
        now += ns
    return events


def instructions(modelled: ModelledProgram, *groups: Sequence[Activity]) -> list[str]:
    events = tuple(itertools.chain(*groups))
    (device,) = with_instructions(ProfileTrace("", (DeviceTrace("/device:GPU:0", events),)), modelled).devices
    return [activity.name for activity in device.activities]


def test_kernels_that_are_shared_belong_to_their_layers() -> None:
    # One kernel serves all conversions of a shape; the library's names say nothing.
    layers = (
        [(f"wrapped_convert.{i}", "", 5.0) for i in range(3)],
        [(f"custom-call.{i}", "matmul", 50.0) for i in range(3)],
    )
    modelled = program(*itertools.chain(*zip(*layers, strict=True)))
    # The library adds up parts of its results.
    events = graph([("wrapped_convert", 5.0), (NVJET, 52.0), ("splitKreduce_kernel", 2.0)] * 3)
    expected = [[f"wrapped_convert.{i}", f"custom-call.{i}", f"custom-call.{i}"] for i in range(3)]
    assert instructions(modelled, events) == list(itertools.chain(*expected))


def test_kernels_in_another_order_get_the_next_of_their_kind() -> None:
    modelled = program(("gemm_fusion_dot.1", "matmul", 100.0), ("loop_add_fusion", "", 9.0), ("sort.2", "sort", 10.0))
    events = graph([(NVJET, 90.0), ("cub::DeviceRadixSort", 11.0), ("loop_add_fusion_4", 9.0)])
    assert instructions(modelled, events) == ["gemm_fusion_dot.1", "sort.2", "loop_add_fusion"]


def test_an_instruction_that_the_machine_compiled_otherwise_is_found_by_what_it_computes() -> None:
    modelled = program(("gemm_fusion_dot.3", "matmul", 50.0), ("dot_product_attention_fwd.1", "attention", 70.0))
    kernels = ["sm90_xmma_gemm_bf16", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "convert_dq_to_16bits"]
    events = [
        *graph([(kernels[0], 50.0)], name="custom-call.9", launch=1),
        *graph([(kernels[1], 70.0), (kernels[2], 3.0)], name="custom-call.2", launch=70),
    ]
    attention = "dot_product_attention_fwd.1"
    assert instructions(modelled, events) == ["gemm_fusion_dot.3", attention, attention]


def test_what_the_program_does_not_have_keeps_its_own_name() -> None:
    modelled = program(("loop_add_fusion", "", 9.0), ("dot.1", "matmul", 50.0))
    events = graph([("loop_add_fusion", 9.0), ("wrapped_transpose", 5.0), (NVJET, 50.0)])
    assert instructions(modelled, events) == ["loop_add_fusion", "command_buffer_1: wrapped_transpose", "dot.1"]


def test_every_round_of_a_loop_launches_the_same_instructions() -> None:
    modelled = program(("fusion.1", "", 5.0), ("dot.2", "matmul", 50.0), ("fusion.3", "", 9.0))
    rounds = [graph([("fusion_1", 5.0), (NVJET, 50.0)], launch=60 * i, name="command_buffer_4") for i in range(1, 4)]
    last = graph([("fusion_3", 9.0)], launch=1000, name="command_buffer_5")
    assert instructions(modelled, *rounds, last) == ["fusion.1", "dot.2"] * 3 + ["fusion.3"]


def test_kernels_on_two_streams_may_overlap_in_another_order_in_each_round() -> None:
    modelled = program(("fusion.1", "", 5.0), ("dot.2", "matmul", 50.0), ("fusion.3", "", 9.0))
    first = graph([("fusion_1", 5.0), (NVJET, 50.0), ("fusion_3", 9.0)], launch=1)
    other = graph([("fusion_3", 9.0), ("fusion_1", 5.0), (NVJET, 50.0)], launch=70)
    assert instructions(modelled, first, other) == ["fusion.1", "dot.2", "fusion.3", "fusion.3", "fusion.1", "dot.2"]


def test_launches_that_a_trace_has_a_part_of_are_of_the_same_graph() -> None:
    modelled = program(
        ("fusion.1", "", 5.0), ("dot.2", "matmul", 50.0), ("fusion.3", "", 5.0), ("dot.4", "matmul", 50.0)
    )
    kernels = [("fusion_1", 5.0), (NVJET, 50.0), ("fusion_1", 5.0), (NVJET, 50.0)]
    whole = ["fusion.1", "dot.2", "fusion.3", "dot.4"]
    launched = [
        graph(kernels[1:], launch=1),
        *(graph(kernels, launch=200 * i) for i in (1, 2)),
        graph(kernels[:3], launch=600),
    ]
    assert instructions(modelled, *launched) == [*whole[1:], *whole, *whole, *whole[:3]]
    # The first launch ran what the others did last, also of kernels that are all alike.
    modelled = program(*((f"fusion.{i}", "", 5.0) for i in range(3)))
    launched = [graph([("fusion", 5.0)] * count, launch=launch) for count, launch in ((2, 1), (3, 60), (2, 120))]
    names = ["fusion.0", "fusion.1", "fusion.2"]
    assert instructions(modelled, *launched) == [*names[1:], *names, *names[:2]]


def test_a_kernel_of_one_launch_alone_keeps_its_name() -> None:
    modelled = program(("fusion.1", "", 5.0), ("fusion.2", "", 5.0))
    launched = [graph([("fusion_1", 5.0), ("fusion_2", 5.0)], launch=1), graph([(NVJET, 5.0)], launch=60)]
    assert instructions(modelled, *launched) == ["fusion.1", "fusion.2", "command_buffer_1"]


@pytest.mark.parametrize(
    ("instruction", "kernel"),
    [
        ("bitcast_dynamic-update-slice_fusion", "bitcast_dynamic_update_slice_fusion"),
        ("wrapped_dynamic-slice.1", "wrapped_dynamic_slice_1"),
        ("wrapped_reduce-window", "wrapped_reduce_window"),
        ("add.3", "wrapped_add_3"),
    ],
)
def test_kernels_have_the_names_that_xla_gives_them(instruction: str, kernel: str) -> None:
    assert instructions(program((instruction, "", 5.0)), graph([(kernel, 5.0)])) == [instruction]


def test_names_that_xla_made_up_are_not_of_a_library() -> None:
    modelled = program(("loop_convolution_fusion", "", 5.0), ("custom-call.1", "convolution", 50.0))
    events = graph([("cudnn_implicit_gemm_kernel", 50.0), ("loop_convolution_fusion", 5.0)])
    assert instructions(modelled, events) == ["custom-call.1", "loop_convolution_fusion"]
    # A library has an instruction's family, not its name.
    modelled = program(("convert_gemm_operands", "", 5.0), ("custom-call.1", "matmul", 50.0))
    assert instructions(modelled, graph([(NVJET, 50.0)])) == ["custom-call.1"]


def test_graphs_that_run_at_the_same_time_are_told_apart() -> None:
    modelled = program(("fusion.1", "", 5.0), ("fusion.3", "", 5.0), ("dot.2", "matmul", 5.0), ("fusion.4", "", 5.0))
    first = graph([("fusion_1", 5.0), ("fusion_3", 5.0)], launch=1)
    second = graph([(NVJET, 5.0), ("fusion_4", 5.0)], launch=2, name="command_buffer_2")
    both = [
        attrs.evolve(each, start_ns=1000.0 * i) for i, each in enumerate([first[0], second[0], first[1], second[1]])
    ]
    assert instructions(modelled, both) == ["fusion.1", "dot.2", "fusion.3", "fusion.4"]


def test_collectives_are_aligned_apart_from_kernels_beside_them() -> None:
    modelled = program(
        ("all-gather-start.1", "collective", 30.0), ("fusion.1", "", 5.0), ("all-reduce-start.2", "collective", 40.0)
    )
    # The gather ends after the kernel that it runs beside has begun.
    events = graph(
        [("fusion_1", 5.0), ("ncclDevKernel_AllGather_RING_LL", 30.0), ("ncclDevKernel_AllReduce_Sum", 40.0)]
    )
    assert instructions(modelled, events) == ["fusion.1", "all-gather-start.1", "all-reduce-start.2"]


def test_missing_kernels_leave_the_rest_aligned() -> None:
    kinds = ["loop_add_fusion", "input_reduce_fusion", "loop_multiply_fusion"]
    names = [f"{kinds[index % 3]}.{index}" for index in range(40)]
    modelled = program(*((name, "", 5.0 + index % 7) for index, name in enumerate(names)))
    # Names of kernels are shared, and a few instructions are other kernels.
    events = graph([(name.split(".")[0], 5.0 + index % 7) for index, name in enumerate(names) if index % 11])
    named = [
        name == expected
        for name, expected in zip(
            instructions(modelled, events), [name for index, name in enumerate(names) if index % 11], strict=True
        )
    ]
    assert sum(named) >= 34, named
