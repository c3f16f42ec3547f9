"""How long does planning take, compared with walking the tree once and with other matchers?

**Method.** Four trees of shapes (benchmarks/trees.py), each with twelve regex rules. In every round each contestant
runs once, in rotating order, and its time is divided by another contestant's in the same round; the figures are
medians of these ratios. The contestants:

- `floor`: `tree_flatten_with_path` of the tree and `tree_unflatten` of a prepared list of specs;
- `apply`: `RegexShardingRule(rules).apply(tree)`, with a prepared rule;
- `apply, new rule`: the same, with a new rule in every call, so that no call profits from the previous one;
- `plan`: `plan(tree, mesh)` of the same rule, and reading its specs, its findings and the reason of every leaf;
- `eformer`, `scalax`: `match_partition_rules` and `TreePathShardingRule.apply`, with the same rules on the same tree.

Before anything is timed, the specs of all contestants are compared leaf by leaf, and the benchmark stops if they
differ. A second part runs a rule that reads the mesh (five regexes, then `AutoShardingRule`) on meshes of 8, 512 and
65,536 devices. A third part makes a rule of 10,000 patterns, one for each of 10,000 leaves, and plans with it; its base
is compiling the patterns alone. The garbage collector is left on, except with `--no-gc`; it runs before each sample,
and each result is freed, outside the timing, before the next call. Calls under a few milliseconds are timed in batches.

**Last answer.** 2026-11-21, 2 cores of an AMD EPYC, Python 3.11.7, JAX 0.10.2. All targets met.

| median of ratios | 148 | 1,137 | 45,395 | 200,000 |
|---|---|---|---|---|
| apply / floor | 3.58 | 1.45 | 0.17 | 0.35 |
| plan / apply | 1.21 | 0.98 | 0.94 | 0.97 |
| eformer / apply | 4.8 | 5.5 | 12.8 | 6.2 |
| scalax / apply | 4.7 | 5.4 | 12.2 | 6.1 |
| apply, 65,536 devices / 8 devices | | 0.98 | 0.99 | |

Rule and plan of 10,000 patterns take 2.46 times as long as compiling them (2026-11-22, on a busy machine).

Run it as `python benchmarks/plan_time.py` (about three minutes); see `--help` for less.
"""

import argparse
import gc
import json
import math
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import attrs
import jax
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten
from trees import TOY_TREES, TREES, Rules, Tree

import shardrules as sr

Run = Callable[[], Any]
Matcher = Callable[[Rules, Any], Any]

APPLY_LIMITS = {"gpt2": 4.0, "llama_405b": 2.0, "deepseek_v3": 0.9, "synthetic_200k": 0.5}
PLAN_LIMIT = 2.0
PEER_LIMIT = 3.0
DEVICES_LIMIT = 1.05
RULES_LIMIT = 4.0

PLAN_MESH = "data:32,model:16"
MESHES = {8: "data:4,model:2", 512: "data:32,model:16", 65_536: "data:512,model:128"}
DEVICE_TREES = ("llama_405b", "deepseek_v3")


@final
@attrs.frozen
class Effort:
    """How long to measure: seconds per part, and the least and the most rounds."""

    seconds: Mapping[str, float]
    least: int
    most: int


FULL = Effort(
    {"gpt2": 8, "llama_405b": 10, "deepseek_v3": 25, "synthetic_200k": 40, "devices": 12, "rules": 20},
    least=5,
    most=300,
)
TOY = Effort({}, least=2, most=2)


@final
@attrs.frozen
class Row:
    """One line of the result: a contestant on a tree, its time and its ratio to the `base` of the same rounds."""

    tree: str
    leaves: int
    name: str
    rounds: int
    calls: int
    median_ms: float
    base: str
    ratio: float
    ratio_low: float
    ratio_high: float
    target: str | None = None
    met: bool | None = None


def sample(run: Run, calls: int) -> float:
    """Times `calls` calls of `run`, each result freed outside the time; returns seconds per call."""
    gc.collect()
    total = 0
    for _ in range(calls):
        start = time.perf_counter_ns()
        result = run()
        total += time.perf_counter_ns() - start
        del result
    return total / calls / 1e9


def interleave(runs: Mapping[str, Run], calls: int, seconds: float, effort: Effort) -> list[dict[str, float]]:
    """Runs every contestant once per round until `seconds` are over; returns one dict of seconds per round."""
    names = list(runs)
    for name in names:
        sample(runs[name], 1)
    rounds: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    while len(rounds) < effort.least or (len(rounds) < effort.most and time.perf_counter() < end):
        turn = len(rounds) // 2 % len(names)
        order = names[turn:] + names[:turn]
        if len(rounds) % 2:
            order.reverse()
        rounds.append({name: sample(runs[name], calls) for name in order})
    return rounds


def calls_per_sample(run: Run) -> int:
    """How many calls take about five milliseconds together, at most 50."""
    sample(run, 1)
    return max(1, min(50, math.ceil(0.005 / sample(run, 1))))


