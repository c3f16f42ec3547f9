"""Do plans put layers in stages where that pays, and only there?

**Method.** `plan_training` gets Llama 3 as row 44 of `published/rows.toml` has it, or an MLP of wide layers, in the
size, batch and cluster of each case: once with stages allowed, once with `stages=1`, and where the network is slow with
2, 4 and 8. `ratio` is the modelled time of the first plan over that of the best other, `effort` the processor time of
the first search over that of the second, and `stages` the fastest set-up with stages that was planned, without a limit
of memory if none fits, over the plan. Slow networks have 3 to 25 GB/s for each host. Nobody measured stages of the same
program: of Llama 3 70B, NeMo's pipeline and MaxText's FSDP were measured within 6 % of each other on 64 and 128 H100s.
The search for 8B on 64, which has 32 layers, has a limit of its own: 120 s of a core.

**Last answer.** 2026-11-23 (1B and 8B) and 2026-11-26 (70B and 405B), 2 cores of an AMD EPYC, JAX 0.10.2. No plan has
stages. For 1B on 8 H100s none is planned with any: waiting alone would cost more than the plan loses. For 8B on 8 the
fastest planned takes 1.31 times as long, for 70B on 64 and on 128 1.10 and 1.11 times, without a limit of memory.
Ratios are 1.000, and efforts 1.01 (1B), 1.09 (8B), 1.44 (70B on 64) and 1.13 (70B on 128). For 70B on 128 and 405B on
512 the time limit of 600 s ended the search; 405B takes 39.2 s, and on an earlier day, with 8 stages of 8 x 8, 48 s
without a limit of memory. The search for 8B on 64, on 2026-11-24, took 62 s of a core with stages allowed. All of this
is from before plans were compared by times in which sending overlaps. Of the cases with slow networks, two were planned
so far with stages allowed, on 2026-11-28, by calls like those below: 8B with 6.25 GB/s takes 4.04 s in 4 stages, as
with `stages=4`, and 4.38 s without, effort 0.98; with 12.5 GB/s 2.57 s without stages, and 2.99 s with `stages=4`,
effort 1.07. Neither was planned with `stages=2` or `stages=8`. For 1B, with 3 and 6.25 GB/s, no plan has stages: ratios
are 1.000, and efforts 1.02 and 1.37; with 2 stages it takes 2.17 and 1.56 times as long.

Run it as `python benchmarks/stage_plans.py`; see `--help` for less.
"""

import argparse
import json
import math
import os
import sys
import time
from typing import Any, NamedTuple

MOST_EFFORT = 1.1
"""The most that a search with stages may take, as a part of the one without."""

MOST_SLOW_EFFORT = 1.3
"""The same where the network is slow."""

STAGES = (1, 2, 4, 8)
"""The numbers of stages that are asked for where the network is slow."""

MOST_SECONDS = {"8B on 64": 120.0}
"""What a search may take of a core: for 32 layers on 64 devices, with everything left to choose."""

TOLERANCE = 1e-3
"""What models of costs do not tell apart, as in the search."""


class Case(NamedTuple):
    """A model, a batch and a cluster."""

    name: str
    cluster: str
    sequences: int
    length: int
    dims: dict[str, int]
    host_gigabytes: float | None = None
    """What the network of a host sends in a second; by default that of the sheet."""


WIDE_MLP = {"embed": 1024, "mlp": 65536, "vocab": 256, "layers": 32}
"""Layers whose gradients take longer to add up over slow networks than all hosts to compute the same."""

LLAMA_1B = {"embed": 2048, "heads": 32, "kv_heads": 8, "head_dim": 64, "mlp": 8192, "layers": 16}
LLAMA_8B = {"embed": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 14336, "layers": 32}
LLAMA_70B = {"embed": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128, "mlp": 28672, "layers": 80}
LLAMA_405B = {"embed": 16384, "heads": 128, "kv_heads": 8, "head_dim": 128, "mlp": 53248, "layers": 126}

CASES = (
    Case("1B", "cuda:h100:8", 64, 4096, LLAMA_1B),
    Case("8B", "cuda:h100:8", 32, 4096, LLAMA_8B),
    Case("8B on 64", "cuda:h100:64", 128, 8192, LLAMA_8B),
    Case("70B on 64", "cuda:h100:64", 128, 8192, LLAMA_70B),
    Case("70B on 128", "cuda:h100:128", 256, 8192, LLAMA_70B),
    Case("405B", "cuda:h100:512", 256, 8192, LLAMA_405B),
    *(Case(f"8B, {speed:g} GB/s", "cuda:h100:32", 64, 4096, LLAMA_8B, speed) for speed in (3.0, 6.25, 12.5, 25.0)),
    *(Case(f"1B, {speed:g} GB/s", "cuda:h100:32", 64, 1024, LLAMA_1B, speed) for speed in (3.0, 6.25)),
    Case("MLP, 6.25 GB/s", "cuda:h100:32", 64, 4096, WIDE_MLP, 6.25),
)

SMOKE = Case("toy", "cpu:2", 16, 64, {"layers": 2})


