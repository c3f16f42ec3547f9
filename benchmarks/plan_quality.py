"""Is what `autoplan` finds as good as what an expert writes by hand?

**Method.** Train steps of seven models (`plan_models/`: GPT-2, a Llama, a mixture of experts, a vision transformer,
an encoder-decoder, a convolution net, an LSTM) are compiled for 8 and for 64 H100s, of which none has to be there:
under plans that experts write by hand, specs and activation constraints both, and under the plan that `autoplan` finds
for the same function without any constraint. Figures are read from the programs that were compiled. `ms` is the
measure: FLOPs of matmuls at 495 TFLOP/s, and after that bytes on the wire at 360 GB/s, as if NVLink joined all GPUs;
`autoplan` is told the same of them. `roofline` is our own model of the step, on hosts of 8; `work` how many times the
FLOPs are done that the function asks for. `autoplan` is divided by the best expert that fits. Each case runs twice:
within the memory of the device, which the limits are for, and `tight`: with `TIGHT` times what the expert with the
lowest peak takes. That peak is the compiler's, and what `autoplan` takes it to be before compiling is a model.

**Last answer.** 2026-11-21, 2 cores of an AMD EPYC, JAX 0.10.2, 8 H100s as data:8, data:4,model:2 and
data:2,fsdp:2,model:2 and 64 as data:16,model:4. Within the device, 26 of 28 plans take at most as long as the best
expert's (`share` 0.93), the worst 1.003 times (the encoder-decoder on data:4,model:2 and data:2,fsdp:2,model:2), the
best 0.975 (GPT-2 on data:16,model:4). Predicted bytes on the wire are off by 0.0 % in the median and 0.8 % at the most;
the predicted peak by up to twice what is compiled, for the convolution net. Planning took 0.3 to 62 s on a machine that
was busy with other things. The tight case was run on data:4,model:2 alone: four of seven plans fit, at 0.931 to 1.011
times the best expert's time; the other three (GPT-2, the convolution net, the LSTM) are refused, since their memory is
taken to be more than the compiler needs.

Run it as `python benchmarks/plan_quality.py`; see `--help` for less. It needs the extras `cuda` and `bench`. Compiling
takes long, what experts write most of it: `--cache DIR` keeps their figures.
"""

import argparse
import hashlib
import inspect
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import attrs

MESHES = ("data:8", "data:4,model:2", "data:2,fsdp:2,model:2", "data:16,model:4")
FLOPS_PER_SECOND, WIRE_BYTES_PER_SECOND = 495e12, 360e9
TOYS = ("llama", "lstm")
"""The models of a smoke run."""

TIGHT = 1.5
"""How much more than the thriftiest expert a plan may take in the tight case."""

SHARE_LIMIT, WORST_LIMIT = 0.80, 1.10
MEDIAN_LIMIT, TAIL_LIMIT = 0.10, 0.30
"""How large a share of cases is to be as good as the best expert, and how bad the worst may be; how far off the
predicted bytes on the wire may be."""

ROUNDING = 1e-3
"""What counts as equal: programs differ by scalars that are summed up."""


@final
@attrs.frozen
class Row:
    """What was compiled, per device.

    **Arguments:**

    - `name`: the plan.
    - `flops`, `wire_bytes`, `peak_bytes`: of one step.
    - `ms`: the time by the yardstick.
    - `roofline_ms`: the time by our own model, nothing overlapped.
    - `work`: FLOPs that all devices do, over those that the function asks for.
    - `compile_seconds`: what the compiler took.
    """

    name: str
    flops: int
    wire_bytes: int
    peak_bytes: int
    ms: float
    roofline_ms: float
    work: float
    compile_seconds: float


@final
@attrs.frozen
class Found:
    """What `autoplan` found for one case, and what it said of it.

    **Arguments:**

    - `model`, `mesh`, `case`: which one; `case` is `"device"` or `"tight"`.
    - `limit_bytes`: what a plan may take.
    - `row`: what was compiled; `None` where nothing was.
    - `best`: the best expert within the limit, and its time.
    - `wire_bytes`, `peak_bytes`: what was predicted.
    - `seconds`: what planning took.
    - `error`: what went wrong, if anything did.
    """

    model: str
    mesh: str
    case: str
    limit_bytes: int
    row: Row | None
    best: str
    best_ms: float
    wire_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def ratio(self) -> float:
        """Its time over that of the best expert; infinite where it failed or does not fit."""
        if self.row is None or self.row.peak_bytes > self.limit_bytes:
            return math.inf
        return self.row.ms / self.best_ms

    @property
    def wire_error(self) -> float:
        """How far off the predicted bytes on the wire are."""
        return _off(self.wire_bytes, None if self.row is None else self.row.wire_bytes)

    @property
    def peak_error(self) -> float:
        """How far off the predicted peak is."""
        return _off(self.peak_bytes, None if self.row is None else self.row.peak_bytes)


