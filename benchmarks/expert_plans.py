"""Do plans of mixtures of experts reach expert parallelism by hand?

**Method.** Train steps of two mixtures (`mixture_plans/`: one-hot tensors with a capacity, as GShard writes them, and
tokens sorted by expert for `jax.lax.ragged_dot`; two layers of 16 experts, two for each token, Adam) are compiled for 8
H100 and for 16 TPU v5e, which need not be present: as experts write them with `jax.shard_map` (ZeRO-1, FSDP, tensor
parallel, experts over some or all axes with FSDP over the rest, tokens exchanged or gathered), and under the plan that
`autoplan` finds for the same function without any sharding, and for the function with `shardrules.expert_exchange`
instead. Times and peaks are those of an audit of the compiled program. The time of a plan is divided by that of the
fastest expert that fits, its peak by that expert's.

**Last answer.** 2026-11-23, for sorted tokens 2026-11-26, 2 cores of an AMD EPYC, JAX 0.10.2. Of the
fastest expert's time and peak, for 8 H100: one-hot tensors 1.004 and 0.95 (experts over all axes take 7.97 ms, ZeRO-1
11.9, FSDP 12.6, tensor parallel over one axis 13.6, over both 18.2), with `expert_exchange` 0.87 and 0.89; sorted
tokens 1.045 and 1.19 (FSDP takes 65.0 ms, experts over all axes 67.3), with `expert_exchange` 0.98 and 0.62. Experts
sort the tokens of each device by themselves; the function without `expert_exchange` sorts those of all, so that its
tokens are sent. For 16 TPU v5e, where of experts only the plan of experts over all axes was compiled beside ZeRO-1
and FSDP (28.0, 67.5 and 75.0 ms): one-hot tensors 1.050 and 1.054, with the same bytes on the wire; with
`expert_exchange` 1.07 and 1.04. Sorted tokens were not compiled for TPUs.

Run it as `python benchmarks/expert_plans.py`; see `--help` for less. It needs the extras `cuda` and `tpu`.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO, final

import attrs
import jax
from jax.sharding import Mesh
from mixture_plans.by_hand import HandPlan, hand_plans
from mixture_plans.layers import KINDS, Mixture
from plan_models.experts import expert_constraints

import shardrules as sr

CASES = {"cuda:h100:8": "data:2,expert:4", "tpu:v5e:4x4": "data:4,expert:4"}
"""The mesh on each target."""

TOY_TARGET, TOY_MESH = "cpu:8", "data:2,expert:4"

TIME_LIMIT, PEAK_LIMIT, ROUNDING = 1.0, 1.05, 1e-3
"""The most time and memory that a plan may take, over the fastest expert's; times that differ by rounding are equal."""


@final
@attrs.frozen
class Row:
    """The figures of a compiled plan: of one step on one device."""

    kind: str
    target: str
    mesh: str
    name: str
    ms: float
    """Modelled by an audit."""
    compute_ms: float
    flops: int
    wire_bytes: int
    peak_bytes: int
    fits: bool
    compile_seconds: float
    time_ratio: float | None = None
    """Over the fastest expert's; of plans of `autoplan` only."""
    peak_ratio: float | None = None
    planned_ms: float | None = None
    """What the plan predicts."""
    planned_peak_bytes: int | None = None
    planning_seconds: float | None = None
    regions: tuple[str, ...] = ()


@final
@attrs.frozen(eq=False)
class Case:
    """A mixture on a mesh of a target's devices."""

    mixture: Mixture
    target: str
    mesh_text: str
    mesh: Mesh

    @classmethod
    def of(cls, kind: str, target: str, mesh_text: str, *, smoke: bool) -> "Case":
        """A mixture with four sequences for each device; a toy with one."""
        mesh = sr.Target.parse(target).mesh(sr.mesh_shape(mesh_text))
        toy = {"length": 16, "width": 16, "hidden": 32, "experts": 8, "layers": 1}
        return cls(Mixture(kind, (1 if smoke else 4) * mesh.size, **(toy if smoke else {})), target, mesh_text, mesh)

    def by_hand(self, plan: HandPlan) -> Row:
        """Compiles the step of an expert."""
        args = self.mixture.args()
        state, tokens = plan.split.shardings(args, self.mesh)
        step = jax.jit(
            plan.step(self.mixture, self.mesh),
            in_shardings=(state, tokens),
            out_shardings=(state, None),
            donate_argnums=0,
        )
        with expert_constraints(self.mesh, plan.split):
            return self._row(plan.split.name, step, args)

    def by_autoplan(self, name: str, layer: Any, experts: Sequence[Row]) -> Row:
        """Plans the step of a user, and compiles it."""
        step, args = self.mixture.step(layer), self.mixture.args()
        start = time.perf_counter()
        plan = sr.autoplan(step, *args, mesh=self.mesh)
        seconds = time.perf_counter() - start
        row = self._row(name, plan.jit(step, donate_argnums=0), args)
        best = min((expert for expert in experts if expert.fits), key=lambda expert: expert.ms)
        return attrs.evolve(
            row,
            time_ratio=row.ms / best.ms,
            peak_ratio=row.peak_bytes / best.peak_bytes,
            planned_ms=1e3 * plan.step_time.seconds,
            planned_peak_bytes=plan.peak_bytes,
            planning_seconds=seconds,
            regions=tuple(str(use) for use in plan.regions),
        )

    def _row(self, name: str, step: Any, args: Any) -> Row:
        start = time.perf_counter()
        report = sr.audit(step, *args, mesh=self.mesh, target=self.target)
        return Row(
            *(self.mixture.kind, self.target, self.mesh_text, name),
            1e3 * report.step_time(),
            1e3 * report.time.compute_seconds,
            report.flops,
            report.wire_bytes,
            report.peak_bytes,
            report.fits,
            time.perf_counter() - start,
        )


