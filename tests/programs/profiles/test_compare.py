"""Measured beside modelled: on traces recorded here, and on what TPUs and GPUs write."""

import itertools
import json
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.profiler import ProfileData
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.program import read_program
from shardrules.programs.profiles.compare import compare_trace, length, outside, union
from shardrules.programs.profiles.comparison import ComparedTime, TraceComparison
from shardrules.programs.profiles.modelled import model_program
from shardrules.programs.profiles.trace import ProfileTrace, read_trace
from tests.programs.audits.sample_report import REPORT
from tests.programs.profiles.planes import PROGRAM, gpu_trace, recorded_trace, tpu_trace, trace

MODELLED_SECONDS = 80e-6
V5E = attrs.evolve(
    sr.Hardware.named("tpu:v5e"),
    matmul_fractions=(),
    memory_fractions=(),
    link_fractions=(),
    launch_seconds=0,
    collective_launch_seconds=0,
)
"""At its peaks: what is modelled is in proportion to FLOPs and bytes."""


def compare(data: bytes, text: str = PROGRAM, **options: Any) -> TraceComparison:
    program = read_program(text)
    modelled = model_program(program, find_collectives(program), options.get("hardware", V5E))
    trace = read_trace(ProfileData.from_serialized_xspace(data))
    return compare_trace(trace, modelled, "step", MODELLED_SECONDS, options.get("module"))


def by_name(times: tuple[ComparedTime, ...]) -> dict[str, ComparedTime]:
    return {time.name: time for time in times}


def measured(times: tuple[ComparedTime, ...]) -> dict[str, float]:
    """Microseconds, rounded: traces have whole nanoseconds."""
    return {time.name: round(time.measured_seconds * 1e6, 3) for time in times}


def test_kernels_of_tpus_are_measured_by_their_own_time() -> None:
    comparison = compare(tpu_trace(steps=4, devices=1))
    assert measured(comparison.kernels) == {"dot.2": 30, "fusion.1": 20, "dot.1": 9}
    assert (comparison.step_count, comparison.left_out, comparison.matched_share) == (3, 1, 1)
    (device,) = comparison.devices
    assert [round(seconds * 1e6, 3) for seconds in attrs.astuple(device)[1:]] == [100, 240, 59, 31, 11, 10 + 20]


@pytest.mark.parametrize(("link_bytes_per_second", "microseconds"), [(400e9, 11), (80e9, None), (8e9, 31)])
def test_a_transfer_beside_kernels_took_what_is_nearest_to_the_model(
    link_bytes_per_second: float, microseconds: float | None
) -> None:
    # In flight for 31 microseconds, 20 of them beside a kernel: it took between 11 and 31.
    hardware = attrs.evolve(V5E, link_bytes_per_second=link_bytes_per_second)
    (gather,) = compare(tpu_trace(steps=4, devices=1), hardware=hardware).collectives
    expected = gather.modelled_seconds if microseconds is None else microseconds * 1e-6
    assert gather.measured_seconds == pytest.approx(expected)
    assert gather.exposed_seconds == pytest.approx(11e-6)
    assert gather.label == "all-gather over groups of 4: w"


def test_devices_are_told_apart() -> None:
    comparison = compare(tpu_trace(steps=4, devices=3))
    dot = by_name(comparison.kernels)["dot.1"]
    assert (round(dot.measured_seconds * 1e6, 1), round(dot.slowest_seconds * 1e6, 1)) == (9.9, 10.8)
    assert dot.slowest_device == "/device:TPU:2"
    assert round(comparison.step_seconds * 1e6) == 120
    assert round(comparison.spread, 3) == round(1 - 100 / 120, 3)


def test_lines_add_up_kernels_and_collectives() -> None:
    comparison = compare(gpu_trace())
    # The matmul of line 20 is two kernels, and waits for the gather of line 20.
    assert measured(comparison.lines) == {"me/model.py:10": 20, "me/model.py:20": 9 + 30, "me/model.py:30": 30}
    assert by_name(comparison.lines)["me/model.py:20"].count == 2
    differences = [abs(time.difference) for time in comparison.lines]
    assert differences == sorted(differences, reverse=True)