def row(
    tree: Tree, rounds: Sequence[Mapping[str, float]], calls: int, name: str, base: str, limit: float | None, most: bool
) -> Row:
    """Summarizes the rounds of a contestant as ratios to `base`; `limit` is their most, or else their least."""
    ratios = [times[name] / times[base] for times in rounds]
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
    met = None if limit is None else (ratio <= limit if most else ratio >= limit)
    target = None if limit is None else f"{'<=' if most else '>='} {limit:g}"
    milliseconds = 1e3 * statistics.median(times[name] for times in rounds)
    return Row(tree.name, tree.leaves, name, len(rounds), calls, milliseconds, base, ratio, low, high, target, met)


def find_peers() -> dict[str, Matcher]:
    """The matchers to compare with. Exits with the command that installs them when they are missing."""
    try:
        from eformer.escale import match_partition_rules
        from scalax.sharding import TreePathShardingRule
    except ImportError as error:
        sys.exit(f"{error}. Install the peers with: pip install eformer scalax (or skip them: --no-peers)")
    return {
        "eformer": lambda rules, tree: match_partition_rules(list(rules), tree, min_size=0),
        "scalax": lambda rules, tree: TreePathShardingRule(*rules).apply(tree),
    }


def read_plan(rule: sr.ShardingRule, tree: Any, mesh: jax.sharding.AbstractMesh) -> Any:
    """Plans, and reads the specs, the findings and the reason of every leaf."""
    plan = rule.plan(tree, mesh)
    reasons = [decision.reason for decision in plan.decisions]  # equal leaves share one
    return plan, plan.specs, plan.findings, [reasons[kind] for kind in plan.survey.kind_of]


def require_same_specs(tree: Any, runs: Mapping[str, Run]) -> None:
    """Exits when the specs of any contestant differ from the first one's."""
    first, *others = runs
    expected, _ = tree_flatten_with_path(runs[first]())
    if len(expected) != len(tree_leaves(tree)):
        sys.exit(f"{first} gives {len(expected)} specs for {len(tree_leaves(tree))} leaves")
    for other in others:
        specs, _ = tree_flatten_with_path(runs[other]())
        for (path, spec), (other_path, other_spec) in zip(expected, specs, strict=True):
            if path != other_path or not sr.specs.same(spec, other_spec):
                sys.exit(f"{first} gives {spec} to {keystr(path)}, {other} {other_spec} to {keystr(other_path)}")


def race(case: Tree, peers: Mapping[str, Matcher], effort: Effort, check: bool) -> list[Row]:
    """Measures one tree: the floor, shardrules and the peers."""
    tree = case.build()
    mesh = sr.mesh_shape(PLAN_MESH)
    rule = sr.RegexShardingRule(case.rules)
    specs: list[P] = [P()] * case.leaves

    def floor() -> Any:
        _, structure = tree_flatten_with_path(tree)
        return tree_unflatten(structure, specs)

    def run_peer(match: Matcher) -> Run:
        return lambda: match(case.rules, tree)

    applied: dict[str, Run] = {
        "apply": lambda: rule.apply(tree),
        "apply, new rule": lambda: sr.RegexShardingRule(case.rules).apply(tree),
        **{name: run_peer(match) for name, match in peers.items()},
    }
    require_same_specs(tree, {"plan": lambda: rule.plan(tree, mesh).specs, **applied})
    rule.plan(tree, mesh).check()

    runs = {"floor": floor, "plan": lambda: read_plan(rule, tree, mesh), **applied}
    calls = calls_per_sample(runs["apply"])
    rounds = interleave(runs, calls, effort.seconds.get(case.name, 0), effort)

    def line(name: str, base: str, limit: float | None = None, most: bool = True) -> Row:
        return row(case, rounds, calls, name, base, limit if check else None, most)

    return [
        line("floor", "floor"),
        line("apply", "floor", APPLY_LIMITS[case.name]),
        line("apply, new rule", "floor"),
        line("plan", "floor"),
        line("plan", "apply", PLAN_LIMIT),
        *(line(name, "floor") for name in peers),
        *(line(name, "apply", PEER_LIMIT, most=False) for name in peers),
    ]


def race_devices(case: Tree, effort: Effort, check: bool) -> list[Row]:
    """Measures one tree on meshes of 8, 512 and 65,536 devices, with a rule that reads the mesh."""
    tree = case.build()
    rows: list[Row] = []

    def make(method: str, mesh: jax.sharding.AbstractMesh) -> Run:
        # Auto decides the leaves that the five rules do not match. Its threshold, by default the device count, is 1
        # here, so that the work is the same on every mesh.
        auto = sr.AutoShardingRule(mesh=mesh, min_shard_size=1)
        rule = sr.CompositeShardingRule(sr.RegexShardingRule(case.rules[:5]), auto)
        return (lambda: rule.apply(tree)) if method == "apply" else (lambda: read_plan(rule, tree, mesh))

    for method in ("apply", "plan"):
        runs = {f"{method}, {devices:,} devices": make(method, sr.mesh_shape(text)) for devices, text in MESHES.items()}
        base, *others = runs
        calls = calls_per_sample(runs[base])
        rounds = interleave(runs, calls, effort.seconds.get("devices", 0), effort)
        rows.append(row(case, rounds, calls, base, base, None, True))
        rows.extend(row(case, rounds, calls, name, base, DEVICES_LIMIT if check else None, True) for name in others)
    return rows