def _off(said: float, true: float | None) -> float:
    if true is None:
        return math.inf
    return abs(said / true - 1) if true else float(said != 0)


@final
@attrs.frozen(eq=False)
class Question:
    """A model on a mesh, to be compiled for a target.

    **Arguments:**

    - `model`: the model.
    - `mesh`: the mesh as it is written; `there` is the same on devices of `target`.
    - `step`, `args`: its train step, and shapes.
    - `asked_flops`: what that asks for.
    """

    model: Any
    mesh: str
    there: Any
    target: Any
    step: Callable[..., Any]
    args: tuple[Any, Any]
    asked_flops: int

    @classmethod
    def of(cls, model: Any, mesh: str, smoke: bool) -> "Question":
        """Builds a model for a mesh."""
        import equinox as eqx
        import jax

        import shardrules as sr
        from shardrules.analysis.compiling.model_flops import model_matmuls, without_dead_code

        shape = sr.mesh_shape(mesh)
        target = sr.Target.parse(f"cpu:{shape.size}" if smoke else f"cuda:h100:{shape.size}")
        step, args = model.build(shape.size, smoke)
        arrays, rest = eqx.partition(args, is_shape)
        traced = jax.jit(lambda *given: eqx.filter(step(*eqx.combine(given, rest)), eqx.is_array)).trace(*arrays)
        asked = sum(one.flops for one in model_matmuls(without_dead_code(traced.jaxpr)))
        return cls(model, mesh, target.mesh(shape), target, step, args, asked)

    @property
    def experts(self) -> list[Any]:
        """The experts for such a mesh."""
        return [one for one in self.model.experts if one.fits(self.args, self.there)]

    def read(self, name: str, compiled: Any, seconds: float) -> Row:
        """Reads what was compiled."""
        from shardrules.analysis.audits.roofline import step_time
        from shardrules.analysis.compiling.compile import CompilerMemory
        from shardrules.analysis.program.collectives import find_collectives
        from shardrules.analysis.program.flops import find_matmuls, total_flops
        from shardrules.analysis.program.program import read_program

        told = compiled.memory_analysis()
        memory = CompilerMemory(
            told.argument_size_in_bytes, told.output_size_in_bytes, told.alias_size_in_bytes, told.temp_size_in_bytes
        )
        program = read_program(compiled.as_text())
        collectives, matmuls = find_collectives(program, self.there, self.target), find_matmuls(program)
        wire, flops = sum(one.total_wire_bytes for one in collectives), total_flops(matmuls)
        return Row(
            name,
            flops,
            wire,
            memory.peak_bytes,
            1e3 * (flops / FLOPS_PER_SECOND + wire / WIRE_BYTES_PER_SECOND),
            1e3 * step_time(program, collectives, matmuls, self.target.hardware).serial_seconds,
            flops * self.there.size / self.asked_flops,
            seconds,
        )

    def by_hand(self, expert: Any) -> Row:
        """Compiles the step as an expert writes it."""
        import equinox as eqx
        import jax
        from plan_models import constrained

        arrays, rest = eqx.partition(self.args, is_shape)
        shardings = expert.shardings(self.args, self.there)
        placed = jax.tree.map(
            lambda one, at: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=at), arrays, shardings
        )

        def run(*given: Any) -> Any:
            state, loss = self.step(*eqx.combine(given, rest))
            return eqx.filter(state, eqx.is_array), loss

        start = time.perf_counter()
        with constrained(self.there, expert):
            lowered = jax.jit(run, donate_argnums=0, out_shardings=(shardings[0], None)).lower(*placed)
        compiled = lowered.compile()
        return self.read(expert.name, compiled, time.perf_counter() - start)

    def by_autoplan(self, case: str, limit_bytes: int | None, experts: Sequence[Row]) -> Found:
        """Lets `autoplan` find a plan, and compiles the step under it."""
        import jax

        import shardrules as sr

        allowed = self.target.hardware.memory_bytes if limit_bytes is None else limit_bytes
        joined = attrs.evolve(self.target.hardware, devices_per_host=self.there.size)  # as the measure has it
        best = min((one for one in experts if one.peak_bytes <= allowed), key=lambda one: one.ms)
        found = Found(self.model.name, self.mesh, case, allowed, None, best.name, best.ms)
        try:
            start = time.perf_counter()
            mesh = self.there.abstract_mesh
            plan = sr.autoplan(self.step, *self.args, mesh=mesh, memory_limit=limit_bytes, hardware=joined)
            planned = time.perf_counter()
            with jax.set_mesh(self.there):
                compiled = plan.jit(self.step, donate_argnums=0).lower(*self.args).compile()
            row = self.read("autoplan", compiled, time.perf_counter() - planned)
        except Exception as error:  # noqa: BLE001  one case that fails is a result, and says nothing of the others
            return attrs.evolve(found, error=f"{type(error).__name__}: {error}")
        return attrs.evolve(
            found, row=row, wire_bytes=plan.wire_bytes, peak_bytes=plan.peak_bytes, seconds=planned - start
        )


