"""How long does it take to place a tree of NumPy arrays on 8 devices and to get it back, compared with `device_put`?

**Method.** Two trees of float32 matrices: 150 leaves (380 MB), and 1,500 leaves (190 MB), with rows split over 8
virtual CPU devices. Every contestant runs in its own processes, because the start of a training pays for the first
call: it is timed (`cold`), and divided by the floor's first call in the same round. Five more calls follow (`warm`),
alternating with five calls of the floor in the same process, and their medians are divided: whether an allocator
returns pages differs between processes, and would outweigh every difference here. Each call is timed to the end of the
transfer. In every round each contestant has one process, in rotating order; the figures are medians over the rounds.

- `floor`: `jax.device_put(tree, shardings)` and `jax.device_get(tree)`, with shardings computed beforehand;
- `shardings`, `plan`, `rule`: `sr.filter_shard` with a tree of shardings, with a plan computed beforehand, and with a
  rule, which is planned during the call; back with `sr.filter_gather`;
- `equinox`: `eqx.filter_shard` with the shardings;
- `jits`: one function per leaf, `jit(identity, out_shardings=...)`, and back `jit(identity)` to a replicated array and
  `device_get`, as the shard and gather functions of several libraries do. It is slow, so it has a single process.

**Last answer.** 2026-11-21, 2 cores of an AMD EPYC, Python 3.11.7, JAX 0.10.2, 5 rounds. Placing is as fast as
`device_put`. Getting back *is* `jax.device_get` of the whole tree, so its figures show how far such times scatter: the
same function gives 0.65 to 1.39.

| over the floor | 150 leaves: cold | warm | 1,500 leaves: cold | warm |
|---|---|---|---|---|
| placed by shardings | 0.95 | 0.97 | 0.97 | 1.01 |
| by a plan | 0.97 | 1.11 | 0.98 | 0.95 |
| by a rule | 0.97 | 0.97 | 0.97 | 0.97 |
| by `eqx.filter_shard` | 0.97 | 0.71 | 3.42 | 5.11 |
| by one jit per leaf | 15.7 | 11.5 | 119 | 140 |
| back, with `filter_gather`, from each of the three | 0.98 to 1.33 | 0.96 to 1.02 | 1.21 to 1.24 | 0.65 to 1.39 |
| back, with one jit per leaf | 15.2 | 3.0 | 68.5 | 31.4 |

Run it as `python benchmarks/place_time.py` (about sixteen minutes); see `--help` for less.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, final

import attrs

DEVICES = 8
LIMIT = 1.1
"""The largest ratio of `filter_shard` to the floor: times of the same function scatter by about a tenth."""

CHECKED = ("shardings", "plan", "rule")
SLOW = "jits"
CONTESTANTS = ("floor", *CHECKED, "equinox", SLOW)


@final
@attrs.frozen
class Case:
    """A tree of `leaves` float32 matrices of `rows` by `columns`."""

    name: str
    leaves: int
    rows: int
    columns: int

    @property
    def total_mb(self) -> int:
        """The size of the tree."""
        return self.leaves * self.rows * self.columns * 4 // 10**6


CASES = (Case("150 leaves", 150, 1024, 620), Case("1,500 leaves", 1500, 256, 124))
TOY = (Case("150 leaves", 15, 64, 8), Case("1,500 leaves", 30, 32, 8))


def work(case: Case, contestant: str, repeats: int) -> dict[str, float]:
    """Runs one contestant in this process; returns seconds."""
    import equinox as eqx
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import shardrules as sr

    mesh = sr.create_mesh(f"data:{DEVICES}")
    rule = sr.DimShardingRule("data", 0)
    rng = np.random.default_rng(0)
    block = rng.standard_normal((case.rows, case.columns), dtype=np.float32)
    tree = {"layers": [{"w": block + n} for n in range(case.leaves)]}
    plan = rule.plan(tree, mesh)
    shardings = plan.shardings()

    def jits(tree: Any) -> Any:
        return jax.tree.map(lambda x, s: jax.jit(lambda y: y, out_shardings=s)(x), tree, shardings)

    def jits_back(tree: Any) -> Any:
        replicated = NamedSharding(mesh, P())
        return jax.tree.map(lambda x: jax.device_get(jax.jit(lambda y: y, out_shardings=replicated)(x)), tree)

    place: Callable[[Any], Any]
    back: Callable[[Any], Any] = sr.filter_gather
    match contestant:
        case "floor":
            place, back = (lambda tree: jax.device_put(tree, shardings)), jax.device_get
        case "shardings":
            place = lambda tree: sr.filter_shard(tree, shardings)  # noqa: E731
        case "plan":
            place = lambda tree: sr.filter_shard(tree, plan)  # noqa: E731
        case "rule":
            place = lambda tree: sr.filter_shard(tree, rule, mesh)  # noqa: E731
        case "equinox":
            place, back = (lambda tree: eqx.filter_shard(tree, shardings)), jax.device_get
        case _:
            place, back = jits, jits_back
    jax.block_until_ready(jax.device_put(np.zeros(DEVICES), NamedSharding(mesh, P("data"))))  # starts the backend
    result: dict[str, float] = {}
    floors = (lambda tree: jax.device_put(tree, shardings)), jax.device_get
    for kind, run, floor, on_devices in (("place", place, floors[0], None), ("back", back, floors[1], shardings)):
        # An array keeps its host copy once it has one, so every call back gets new arrays.
        calls = 1 + 2 * repeats
        source = [tree] if on_devices is None else [jax.device_put(tree, on_devices) for _ in range(calls)]
        jax.block_until_ready(source)
        seconds: list[float] = []
        for turn in range(calls):
            start = time.perf_counter()
            result_tree = jax.block_until_ready((floor if turn % 2 else run)(source[turn % len(source)]))
            seconds.append(time.perf_counter() - start)
            del result_tree
        result[f"{kind} cold"] = seconds[0]
        result[f"{kind} warm"] = statistics.median(seconds[2::2])
        result[f"{kind} warm, floor"] = statistics.median(seconds[1::2])
    return result


def in_process(case: Case, contestant: str, repeats: int) -> dict[str, float]:
    """Runs one contestant in its own process."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}".strip()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, "--worker", json.dumps([*attrs.astuple(case), contestant, repeats])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{contestant} on {case.name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(cases: tuple[Case, ...], rounds: int, repeats: int) -> list[dict[str, Any]]:
    """One row for each case, kind of call and contestant."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
        for turn in range(rounds):
            order = CONTESTANTS[turn % len(CONTESTANTS) :] + CONTESTANTS[: turn % len(CONTESTANTS)]
            for name in order:
                if name != SLOW:
                    runs[name].append(in_process(case, name, repeats))
                elif not runs[name]:
                    runs[name] = [in_process(case, name, 1)] * rounds
        for kind in ("place cold", "place warm", "back cold", "back warm"):
            for name in CONTESTANTS:
                bases = runs["floor"] if "cold" in kind else [{kind: run[f"{kind}, floor"]} for run in runs[name]]
                ratios = [run[kind] / base[kind] for run, base in zip(runs[name], bases, strict=True)]
                seconds = statistics.median(run[kind] for run in runs[name])
                ratio = statistics.median(ratios)
                row = {"case": case.name, "mb": case.total_mb, "kind": kind, "name": name, "rounds": rounds}
                met = ratio <= LIMIT if name in CHECKED else None
                rows.append({**row, "seconds": seconds, "ratio": ratio, "met": met})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines: list[str] = []
    for case in dict.fromkeys(row["case"] for row in rows):
        case_rows = [row for row in rows if row["case"] == case]
        kinds = list(dict.fromkeys(row["kind"] for row in case_rows))
        lines.append(f"\n{case}, {case_rows[0]['mb']} MB: ratio to the floor")
        lines.append(f"{'':12}" + "".join(f"{kind:>14}" for kind in kinds))
        for name in CONTESTANTS:
            cells = [row for kind in kinds for row in case_rows if (row["kind"], row["name"]) == (kind, name)]
            shown = [f"{row['ratio']:.2f}x" if name != "floor" else f"{row['seconds'] * 1e3:.0f} ms" for row in cells]
            lines.append(f"{name:12}" + "".join(f"{cell:>14}" for cell in shown))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=7, help="processes per contestant")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, one round")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--check", action="store_true", help=f"fail where filter_shard takes over {LIMIT} times the floor"
    )
    options = parser.parse_args()
    if options.worker:
        *case, contestant, repeats = json.loads(options.worker)
        print(json.dumps(work(Case(*case), contestant, repeats)))
        return
    if options.smoke and options.check:
        parser.error("toy sizes have no targets: use --check without --smoke")
    rows = measure(TOY if options.smoke else CASES, 1 if options.smoke else options.rounds, 1 if options.smoke else 5)
    missed = [f"{row['case']}, {row['kind']}: {row['name']} {row['ratio']:.2f}x" for row in rows if row["met"] is False]
    if options.smoke:
        rows = [{**row, "met": None} for row in rows]
    machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    if options.json:
        print(json.dumps({"date": time.strftime("%Y-%m-%d"), **machine, "rows": rows, "missed": missed}, indent=1))
    else:
        print(table(rows))
        for line in missed:
            print(f"over {LIMIT}x: {line}")
    if options.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
