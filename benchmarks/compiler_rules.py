"""What is each rule about a compiler worth?

**Method.** Each rule that says what a compiler does is switched off, and the model is compared with the table of
`compiled_plans.py` again: without it, what share of peaks is within 15 % of the compiler's, how far is the largest
error, are plans still in the order of their compiled times (Kendall's tau, the mean over programs), and how much longer
than the fastest does the plan take that the model prefers? It is asked for the programs that were looked at while the
rules were made and for those that were set aside.

**Rules that it cannot show.** The table has only plans that were chosen with all rules on, and no memory that no
program of it uses. Programs compiled on 2026-11-28 (JAX 0.10.2) show what these rules are worth:

- Dots with vectors are reordered: the plan that `decode` gets for 8 H100s without it takes 1.88 ms, with it 1.52.
- Lone collectives pay latency: without it, that plan takes 1.54 ms.
- What branches take stays, and cumulative sums are kernels: without either, the peak of a program of
  `tests/programs/autoplan/compiled_peaks.py` is above all that the model says: 134 MB, said to be 121 at most, and 87,
  said to be 39.
- `GpuCompiler.moves_summed_dims`: planned programs tell the compiler to keep the order. `vit` for 8 H100s takes 15.95
  ms and 2.59 GB then, and 17.95 ms and 3.10 GB otherwise.
- `TpuCompiler.narrows`: gradients through 16 layers of a width of 512 take 804 MiB on four v5e, for 65,536 rows in
  float32. A limit between that and 1,028 MiB would be refused, as the stacks alone would take 1,024.

Run it as `python benchmarks/compiler_rules.py`; it compiles nothing. With `--write` it keeps the figures in
`compiler_rules.json`, of which the page on how autoplan works makes its table.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import attrs
import jax
from compiled_plans import MESH, PROGRAMS, SET_ASIDE, TARGETS, CompiledPlan, planning_mesh, read_layouts, read_table

import shardrules as sr
from shardrules.core.axes import AnyMesh
from shardrules.programs.autoplan.graph import machine as graph_machine
from shardrules.programs.autoplan.graph.machine import Machine
from shardrules.programs.autoplan.run.call import Call, read_call
from shardrules.programs.autoplan.solve.peak import Peak
from shardrules.programs.autoplan.solve.search import Task
from shardrules.programs.compilers import kernels, norms, order
from shardrules.programs.traced.program import TracedProgram, read_jaxpr

FIGURES = Path(__file__).with_suffix(".json")
PROGRAMS_ROOM = "shardrules.programs."


@final
@attrs.frozen(eq=False)
class Rule:
    """A rule, and what stands in its place while it is off."""

    name: str
    patches: tuple[tuple[str, Any], ...]
    """Pairs of a place, as `module:attribute` or `module:class.attribute`, and what to put there."""

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Switches the rule off inside a `with` block."""
        before = []
        for place, value in self.patches:
            module_name, _, path = place.partition(":")
            owner: Any = importlib.import_module(PROGRAMS_ROOM + module_name)
            *classes, name = path.split(".")
            for each in classes:
                owner = getattr(owner, each)
            before.append((owner, name, owner.__dict__[name]))
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)


@final
@attrs.frozen(eq=False)
class Case:
    """A program on a target, traced."""

    name: str
    target: str
    call: Call
    program: TracedProgram
    machine: Machine
    rows: tuple[CompiledPlan, ...]

    def task(self) -> Task:
        """Builds what the rules decide."""
        machine = attrs.evolve(self.machine, assumptions=graph_machine.Assumptions())
        return Task.of(self.program, machine, self.call.paths, self.call.feedback, {})


@final
@attrs.frozen
class Point:
    """What the model says of a compiled plan."""

    row: CompiledPlan
    peak: Peak
    cost: float

    @property
    def is_inside(self) -> bool:
        """Returns whether the compiler's peak is between the two."""
        return self.peak.at_least <= self.row.peak_bytes <= self.peak.at_most

    @property
    def excess(self) -> float:
        """Returns the compiler's peak over the most that is said."""
        return self.row.peak_bytes / self.peak.at_most

    @property
    def is_misjudged(self) -> bool:
        """Returns whether the plan is called certain to fit where it takes a byte too much."""
        return self.peak.fit(self.row.peak_bytes - 1) == "certain"

    @property
    def ratio(self) -> float:
        """The expected peak over the compiler's peak."""
        return self.peak.expected / self.row.peak_bytes


def read_cases(names: Sequence[str], target: sr.Target, mesh: AnyMesh) -> list[Case]:
    """Traces the programs that are in the table."""
    table, cases = read_table(), []
    machine = Machine.of(mesh, target.hardware, None)
    for name in names:
        rows = tuple(row for key, row in table.items() if key[:2] == (name, str(target)))
        if not rows:
            continue
        step, args = PROGRAMS[name].build(mesh.size, False)
        call = read_call(step, args, mesh, name, None)
        cases.append(Case(name, str(target), call, read_jaxpr(call.jaxpr), machine, rows))
        jax.clear_caches()
    return cases


