"""Do training plans keep limits of memory, and are they as good as what experts write within them?

**Method.** Each step of `published/limits.toml` is compiled for 8 H100s, which need not be present, as experts run it:
on several meshes, with several of MaxText's policies for what the backward pass keeps, and with up to four batches
whose gradients are added up. Then `plan_training` plans the model, written without any of this, within 0.9, 0.7 and
0.5 of the compiled peak of the fastest expert, and compiles its best few plans. `ratio` is the time of the plan over
that of the fastest expert which fits, both by our model of the compiled program; what fits is the compiler's peak.

**Last answer.** 2026-11-24, 2 cores of an AMD EPYC, JAX 0.10.2; of scanned layers, and of written-out ones at 0.9 and
0.7, 2026-11-23. Twelve scanned layers: 0.87, 0.87 and 0.88 of the fastest expert that fits. Six layers whose weights
take most memory: 0.91, 0.90 and 0.93. Four layers that are written out: 0.93, 0.93 and 0.83. All plans that were
compiled fit, with 36 to 358 s of a core for each limit.

Run it as `python benchmarks/train_limits.py --cache DIR`; `--check` fails where a ratio is over 1.05, see `--help` for
less. It needs the extra `cuda`.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

SHARES = (0.9, 0.7, 0.5)
"""The limits, over the compiled peak of the fastest expert."""

LIMIT = 1.05
"""The most that a plan may take, over the fastest expert that fits."""

REMATS = ("none", "minimal", "save_dot_except_mlpwi", "save_qkv_proj", "full")
"""What the backward pass keeps, by MaxText's names, from most to least."""

ACCUMULATIONS = (1, 2, 4)
"""Of how many batches experts add up the gradients, where all of a layer is recomputed."""

PROVED, TOY_PROVED = 3, 1
"""How many plans are compiled for each limit, and in a smoke run."""


@attrs.frozen
class Expert:
    """The figures of a compiled expert."""

    name: str
    ms: float
    peak_bytes: int


def expert_rows(rows: Sequence[Any]) -> Iterator[Any]:
    """Yields what experts try of a step on the meshes of its rows."""
    for row in rows:
        for remat in REMATS:
            for count in ACCUMULATIONS:
                if row.batch % count or (count > 1 and remat != "full"):
                    continue
                recipe = attrs.evolve(row.recipe, accumulations=count)
                name = f"{row.layout}, {remat}" + (f", {count} batches" if count > 1 else "")
                yield attrs.evolve(row, name=name, remat=remat, batch=row.batch // count, recipe=recipe)


def expert_of(row: Any, cache: Path | None) -> Expert:
    """Compiles what an expert tries, or reads its figures from the cache."""
    import jax
    from published.decoder import Decoder
    from published.rebuild import audit

    key = hashlib.sha256(f"{jax.__version__} {row!r}".encode()).hexdigest()[:16]
    file = None if cache is None else cache / f"{key}.json"
    if file is not None and file.exists():
        return Expert(**json.loads(file.read_text("utf-8")))
    report = audit(row, Decoder(row.dims, row.recipe, "blocks", row.remat))
    expert = Expert(row.name, 1e3 * report.time.seconds, report.peak_bytes)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(attrs.asdict(expert)), "utf-8")
    return expert


def figure_of(case: Any, limit_bytes: int, experts: Sequence[Expert], **options: Any) -> dict[str, Any]:
    """Plans a step within a limit, and compares it with the fastest expert that fits."""
    import shardrules as sr

    start, used = time.perf_counter(), time.process_time()
    figure: dict[str, Any] = {"limit_bytes": limit_bytes, "plans": []}
    try:
        plan = sr.plan_training(
            case.loss,
            case.weights,
            case.optimizer,
            case.batch,
            cluster=case.row.compiled_for,
            memory_limit=limit_bytes,
            **options,
        )
        figure["plans"] = [
            {"mesh": proof.mesh, "recipe": proof.recipe, "ms": 1e3 * proof.seconds, "peak_bytes": proof.peak_bytes}
            | {"modelled_ms": 1e3 * proof.modelled_seconds, "modelled_bytes": proof.modelled_bytes, "fits": proof.fits}
            for proof in plan.compiled
        ]
    except sr.errors.DoesNotFitError as error:
        figure["error"] = " ".join(str(error).split())
    expert = min((each for each in experts if each.peak_bytes <= limit_bytes), key=lambda each: each.ms, default=None)
    fitting = [plan["ms"] for plan in figure["plans"] if plan["fits"]]
    ms = min(fitting, default=math.inf)
    return figure | {
        "expert": None if expert is None else attrs.asdict(expert),
        "ms": ms,
        "ratio": ms / expert.ms if expert is not None else 0.0 if fitting else None,
        "planning_seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - used,
    }


