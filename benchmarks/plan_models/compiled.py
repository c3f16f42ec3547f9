"""Steps that are compiled under plans, for devices that need not be present: their figures, and a cache of programs.

Compiled programs are kept by a hash of what was lowered: what leaves the program as it is compiles nothing again, for
experts and for `autoplan`. Their figures are read anew each time.
"""

import gzip
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import attrs
import equinox as eqx
import jax
from jax.sharding import Mesh

import shardrules as sr
from plan_models import Expert, Model, expert_constraints
from shardrules.programs.compiled.collectives import Collective, find_collectives
from shardrules.programs.compiled.flops import find_matmuls
from shardrules.programs.compiled.kernels import Kernel, find_kernels
from shardrules.programs.compiled.program import CompiledProgram, read_program
from shardrules.programs.compiling.compile import CompilerMemory
from shardrules.programs.compiling.model_flops import model_matmuls
from shardrules.programs.costs.schedule import play_schedule
from shardrules.programs.jaxprs.walk import without_dead_code

FLOPS_PER_SECOND, WIRE_BYTES_PER_SECOND, MEMORY_BYTES_PER_SECOND = 495e12, 360e9, 2.7e12
"""Half of an H100's peak for bf16, four fifths of its NVLink, and of its memory. Only their ratios decide which plan is
best: doubling one of them favors plans with less of the others."""


@final
@attrs.frozen
class Compilation:
    """What a compiler made of a step."""

    text: str
    memory: CompilerMemory
    seconds: float


@final
@attrs.frozen
class Cache:
    """Compiled programs in a folder, by a hash of what was lowered."""

    folder: Path | None  # `None` to keep nothing

    def compilation(self, lowered: Any, target: str) -> Compilation:
        """Returns what a compiler makes of a lowered step; `target` names all that it is compiled for and with."""
        key = hashlib.sha256(f"{jax.__version__}\n{target}\n{lowered.as_text()}".encode()).hexdigest()[:32]
        file = None if self.folder is None else self.folder / f"{key}.json.gz"
        if file is not None and file.exists():
            fields = json.loads(gzip.decompress(file.read_bytes()))
            return Compilation(fields["text"], CompilerMemory(**fields["memory"]), fields["seconds"])
        start = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
        stats = compiled.memory_analysis()
        memory = CompilerMemory(
            stats.argument_size_in_bytes,
            stats.output_size_in_bytes,
            stats.alias_size_in_bytes,
            stats.temp_size_in_bytes,
        )
        compilation = Compilation(compiled.as_text(), memory, seconds)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")  # a run that is stopped leaves no half of a file
            partial.write_bytes(gzip.compress(json.dumps(attrs.asdict(compilation)).encode(), 6))
            partial.rename(file)
        return compilation


@final
@attrs.frozen
class Row:
    """The figures of one compiled plan: of one step on one device."""

    name: str
    flops: int
    wire_bytes: int
    memory_bytes: int
    """What kernels read and write."""

    peak_bytes: int
    ms: float
    """The measure: each kernel takes as long as its FLOPs or its bytes, then the bytes on the wire."""

    flops_and_wire_ms: float
    """The same if memory took no time."""

    roofline_ms: float
    """The time by our own model."""

    work: float
    """The FLOPs of all devices, over the FLOPs that the function requests."""

    compile_seconds: float


