"""Are training plans as good as what experts published?

**Method.** Each row of `published/rows.toml` is a training step with its mesh, its layouts and what its backward pass
keeps. `plan_training` gets the model, written without a mesh, constraints or `jax.checkpoint`, with the batch of a
whole step and the cluster. `ratio` is the modelled time of its plan over that of the published configuration: the same
model with the row's mesh, constraints, pinned weights, policy and accumulations, planned by the same costs. Attention
is the same for both: blocks of queries, in plain JAX. With `--prove N`, the best N plans are compiled, and the
published configuration as its authors run it, both with its flags; that ratio is of the times of the compiled programs.

**Last answer.** 2026-11-23 (R4 2026-11-27), 2 busy cores, JAX 0.10.2. By the model, without stages, the plan takes
0.86 of the published configuration's time for R4, 0.87 for R1, 0.90 for row 45, 0.91 for 40, 0.94 for MPT-7B and 0.93
for MPT-13B of row 60, 0.92 for 44, 0.955 for 13, and 0.91, 0.93 and 0.93 for 49 with 512, 1,024 and 2,048 GPUs, each
with 12 to 293 s of a core; with 512 GPUs the search took 600 s, and was cut short there. Compiled, with stages
allowed, it takes 0.80 for R4, 0.82 for MPT-13B, 0.86 for MPT-7B, 0.84 for R1 and 0.87 for 40, all with `--prove 1`,
and no plan has stages. Compiled before the last changes to the model of memory, it takes 0.87 for 13, 0.90 for 44 and
49 with 1,024 GPUs, 0.91 for 45, and 0.94 and 0.96 for 49 with 2,048 and 512 GPUs. All fit. The plan for 13, which
keeps 27 GiB on hosts, compiles to 18.0 s and 21.7 GiB, the published configuration to 20.7 s and 35.0 GiB. For R1 the
plan is FSDP, as on the fastest machine; for R4 tensor parallelism in the MLP, as there, with gathered projections of
attention. Attention in plain JAX takes longer and more memory than the kernels that were measured: the configurations
of 44 and 60 do not fit. Three rows more, of MaxText on v5e and v5p, are taken back: what they called published was not
what ran ("How far to believe the times" says more).

Run it as `python benchmarks/train_plans.py`; see `--help` for less.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

LIMIT = 1.0
"""The most that a plan may take, as a part of the published configuration's time."""

TOLERANCE = 1e-3
"""What models of costs do not tell apart: plans that differ by less count as equal, as they do in the search."""


def figure_of(row: Any, time_limit: float, prove: int, texts: Path | None = None) -> dict[str, Any]:
    """Plans a row, and the published configuration."""
    from published.training import expert_outcome, scanned_row, training_case

    import shardrules as sr

    case = training_case(scanned_row(row))
    expert = expert_outcome(case)
    start, used = time.perf_counter(), time.process_time()
    plan = sr.plan_training(
        case.loss,
        case.weights,
        case.optimizer,
        case.batch,
        cluster=row.compiled_for,
        time_limit=time_limit,
        prove=prove,
    )
    figure = {
        "name": row.name,
        "target": row.target,
        "expert_mesh": row.layout,
        "expert_seconds": expert.seconds,
        "expert_bytes": expert.peak_bytes,
        "mesh": plan.report.mesh,
        "recipe": str(plan.recipe),
        "seconds": plan.step_time.seconds,
        "bytes": plan.peak_bytes,
        "limit_bytes": plan.report.memory_limit,
        "ratio": plan.step_time.seconds / expert.seconds,
        "planning_seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - used,
        "late": any(finding.code == "time-is-up" for finding in plan.report.findings),
    }
    return figure | (compiled_figures(case, plan, texts) if plan.compiled else {})


