"""`shardrules audit`: compiles a step for a machine that need not be there, and reports what it will really do."""

import argparse
from pathlib import Path

import jax

from shardrules.analysis.analyzer import ShardingAnalyzer
from shardrules.analysis.machine.targets import Target
from shardrules.cli.command import FINE, FOUND, Command
from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.files import write
from shardrules.cli.rules import load_rules
from shardrules.cli.step import Step, add_step, load_step
from shardrules.cli.subject import add_rules, read_mesh
from shardrules.cli.terminal import LEVELS, complain, complain_of, loud, show, working
from shardrules.core.axes import mesh_text
from shardrules.core.errors import HardwareError, TargetError


def _declare(parser: argparse.ArgumentParser) -> None:
    add_step(parser)
    add_rules(parser)
    parser.add_argument("--target", default="cpu", metavar="TARGET", help="cpu, cuda:h100:8, tpu:v5e:4x4, ...")
    parser.add_argument("--params", metavar="NAME", help="what the rules are for: an argument, or state/model in one")
    parser.add_argument("--batch", metavar="AXES", help="what splits the first dimension of other arguments: data")
    parser.add_argument("--donate", metavar="NAMES", help="arguments whose memory results may take: state")
    parser.add_argument("--level", choices=LEVELS, default="error", help="exit 1 for findings from here on")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="writes the report as JSON")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text or json")


def _run(args: argparse.Namespace) -> int:
    try:
        target = Target.parse(args.target)
    except (TargetError, HardwareError) as error:
        raise UsageError(f"--target: {one_line(error)}") from error
    known = None if args.rules is None else load_rules(args.rules)
    mesh = read_mesh(args.mesh) if args.mesh is not None else None if known is None else known.mesh
    if mesh is None:
        raise UsageError("a mesh is needed: --mesh data:4,model:2, axes and sizes")
    if target.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", mesh.size)
    step = load_step(args.step)
    donated = _donated(step, args.donate)
    shardings = None
    if known is not None:
        plan, shardings, whole = step.shardings(known, mesh, args.params, args.batch)
        complain_of(plan)
        if whole:
            complain(f"{', '.join(whole)}: whole on every device; --batch AXES splits the first dimension", "warning")
    with step.traced(), working(f"compiling {args.step} for {target} on {mesh_text(mesh)}"):
        report = ShardingAnalyzer(mesh).audit(
            step.fn, *step.args, in_shardings=shardings, donate_argnums=donated, target=target
        )
    if args.output is not None:
        write(args.output, f"{report.to_json()}\n")
    show(report.to_json() if args.format == "json" else str(report))
    return FOUND if loud(report.findings, args.level) else FINE


def _donated(step: Step, text: str | None) -> tuple[int, ...]:
    names = [name.strip() for name in text.split(",")] if text else []
    return tuple(step.number(name, f"--donate {text}") for name in names)


COMMAND = Command(
    "audit",
    "Compiles a step for any machine, and reports collectives, memory and surprises.",
    "STEP --rules RULES --mesh MESH [options]",
    (
        (
            "audit docs/examples/train_gpt.py:training --mesh data:4,model:2 \\\n"
            "      --rules docs/examples/train_gpt.py:RULES --params state/model"
        ),
    ),
    _declare,
    _run,
)
"""What `shardrules audit` is."""