@final
@attrs.frozen
class Result:
    """The plan that `autoplan` found for one case, and its predictions."""

    model: str
    mesh: str
    case: str
    limit_bytes: int
    row: Row | None
    """The figures of the compiled plan; `None` where planning or compiling failed."""

    best: str
    """The best expert within the limit."""

    best_ms: float
    best_flops_and_wire_ms: float = math.inf
    """The least of any expert within the limit, as is `best_roofline_ms`."""

    best_roofline_ms: float = math.inf

    wire_bytes: int = 0
    """Predicted, as is `peak_bytes`."""

    peak_bytes: int = 0
    seconds: float = 0.0  # of planning
    processor_seconds: float = 0.0  # of planning, by all threads
    error: str = ""
    findings: str = ""
    """The codes of the plan's warnings and errors."""

    gap: float = 0.0
    """By what part of its cost the best plan of the model may be better."""

    modelled_seconds: float = 0.0
    """What the plan says that a step takes."""

    audited_seconds: float = 0.0
    """What an audit says of the compiled plan, on the hardware that was planned for."""

    @property
    def fits(self) -> bool:
        """Whether there is a plan, and it compiles to what the limit allows."""
        return self.row is not None and self.row.peak_bytes <= self.limit_bytes

    @property
    def time_ratio(self) -> float:
        """The modelled time over the audited one."""
        return self.modelled_seconds / self.audited_seconds if self.audited_seconds else math.inf

    @property
    def peak_ratio(self) -> float:
        """The predicted peak over the compiler's."""
        return self.peak_bytes / self.row.peak_bytes if self.row is not None else math.inf

    @property
    def ratio(self) -> float:
        """Its time over the best expert's; infinite where it failed or does not fit, 0 where no expert fits."""
        return self.row.ms / self.best_ms if self.row is not None and self.fits else math.inf

    @property
    def flops_and_wire_ratio(self) -> float:
        """The same if memory took no time."""
        return self.row.flops_and_wire_ms / self.best_flops_and_wire_ms if self.row and self.fits else math.inf

    @property
    def roofline_ratio(self) -> float:
        """The same by our own model."""
        return self.row.roofline_ms / self.best_roofline_ms if self.row and self.fits else math.inf

    @property
    def wire_error(self) -> float:
        """The relative error of the predicted bytes on the wire."""
        return _relative_error(self.wire_bytes, None if self.row is None else self.row.wire_bytes)

    @property
    def peak_error(self) -> float:
        """The relative error of the predicted peak."""
        return _relative_error(self.peak_bytes, None if self.row is None else self.row.peak_bytes)


def _relative_error(predicted: float, actual: float | None) -> float:
    if actual is None:
        return math.inf
    return abs(predicted / actual - 1) if actual else float(predicted != 0)


