"""`shardrules check`: holds a model's plan to rules, to a golden plan and to a budget, before anybody merges."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardrules.cli.command import FINE, FOUND, Command
from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.files import read_text, write
from shardrules.cli.subject import Subject, add_subject, load_subject
from shardrules.cli.terminal import LEVELS, line_of, loud, show, style_of
from shardrules.core.check import bytes_text
from shardrules.core.errors import ConfigError, PlanError
from shardrules.core.fields import read_bytes
from shardrules.core.finding import Finding, merged
from shardrules.core.rule import ShardingPlan
from shardrules.core.storage.codec import finding_to_json


def _declare(parser: argparse.ArgumentParser) -> None:
    add_subject(parser)
    parser.add_argument("--golden", metavar="FILE", type=Path, help="the plan as it is to be, from plan -o FILE")
    parser.add_argument("--update", action="store_true", help="writes the golden plan anew")
    parser.add_argument("--budget", metavar="BYTES", help="the most that a device may hold: 16GiB")
    parser.add_argument("--level", choices=LEVELS, default="warning", help="what fails: findings from here on")
    parser.add_argument("--format", choices=("text", "github", "json"), default="text", help="text, github or json")


def _run(args: argparse.Namespace) -> int:
    if args.update and args.golden is None:
        raise UsageError("--update writes the golden plan: name it, --golden plan.json")
    budget = _budget(args.budget)
    try:
        subject = load_subject(args)
    except PlanError as error:
        findings = tuple(one for one in error.findings if isinstance(one, Finding)) or (_finding(error),)
        return _told(findings, None, args)
    if args.update:
        subject.plan.check()  # an unsound plan is no golden one
        if args.golden.exists():
            golden_plan(args.golden)  # it may be something else
        write(args.golden, f"{subject.plan.to_json()}\n")
    over = _over(subject, budget) if budget is not None else ()
    changed = _changes(subject.plan, args.golden) if args.golden is not None else ()
    return _told((*subject.findings, *over, *changed), subject, args)


def _told(findings: Sequence[Finding], subject: Subject | None, args: argparse.Namespace) -> int:
    """Prints what is to be told, and says whether that is too much."""
    told = loud(merged(findings), args.level)
    if args.format == "json":
        show(_as_json(told, subject))
    elif args.format == "github":
        for one in told:
            show(_github(one, args.rules))
    else:
        for one in told:
            show(line_of(one), style_of(one.severity))
    if args.format != "json":
        show(_summary(told, subject))
    return FOUND if told else FINE


def _summary(told: Sequence[Finding], subject: Subject | None) -> str:
    many = f"{len(told)} finding{'s' * (len(told) != 1)}"
    return many if subject is None else f"{many}: {subject.summary}"


def _github(found: Finding, rules: str | None) -> str:
    """A workflow command of GitHub, which puts it at the file of rules."""
    kind = {"error": "error", "warning": "warning", "note": "notice"}[found.severity]
    where = f"file={_escaped(rules)}," if rules is not None and rules.endswith((".toml", ".json")) else ""
    return f"::{kind} {where}title={_escaped(found.code)}::{_escaped(line_of(found), data=True)}"


def _escaped(text: str, *, data: bool = False) -> str:
    for char in "%\r\n" if data else "%\r\n:,":
        text = text.replace(char, f"%{ord(char):02X}")
    return text


def _as_json(told: Sequence[Finding], subject: Subject | None) -> str:
    data: dict[str, object] = {"findings": [finding_to_json(one) for one in told]}
    if subject is not None:
        sums = subject.plan.memory()
        data |= {
            "arrays": sums.leaf_count,
            "total_bytes": sums.total_bytes,
            "device_bytes": subject.device_bytes,
            "fingerprint": subject.plan.fingerprint,
        }
    return json.dumps(data, indent=1)


def _finding(error: PlanError) -> Finding:
    return Finding("error", "undecided", one_line(error))


def _budget(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return read_bytes("--budget", int(text) if text.isdecimal() else text)
    except ConfigError as error:
        raise UsageError(one_line(error)) from error


def _over(subject: Subject, budget: int) -> Iterator[Finding]:
    held = subject.device_bytes
    if held > budget:
        what = f"model and {subject.optimizer} together take" if subject.state else "all arrays together take"
        why = f"{what} {held:,} bytes per device ({bytes_text(held)}), the budget is {budget:,} ({bytes_text(budget)})"
        biggest = max(subject.plan.rows, key=lambda row: row.device_bytes, default=None)
        most = "" if biggest is None else f"; {biggest.path} takes the most, {bytes_text(biggest.device_bytes)}"
        yield Finding("error", "over-budget", why, remedy=f"Split more, or over more devices{most}")


def golden_plan(file: Path) -> ShardingPlan:
    """Reads a golden plan.

    **Arguments:**

    - `file`: the file.

    **Returns:**

    The plan.

    **Raises:**

    `UsageError` where there is none, or something else.
    """
    try:
        return ShardingPlan.from_json(read_text(file))
    except UsageError as error:
        raise UsageError(f"--golden: {error}; --update writes it") from error
    except PlanError as error:
        raise UsageError(f"--golden {file}: {one_line(error)}") from error


def _changes(plan: ShardingPlan, file: Path) -> Iterator[Finding]:
    """What is other than in a golden plan."""
    diff = golden_plan(file).diff(plan)
    accept = "If that is meant, run it again with --update"
    if diff.old_mesh != diff.new_mesh:
        why = f"the mesh is {diff.new_mesh}, in {file} it is {diff.old_mesh}"
        yield Finding("error", "changed", why, remedy=accept)
    for one in diff.changes:
        sizes = f"{bytes_text(one.old_bytes)} -> {bytes_text(one.new_bytes)} per device"
        why = f"{one.old or 'absent'} -> {one.new or 'absent'}, {sizes}"
        yield Finding("error", "changed", why, one.path, accept, one.shape)


COMMAND = Command(
    "check",
    "Holds a plan to rules, a golden plan and a budget: exit 0, or 1 with findings.",
    "MODEL --rules RULES --mesh MESH [options]",
    (
        (
            "check docs/examples/train_gpt.py:GPT --mesh data:4,model:2 \\\n"
            "      --rules docs/examples/train_gpt.py:RULES --budget 2MiB"
        ),
    ),
    _declare,
    _run,
)
"""What `shardrules check` is."""
