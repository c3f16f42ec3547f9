"""`shardrules audit`: compiles a step for any machine, without having one, and reports what it will do there."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import attrs
import jax

from shardrules.cli.command import FINDINGS, SUCCESS, Command
from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.files import write
from shardrules.cli.objects import user_code
from shardrules.cli.rules import load_rules
from shardrules.cli.step import Step, add_step, load_step, read_hardware
from shardrules.cli.subject import add_rules, read_mesh
from shardrules.cli.terminal import add_level, complain, complain_of, failing, show, working
from shardrules.core.axes import mesh_text
from shardrules.core.errors import HardwareError, ShardRulesError, TargetError, TraceError
from shardrules.programs.audits.audit import audit
from shardrules.programs.machine.flags import read_flags
from shardrules.programs.machine.targets import Target
from shardrules.programs.profiles.trace import trace_files
from shardrules.rules.files.rules_file import Limits

_T = TypeVar("_T")


def _declare(parser: argparse.ArgumentParser) -> None:
    add_step(parser)
    add_rules(parser)
    parser.add_argument("--target", default="cpu", metavar="TARGET", help="cpu, cuda:h100:8, tpu:v5e:4x4, ...")
    parser.add_argument("--hardware", metavar="NAME", help="a sheet, or a file from Hardware.save")
    parser.add_argument("--flags", metavar="FLAGS", help="compiler flags: --flags=--xla_a=1, maxtext:v5p")
    parser.add_argument("--params", metavar="NAME", help="the argument, or a part of it, for the rules: state/model")
    parser.add_argument("--batch", metavar="AXES", help="axes that split dimension 0 of other arguments: data")
    parser.add_argument("--donate", metavar="NAMES", help="arguments whose memory results may reuse: state")
    add_level(parser)
    parser.add_argument("--trace", metavar="DIR", type=Path, help="compare with a trace that jax.profiler.trace wrote")
    parser.add_argument("--module", metavar="NAME", help="the program's name in the trace: jit_train_step")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write the report as JSON")
    parser.add_argument("--timeline", metavar="FILE", type=Path, help="write what runs when, for ui.perfetto.dev")
    parser.add_argument("--format", choices=("text", "json"), metavar="FORMAT", default="text", help="text or json")


def _run(args: argparse.Namespace) -> int:
    target = _target(args)
    hardware = None if args.hardware is None else read_hardware(args.hardware)
    rules = None if args.rules is None else load_rules(args.rules)
    mesh = read_mesh(args.mesh) if args.mesh is not None else None if rules is None else rules.file.mesh
    if mesh is None:
        raise UsageError("no mesh: pass --mesh data:4,model:2, axes and sizes")
    if target.platform == "cpu":
        # Must be set before JAX starts: a CPU program is compiled for real devices.
        jax.config.update("jax_num_cpu_devices", mesh.size)
    for option in ("params", "batch") if rules is None else ():
        if getattr(args, option) is not None:
            raise UsageError(f"--{option} says what rules are for: pass --rules, too")
    if args.module is not None and args.trace is None:
        raise UsageError("--module names a program of a trace: pass --trace, too")
    if args.trace is not None:
        # A folder without a trace is reported before the compiler runs.
        _refusing_traces(lambda: trace_files(args.trace))
    step = load_step(args.step)
    donated = _donated(step, args.donate)
    shardings = None
    if rules is not None:
        plan, shardings, whole = step.shardings(rules, mesh, args.params, args.batch)
        complain_of(plan)
        if whole:
            names = ", ".join(whole)
            complain(f"{names}: whole on every device; --batch AXES splits the first dimension", "warning")
    with (
        user_code(f"{args.step}: the step", ShardRulesError),
        working(f"compiling {args.step} for {target} on {mesh_text(mesh)}"),
    ):
        report = audit(
            step.fn,
            *step.args,
            mesh=mesh,
            in_shardings=shardings,
            donate_argnums=donated,
            target=target,
            hardware=hardware,
        )
    if args.output is not None:
        write(args.output, f"{report.to_json(timeline=True)}\n")
    if args.timeline is not None:
        write(args.timeline, report.timeline.to_json())
    if args.trace is None:
        show(report.to_json() if args.format == "json" else str(report))
    else:
        comparison = _refusing_traces(lambda: report.compare(args.trace, module=args.module))
        show(comparison.to_json() if args.format == "json" else f"{report}\n\n{comparison}")
    return FINDINGS if failing(report.findings, args, Limits() if rules is None else rules.file.limits) else SUCCESS


def _refusing_traces(read: Callable[[], _T]) -> _T:
    """Returns what `read` does, with an error in one line that lists the programs of the trace."""
    try:
        return read()
    except TraceError as error:
        hint = str(error).replace("pass module=", "pass --module ")
        raise UsageError(f"--trace: {hint}") from error


def _target(args: argparse.Namespace) -> Target:
    try:
        target = Target.parse(args.target)
    except (TargetError, HardwareError) as error:
        raise UsageError(f"--target: {one_line(error)}") from error
    try:
        # They come after the flags of the target itself, and so change these.
        return attrs.evolve(target, flags=(*target.flags, *read_flags(args.flags or "")))
    except TargetError as error:
        raise UsageError(f"--flags: {one_line(error)}") from error


def _donated(step: Step, text: str | None) -> tuple[int, ...]:
    names = [name.strip() for name in text.split(",")] if text else []
    return tuple(step.index_of(name, f"--donate {text}") for name in names)


COMMAND = Command(
    "audit",
    "Compiles a step for any machine, and reports collectives, memory and surprises.",
    "STEP --rules RULES --mesh MESH [options]",
    (
        (
            "audit docs/examples/train_gpt.py:training --mesh data:4,model:2 \\\n"
            "      --rules docs/examples/train_gpt.py:RULES --params state/model --batch data"
        ),
    ),
    _declare,
    _run,
    "findings",
)
