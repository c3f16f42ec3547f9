"""Does `autoplan` keep its word: is a plan found that fits wherever there is one, in time, and the same everywhere?

**Method.** Steps of sixteen kinds (`plan_models/`) are planned for 8 H100s, which need not be present, as
data:4,model:2: without a limit, then with limits at 0.9, 0.8 and 0.7 of the compiled peak of the best expert's plan and
at 1.05 of the compiled peak of its own plan. All plans are compiled, with those of experts. A case fails where

- no plan is found that compiles to what the limit allows, though an expert's does, or its own without a limit;
- `DoesNotFitError` is raised for a limit that any plan which was tried for the step keeps;
- the plan takes more than `SLOW` times as long as the best expert's that fits, by the measure of `plan_quality.py`;
- planning takes more than a tenth longer than `time_limit`.

Then a train step of 0.9 M parameters is planned in processes of its own: alone, under other hash seeds, and beside four
busy processes. The plan has to be the same each time, and to take at most `SMALL_SECONDS` of processor time.

**Last answer.** 2026-11-25, 2 cores of an AMD EPYC under a load of 4 to 7, JAX 0.10.2, without `--prove`. None of the
40 limits is refused. Wherever an expert's plan fits, so does the plan, and takes 0.69 to 1.035 times as long as the
best of them. One limit counts as wrong: at 0.9 of the best expert's peak no expert's plan of grouped queries fits,
and none was found, though the plan for a larger limit compiles to 0.2 % less. At 0.7 an expert's plan fits for two of
the ten kinds only, at 0.8 for three. Searches took 1.7 to 61 s (the U-Net at 0.9 and 0.8, which the clock ended). The
neural ODE, which is not among the ten, was not run. The small step takes 4.8 to 8.5 s of processors under that load,
and on each mesh has the same plan alone, under other hash seeds and beside four busy processes.

Run it as `python benchmarks/plan_limits.py --cache DIR`; see `--help` for less. It needs the extras `cuda` and `bench`.
Without a cache it takes hours: `plan_quality.py --kinds` fills the same cache.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, final

import attrs
import jax
from plan_models import KINDS
from plan_models.compiled import Cache, Question, Result, Row
from plan_models.kinds import small_decoder

import shardrules as sr

MESH = "data:4,model:2"
SMALL_MESHES = ("data:4,model:2", "data:2,fsdp:2,model:2")
DEFAULT_KINDS = (
    *("decode", "low_rank", "batch_norm", "unet", "accumulation"),
    *("switch_experts", "sorted_experts", "relative_positions", "image_text_pairs", "grouped_queries"),
)
"""Ten kinds with four limits each: those whose limits were refused once, and others that differ from them."""

TOYS = ("decode",)
EXPERT_SHARES, OWN_SHARE = (0.9, 0.8, 0.7), 1.05
"""The limits, over the compiled peaks of the best expert's plan and of its own."""

SLOW = 1.05
"""How much longer than the best expert's that fits a plan may take."""

LATE = 1.1
"""How much longer than its time limit a search may take."""

SMALL_SECONDS = 10.0
"""How much processor time planning the small step may take."""

BUSY = 4
"""How many processes are busy beside a search."""


def limits_of(experts: Sequence[Row], unlimited: Row | None) -> dict[str, int]:
    """The limits of a step, by what they are."""
    best = min(experts, key=lambda row: row.ms)
    limits = {f"{share} of the best expert's": int(share * best.peak_bytes) for share in EXPERT_SHARES}
    return limits if unlimited is None else {**limits, f"{OWN_SHARE} of its own": int(OWN_SHARE * unlimited.peak_bytes)}


def faults_of(result: Result, tried: Sequence[Row], time_limit: float) -> Iterator[str]:
    """What is wrong with the answer to a limit, given the rows of all plans that were tried for the step."""
    smallest = min(row.peak_bytes for row in tried)
    if not result.fits and smallest <= result.limit_bytes:
        yield f"a plan of {smallest / 1e9:.3f} GB fits"
        if result.error.startswith("DoesNotFitError"):
            yield "refused without a proof"
    if result.fits and result.ratio > SLOW:
        yield f"{result.ratio:.3f} of {result.best}"
    if result.seconds > LATE * time_limit:
        yield f"{result.seconds:.0f} s for {time_limit:.0f}"