def is_shape(leaf: Any) -> bool:
    """Returns whether a leaf of the arguments is an array."""
    import jax

    return isinstance(leaf, jax.ShapeDtypeStruct)


@final
@attrs.frozen
class Cache:
    """Experts' figures that were compiled before, in a folder; by what they were made from.

    **Arguments:**

    - `folder`: the folder; `None` to keep nothing.
    - `sources`: the code that figures depend on, by the name of its file: as it was when it was imported.
    """

    folder: Path | None
    sources: dict[str, str]

    @classmethod
    def of(cls, folder: Path | None) -> "Cache":
        """Reads the code."""
        return cls(folder, {file.name: file.read_text() for file in Path(__file__).parent.glob("plan_models/*.py")})

    def row(self, question: Question, expert: Any, smoke: bool) -> Row:
        """Returns the figures of an expert, compiled unless they are known."""
        import jax

        if self.folder is None:
            return question.by_hand(expert)
        own = Path(inspect.getsourcefile(question.model.build) or "").name
        sources = [self.sources[one] for one in (own, "experts.py", "parts.py")]
        sources += READING
        key = json.dumps([question.model.name, question.mesh, repr(expert), smoke, jax.__version__, *sources])
        file = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        if file.exists():
            return Row(**json.loads(file.read_text()))
        row = question.by_hand(expert)
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(attrs.asdict(row)))
        return row


READING = (inspect.getsource(Question.read), inspect.getsource(Question.by_hand))
"""How figures are made, which they depend on as well."""


def tight_limit(experts: Sequence[Row]) -> int:
    """Returns the bytes that are allowed in the tight case."""
    return int(TIGHT * min(one.peak_bytes for one in experts))


def finite(value: float) -> float | None:
    """Returns a number as JSON has them."""
    return value if math.isfinite(value) else None


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value that a share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.inf


def summary(found: Sequence[Found]) -> dict[str, float]:
    """Adds up what `autoplan` found. Where nothing was compiled, no prediction was wrong."""
    ratios, tight = ([one.ratio for one in found if one.case == case] for case in ("device", "tight"))
    compiled = [one for one in found if one.row is not None]
    errors = {"wire": [one.wire_error for one in compiled], "peak": [one.peak_error for one in compiled]}
    return {
        "cases": len(found),
        "share": sum(one <= 1 + ROUNDING for one in ratios) / len(ratios),
        "worst": max(ratios),
        "tight_fits": sum(map(math.isfinite, tight)) / len(tight),
        "tight_share": sum(one <= 1 + ROUNDING for one in tight) / len(tight),
        **{f"{name}_error_median": percentile(values, 0.5) for name, values in errors.items()},
        **{f"{name}_error_95th": percentile(values, 0.95) for name, values in errors.items()},
        "longest_planning_seconds": max(one.seconds for one in found),
    }


def missed(totals: dict[str, float]) -> list[str]:
    """Returns what is over its limit."""
    limits = {"worst": WORST_LIMIT, "wire_error_median": MEDIAN_LIMIT, "wire_error_95th": TAIL_LIMIT}
    over = [f"{name} {totals[name]:.3f}, at most {limit}" for name, limit in limits.items() if totals[name] > limit]
    low = [f"share {totals['share']:.2f}, at least {SHARE_LIMIT}"] if totals["share"] < SHARE_LIMIT else []
    return low + over