def points(case: Case) -> list[Point]:
    """What the model says of all plans of a case."""
    task = case.task()
    result = []
    for row in case.rows:
        choice = read_layouts(task.problem, row.layouts)
        if choice is None:
            print(f"{case.name}, {case.target}, {row.plan}: the problem has other layouts", file=sys.stderr)
            continue
        each = task.tight() if row.limit_bytes is not None else task
        result.append(Point(row, each.peak(choice), task.problem.cost(choice)))
    return result


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns how far two figures of plans agree in their order; differences below 1 % do not count."""
    score, count = 0, 0
    for (a, b), (c, d) in itertools.combinations(pairs, 2):
        if abs(b - d) <= 0.01 * max(b, d):
            continue
        count += 1
        score += 0 if abs(a - c) <= 1e-6 * max(a, c) else 1 if (a < c) == (b < d) else -1
    return score / count if count else math.nan


def summary(all_points: Sequence[list[Point]], near: float) -> dict[str, float]:
    """Summarizes how near the model is to the compiler."""
    flat = [point for points in all_points for point in points]
    free = [point for point in flat if point.row.limit_bytes is None]
    taus = [kendall([(point.cost, point.row.seconds) for point in points]) for points in all_points]
    taus = [tau for tau in taus if not math.isnan(tau)]
    chosen = [
        min(points, key=lambda point: point.cost).row.seconds / min(point.row.seconds for point in points)
        for points in all_points
        if points
    ]
    if not flat or not free:
        return {}
    return {
        "near": sum(abs(point.ratio - 1) <= near for point in free) / len(free),
        "spread": math.exp(sum(abs(math.log(point.ratio)) for point in free) / len(free)) - 1,
        "least": min(point.ratio for point in free),
        "most": max(point.ratio for point in free),
        "safe": sum(point.row.peak_bytes <= point.peak.at_most for point in free) / len(free),
        "inside": sum(point.is_inside for point in free) / len(free),
        "width": statistics.median(point.peak.at_most / point.peak.at_least - 1 for point in free),
        "time": time_spread(all_points),
        "tau": sum(taus) / len(taus) if taus else math.nan,
        "chosen": math.exp(sum(map(math.log, chosen)) / len(chosen)),
        "worst": max(chosen),
    }


def time_spread(all_points: Sequence[list[Point]]) -> float:
    """Returns how far modelled times of the plans of a program differ in their ratio to the compiled ones."""
    spreads = []
    for points in all_points:
        logs = [math.log(point.cost / point.row.seconds) for point in points if point.row.limit_bytes is None]
        middle = statistics.median(logs) if logs else 0.0
        spreads += [abs(value - middle) for value in logs]
    return math.exp(sum(spreads) / len(spreads)) - 1 if spreads else math.nan


def line(name: str, halves: Sequence[dict[str, float]]) -> str:
    """A line of the table."""
    cells = ["".join(f"{half[key]:8.3f}" if half else f"{'':8}" for key in COLUMNS) for half in halves]
    return f"{name:44}" + "  |".join(cells)


ALL_ON = "(all rules on)"
COLUMNS = ("near", "inside", "safe", "width", "spread", "most", "time", "tau", "chosen", "worst")


def off(*patches: Any) -> tuple[tuple[str, Any], ...]:
    """Pairs up places and values."""
    return tuple(zip(patches[::2], patches[1::2], strict=True))


def nothing(*_: Any, **__: Any) -> None:
    """Returns `None`."""


def no_dict(*_: Any, **__: Any) -> dict[Any, Any]:
    """Returns nothing at all."""
    return {}


def no_items(*_: Any, **__: Any) -> tuple[()]:
    """Returns nothing at all."""
    return ()


def false(*_: Any, **__: Any) -> bool:
    """Returns `False`."""
    return False


def orders(gpus: Sequence[order.Order], others: Sequence[order.Order]) -> tuple[tuple[str, Any], ...]:
    """Pairs up the orders of GPUs, and of TPUs and CPUs, with their places."""
    places = [f"compilers.compiler:{name}Compiler.orders" for name in ("Gpu", "Tpu", "Cpu")]
    on_gpus, on_others = property(lambda self: gpus), property(lambda self: others)
    return off(places[0], on_gpus, places[1], on_others, places[2], on_others)


def rules() -> list[Rule]:
    """All rules."""
    late, early, written = order.late_order, order.early_order, order.program_order
    no_norms = classmethod(lambda cls, program, written, device_count: norms.NormGradients({}, {}))
    return [
        Rule("rows kept on chip share a read", off("compilers.fusion:_join_rows", nothing)),
        Rule("an optimizer is one kernel", off("compilers.fusion:_join_optimizer", nothing)),
        Rule("dots with vectors are reordered", off("compilers.compiler:GpuCompiler.reads_in_order", False)),
        Rule("swapped dims are views", off("compilers.kernels:_is_free_transpose", false)),
        Rule("short rows are on chip", off("compilers.fusion:reduced_rows", no_items)),
        Rule("rows that end on chip are written", off("compilers.fusion:_normalized", no_items)),
        Rule("what is costly is written", off("compilers.fusion:with_costly", lambda program, written, _: written)),
        Rule(
            "what has many copies is written", off("compilers.fusion:with_copied", lambda program, written, _: written)
        ),
        Rule("bfloat16 is computed in float32", off("compilers.compiler:CpuCompiler.widens_bfloat16", False)),
        Rule("products for gradients of norms are written", off("compilers.norms:NormGradients.of", no_norms)),
        Rule("order as written", orders((late, early), (early,))),
        Rule("early updates", orders((late, written), (written,))),
        Rule("late matmuls", orders((early, written), (early, written))),
        Rule("chains write over what they read", off("autoplan.solve.memory:_overwrites", false)),
        Rule("results are written over arguments", off("autoplan.solve.memory:_overwritten", no_dict)),
        Rule("updates are in place", off("autoplan.solve.memory:_updated", no_dict)),
        Rule("ragged matmuls copy rows", off("autoplan.solve.memory:_expansion_stays", no_items)),
        Rule("zeros of one shape are made together", off("autoplan.solve.memory:_zeros", no_dict)),
        Rule("places in windows are written", off("autoplan.solve.memory:_window_stays", no_items)),
        Rule("what branches take stays", off("autoplan.solve.memory:_branch_ends", no_dict)),
        Rule("lone collectives pay latency", off("autoplan.graph.edges:EdgeBuilder._is_alone", false)),
        Rule("cumulative sums are kernels", off("compilers.kernels:WHOLE", kernels.WHOLE - CUMULATIVE)),
    ]


CUMULATIVE = frozenset(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"))


def plan_lines(case: Case) -> Iterator[str]:
    """What the model says of each plan of a case: the peak, its range, and the time, over the compiler's."""
    for point in points(case):
        row, peak = point.row, point.peak
        yield (
            f"{case.name:20}{row.plan[:46]:48}{row.peak_bytes / 1e9:8.2f} GB {point.ratio:6.2f} "
            f"({peak.at_least / row.peak_bytes:.2f} to {peak.at_most / row.peak_bytes:.2f}) "
            f"{1e3 * row.seconds:9.2f} ms {point.cost / row.seconds:6.2f}"
        )


