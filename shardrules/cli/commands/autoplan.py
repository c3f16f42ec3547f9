"""`shardrules autoplan`: finds the best plan of a step."""

import argparse
import functools
import re
from pathlib import Path
from typing import Any

from shardrules.cli.command import SUCCESS, Command
from shardrules.cli.errors import UsageError, byte_option
from shardrules.cli.files import write
from shardrules.cli.objects import user_code
from shardrules.cli.rules import load_rules
from shardrules.cli.rules_out import add_rules_out, alternatives, check_rules_out, write_rules
from shardrules.cli.step import add_step, load_step, read_hardware
from shardrules.cli.subject import make_plan, read_mesh
from shardrules.cli.terminal import complain_of, show, working
from shardrules.core.axes import mesh_text
from shardrules.core.errors import ShardRulesError
from shardrules.core.fields import whole_number
from shardrules.core.finding import listing
from shardrules.programs.autoplan.answer.frontier import Frontier
from shardrules.programs.autoplan.answer.report import AutoPlanReport
from shardrules.programs.autoplan.autoplan import MESH_AXES, autoplan
from shardrules.programs.autoplan.query import pins_plan
from shardrules.programs.compiling.arguments import argument_names


def _declare(parser: argparse.ArgumentParser) -> None:
    add_step(parser)
    parser.add_argument("--mesh", metavar="MESH", required=True, help="data:4,model:2, or 8 to try meshes of 8 devices")
    parser.add_argument("--memory-limit", metavar="BYTES", help="memory that a device may use: 40GiB")
    parser.add_argument(
        "--hardware", metavar="NAME", help="cuda:h100 (default), tpu:v5e, ..., or a file from Hardware.save"
    )
    parser.add_argument("--pins", metavar="RULES", help="rules that fix the arguments they match")
    parser.add_argument(
        "--time-limit", metavar="SECONDS", type=float, default=60.0, help="for the search (default: 60)"
    )
    parser.add_argument(
        "--prove", action="store_true", help="compile the best few plans, and let the compiler decide which fit"
    )
    parser.add_argument(
        "--frontier", metavar="N", type=int, default=0, help="also find the best plan for N memory budgets"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write it as JSON, which plan, diff and report read"
    )
    add_rules_out(parser)
    parser.add_argument("--format", choices=("text", "json"), metavar="FORMAT", default="text", help="text or json")


def _run(args: argparse.Namespace) -> int:
    hardware = read_hardware(args.hardware or "cuda:h100")
    if not args.time_limit > 0:
        raise UsageError(f"--time-limit must be a number of seconds above 0, got {args.time_limit}")
    if args.frontier < 0 or args.frontier == 1:
        raise UsageError(f"--frontier must be 2 budgets or more, got {args.frontier}")
    check_rules_out(args)
    # A plain number of devices means all meshes of that size.
    if re.fullmatch(r"-\d+|0+", args.mesh):
        raise UsageError(
            f"--mesh {args.mesh}: a number of devices is 1 or more; or write axes and sizes, data:4,model:2"
        )
    mesh = whole_number(args.mesh) or read_mesh(args.mesh)
    pins = None if args.pins is None else load_rules(args.pins)
    if pins is not None:  # before anything is traced
        if isinstance(mesh, int):
            pins.check_axis_names(MESH_AXES, f"meshes of {mesh} devices have {' and '.join(MESH_AXES)}")
        else:
            pins.check_axis_names(mesh.axis_names, f"the mesh is {mesh_text(mesh)}")
    memory_limit = byte_option("--memory-limit", args.memory_limit)
    step = load_step(args.step)
    if pins is not None and not isinstance(mesh, int):
        plan = make_plan(pins.file.rules, step.args, mesh, functools.partial(pins_plan, step.fn))
        # Rules that were written for a model match nothing here, since each path begins with the index of an argument.
        if all(decision.spec is None for decision in plan.decisions):
            raise UsageError(
                f"--pins {args.pins} matches no array: paths begin with the name or the index of an argument, as "
                f"{argument_names(step.fn, 1)[0]!r} or {plan.paths[0]!r}"
            )
        # Only these, since autoplan resolves what other findings are about, such as dimensions that do not divide.
        complain_of(plan, ("dead-pin", "dead-pattern", "shadowed-pattern"))
    with user_code(f"{args.step}: the step", ShardRulesError), working(f"planning {args.step}"):
        result = autoplan(
            step.fn,
            *step.args,
            mesh=mesh,
            memory_limit=memory_limit,
            pins=None if pins is None else pins.file.rules,
            hardware=hardware,
            time_limit=args.time_limit,
            prove=args.prove,
        )
    with working(f"searching {args.frontier} budgets"):
        report = AutoPlanReport.of(result, frontier=args.frontier)
    if args.output is not None:
        write(args.output, f"{report.to_json()}\n")
    if args.rules_out is not None:
        with working("writing rules"):
            rule: Any = result.to_rules()
            next_best = alternatives(result, len(rule.rules))
            title = f"Rules for {args.step}, as `shardrules autoplan` planned it: yours to edit."
            scope = "Paths begin with the index of an argument."
            write_rules(args.rules_out, (title, scope), result.plan, rule, next_best)
    if args.format == "json":
        show(report.to_json())
    else:
        show(str(result))
        if report.frontier:
            show(f"\n{Frontier(report.name, report.mesh, report.frontier)}")
        elif args.frontier:
            show(listing(report.findings[len(result.findings) :]))
    return SUCCESS


COMMAND = Command(
    "autoplan",
    "Finds the fastest layout of all arrays of a step within a memory limit.",
    "STEP --mesh MESH [options]",
    (
        "autoplan docs/examples/train_gpt.py:training --mesh data:4,model:2",
        "autoplan docs/examples/train_gpt.py:training --mesh 8 -o auto.json",
    ),
    _declare,
    _run,
    "nothing fits",
)
