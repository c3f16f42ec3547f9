"""How long does an audit take, and how much of that is not spent in the compiler?

**Method.** The train step of a GPT (attention, MLP, Adam, recomputed activations, every layer written out) is audited
for a target, from shapes. `compile` is tracing, lowering and compiling; `read` is the rest: reading the program, the
collectives, FLOPs, memory, the modelled time and the findings. `play` is the part of it that plays the schedule. Each
case is audited `--rounds` times with fresh caches, and medians are shown. `floor` is `text.splitlines()`, the least
that a reader of text can do.

**Last answer.** 2026-11-21, 2 cores of an AMD EPYC, Python 3.11.7, JAX 0.10.2, the best of three rounds.

| | compile | read | program |
|---|---|---|---|
| 12 layers, 256 CPU devices | 7.4 s | 0.50 s | 2.8 MB |
| 12 layers, 64 H100s | 10.0 s | 0.38 s | 3.0 MB |
| 44 layers, 8 CPU devices | 23.8 s | 1.74 s | 9.3 MB |

Run it as `python benchmarks/audit_time.py`; the CUDA cases need the extra `cuda`, and without it
the output lists them as skipped.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from typing import Any, final

import attrs

DEVICES = 256
"""CPU devices of the process: as many as the largest case has."""

TOTAL_LIMIT, READ_LIMIT = 30.0, 2.0
"""Seconds for a whole audit of 12 layers, and for reading 10 MB of program: about twice the last answer, so that a busy
machine passes and a reader of quadratic time does not."""


@final
@attrs.frozen
class Case:
    """A GPT of `layers` layers, for a target, on a mesh."""

    name: str
    target: str
    mesh: str
    layers: int = 12
    width: int = 1024


CASES = (
    Case("12 layers, 256 CPU devices", "cpu", "data:64,model:4"),
    Case("12 layers, 64 H100s", "cuda:h100:64", "data:16,model:4"),
    Case("44 layers, 8 CPU devices", "cpu", "data:4,model:2", layers=44, width=256),
)
SMOKE = (Case("2 layers, 8 CPU devices", "cpu", "data:4,model:2", layers=2, width=64),)
HEADS, VOCAB, CONTEXT = 16, 50304, 1024


def train_step(case: Case) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The step, its arguments, and the options of the audit with its shardings."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import PartitionSpec as P

    import shardrules as sr

    width, hidden = case.width, 4 * case.width

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def constrain(x: Any, *spec: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, P(*spec))

    def norm(x: Any, weight: Any) -> Any:
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype) * weight

    @jax.checkpoint
    def block(layer: Any, x: Any) -> Any:
        batch, length, _ = x.shape
        y = constrain(norm(x, layer["norms"][0]), "data")
        q, k, v = (
            constrain((y @ layer[name]).reshape(batch, length, HEADS, width // HEADS), "data", None, "model")
            for name in ("q", "k", "v")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
        heads = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
        x = constrain(x + constrain(heads.reshape(batch, length, width), "data", None, "model") @ layer["out"], "data")
        y = constrain(norm(x, layer["norms"][1]), "data")
        return constrain(x + constrain(jax.nn.gelu(y @ layer["up"]), "data", None, "model") @ layer["down"], "data")

    def loss(params: Any, tokens: Any) -> Any:
        x = constrain(params["embed"][tokens[:, :-1]], "data")
        for layer in params["layers"]:
            x = block(layer, x)
        logits = constrain(norm(x, params["norm"]) @ params["head"], "data", None, "model").astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1))

    optimizer = optax.adam(1e-3)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    square, wide = array(width, width), array(width, hidden)
    layer = dict.fromkeys(("q", "k", "v", "out"), square) | {"up": wide, "down": array(hidden, width)}
    params = {
        "embed": array(VOCAB, width),
        "layers": [layer | {"norms": [array(width)] * 2} for _ in range(case.layers)],
        "norm": array(width),
        "head": array(width, VOCAB),
    }
    rules = sr.RegexShardingRule(
        [("norm", P()), ("/(q|k|v|up)$|head", P("data", "model")), ("out|down|embed", P("model", "data"))]
    )
    plan = rules.plan(params, sr.mesh_shape(case.mesh))
    examples = 2 * plan.mesh.shape["data"] if plan.mesh is not None else 1
    tokens = jax.ShapeDtypeStruct((examples, CONTEXT + 1), jnp.int32)
    shardings = {
        "plan": plan,
        "in_shardings": (None, None, P("data")),
        "out_shardings": (plan, plan.mirror, None),
        "donate_argnums": (0, 1),
    }
    return step, (params, jax.eval_shape(optimizer.init, params), tokens), shardings


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Audits one case, and returns medians."""
    import jax

    import shardrules as sr

    step, args, shardings = train_step(case)
    compiling, reading, playing, floor, size = [], [], [], [], 0
    for _ in range(rounds):
        jax.clear_caches()
        start = time.perf_counter()
        report = sr.audit(step, *args, **shardings, target=case.target)
        compiling.append(report.compile_seconds)
        reading.append(time.perf_counter() - start - report.compile_seconds)
        playing.append(play_seconds(report))
        start = time.perf_counter()
        report.hlo_text.splitlines()
        floor.append(time.perf_counter() - start)
        size = len(report.hlo_text)
    read = statistics.median(reading)
    return {
        "name": case.name,
        "target": case.target,
        "compile_seconds": statistics.median(compiling),
        "read_seconds": read,
        "play_seconds": statistics.median(playing),
        "floor_seconds": statistics.median(floor),
        "mb": size / 1e6,
        "read_seconds_per_10_mb": read / size * 1e7,
        "read_over_compile": read / statistics.median(compiling),
    }


