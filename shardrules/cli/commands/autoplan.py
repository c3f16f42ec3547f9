"""`shardrules autoplan`: finds the plan of a step by itself."""

import argparse
from pathlib import Path

from shardrules.analysis.machine.hardware import sheets
from shardrules.cli.command import FINE, Command
from shardrules.cli.errors import UsageError
from shardrules.cli.files import write
from shardrules.cli.rules import load_rules
from shardrules.cli.step import add_step, load_step
from shardrules.cli.subject import planned, read_mesh
from shardrules.cli.terminal import complain_of, show, working
from shardrules.core.errors import suggest
from shardrules.planning.answer.frontier import Frontier
from shardrules.planning.answer.report import AutoPlanReport
from shardrules.planning.autoplan import autoplan


def _declare(parser: argparse.ArgumentParser) -> None:
    add_step(parser)
    parser.add_argument(
        "--mesh", metavar="MESH", required=True, help="data:4,model:2; or 8, to try meshes of 8 devices"
    )
    parser.add_argument("--memory-limit", metavar="BYTES", help="the most that a device may hold: 40GiB")
    parser.add_argument("--hardware", metavar="NAME", help="what it is to run on: cuda:h100 (default), tpu:v5e, ...")
    parser.add_argument("--pins", metavar="RULES", help="rules for the arguments, which are kept to")
    parser.add_argument("--time-limit", metavar="SECONDS", type=float, default=60.0, help="for a search (default 60)")
    parser.add_argument(
        "--frontier", metavar="N", type=int, default=0, help="the best plan for N budgets of memory, too"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="writes it as JSON, which plan, diff and report read"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text or json")


def _run(args: argparse.Namespace) -> int:
    if args.hardware is not None and args.hardware not in sheets():
        near = suggest(args.hardware, sheets())
        raise UsageError(f"--hardware: unknown hardware {args.hardware!r}{near}; the sheets are {', '.join(sheets())}")
    if not args.time_limit > 0:
        raise UsageError(f"--time-limit is a number of seconds above 0, got {args.time_limit}")
    if args.frontier < 0 or args.frontier == 1:
        raise UsageError(f"--frontier is a number of budgets, 2 or more; got {args.frontier}")
    mesh = int(args.mesh) if args.mesh.isdecimal() and int(args.mesh) else read_mesh(args.mesh)
    pins = None if args.pins is None else load_rules(args.pins)
    limit = int(args.memory_limit) if (args.memory_limit or "").isdecimal() else args.memory_limit
    step = load_step(args.step)
    if pins is not None and not isinstance(mesh, int):
        pins.check_axes(mesh)
        plan = planned(pins.rule, step.args, mesh)
        if all(one.spec is None for one in plan.decisions):
            raise UsageError(
                f"--pins {args.pins} pins nothing: no path begins with an argument's number, {plan.paths[0]!r}"
            )
        complain_of(plan, ("dead-pin", "dead-pattern", "shadowed-pattern"))  # of the rest autoplan takes care
    with step.traced(), working(f"planning {args.step}"):
        found = autoplan(
            step.fn,
            *step.args,
            mesh=mesh,
            memory_limit=limit,
            pins=None if pins is None else pins.rule,
            hardware=sheets()[args.hardware or "cuda:h100"],
            time_limit=args.time_limit,
        )
    with working(f"searching {args.frontier} budgets"):
        report = AutoPlanReport.of(found, frontier=args.frontier)
    if args.output is not None:
        write(args.output, f"{report.to_json()}\n")
    if args.format == "json":
        show(report.to_json())
    else:
        show(str(found))
        if report.frontier:
            show(f"\n{Frontier(report.name, report.mesh, report.frontier)}")
    return FINE


COMMAND = Command(
    "autoplan",
    "Finds where all arrays of a step are to be, within a limit of memory.",
    "STEP --mesh MESH [options]",
    (
        "autoplan docs/examples/train_gpt.py:training --mesh data:4,model:2",
        "autoplan docs/examples/train_gpt.py:training --mesh 8 -o auto.json",
    ),
    _declare,
    _run,
)
"""What `shardrules autoplan` is."""