def test_collectives_of_gpus_are_kernels_on_another_stream() -> None:
    (gather,) = compare(gpu_trace()).collectives
    # From 1 to 31, with a kernel until 20.
    assert (round(gather.measured_seconds * 1e6), round(gather.exposed_seconds * 1e6)) == (30, 11)


def test_kernels_in_graphs_of_a_gpu_are_those_of_the_program() -> None:
    comparison, plain = compare(gpu_trace(graph=True)), compare(gpu_trace())
    assert measured(comparison.kernels) == measured(plain.kernels)
    assert comparison.missing == plain.missing
    # Only what the library clears before it multiplies is not of an instruction.
    assert comparison.matched_share == pytest.approx(89 / 90)
    assert by_name(comparison.kernels)["dot.2"].measured_seconds == pytest.approx(30e-6)


def test_a_trace_of_an_h100_is_matched_with_a_program_that_was_compiled_without_one() -> None:
    text, recorded = recorded_trace()
    comparison = compare(recorded, text, hardware=sr.Hardware.named("cuda:h100"))
    assert (comparison.step_count, comparison.missing) == (4, ())
    assert comparison.matched_share > 0.99
    rows = by_name(comparison.kernels)
    # The largest matmul, at the end, is a kernel of cuBLAS there, which reads 131 MB.
    head = rows["gemm_fusion_dot.9"]
    assert (head.count, head.line) == (1, "plan_models/parts.py:123")
    assert head.measured_seconds == pytest.approx(head.modelled_seconds, rel=0.2)
    # The caches are copied before the loop, at once; each layer writes its own part, four times as many rounds.
    copies = [row for row in comparison.kernels if row.name.startswith("copy.") and row.measured_seconds > 1e-4]
    updates = [row for row in comparison.kernels if row.name.startswith("loop_dynamic_update_slice_fusion")]
    assert [row.count for row in copies] == [1, 1]
    assert {row.count for row in updates} == {4}
    for row in (*copies, *updates):
        assert row.measured_seconds == pytest.approx(row.modelled_seconds, rel=0.15)


def test_a_trace_of_another_program_for_gpus_is_refused() -> None:
    # All of its kernels are of a kind that this program has, but not the other way around.
    text, _ = recorded_trace()
    with pytest.raises(sr.errors.TraceError, match=r"its program 'jit_step' is not the audited one: \d+% of its time"):
        compare(gpu_trace(graph=True), text, hardware=sr.Hardware.named("cuda:h100"))


def test_a_copy_to_the_host_is_a_transfer() -> None:
    copying = PROGRAM.replace(
        "  %tuple.1 = ",
        "  %copy-start.1 = (bf16[1024,1024]{1,0:S(5)}, bf16[1024,1024]{1,0}, u32[]{:S(2)}) copy-start(%x)\n"
        "  %copy-done.1 = bf16[1024,1024]{1,0:S(5)} copy-done(%copy-start.1)\n  %tuple.1 = ",
    )
    lines = {
        "XLA Modules": [("jit_step(1)", 0.0, 300.0, {})],
        "XLA Ops": [("copy-start.1", 0.0, 1.0, {}), ("fusion.1", 1.0, 200.0, {}), ("copy-done.1", 201.0, 20.0, {})],
        "Async XLA Ops": [("copy-start", 0.5, 220.0, {"hlo_op": "copy-start.1"})],
    }
    comparison = compare(trace({"/device:TPU:0": lines}), copying)
    copy = by_name(comparison.kernels)["copy-start.1"]
    # 2 MiB at 25 GB/s; it took between the 21 microseconds without a kernel and the 221 from its start to its end.
    assert copy.label == "copy"
    assert copy.modelled_seconds == pytest.approx(2**21 / V5E.host_link_bytes_per_second)
    assert 21e-6 < copy.modelled_seconds < 221e-6
    assert copy.measured_seconds == copy.modelled_seconds
    assert copy.exposed_seconds == pytest.approx(21e-6)
    assert comparison.devices[0].idle_seconds == pytest.approx(79e-6)