def lines(name: str, share: float, figure: dict[str, Any]) -> Iterator[str]:
    """Yields a figure as text."""
    expert, ratio = figure["expert"], figure["ratio"]
    by_hand = "no expert fits" if expert is None else f"{expert['ms']:.2f} ms {expert['name']}"
    comparison = "nothing fits" if ratio is None else f"{figure['ms']:.2f} ms" + (f", {ratio:.3f}" if ratio else "")
    limit = f"{figure['limit_bytes'] / 2**30:.2f} GiB"
    yield f"{name:12} {share} = {limit}: {comparison} ({by_hand}), {figure['processor_seconds']:.0f} s of a core"
    for plan in figure["plans"]:
        sizes = f"{plan['peak_bytes'] / 2**30:.2f} GiB ({plan['modelled_bytes'] / 2**30:.2f} as planned)"
        times = f"{plan['ms']:.2f} ms ({plan['modelled_ms']:.2f} as planned)"
        yield f"{'':14}{'fits' if plan['fits'] else 'over'} {times}, {sizes}: {plan['mesh']}, {plan['recipe']}"
    if "error" in figure:
        yield f"{'':14}{figure['error'][:200]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="Training plans within limits of memory against experts.")
    parser.add_argument("--model", nargs="*", default=[], metavar="NAME", help="only these models of limits.toml")
    parser.add_argument("--share", nargs="*", type=float, default=SHARES, help="the limits to plan within")
    parser.add_argument("--time-limit", type=float, default=600.0, help="for each plan, in seconds")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep the figures of experts here")
    parser.add_argument("--smoke", action="store_true", help="a toy model on CPU devices")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="fail where a ratio is over the limit")
    options = parser.parse_args(arguments)
    if options.check and options.smoke:
        parser.error("toy models have no limits: use --check without --smoke")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    if options.smoke:
        jax.config.update("jax_num_cpu_devices", 2)
    from published.rows import FILE, read_rows
    from published.training import training_case

    by_model: dict[str, list[Any]] = {}
    for row in read_rows([FILE.with_name("limits.toml")]):
        if (row.model == "toy") == options.smoke and (not options.model or row.model in options.model):
            by_model.setdefault(row.model, []).append(row)
    out, answers = sys.stderr if options.json else sys.stdout, []
    for model, rows in by_model.items():
        experts = []
        for row in list(expert_rows(rows))[: 2 if options.smoke else None]:
            experts.append(expert_of(row, options.cache))
            print(
                f"  {experts[-1].ms:9.2f} ms{experts[-1].peak_bytes / 2**30:8.2f} GiB  {row.name}", file=out, flush=True
            )
            jax.clear_caches()
        best = min(experts, key=lambda each: each.ms)
        case = training_case(rows[0])
        for share in options.share[: 1 if options.smoke else None]:
            limit_bytes = best.peak_bytes * 2 if options.smoke else int(share * best.peak_bytes)
            proved = TOY_PROVED if options.smoke else PROVED
            figure = figure_of(case, limit_bytes, experts, time_limit=options.time_limit, prove=proved)
            print(*lines(model, share, figure), sep="\n", file=out, flush=True)
            answers.append({"model": model, "share": share, **figure})
            jax.clear_caches()
    if options.json:
        print(json.dumps({"jax": jax.__version__, "answers": answers}, indent=1))
    over = [each for each in answers if each["ratio"] is not None and each["ratio"] > LIMIT]
    return int(options.check and bool(over))


if __name__ == "__main__":
    sys.exit(main())