def arguments_of(case: Case, row: Any) -> tuple[Any, ...]:
    """Returns what `plan_training` gets: the loss, the weights, the optimizer and the batch."""
    import attrs
    import jax
    import jax.numpy as jnp
    import optax
    from published.training import scanned_row, training_case

    tokens = jax.ShapeDtypeStruct((case.sequences, case.length), jnp.int32)
    if case.dims is not WIDE_MLP:
        step = training_case(
            scanned_row(attrs.evolve(row, dims=attrs.evolve(row.dims, **case.dims), length=case.length))
        )
        return step.loss, step.weights, step.optimizer, (tokens, tokens)
    width, inner, vocabulary, layers = (case.dims[name] for name in ("embed", "mlp", "vocab", "layers"))
    shapes = {"in": (vocabulary, width), "up": (layers, width, inner), "down": (layers, inner, width)}
    shapes["out"] = width, vocabulary

    def loss(weights: Any, tokens: Any) -> Any:
        def layer(x: Any, weights: Any) -> Any:
            up, down = (weight.astype(jnp.bfloat16) for weight in weights)
            return x + jnp.tanh(x @ up) @ down, None

        x = weights["in"].astype(jnp.bfloat16)[tokens]
        x = jax.lax.scan(layer, x, (weights["up"], weights["down"]))[0]
        logits = (x @ weights["out"].astype(jnp.bfloat16)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return loss, weights, optax.adam(1e-3), tokens


def figure_of(case: Case, row: Any, time_limit: float) -> dict[str, Any]:
    """Plans a case with stages and without, and where the network is slow with each number of stages."""
    import attrs
    import jax

    import shardrules as sr

    arguments = arguments_of(case, row)
    sheet = sr.Hardware.named(case.cluster.rpartition(":")[0])
    if case.host_gigabytes is not None and sheet.devices_per_host:
        share = 1e9 * case.host_gigabytes / sheet.devices_per_host
        sheet = attrs.evolve(sheet, network_bytes_per_second=share)
    plans, seconds = [], []
    for stages in (None, *(STAGES if case.host_gigabytes else STAGES[:1])):
        start = time.process_time()
        plans.append(
            sr.plan_training(
                *arguments,
                cluster=case.cluster,
                hardware=sheet,
                stages=stages,
                time_limit=time_limit,
            )
        )
        seconds.append(time.process_time() - start)
        jax.clear_caches()
    plan, *others = plans
    times = [other.step_time.seconds for other in others]
    staged = [each for each in plan.candidates if each.mesh.startswith("stage:") and each.seconds is not None]
    return {
        "name": case.name,
        "target": case.cluster,
        "seconds": plan.step_time.seconds,
        "mesh": plan.report.mesh,
        "recipe": str(plan.recipe),
        "why_no_stages": plan.report.why_no_stages,
        "ratio": plan.step_time.seconds / min(times),
        "by_stages": times,
        "is_slow": case.host_gigabytes is not None,
        "effort": seconds[0] / seconds[1],
        "processor_seconds": seconds[0],
        "stages": min(each.seconds for each in staged) / plan.step_time.seconds if staged else None,
        "late": any(finding.code == "time-is-up" for finding in plan.report.findings),
    }


def line(figure: dict[str, Any]) -> str:
    """A figure as text."""
    stages = f"{figure['stages']:8.2f}" if figure["stages"] is not None else f"{'':8}"
    late = ", search cut short" if figure["late"] else ""
    others = ", ".join(f"{seconds:.4g}" for seconds in figure["by_stages"])
    return (
        f"{figure['name']:14}{figure['target']:16}{figure['seconds']:10.4g}{figure['ratio']:8.3f}{figure['effort']:8.2f}"
        f"{stages}{figure['processor_seconds']:8.0f}  {figure['mesh']}, {figure['recipe']}{late}; others {others}"
    )


def missed(figures: list[dict[str, Any]]) -> list[str]:
    """The limits that were missed."""
    lines = []
    for figure in figures:
        if figure["ratio"] > 1 + TOLERANCE:
            lines.append(f"{figure['name']}: with stages allowed {figure['ratio']:.3f} x the best plan")
        if figure["effort"] > (MOST_SLOW_EFFORT if figure["is_slow"] else MOST_EFFORT):
            lines.append(f"{figure['name']}: the search took {figure['effort']:.2f} x that without stages")
        if figure["processor_seconds"] > MOST_SECONDS.get(figure["name"], math.inf):
            lines.append(f"{figure['name']}: the search took {figure['processor_seconds']:.0f} s of a core")
        if figure["late"] and figure["name"] in MOST_SECONDS:
            lines.append(f"{figure['name']}: the search was cut short")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="Training plans with stages and without.")
    parser.add_argument("--case", nargs="*", default=[], metavar="NAME", help="only cases whose name starts so")
    parser.add_argument("--time-limit", type=float, default=600.0, help="for each plan, in seconds")
    parser.add_argument("--smoke", action="store_true", help="a toy model on CPU devices")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    if options.smoke:
        jax.config.update("jax_num_cpu_devices", 8)
    from published.rows import FILE, read_rows

    rows = read_rows([FILE.with_name("smoke.toml")] if options.smoke else ())
    row = rows[0] if options.smoke else next(row for row in rows if row.name == "44")
    cases = [SMOKE] if options.smoke else CASES
    cases = [case for case in cases if not options.case or any(case.name.startswith(name) for name in options.case)]
    out = sys.stderr if options.json else sys.stdout
    heads = ("plan", "ratio", "effort", "stages", "CPU s")
    sizes = (10, 8, 8, 8, 8)
    print(f"{'':30}" + "".join(f"{head:>{size}}" for head, size in zip(heads, sizes, strict=True)), file=out)
    figures = []
    for case in cases:
        figures.append(figure_of(case, row, options.time_limit))
        print(line(figures[-1]), file=out, flush=True)
    over = [] if options.smoke else missed(figures)
    if options.json:
        print(json.dumps({"jax": jax.__version__, "cases": figures, "missed": over}, indent=1))
    print(*(f"missed: {item}" for item in over), sep="\n", file=out)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