def test_what_only_the_trace_has_is_listed() -> None:
    tpu = {(time.kind, time.name): time for time in compare(tpu_trace(devices=1)).unmatched}
    assert round(tpu["idle", "nothing runs within a step"].seconds * 1e6, 3) == 30
    assert round(tpu["between steps", "from the end of a step to the next"].seconds * 1e6, 3) == 140
    assert round(tpu["loops and calls", "while nothing inside of them runs"].seconds * 1e6, 3) == 20
    assert round(tpu["other program", "jit_convert(5)"].seconds * 1e6, 3) == round(5 / 3, 3)
    assert round(tpu["run left out", f"jit_step({2**60})"].outside_seconds * 1e6, 3) == 200
    assert tpu["host transfer", "tpu::System::TransferToDevice"].outside_seconds == pytest.approx(4e-6)
    gpu = {(time.kind, time.name): time for time in compare(gpu_trace()).unmatched}
    assert gpu["host transfer", "MemcpyH2D"].seconds == pytest.approx(2e-6)
    other = compare(gpu_trace(), PROGRAM.replace("fusion.1", "wrapped_negate.7"))
    names = {(time.kind, time.name): time for time in other.unmatched}
    assert names["instruction", "fusion.1"].seconds == pytest.approx(20e-6)
    assert other.matched_share == pytest.approx(69 / 89)


def test_a_comparison_prints_all_of_its_tables() -> None:
    comparison = compare(gpu_trace(), PROGRAM.replace("fusion.1", "wrapped_negate.7"))
    assert [part.name for part in comparison.missing if part.name != "less"] == ["wrapped_negate.7"]
    assert comparison.missing[0].line == "me/model.py:10"
    head, *tables = str(comparison).split("\n\n")
    assert head.splitlines() == [
        "step",
        "trace a trace in memory",
        "program jit_step(7): 3 steps on 1 device, 1 left out",
    ]
    assert "measured  75 µs a step (/device:GPU:0): kernels 59 µs, collectives 30 µs (11 µs of it exposed)" in tables[0]
    assert "modelled  80 µs: 1.07 of the measured" in tables[0]
    for title in ("line", "collective", "kernel", "in the trace only", "in the program only"):
        assert any(title in table.splitlines()[0] for table in tables[1:]), title
    suspicion = "by the names of instructions\n            another program than the audited one?"
    assert suspicion in tables[0]
    assert suspicion not in str(compare(gpu_trace()))


def test_devices_that_are_left_out_are_counted() -> None:
    # The stages of a pipeline may be programs of one name, and of one id on hosts of their own.
    program = read_program(PROGRAM)
    modelled = model_program(program, find_collectives(program), V5E)
    (device,) = read_trace(ProfileData.from_serialized_xspace(gpu_trace())).devices
    renamed = tuple(
        attrs.evolve(activity, name=f"{activity.name}.stage", kernel="stage") for activity in device.activities
    )
    devices = (
        attrs.evolve(device, device="a /device:GPU:0"),
        attrs.evolve(device, device="b /device:GPU:0", activities=renamed),
        attrs.evolve(device, device="b /device:GPU:1", activities=renamed),
    )
    comparison = compare_trace(ProfileTrace("a trace", devices), modelled, "step", MODELLED_SECONDS, None)
    assert [device.device for device in comparison.devices] == ["a /device:GPU:0"]
    assert comparison.devices_left_out == 2
    line = "3 steps on 1 device (2 left out: they have no whole run of it, or another program), 1 left out"
    assert line in str(comparison)


def test_json_is_read_back() -> None:
    comparison = compare(tpu_trace())
    text = comparison.to_json()
    assert TraceComparison.from_json(text) == comparison
    assert json.loads(text)["totals"]["step_seconds"] == comparison.step_seconds
    with pytest.raises(sr.errors.ReportError, match="this text is not a comparison with a trace"):
        TraceComparison.from_json('{"shardrules_audit": 1}')
    with pytest.raises(sr.errors.ReportError, match="has format 99, and this version reads 1"):
        TraceComparison.from_json('{"shardrules_comparison": 99}')