def line(row: Row) -> str:
    """A line of the table."""
    text = (
        f"  {row.name:55}{row.ms:10.3f}{row.compute_ms:10.3f}{row.flops / 1e12:10.3f}{row.wire_bytes / 1e6:10.1f}"
        f"{row.peak_bytes / 1e9:10.3f}{row.compile_seconds:10.1f}{'' if row.fits else '  does not fit'}"
    )
    if row.planned_ms is None or row.planned_peak_bytes is None:
        return text
    predicted = f"predicted {row.planned_ms:.3f} ms, {row.planned_peak_bytes / 1e9:.3f} GB"
    return f"{text}  {row.time_ratio:.3f} of the time, {row.peak_ratio:.3f} of the peak; {predicted}"


def rows_of(case: Case, options: argparse.Namespace, out: TextIO) -> list[Row]:
    """Compiles all plans of a case, and prints them."""
    columns = ("ms", "compute", "TFLOP", "MB wire", "GB peak", "compiled")
    print(f"\n{case.mixture.kind} on {case.target}, {case.mesh_text}", file=out)
    print(" " * 57 + "".join(f"{column:>10}" for column in columns), file=out)
    has_ragged_exchange = not case.target.startswith("cpu")
    plans = [*hand_plans(case.mesh, case.mixture.kind, has_ragged_exchange=has_ragged_exchange)]
    experts, planned = [], []
    names = options.plans or [plan.split.name for plan in plans]
    for plan in plans[-1:] if options.smoke else [plan for plan in plans if plan.split.name in names]:
        experts.append(case.by_hand(plan))
        print(line(experts[-1]), file=out, flush=True)
    layers = {"autoplan": case.mixture.plain(), "autoplan, expert_exchange": case.mixture.exchanged_layer}
    for name, layer in [*layers.items()][-1:] if options.smoke else layers.items():
        planned.append(case.by_autoplan(name, layer, experts))
        print(line(planned[-1]), *(f"    {use}" for use in planned[-1].regions), sep="\n", file=out, flush=True)
    jax.clear_caches()
    return [*experts, *planned]


def missed(rows: Sequence[Row]) -> list[str]:
    """The limits that were missed."""
    over = []
    for row in rows:
        text = f"{row.kind} on {row.target}, {row.name}"
        if row.time_ratio is not None and row.time_ratio > TIME_LIMIT + ROUNDING:
            over.append(f"{text}: {row.time_ratio:.3f} of the time, at most {TIME_LIMIT}")
        if row.peak_ratio is not None and row.peak_ratio > PEAK_LIMIT:
            over.append(f"{text}: {row.peak_ratio:.3f} of the peak, at most {PEAK_LIMIT}")
    return over


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="Plans of mixtures of experts beside expert parallelism by hand.")
    parser.add_argument("--smoke", action="store_true", help="toy mixtures on 8 CPU devices")
    parser.add_argument("--json", action="store_true", help="print JSON; the table goes to the standard error")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="only these mixtures")
    parser.add_argument("--targets", nargs="*", choices=[*CASES], default=[*CASES], help="only these targets")
    parser.add_argument("--plans", nargs="*", metavar="NAME", help="only these plans of experts")
    parser.add_argument("--check", action="store_true", help="fail where a limit is missed")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    if options.smoke:
        jax.config.update("jax_num_cpu_devices", 8)
    cases = {TOY_TARGET: TOY_MESH} if options.smoke else {target: CASES[target] for target in options.targets}
    out, rows = sys.stderr if options.json else sys.stdout, []
    for target, mesh_text in cases.items():
        for kind in options.kinds or (KINDS[:1] if options.smoke else KINDS):
            rows += rows_of(Case.of(kind, target, mesh_text, smoke=options.smoke), options, out)
    over = [] if options.smoke else missed(rows)
    print("", *(f"missed: {limit}" for limit in over), sep="\n", file=out)
    if options.json:
        versions = {"python": platform.python_version(), "jax": jax.__version__}
        print(json.dumps({**versions, "rows": [attrs.asdict(row) for row in rows], "missed": over}, indent=1))
    return 1 if options.check and over else 0


if __name__ == "__main__":
    sys.exit(main())