def margin_lines(halves: Sequence[Sequence[Case]]) -> Iterator[str]:
    """By how much peaks exceed their range at the most, and what is called certain to fit and does not."""
    for name, half in zip(("seen", "set aside"), halves, strict=True):
        flat = [(point.excess, case.name, point.is_misjudged) for case in half for point in points(case)]
        if flat:
            excess, program, _ = max(flat)
            count, wrong = len(flat), sum(is_misjudged for *_, is_misjudged in flat)
            beyond = sum(each > 1 for each, *_ in flat)
            yield (
                f"{name}: {beyond} of {count} plans above their range, {excess:.3f} times its end at most ({program}); "
                f"{wrong} called certain to fit in a byte less than they take"
            )


def measured(halves: Sequence[Sequence[Case]], near: float) -> list[dict[str, float]]:
    """Summarizes both halves of the programs."""
    return [summary([points(case) for case in half], near) for half in halves]


def write_figures(figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes what was measured for each target, a rule on each line."""
    parts = [
        f"{json.dumps(target)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(halves)}" for name, halves in rules_off.items())
        + "\n}"
        for target, rules_off in figures.items()
    ]
    FIGURES.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="What each rule about a compiler is worth.")
    parser.add_argument("--programs", nargs="*", choices=PROGRAMS, default=list(PROGRAMS), metavar="PROGRAM")
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--plans", action="store_true", help="show what the model says of every plan")
    parser.add_argument("--margins", action="store_true", help="show by how much peaks exceed their range")
    parser.add_argument("--rules", nargs="*", help="only rules whose names contain one of these")
    parser.add_argument("--write", action="store_true", help="keep the figures of these targets for the page")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for target in map(sr.Target.parse, options.targets):
        near = 0.15 if target.platform == "cuda" else 0.25
        cases = read_cases(options.programs, target, planning_mesh(target, target.mesh(sr.mesh_shape(MESH))))
        halves = [[case for case in cases if (case.name in SET_ASIDE) == is_aside] for is_aside in (False, True)]
        if options.plans:
            print(*(text for case in cases for text in plan_lines(case)), sep="\n")
            continue
        if options.margins:
            print(target, *margin_lines(halves), sep="\n  ", flush=True)
            continue
        print(f"\n{target}: {len(halves[0])} programs seen, {len(halves[1])} set aside")
        print(f"{'without':44}" + "  |".join(["".join(f"{column:>8}" for column in COLUMNS)] * 2))

        figures = {ALL_ON: measured(halves, near)}
        print(line(ALL_ON, figures[ALL_ON]), flush=True)
        for rule in rules():
            if options.rules and not any(word in rule.name for word in options.rules):
                continue
            start = time.monotonic()
            with rule.off():
                figures[rule.name] = measured(halves, near)
            print(line(rule.name, figures[rule.name]), f"  {time.monotonic() - start:.0f} s", flush=True)
        if options.write:
            write_figures({**json.loads(FIGURES.read_text()), str(target): figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