@final
@attrs.frozen
class Step:
    """All answers for one step."""

    model: str
    experts: tuple[Row, ...]
    unlimited: Result
    results: tuple[Result, ...]
    faults: tuple[tuple[str, ...], ...]
    """For each of the results."""


def ask(question: Question, options: argparse.Namespace, out: TextIO) -> Step:
    """Plans a step within its limits, and prints the answers."""
    more = {"time_limit": options.time_limit, **({"prove": True} if options.prove else {})}
    chosen = question.experts[:: len(question.experts) - 1] if options.smoke else question.experts
    experts = tuple(map(question.by_hand, chosen))
    print(f"\n{question.model.name} on {question.mesh}", file=out)
    for row in experts:
        print(f"  {row.name:44}{row.ms:10.3f} ms{row.peak_bytes / 1e9:10.3f} GB", file=out, flush=True)
    unlimited = question.by_autoplan("no limit", None, experts, **more)
    print(result_line(unlimited, ()), file=out, flush=True)
    tried, results = [*experts, *([unlimited.row] if unlimited.row is not None else [])], []
    for case, limit in limits_of(experts, unlimited.row).items():
        result = question.by_autoplan(case, limit, experts, **more)
        print(result_line(result, faults_of(result, tried, options.time_limit)), file=out, flush=True)
        tried += [result.row] if result.row is not None else []
        results.append(result)
    # Once more, since a later plan may fit where an earlier search had none.
    faults = tuple(tuple(faults_of(result, tried, options.time_limit)) for result in results)
    jax.clear_caches()
    return Step(question.model.name, experts, unlimited, tuple(results), faults)


def result_line(result: Result, faults: Sequence[str] | Iterator[str]) -> str:
    """A line of the table."""
    if result.row is None:
        answer = result.error
    else:
        fits = "" if result.fits else ", does not fit"
        gap = f", gap {result.gap:.1%}" if result.gap > 0.002 else ""
        predicted = f"predicted {result.peak_bytes / 1e9:.3f}{fits}{gap} {result.findings}".rstrip()
        ratio = f"{result.ratio:.3f} of {result.best}" if result.best and result.fits else "no expert to compare with"
        answer = f"{result.row.ms:.3f} ms, {result.row.peak_bytes / 1e9:.3f} GB ({predicted}), {ratio}"
    spent = f"{result.seconds:.1f} s, {result.processor_seconds:.1f} s of processors"
    wrong = "".join(f"  WRONG: {fault}" for fault in faults)
    return f"  {result.case}, {result.limit_bytes / 1e9:.3f} GB: {answer}; {spent}{wrong}"


@final
@attrs.frozen
class SmallPlan:
    """One plan of the small step."""

    mesh: str
    setting: str
    seconds: float
    processor_seconds: float
    cost_ms: float
    gap: float
    digest: str
    """A hash of where everything is."""


def small_plan(mesh: str, setting: str, smoke: bool) -> SmallPlan:
    """Plans the small step here."""
    shape = sr.mesh_shape(mesh)
    step, args = small_decoder(shape.size, smoke)
    start, used = time.perf_counter(), time.process_time()
    plan = sr.autoplan(step, *args, mesh=shape)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - used
    text = repr((plan.choice, plan.specs, plan.result_specs))
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return SmallPlan(mesh, setting, seconds, processor_seconds, 1e3 * plan.cost, plan.gap, digest)


def small_plans(mesh: str, smoke: bool) -> Iterator[SmallPlan]:
    """Plans the small step alone, under other hash seeds, and beside busy processes."""
    for setting, seed, count in (("alone", "0", 0), ("another hash seed", "1", 0), ("busy", "2", 1 if smoke else BUSY)):
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        try:
            command = [sys.executable, __file__, "--small-step", mesh, setting, *(["--smoke"] if smoke else [])]
            environment = {**os.environ, "PYTHONHASHSEED": seed}
            run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        finally:
            for other in others:
                other.kill()
                other.wait()
        yield SmallPlan(**json.loads(run.stdout.splitlines()[-1]))


def small_faults(plans: Sequence[SmallPlan]) -> list[str]:
    """What is wrong with the plans of the small step on one mesh."""
    mesh, slowest = plans[0].mesh, max(plan.processor_seconds for plan in plans)
    faults = [] if slowest <= SMALL_SECONDS else [f"small step on {mesh}: {slowest:.1f} s of processors"]
    if len({plan.digest for plan in plans}) > 1:
        costs = ", ".join(f"{plan.cost_ms:.4f} ms ({plan.setting})" for plan in plans)
        faults.append(f"small step on {mesh}: different plans: {costs}")
    return faults