def compiled_figures(case: Any, plan: Any, texts: Path | None) -> dict[str, Any]:
    """Compiles the published configuration, and compares it with the best plan that was compiled."""
    from published.training import expert_audit

    expert, best = expert_audit(case), plan.compiled[0]
    if texts is not None:
        texts.mkdir(parents=True, exist_ok=True)
        audits = {"published": expert} | {f"plan {index}": proof.audit for index, proof in enumerate(plan.compiled)}
        for name, report in audits.items():
            (texts / f"{case.row.name}, {name}.txt").write_text(report.hlo_text, "utf-8")
    return {
        "compiled_plans": [str(proof) for proof in plan.compiled],
        "compiled_seconds": best.seconds,
        "compiled_bytes": best.peak_bytes,
        "compiled_expert_seconds": expert.time.seconds,
        "compiled_expert_bytes": expert.peak_bytes,
        "compiled_ratio": best.seconds / expert.time.seconds,
    }


def line(figure: dict[str, Any]) -> str:
    """A figure as text."""
    gigabytes = f"{figure['expert_bytes'] / 2**30:8.1f}{figure['bytes'] / 2**30:8.1f}"
    compiled = f", compiled {figure['compiled_ratio']:.3f}" if "compiled_ratio" in figure else ""
    late = ", search cut short" if figure["late"] else ""
    return (
        f"{figure['name']:16}{figure['target']:18}{figure['expert_seconds']:10.4g}{figure['seconds']:10.4g}"
        f"{figure['ratio']:8.3f}{gigabytes}{figure['processor_seconds']:7.0f}  "
        f"{figure['mesh']}, {figure['recipe']}{compiled}{late}"
    )


def missed(figures: list[dict[str, Any]]) -> list[str]:
    """The limits that were missed."""
    lines = []
    for figure in figures:
        name = f"{figure['name']}, search cut short" if figure["late"] else figure["name"]
        limit_bytes = figure["limit_bytes"]
        ratios = {"by the model": figure["ratio"], "compiled": figure.get("compiled_ratio", 0.0)}
        sizes = {"by the model": figure["bytes"], "compiled": figure.get("compiled_bytes", 0)}
        lines += [
            f"{name}: {ratio:.3f} x the published configuration, {kind}; at most {LIMIT:.2f}"
            for kind, ratio in ratios.items()
            if ratio > LIMIT + TOLERANCE
        ]
        lines += [
            f"{name}: {nbytes / 2**30:.1f} GiB, {kind}, do not fit in {limit_bytes / 2**30:.1f}"
            for kind, nbytes in sizes.items()
            if nbytes > limit_bytes
        ]
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="Training plans against published configurations.")
    parser.add_argument("--row", nargs="*", default=[], metavar="NAME", help="only rows whose name starts so")
    parser.add_argument("--time-limit", type=float, default=600.0, help="for each plan, in seconds")
    parser.add_argument("--prove", type=int, default=0, metavar="N", help="compile the best N plans of each row")
    parser.add_argument("--texts", type=Path, metavar="DIR", help="with --prove: keep compiled programs here")
    parser.add_argument("--smoke", action="store_true", help="toy models on CPU devices")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    if options.smoke:
        jax.config.update("jax_num_cpu_devices", 8)
    from published.rows import FILE, read_rows

    rows = read_rows([FILE.with_name("smoke.toml")] if options.smoke else ())
    # Layers of experts have their layouts in the code of the model.
    rows = [row for row in rows if row.dims.experts is None]
    rows = [row for row in rows if not options.row or any(row.name.startswith(name) for name in options.row)]
    out = sys.stderr if options.json else sys.stdout
    heads = ("published", "plan", "ratio", "GiB", "GiB", "CPU s")
    sizes = (10, 10, 8, 8, 8, 7)
    print(f"{'':34}" + "".join(f"{head:>{size}}" for head, size in zip(heads, sizes, strict=True)), file=out)
    figures = []
    for row in rows:
        figures.append(figure_of(row, options.time_limit, options.prove, options.texts))
        print(line(figures[-1]), file=out, flush=True)
        jax.clear_caches()
    over = [] if options.smoke else missed(figures)
    if options.json:
        print(json.dumps({"jax": jax.__version__, "rows": figures, "missed": over}, indent=1))
    print(*(f"missed: {item}" for item in over), sep="\n", file=out)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