def train_step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        def layer(x: Any, weight: Any) -> Any:
            return jnp.tanh(x @ weight["up"]) @ weight["down"], None

        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, gradients), value


def test_a_trace_recorded_here_is_matched_by_name(tmp_path: Path) -> None:
    mesh = sr.create_mesh("data:4,model:2")
    specs = {"up": P(None, None, "model"), "down": P(None, "model")}
    shapes = {"up": (3, 128, 256), "down": (3, 256, 128)}
    weights = {name: jax.device_put(jnp.ones(shapes[name]), NamedSharding(mesh, specs[name])) for name in shapes}
    x = jax.device_put(jnp.ones((64, 128)), NamedSharding(mesh, P("data")))
    step = jax.jit(train_step)
    report = sr.audit(step, weights, x, mesh=mesh)
    jax.block_until_ready(step(weights, x))
    with jax.profiler.trace(tmp_path):
        for _ in range(4):
            weights, value = step(weights, x)
            jax.block_until_ready(value)
    comparison = report.compare(tmp_path)
    assert (comparison.step_count, comparison.left_out, len(comparison.devices)) == (3, 1, 8)
    assert comparison.matched_share > 0.9
    # Every collective, and every kernel but those that a compiler may run within another one.
    assert {time.name for time in comparison.collectives} == {collective.name for collective in report.collectives}
    matmuls = {part.name for part in comparison.missing if part.modelled_seconds > 1e-7}
    assert matmuls == set()
    assert {time.line.rpartition(":")[0] for time in comparison.lines if time.line} == {"profiles/test_compare.py"}
    assert all(0 < device.step_seconds <= device.period_seconds * 1.5 for device in comparison.devices)


def test_kernels_take_what_the_report_says_of_them() -> None:
    audited = sr.audit(
        lambda x: jax.lax.top_k(x, 2),
        jax.ShapeDtypeStruct((64,), "float32"),
        mesh=sr.mesh_shape("data:1"),
        kernel_costs=[sr.kernel_cost("TopK", flops=10**12)],
    )
    assert max(seconds for _, seconds in audited.kernel_seconds) == pytest.approx(audited.step_time(), rel=0.01)
    assert audited.step_time() >= 10**12 / audited.hardware.flops_per_second("f32")
    report = attrs.evolve(REPORT, collectives=(), hlo_text=PROGRAM, kernel_seconds=(("dot.1", 2.0),))
    saved = sr.reports.AuditReport.from_json(report.to_json(hlo=True))
    comparison = saved.compare(ProfileData.from_serialized_xspace(gpu_trace()))
    assert {time.name: time.modelled_seconds for time in comparison.kernels}["dot.1"] == 2


def test_a_report_without_its_program_says_how_to_save_it() -> None:
    report = attrs.evolve(REPORT, collectives=(), hlo_text=PROGRAM)
    trace = ProfileData.from_serialized_xspace(gpu_trace())
    with pytest.raises(sr.errors.ReportError, match=r"save it with report.to_json\(hlo=True\)"):
        sr.reports.AuditReport.from_json(report.to_json()).compare(trace)
    saved = sr.reports.AuditReport.from_json(report.to_json(hlo=True))
    assert saved.compare(trace).program == "jit_step(7)"
    with pytest.raises(sr.errors.TraceError, match=r"has no program 'jit_stop' \(did you mean 'jit_step'\?\)"):
        saved.compare(trace, module="jit_stop")


INTERVALS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: (min(pair), max(pair))))


def points(intervals: list[tuple[float, float]]) -> set[float]:
    return {point for point in range(20) if any(start <= point < end for start, end in intervals)}


@given(INTERVALS, INTERVALS)
def test_lengths_are_those_of_the_points(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> None:
    merged, others = union(left), union(right)
    assert points(merged) == points(left)
    assert length(merged) == len(points(left))
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(merged))
    assert outside(merged, others) == len(points(left) - points(right))
