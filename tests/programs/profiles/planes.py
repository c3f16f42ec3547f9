"""Traces written by hand, in the format that runtimes of TPUs and GPUs write, and a program that they are traces of."""

import gzip
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jax.profiler import ProfileData

Event: TypeAlias = tuple[str, float, float, Mapping[str, Any]]
"""Its name, its start and its duration in microseconds, and its stats."""

PROGRAM = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%fused (p: bf16[1024,1024]) -> bf16[1024,1024] {
  %p = bf16[1024,1024]{1,0} parameter(0)
  ROOT %negate.1 = bf16[1024,1024]{1,0} negate(%p)
}

%body (state: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %state = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %y = bf16[1024,1024]{1,0} get-tuple-element(%state), index=1
  %dot.2 = bf16[1024,1024]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/while/body/dot_general" source_file="/home/me/model.py" source_line=30}
  ROOT %tuple.2 = (s32[], bf16[1024,1024]{1,0}) tuple(%i, %dot.2)
}

%condition (state.1: (s32[], bf16[1024,1024])) -> pred[] {
  %state.1 = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %limit = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (w: bf16[256,1024], x: bf16[1024,1024]) -> (s32[], bf16[1024,1024]) {
  %w = bf16[256,1024]{1,0} parameter(0), metadata={op_name="w"}
  %x = bf16[1024,1024]{1,0} parameter(1), metadata={op_name="x"}
  %zero = s32[] constant(0)
  %all-gather-start.1 = (bf16[256,1024]{1,0}, bf16[1024,1024]{1,0}) all-gather-start(%w), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(step)/all_gather" source_file="/home/me/model.py" source_line=20}
  %fusion.1 = bf16[1024,1024]{1,0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/neg" source_file="/home/me/model.py" source_line=10}
  %all-gather-done.1 = bf16[1024,1024]{1,0} all-gather-done(%all-gather-start.1)
  %dot.1 = bf16[1024,1024]{1,0} dot(%fusion.1, %all-gather-done.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/dot_general" source_file="/home/me/model.py" source_line=20}
  %tuple.1 = (s32[], bf16[1024,1024]{1,0}) tuple(%zero, %dot.1)
  ROOT %while.1 = (s32[], bf16[1024,1024]{1,0}) while(%tuple.1), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""  # noqa: E501  as XLA prints it
"""A gather beside a kernel, a matmul that waits for it, and a loop of three rounds around another."""

TEXTS = {
    name: line.strip().removeprefix("ROOT ")
    for line in PROGRAM.splitlines()
    if (name := line.strip().removeprefix("ROOT ").partition(" = ")[0].removeprefix("%")) and " = " in line
}
"""The instructions by name, as TPUs name their events."""


def trace(planes: Mapping[str, Mapping[str, Sequence[Event]]]) -> bytes:
    """A trace with planes of lines of events, as its file holds it."""
    text = "\n".join(_plane(name, lines) for name, lines in planes.items())
    return ProfileData.text_proto_to_serialized_xspace(text)


def _plane(name: str, lines: Mapping[str, Sequence[Event]]) -> str:
    names = list(dict.fromkeys(event[0] for events in lines.values() for event in events))
    stats = list(dict.fromkeys(stat for events in lines.values() for event in events for stat in event[3]))
    body = [f"name: {json.dumps(name)}"]
    for index, (line, events) in enumerate(lines.items(), 1):
        # Picoseconds after the start of the line, which is in nanoseconds.
        written = " ".join(
            f"events {{ metadata_id: {names.index(event) + 1} offset_ps: {round(start * 1e6)} "
            f"duration_ps: {round(duration * 1e6)} {_stats(values, stats)} }}"
            for event, start, duration, values in events
        )
        body.append(f"lines {{ id: {index} name: {json.dumps(line)} timestamp_ns: 1000 {written} }}")
    for key, entries in (("event_metadata", names), ("stat_metadata", stats)):
        body += [
            f"{key} {{ key: {index} value {{ id: {index} name: {json.dumps(entry)} }} }}"
            for index, entry in enumerate(entries, 1)
        ]
    return f"planes {{ {' '.join(body)} }}"


def _stats(values: Mapping[str, Any], stats: Sequence[str]) -> str:
    return " ".join(
        f"stats {{ metadata_id: {stats.index(name) + 1} "
        f"{'int64' if isinstance(value, int) else 'str'}_value: {json.dumps(value)} }}"
        for name, value in values.items()
    )


def tpu_step(start: float, slower: float = 1.0) -> dict[str, list[Event]]:
    """A run of the program on a TPU core, which takes 100 microseconds.

    The gather is in flight for 30 microseconds, of which 20 are beside a kernel.
    """

    def event(name: str, offset: float, duration: float, **stats: Any) -> Event:
        return TEXTS.get(name, name), start + offset * slower, duration * slower, stats

    return {
        "XLA Modules": [(f"jit_step({2**60})", start, 100 * slower, {"run_id": int(start)})],
        "XLA Ops": [
            event("all-gather-start.1", 0, 1),
            event("fusion.1", 1, 20),
            event("all-gather-done.1", 21, 10),
            event("dot.1", 31, 9),
            event("while.1", 45, 50),
            *(event("dot.2", 47 + 15 * index, 10) for index in range(3)),
        ],
        "Async XLA Ops": [
            ("all-gather-start", start + slower, 30 * slower, {"hlo_op": "all-gather-start.1", "flow": 7})
        ],
    }


def tpu_trace(steps: int = 4, devices: int = 2, *, period: float = 120.0) -> bytes:
    """A trace of TPU cores, of which each is slower than the one before. The first step takes twice as long."""
    planes: dict[str, dict[str, list[Event]]] = {
        "/host:CPU": {"python": [("tpu::System::TransferToDevice", 130, 4, {})]}
    }
    for device in range(devices):
        lines: dict[str, list[Event]] = {"Steps": [], "XLA TraceMe": [("barrier-cores", 5, 2, {})]}
        for step in range(steps):
            start = step * 2 * period
            for line, events in tpu_step(start, 2.0 if step == 0 else 1 + 0.1 * device).items():
                lines.setdefault(line, []).extend(events)
        # Another program runs before the last step, or after the only one.
        before = (2 * steps - 2) * period - 10 if steps > 1 else 210
        lines["XLA Modules"].append(("jit_convert(5)", before, 5, {}))
        lines["XLA Ops"].append(("%convert.1 = f32[] convert(bf16[] %x)", before, 5, {}))
        planes[f"/device:TPU:{device}"] = lines
    return trace(planes)


def gpu_trace(
    steps: int = 4, *, module: str = "jit_step", program_id: int = 7, cut: bool = False, graph: bool = False
) -> bytes:
    """A trace of a GPU, whose streams have kernels by their own names. `cut`: it ends in the middle of the last step.

    `graph`: what is before the loop is launched as one CUDA graph, and each round as another.
    """
    launches = itertools.count(100)

    def event(kernel: str, op: str, start: float, duration: float, *graph: int) -> Event:
        stats = {
            "correlation_id": 3,
            "tf_op": "XlaModule:",
            "hlo_op": op,
            "hlo_module": module,
            "program_id": program_id,
        }
        if graph:
            stats |= {"correlation_id": graph[0], "cuda_graph_id": 680, "cuda_graph_node_id": 2**32 + graph[0]}
        return kernel, start, duration, stats

    compute: list[Event] = []
    network: list[Event] = []
    for step in range(steps):
        start = 100.0 * step
        network.append(
            event(
                "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-gather-start.1", start + 1, 30
            )
        )
        # One matmul is two kernels of a library.
        matmul = "void cutlass::Kernel2<cutlass_80_tensorop>(Params)"
        reduction = "void splitKreduce_kernel<32, 16>(cublasSplitKParams)"
        copy: Event = (
            "MemcpyH2D",
            start + 21,
            2,
            {"memcpy_details": "kind_src:pageable kind_dst:device size:64"},
        )
        if graph:
            first = next(launches)
            compute.append(event("fusion_1", "command_buffer_1", start, 20, first))
            compute.append(copy)
            if cut and step == steps - 1:
                break
            compute.append(event("Memset 0", "command_buffer_1", start + 30, 1, first))
            compute.append(event(matmul, "command_buffer_1", start + 31, 8, first))
            compute.append(event(reduction, "command_buffer_1", start + 39, 1, first))
            for index in range(3):
                launch = next(launches)
                compute.append(event("nvjet_hsh_128x256", "command_buffer_2", start + 45 + 10 * index, 10, launch))
            continue
        compute.append(event("fusion_1", "fusion.1", start, 20))
        compute.append(copy)
        if cut and step == steps - 1:
            break
        compute.append(event(matmul, "dot.1", start + 31, 8))
        compute.append(event(reduction, "dot.1", start + 39, 1))
        compute += [event("nvjet_hsh_128x256", "dot.2", start + 45 + 10 * index, 10) for index in range(3)]
    return trace(
        {
            "/host:metadata": {},
            "/device:GPU:0": {"Stream #13(Compute)": compute, "Stream #20(Compute)": network, "XLA Ops": compute},
        }
    )


def recorded_trace() -> tuple[str, bytes]:
    """A program as it was compiled without a GPU, and a trace of it from an H100 with JAX 0.11.2.

    It is five steps that decode a token with 4 layers in a loop. Most kernels ran in CUDA graphs.
    """
    recorded = json.loads(gzip.decompress(Path(__file__).with_name("h100_decode.json.gz").read_bytes()))
    lines: dict[str, list[Event]] = {}
    names = ("hlo_op", "hlo_module", "program_id", "correlation_id", "cuda_graph_id")
    for line, kernel, start_ns, duration_ns, *stats in recorded["events"]:
        values = {name: value for name, value in zip(names, stats, strict=True) if value is not None}
        lines.setdefault(line, []).append((kernel, start_ns / 1e3, duration_ns / 1e3, values))
    return recorded["hlo"], trace({"/device:GPU:0": lines})