@final
@attrs.frozen(eq=False)
class Question:
    """A model on a mesh, to compile for a target."""

    model: Model
    mesh: str
    device_mesh: Mesh
    """The mesh on the devices of `target`."""

    target: sr.Target
    step: Callable[..., Any]
    args: tuple[Any, Any]
    """Shapes for `step`."""

    requested_flops: int
    """The FLOPs of the function, without any recomputation."""

    cache: Cache

    @classmethod
    def of(cls, model: Model, mesh: str, smoke: bool, cache: Cache, target_name: str = "") -> "Question":
        """Builds a model for a mesh, of H100s if no target is named."""
        shape = sr.mesh_shape(mesh)
        target = sr.Target.parse(target_name or (f"cpu:{shape.size}" if smoke else f"cuda:h100:{shape.size}"))
        step, args = model.build(shape.size, smoke)
        arrays, rest = eqx.partition(args, is_shape)
        traced = jax.jit(lambda *leaves: eqx.filter(step(*eqx.combine(leaves, rest)), eqx.is_array)).trace(*arrays)
        requested = sum(matmul.flops for matmul in model_matmuls(without_dead_code(traced.jaxpr)))
        return cls(model, mesh, target.mesh(shape), target, step, args, requested, cache)

    @property
    def experts(self) -> list[Expert]:
        """The experts for this mesh."""
        return [expert for expert in self.model.experts if expert.fits(self.args, self.device_mesh)]

    @property
    def one_host(self) -> sr.Hardware:
        """The hardware that the measure assumes: links connect all devices."""
        return attrs.evolve(self.target.hardware, devices_per_host=self.device_mesh.size)

    def read_row(self, name: str, compilation: Compilation) -> Row:
        """Reads the figures of a compiled plan."""
        program, collectives, kernels = self.read(compilation.text)
        schedule = play_schedule(program, collectives, kernels, self.target.hardware)
        wire = sum(collective.total_wire_bytes for collective in collectives)
        flops = sum(kernel.total_flops for kernel in kernels)
        moved = [kernel.total_bytes * kernel.pass_count for kernel in kernels]
        kernel_seconds = sum(
            max(kernel.total_flops / FLOPS_PER_SECOND, nbytes / MEMORY_BYTES_PER_SECOND)
            for kernel, nbytes in zip(kernels, moved, strict=True)
        )
        wire_seconds = wire / WIRE_BYTES_PER_SECOND
        return Row(
            name,
            flops,
            wire,
            sum(moved),
            compilation.memory.peak_bytes,
            1e3 * (kernel_seconds + wire_seconds),
            1e3 * (flops / FLOPS_PER_SECOND + wire_seconds),
            1e3 * schedule.time.seconds,
            flops * self.device_mesh.size / self.requested_flops if self.requested_flops else 1.0,
            compilation.seconds,
        )

    def read(self, text: str) -> tuple[CompiledProgram, tuple[Collective, ...], tuple[Kernel, ...]]:
        """Reads a compiled program, its collectives and its kernels."""
        program = read_program(text)
        collectives = find_collectives(program, self.device_mesh, self.target)
        return program, tuple(collectives), find_kernels(program, find_matmuls(program))

    def by_hand(self, expert: Expert) -> Row:
        """Compiles the step under the plan of an expert."""
        arrays, rest = eqx.partition(self.args, is_shape)
        shardings = expert.shardings(self.args, self.device_mesh)
        placed = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arrays, shardings
        )

        def run(*leaves: Any) -> Any:
            return eqx.filter(self.step(*eqx.combine(leaves, rest)), eqx.is_array)

        donated = self.model.donated
        jitted = jax.jit(run, donate_argnums=donated, out_shardings=self.model.result_shardings(shardings))
        with expert_constraints(self.device_mesh, expert):
            lowered = jitted.lower(*placed)
        return self.read_row(expert.name, self.cache.compilation(lowered, str(self.target)))

    def by_autoplan(self, case: str, limit_bytes: int | None, experts: Sequence[Row], **options: Any) -> Result:
        """Plans the step with `autoplan`, and compiles it."""
        allowed = self.target.hardware.memory_bytes if limit_bytes is None else limit_bytes
        fitting = [row for row in experts if row.peak_bytes <= allowed]
        best = min(fitting, key=lambda row: row.ms, default=None)
        name, ms = ("", math.inf) if best is None else (best.name, best.ms)
        least = min((row.flops_and_wire_ms for row in fitting), default=math.inf)
        modelled = min((row.roofline_ms for row in fitting), default=math.inf)
        result = Result(self.model.name, self.mesh, case, allowed, None, name, ms, least, modelled)
        start, used = time.perf_counter(), time.process_time()
        try:
            mesh = self.device_mesh if options.get("prove") else self.device_mesh.abstract_mesh
            plan = sr.autoplan(
                self.step, *self.args, mesh=mesh, memory_limit=limit_bytes, hardware=self.one_host, **options
            )
        except Exception as error:  # noqa: BLE001  a failure is a result, and the other cases go on
            result = attrs.evolve(result, error=f"{type(error).__name__}: {error}")
            return _with_seconds(result, start, used)
        result = attrs.evolve(
            _with_seconds(result, start, used),
            wire_bytes=plan.wire_bytes,
            peak_bytes=plan.peak_bytes,
            modelled_seconds=plan.step_time.seconds,
            gap=plan.gap,
            findings=" ".join(finding.code for finding in plan.findings if finding.severity != "note"),
        )
        try:
            with jax.set_mesh(self.device_mesh):
                planned = plan.jit(self.step, donate_argnums=self.model.donated)
                lowered, flags = planned.lower(*self.args), planned.compiler_options(self.device_mesh)
            compilation = self.cache.compilation(lowered, f"{self.target} {flags}" if flags else str(self.target))
        except Exception as error:  # noqa: BLE001
            return attrs.evolve(result, error=f"compiling: {type(error).__name__}: {error}")
        row, audited = self.read_row("autoplan", compilation), self.audited_seconds(compilation.text)
        return attrs.evolve(result, row=row, audited_seconds=audited)

    def audited_seconds(self, text: str) -> float:
        """What an audit says that a compiled step takes if links connect all devices."""
        program, collectives, kernels = self.read(text)
        near = [attrs.evolve(collective, host_count=1) for collective in collectives]
        return play_schedule(program, near, kernels, self.one_host).time.seconds


def _with_seconds(result: Result, start: float, used: float) -> Result:
    """Adds how long planning took, from a start of the clock and of the processor's."""
    return attrs.evolve(result, seconds=time.perf_counter() - start, processor_seconds=time.process_time() - used)


def is_shape(leaf: Any) -> bool:
    """Whether a leaf of the arguments is an array."""
    return isinstance(leaf, jax.ShapeDtypeStruct)