def line(row: Row, note: str = "") -> str:
    """Returns a line of the table."""
    return (
        f"  {row.name:62}{row.ms:9.3f}{row.roofline_ms:10.3f}{row.flops / 1e12:9.3f}{row.work:7.3f}"
        f"{row.wire_bytes / 1e6:10.1f}{row.peak_bytes / 1e9:8.2f}{row.compile_seconds:8.1f}  {note}"
    ).rstrip()


def told(found: Found) -> list[str]:
    """Returns the lines of the table for what `autoplan` found."""
    limit = f"{found.limit_bytes / 1e9:.2f} GB"
    if found.row is None:
        return [f"  autoplan, {found.case}, {limit}: {found.error}"]
    row = attrs.evolve(found.row, name=f"autoplan, {found.case}, {limit}")
    note = f"{found.ratio:.3f} of {found.best}" if math.isfinite(found.ratio) else "does not fit"
    said = (
        f"planned in {found.seconds:.1f} s; predicted {found.wire_bytes / 1e6:.1f} MB on the wire (off by "
        f"{found.wire_error:.1%}), peak {found.peak_bytes / 1e9:.2f} GB (off by {found.peak_error:.1%})"
    )
    return [line(row, note), f"    {said}"]


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="How good the plans are that autoplan finds.")
    parser.add_argument("--smoke", action="store_true", help="toys, on 8 CPU devices")
    parser.add_argument("--json", action="store_true", help="print JSON; the table goes to the standard error")
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--meshes", nargs="*", help=f"other meshes than {' '.join(MESHES)}")
    parser.add_argument("--experts-only", action="store_true", help="leave autoplan out")
    parser.add_argument("--check", action="store_true", help="fail where a limit is missed")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep the experts' figures there")
    options = parser.parse_args(arguments)
    if options.check and (options.smoke or options.experts_only):
        parser.error("limits are for what autoplan finds for the real models: use --check on its own")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    if options.smoke:
        jax.config.update("jax_num_cpu_devices", 8)
    from plan_models import MODELS

    unknown = [one for one in options.models or () if one not in MODELS]
    if unknown:
        parser.error(f"there is no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    meshes = options.meshes or (MESHES[1:2] if options.smoke else MESHES)
    cache, everything, found = Cache.of(options.cache), [], []
    out = sys.stderr if options.json else sys.stdout
    for name in options.models or (TOYS if options.smoke else MODELS):
        for mesh in meshes:
            question = Question.of(MODELS[name], mesh, options.smoke)
            head = f"\n{name} on {mesh}: {question.asked_flops / 1e12:.4g} TFLOP asked for"
            columns = ("ms", "roofline", "TFLOP", "work", "MB wire", "GB", "compiled")
            print(f"{head}\n{'':64}{columns[0]:>9}", end="", file=out)
            print(
                "".join(f"{one:>{size}}" for one, size in zip(columns[1:], (10, 9, 7, 10, 8, 10), strict=True)),
                file=out,
            )
            rows, experts = [], question.experts
            for expert in experts[:: len(experts) - 1] if options.smoke else experts:  # of toys the first and the last
                rows.append(cache.row(question, expert, options.smoke))
                print(line(rows[-1]), file=out, flush=True)
            everything.append({"model": name, "mesh": mesh, "experts": [attrs.asdict(one) for one in rows]})
            cases = {} if options.experts_only else {"device": None, "tight": tight_limit(rows)}
            for case, limit in cases.items():
                found.append(question.by_autoplan(case, limit, rows))
                print(*told(found[-1]), sep="\n", file=out, flush=True)
            jax.clear_caches()
    totals = summary(found) if found else {}
    over = missed(totals) if found and not options.smoke else []
    print("", *(f"{name}: {value:.3f}" for name, value in totals.items()), sep="\n", file=out)
    print(*(f"missed: {one}" for one in over), sep="\n", file=out)
    if options.json:
        where = {"python": platform.python_version(), "jax": jax.__version__}
        listed = [{**attrs.asdict(one), "ratio": finite(one.ratio)} for one in found]
        counted = {name: finite(value) for name, value in totals.items()}
        print(json.dumps({**where, "cases": everything, "found": listed, "summary": counted, "missed": over}, indent=1))
    return 1 if options.check and over else 0


if __name__ == "__main__":
    sys.exit(main())