def race_rules(count: int, effort: Effort, check: bool) -> list[Row]:
    """Measures a new rule of `count` patterns with its plan, and compiling the patterns."""
    specs = (P("data"), P(None, "model"), P("model", "data"), P())
    rules = [(rf"^blocks/{index // 10}/(part|side){index % 10}/\w+$", specs[index % 4]) for index in range(count)]
    array = jax.ShapeDtypeStruct((512, 512), "float32")
    blocks = [{f"part{index}": {"w": array} for index in range(10)}] * (count // 10)
    case = Tree("rules", lambda: {"blocks": blocks}, tuple(rules), count)
    tree, mesh = case.build(), sr.mesh_shape(PLAN_MESH)
    sr.RegexShardingRule(rules).plan(tree, mesh).check()

    def compile_all() -> Any:
        re.purge()  # `re` keeps the last 512 patterns
        return [re.compile(pattern) for pattern, _ in rules]

    def plan_all() -> Any:
        re.purge()
        return read_plan(sr.RegexShardingRule(rules), tree, mesh)

    rounds = interleave({"compile": compile_all, "rule and plan": plan_all}, 1, effort.seconds.get("rules", 0), effort)
    return [
        row(case, rounds, 1, "compile", "compile", None, True),
        row(case, rounds, 1, "rule and plan", "compile", RULES_LIMIT if check else None, True),
    ]


def processor() -> str:
    """The processor's name and the number of cores this process may use."""
    name = platform.processor() or platform.machine()
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as file:
            models = [text.partition(":")[2].strip() for text in file if text.startswith("model name")]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} cores"


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, a blank line between trees."""
    lines = [f"{'tree':<15}{'leaves':>8}  {'contestant':<24}{'median':>11}  {'ratio':>8}  {'middle half':<15}to"]
    for index, row in enumerate(rows):
        if index == 0 or rows[index - 1].tree != row.tree:
            lines += ["", f"{row.tree:<15}{row.leaves:>8,}"]
        half = f"{row.ratio_low:.3f}-{row.ratio_high:.3f}"
        verdict = "" if row.target is None else f"{row.target:<8}{'met' if row.met else 'MISSED'}"
        base = row.base.removeprefix("apply, ").removeprefix("plan, ")
        text = f"  {row.name:<24}{row.median_ms:>8.3f} ms  {row.ratio:>7.3f}x  {half:<15}{base:<12}{verdict}"
        lines.append((" " * 23 + text).rstrip())
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Time to plan a tree, against a floor and two other matchers.")
    names = [tree.name for tree in TREES]
    parser.add_argument(
        "--only", choices=[*names, "devices", "rules"], action="append", help="only this part (may be repeated)"
    )
    parser.add_argument("--no-peers", action="store_true", help="skip eformer and scalax")
    parser.add_argument("--no-gc", action="store_true", help="run the garbage collector between samples only")
    parser.add_argument("--smoke", action="store_true", help="toy trees and two rounds")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if options.smoke and options.check:
        parser.error("toy sizes have no targets: use --check without --smoke")

    jax.config.update("jax_platforms", "cpu")  # a peer may use devices, and this measures no accelerator
    if options.no_gc:
        gc.disable()
    effort = TOY if options.smoke else FULL
    peers = {} if options.no_peers else find_peers()
    parts = options.only or [*names, "devices", "rules"]
    rows: list[Row] = []
    device_rows: list[Row] = []
    for tree in TOY_TREES if options.smoke else TREES:
        if tree.name in parts:
            print(f"{tree.name}: {tree.leaves:,} leaves ...", file=sys.stderr)
            rows += race(tree, peers, effort, not options.smoke)
        if "devices" in parts and tree.name in DEVICE_TREES:
            print(f"{tree.name}: {', '.join(f'{count:,}' for count in MESHES)} devices ...", file=sys.stderr)
            device_rows += race_devices(tree, effort, not options.smoke)

    rows += device_rows
    if "rules" in parts:
        print("rules ...", file=sys.stderr)
        rows += race_rules(100 if options.smoke else 10_000, effort, not options.smoke)
    missed = [row for row in rows if row.met is False]
    setting = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "garbage_collector": "off" if options.no_gc else "on",
    }
    if options.json:
        print(json.dumps({**setting, "rows": [attrs.asdict(row) for row in rows], "missed": len(missed)}, indent=2))
    else:
        print(table(rows))
        where = f"{setting['date']}, {setting['processor']}, Python {setting['python']}, JAX {setting['jax']}"
        print(f"\n{where}, garbage collector {setting['garbage_collector']}; {len(missed)} targets missed")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
