"""Rebuilds a published step without its hardware: compiles it, and models its time."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from published.adapters import parted
from published.attention import BATCH, LENGTH, RATES, causal_share
from published.decoder import Decoder, state_shapes, weight_shapes, weight_specs
from published.rows import Row
from shardrules.programs.compiled.collectives import Collective, find_collectives
from shardrules.programs.compiled.flops import Matmul, find_matmuls
from shardrules.programs.compiled.kernel_costs import KernelFacts
from shardrules.programs.compiled.kernels import find_kernels
from shardrules.programs.compiled.program import CompiledProgram, read_program
from shardrules.programs.compiling.kernel_calls import find_kernel_calls
from shardrules.programs.costs.attention import is_attention, sustained_part
from shardrules.programs.costs.collective import Group, collective_cost
from shardrules.programs.costs.matmul import flops_seconds
from shardrules.programs.costs.schedule import play_schedule
from shardrules.programs.costs.slowest import slowest_of
from shardrules.programs.costs.step_time import StepTime


@final
@attrs.frozen
class Result:
    """What became of a row."""

    row: Row
    time: StepTime
    compile_seconds: float
    """How long the whole rebuild took."""
    is_compiled: bool
    """Whether it was compiled, and not read."""
    peak_bytes: int = 0
    """The peak of a device, as compiled; 0 where other numbers of layers were."""

    @property
    def predicted(self) -> float:
        """The modelled seconds of a step."""
        return self.time.seconds

    @property
    def ratio(self) -> float | None:
        """Predicted over measured; `None` if nobody measured it."""
        return None if self.row.seconds is None else self.predicted / self.row.seconds

    @property
    def memory_ratio(self) -> float | None:
        """The compiled peak over the printed one; `None` without either."""
        if self.row.gigabytes is None or not self.peak_bytes:
            return None
        return self.peak_bytes / (self.row.gigabytes * 1e9)


def rebuild(row: Row, texts: Path | None = None) -> Result:
    """Compiles a row for its target, or reads the compiled program from `texts`, where it is kept."""
    if not row.layers_compiled:
        return _rebuild(row, texts)
    few, more = (_rebuild(_with_layers(row, count), texts) for count in row.layers_compiled)
    share = (row.dims.layers - few.row.dims.layers) / (more.row.dims.layers - few.row.dims.layers)
    times = zip(attrs.astuple(few.time), attrs.astuple(more.time), strict=True)
    extended = StepTime(*(short + share * (long - short) for short, long in times))
    # The peak of few layers may be where that of many is not: it says nothing.
    compile_seconds = few.compile_seconds + more.compile_seconds
    return Result(row, extended, compile_seconds, few.is_compiled or more.is_compiled)


def _with_layers(row: Row, count: int) -> Row:
    """The same row with so many layers."""
    dims = attrs.evolve(row.dims, layers=count)
    return attrs.evolve(row, name=f"{row.name}, {count} layers", dims=dims, layers_compiled=())


def _rebuild(row: Row, texts: Path | None) -> Result:
    start = time.perf_counter()
    path = None if texts is None else texts / f"{_slug(row.name)}.txt"
    mesh = sr.mesh_shape(",".join(f"{axis}:{size}" for axis, size in row.mesh.items()))
    is_kept = path is not None and path.exists()
    if path is not None and is_kept:
        text, peak = path.read_text("utf-8"), path.with_suffix(".peak")
        peak_bytes = int(peak.read_text("utf-8")) if peak.exists() else 0
    else:
        report = audit(row, _decoder(row))
        text, peak_bytes = report.hlo_text, report.peak_bytes
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            path.with_suffix(".peak").write_text(str(peak_bytes), "utf-8")
    modelled = _model(row, text, mesh)
    return Result(row, modelled, time.perf_counter() - start, not is_kept, peak_bytes)


def _decoder(row: Row) -> Decoder:
    return Decoder(row.dims, row.recipe, row.target.split(":")[0], row.remat)


def _arguments(row: Row) -> tuple[Any, ...]:
    """The shapes that a step takes."""
    weights = weight_shapes(row.dims, row.recipe, row.length)
    shape = (row.sequences, row.length)
    if _has_batches(row):
        shape = (row.recipe.accumulations, *shape)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    trained = parted(weights)[0] if row.recipe.lora_rank else weights
    return weights, state_shapes(trained, row.recipe), tokens, tokens


def _has_batches(row: Row) -> bool:
    """The first dim of tokens is that of batches."""
    return row.recipe.accumulations > 1 or row.recipe.fsdp == "fully_shard"


def audit(row: Row, decoder: Decoder) -> sr.reports.AuditReport:
    """Compiles the step of a decoder with a row's mesh and layouts."""
    mesh = sr.mesh_shape(",".join(f"{axis}:{size}" for axis, size in row.mesh.items()))
    arguments = _arguments(row)
    plan = sr.SpecTreeShardingRule(weight_specs(row.dims, row.recipe, row.length)).plan(arguments[0], mesh)
    spec = P(None, BATCH, LENGTH) if _has_batches(row) else P(BATCH, LENGTH)
    return sr.audit(
        decoder.step,
        *arguments,
        mesh=mesh,
        target=row.compiled_for,
        plan=plan,
        in_shardings=(None, None, spec, spec),
        out_shardings=(plan, plan.mirror, None),
        donate_argnums=(0, 1),
    )