def summary(steps: Sequence[Step]) -> dict[str, float]:
    """Summarizes all limits."""
    results = [result for step in steps for result in step.results]
    faults = [fault for step in steps for fault in step.faults]
    ratios = [result.ratio for result in results if result.best and result.fits]
    return {
        "cases": len(results),
        "fitting": sum(result.fits for result in results),
        "right": sum(not each for each in faults),
        "refused_without_a_proof": sum("refused without a proof" in each for each in faults),
        "worst": max(ratios, default=0.0),
        "longest_seconds": max((result.seconds for result in results), default=0.0),
        "longest_processor_seconds": max((result.processor_seconds for result in results), default=0.0),
    }


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Whether autoplan finds what fits, in time, and the same everywhere.")
    parser.add_argument("--smoke", action="store_true", help="toy steps on 8 CPU devices")
    parser.add_argument("--json", action="store_true", help="print JSON; the table goes to the standard error")
    parser.add_argument("--kinds", nargs="*", metavar="KIND", help=f"other kinds than {' '.join(DEFAULT_KINDS)}")
    parser.add_argument("--mesh", default=MESH, help=f"another mesh than {MESH}")
    parser.add_argument("--prove", action="store_true", help="let autoplan ask the compiler")
    parser.add_argument("--time-limit", type=float, default=60.0, help="the time limit of each search, in seconds")
    parser.add_argument("--no-small-step", action="store_true", help="leave the step of 0.9 M parameters out")
    parser.add_argument("--small-step", nargs=2, metavar=("MESH", "SETTING"), help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help="fail where anything is wrong")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep compiled programs in this folder")
    options = parser.parse_args(arguments)
    if options.check and options.smoke:
        parser.error("toy steps have no targets: use --check without --smoke")
    unknown = [name for name in options.kinds or () if name not in KINDS]
    if unknown:
        parser.error(f"unknown kind {', '.join(unknown)}; the kinds are {', '.join(KINDS)}")
    if options.kinds is None:
        options.kinds = TOYS if options.smoke else DEFAULT_KINDS
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    options = read_options(arguments)
    jax.config.update("jax_platforms", "cpu")
    if options.smoke:
        jax.config.update("jax_num_cpu_devices", 8)
    if options.small_step:
        mesh, setting = options.small_step
        print(json.dumps(attrs.asdict(small_plan(mesh, setting, options.smoke))))
        return 0
    out, cache = sys.stderr if options.json else sys.stdout, Cache(options.cache)
    steps = [ask(Question.of(KINDS[name], options.mesh, options.smoke, cache), options, out) for name in options.kinds]
    wrong = [
        f"{step.model}, {result.case}: {fault}"
        for step in steps
        for result, faults in zip(step.results, step.faults, strict=True)
        for fault in faults
    ]
    small: list[SmallPlan] = []
    for mesh in () if options.no_small_step else SMALL_MESHES[: 1 if options.smoke else None]:
        plans = list(small_plans(mesh, options.smoke))
        for plan in plans:
            times = f"{plan.seconds:.1f} s, {plan.processor_seconds:.1f} s of processors"
            print(f"small step on {mesh}, {plan.setting}: {plan.cost_ms:.4f} ms, {plan.digest}; {times}", file=out)
        wrong += small_faults(plans)
        small += plans
    totals = summary(steps)
    print("", *(f"{name}: {value:.3f}" for name, value in totals.items()), sep="\n", file=out)
    print(*(f"wrong: {fault}" for fault in wrong), sep="\n", file=out)
    if options.json:
        versions = {"python": platform.python_version(), "jax": jax.__version__}
        answers = {"steps": [as_json(step) for step in steps], "small": list(map(attrs.asdict, small))}
        print(json.dumps({**versions, **answers, "summary": totals, "wrong": wrong}, indent=1))
    return 1 if options.check and wrong else 0


def as_json(step: Step) -> dict[str, Any]:
    """A step for JSON, which has no infinity."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return finite(attrs.asdict(step))


if __name__ == "__main__":
    sys.exit(main())