def play_seconds(report: Any) -> float:
    """How long playing the schedule of a report takes, once its kernels and collectives are read."""
    from shardrules.programs.compiled.flops import find_matmuls
    from shardrules.programs.compiled.kernels import find_kernels
    from shardrules.programs.compiled.program import read_program
    from shardrules.programs.costs.schedule import play_schedule

    program = read_program(report.hlo_text)
    kernels = find_kernels(program, find_matmuls(program))
    start = time.perf_counter()
    play_schedule(program, report.collectives, kernels, report.hardware)
    return time.perf_counter() - start


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The limits that were missed."""
    late = [
        f"{row['name']}: {row['compile_seconds'] + row['read_seconds']:.1f} s of {TOTAL_LIMIT:.0f}"
        for row in rows
        if row["name"].startswith("12 layers") and row["compile_seconds"] + row["read_seconds"] > TOTAL_LIMIT
    ]
    slow = [row for row in rows if row["read_seconds_per_10_mb"] > READ_LIMIT]
    return late + [
        f"{row['name']}: {row['read_seconds_per_10_mb']:.2f} s for 10 MB of {READ_LIMIT:.0f}" for row in slow
    ]


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="How long an audit takes.")
    parser.add_argument("--smoke", action="store_true", help="a toy of two layers on 8 CPU devices")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=3, help="how many times to audit each case")
    parser.add_argument("--check", action="store_true", help="fail where a limit is missed")
    options = parser.parse_args(arguments)
    if options.check and options.smoke:
        parser.error("toy sizes have no limits: use --check without --smoke")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    import shardrules as sr

    jax.config.update("jax_num_cpu_devices", 8 if options.smoke else DEVICES)
    rows, skipped = [], []
    for case in SMOKE if options.smoke else CASES:
        try:
            sr.Target.parse(case.target).devices()
        except sr.errors.MissingCompilerError as error:
            skipped.append(f"{case.name}: {error}")
            continue
        rows.append(measure(case, 1 if options.smoke else options.rounds))
    over = [] if options.smoke else missed(rows)
    if options.json:
        versions = {"python": platform.python_version(), "jax": jax.__version__}
        print(json.dumps({**versions, "rows": rows, "skipped": skipped, "missed": over}, indent=1))
    else:
        print(f"{'':28}{'compile':>10}{'read':>9}{'play':>9}{'floor':>9}{'program':>10}{'read, 10 MB':>13}")
        for row in rows:
            print(
                f"{row['name']:28}{row['compile_seconds']:>8.1f} s{row['read_seconds']:>7.2f} s"
                f"{row['play_seconds']:>7.3f} s"
                f"{row['floor_seconds']:>7.3f} s{row['mb']:>7.1f} MB{row['read_seconds_per_10_mb']:>11.2f} s"
            )
        print(*(f"skipped {case}" for case in skipped), *(f"missed {limit}" for limit in over), sep="\n")
    return 1 if options.check and over else 0


if __name__ == "__main__":
    sys.exit(main())