def _model(row: Row, text: str, mesh: Any) -> StepTime:
    target = sr.Target.parse(row.target)
    program, devices = read_program(text), target.mesh(mesh)
    facts = KernelFacts()
    if target.platform == "tpu":
        # The text does not say how many blocks the mask of splash attention leaves.
        with jax.sharding.use_abstract_mesh(devices.abstract_mesh):
            step = jax.make_jaxpr(_decoder(row).step)(*_arguments(row))
        facts = KernelFacts(calls=find_kernel_calls(step))
    attention, hardware = row.recipe.attention, slowest_of(row.hardware, row.device_count)
    matmuls = tuple(_at_rate(matmul, attention, hardware) for matmul in find_matmuls(program, facts))
    if target.platform == "tpu" and not row.recipe.tpu_kernel.is_splash:
        matmuls = tuple(map(_causal, matmuls))
    collectives = find_collectives(program, devices, target)
    if row.recipe.sequence_parallel:
        program = _waiting(program, [each for each in collectives if each.axes == ("tensor",)])
    if row.recipe.devices_per_host:
        collectives = tuple(_on_hosts(collective, row.recipe.devices_per_host, devices) for collective in collectives)
    if row.recipe.pair_bytes_per_second:
        collectives = tuple(_over_pairs(each, row.recipe.pair_bytes_per_second, hardware) for each in collectives)
    return play_schedule(program, collectives, find_kernels(program, matmuls), hardware).time


def _at_rate(matmul: Matmul, attention: str, hardware: sr.Hardware) -> Matmul:
    """Attention as other kernels than the compiled ones: the FLOPs that matmuls would do in the time they take."""
    if not attention or not is_attention(matmul):
        return matmul
    forward, backward = RATES[attention]
    rate, half = forward if len(matmul.products) == 2 else backward
    seconds = matmul.flops / (rate * sustained_part(hardware)) * (1 + half / matmul.products[0].m)
    flops = seconds / flops_seconds(1.0, matmul.dtype, matmul.precision, hardware)
    return attrs.evolve(matmul, flops=round(flops), products=())


def _waiting(program: CompiledProgram, collectives: Iterable[Collective]) -> CompiledProgram:
    """A program that waits for collectives where they begin, as PyTorch does."""
    starts = {(collective.computation, collective.name) for collective in collectives}
    computations = []
    for computation in program.computations:
        ends = {
            instruction.operands[0]: instruction
            for instruction in computation.instructions
            if instruction.op.endswith("-done") and (computation.name, instruction.operands[0]) in starts
        }
        order = []
        for instruction in computation.instructions:
            if instruction.op.endswith("-done") and instruction.operands[0] in ends:
                continue
            order += [instruction, *([ends[instruction.name]] if instruction.name in ends else [])]
        computations.append(attrs.evolve(computation, instructions=tuple(order)))
    return attrs.evolve(program, computations=tuple(computations))


def _on_hosts(collective: Collective, per_host: int, mesh: Mesh) -> Collective:
    """A collective over whole axes of the mesh, on hosts of so many devices, which follow each other."""
    if collective.kind == "collective-permute" or collective.axes is None:
        return collective
    group = tuple(slice(None) if axis in collective.axes else 0 for axis in mesh.axis_names)
    hosts = {device.id // per_host for device in np.ravel(mesh.devices[group])}
    return attrs.evolve(collective, host_count=len(hosts))


def _over_pairs(collective: Collective, pair_bytes: float, hardware: sr.Hardware) -> Collective:
    """A collective inside a host whose GPUs are linked in pairs: it sends as many more bytes as it takes longer."""
    others = collective.group_size - 1
    if collective.host_count > 1 or not others or not collective.wire_bytes:
        return collective
    links = min(hardware.link_bytes_per_second, others * pair_bytes)
    # Tables are of GPUs behind a switch.
    linked = attrs.evolve(hardware, link_bytes_per_second=links, collective_times=())
    switched, paired = (
        collective_cost(collective.kind, collective.wire_bytes, Group(collective.group_size), sheet).seconds
        for sheet in (hardware, linked)
    )
    return attrs.evolve(collective, wire_bytes=round(collective.wire_bytes * max(1.0, paired / switched)))


def _causal(matmul: Matmul) -> Matmul:
    """Attention of `flash_attention` without the blocks of scores that a causal mask leaves out."""
    if not is_attention(matmul):
        return matmul
    share = causal_share(len(matmul.products), matmul.products[0].n)
    products = tuple(attrs.evolve(product, batch=round(product.batch * share)) for product in matmul.products)
    return attrs.evolve(matmul, flops=sum(product.flops for product in products), products=products)


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)
