"""`shardrules check`: compares a model's plan with a golden plan and a budget, for CI."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardrules.cli.command import FINDINGS, SUCCESS, Command
from shardrules.cli.errors import UsageError, byte_option, one_line
from shardrules.cli.faults import faults
from shardrules.cli.files import read_text, write
from shardrules.cli.models import read_plan
from shardrules.cli.subject import Subject, add_subject, load_subject, read_rules
from shardrules.cli.terminal import STYLES, add_level, failing, finding_line, show
from shardrules.core.errors import PlanError
from shardrules.core.finding import Finding, merged
from shardrules.core.rule import ShardingPlan
from shardrules.core.storage.codec import finding_to_json
from shardrules.core.storage.records import Format, read_json
from shardrules.core.text import bytes_text
from shardrules.rules.files.rules_file import Limits

_FORMAT = Format("shardrules_check", 1)

_FORMATS = ("text", "github", "json")


def _declare(parser: argparse.ArgumentParser) -> None:
    add_subject(parser)
    parser.add_argument("--golden", metavar="FILE", type=Path, help="the expected plan, from plan -o FILE")
    parser.add_argument("--update", action="store_true", help="write the golden plan")
    parser.add_argument("--budget", metavar="BYTES", help="memory that a device may use: 16GiB")
    add_level(parser)
    parser.add_argument("--format", choices=_FORMATS, metavar="FORMAT", default="text", help=", ".join(_FORMATS))


def _run(args: argparse.Namespace) -> int:
    rules = read_rules(args)
    limits = Limits() if rules is None else rules.file.limits
    _fill_in(args, limits)
    if args.update and args.golden is None:
        raise UsageError("--update needs the name of the golden plan: --golden plan.json")
    budget = byte_option("--budget", args.budget)
    try:
        subject = load_subject(args, rules)
    except PlanError as error:
        # Undecided leaves are findings too, in every format.
        findings = tuple(finding for finding in error.findings if isinstance(finding, Finding))
        findings = findings or (Finding("error", "undecided", one_line(error)),)
        return _print_findings(failing(faults(findings), args, limits), None, args)
    if args.update:
        # A golden plan must be sound.
        subject.plan.check()
        if args.golden.exists() and not _is_replaced(args.golden):
            raise UsageError(f"--update would replace {args.golden}, which is not a plan: name another file")
        write(args.golden, f"{subject.plan.to_json()}\n", makes_folders=True)
    over = _over_budget(subject, budget) if budget is not None else ()
    changed = _changes(subject.plan, args.golden) if args.golden is not None else ()
    findings = merged((*subject.faults, *over, *changed))
    return _print_findings(failing(findings, args, limits), subject, args)


def _fill_in(args: argparse.Namespace, limits: Limits) -> None:
    """Takes from the rules file what the command line does not say."""
    if args.golden is None:
        args.golden = limits.golden
    if args.budget is None and limits.budget is not None:
        args.budget = str(limits.budget)


def _print_findings(listed: Sequence[Finding], subject: Subject | None, args: argparse.Namespace) -> int:
    """Prints findings, and returns the exit code."""
    if args.format == "json":
        show(_as_json(listed, subject))
    elif args.format == "github":
        for finding in listed:
            show(_github_command(finding, args.rules))
    else:
        for finding in listed:
            show(finding_line(finding), STYLES[finding.severity])
    if args.format != "json":
        show(_summary(listed, subject))
    return FINDINGS if listed else SUCCESS


def _summary(listed: Sequence[Finding], subject: Subject | None) -> str:
    many = f"{len(listed)} finding{'s' * (len(listed) != 1)}"
    return many if subject is None else f"{many}: {subject.summary}"


def _github_command(finding: Finding, rules: str | None) -> str:
    """A workflow command, with which GitHub shows the finding at the file of rules."""
    kind = {"error": "error", "warning": "warning", "note": "notice"}[finding.severity]
    location = f"file={_escape(rules)}," if rules is not None and rules.endswith((".toml", ".json")) else ""
    return f"::{kind} {location}title={_escape(finding.code)}::{_escape(finding_line(finding), data=True)}"


def _escape(text: str, *, data: bool = False) -> str:
    # GitHub reads these characters as the syntax of its commands.
    for char in "%\r\n" if data else "%\r\n:,":
        text = text.replace(char, f"%{ord(char):02X}")
    return text


def _as_json(listed: Sequence[Finding], subject: Subject | None) -> str:
    data: dict[str, object] = {"findings": [finding_to_json(finding) for finding in listed]}
    if subject is not None:
        memory = subject.plan.memory()
        data |= {
            "arrays": memory.leaf_count,
            "total_bytes": memory.total_bytes,
            "device_bytes": subject.device_bytes,
            "fingerprint": subject.plan.fingerprint,
        }
    return _FORMAT.write(data)


def _over_budget(subject: Subject, budget: int) -> Iterator[Finding]:
    used = subject.device_bytes
    if used > budget:
        owner = f"model and {subject.optimizer} together take" if subject.state else "all arrays together take"
        why = f"{owner} {used:,} bytes per device ({bytes_text(used)}), the budget is {budget:,} ({bytes_text(budget)})"
        biggest = max(subject.plan.rows, key=lambda row: row.device_bytes, default=None)
        most = "" if biggest is None else f"; {biggest.path} takes the most, {bytes_text(biggest.device_bytes)}"
        yield Finding("error", "over-budget", why, remedy=f"Split more, or over more devices{most}")


def golden_plan(file: Path) -> ShardingPlan:
    """Reads a golden plan."""
    try:
        return read_plan(file)
    except UsageError as error:
        remedy = "" if file.exists() and not _is_replaced(file) else "; --update writes it"
        raise UsageError(f"--golden: {error}{remedy}") from error


def _is_replaced(file: Path) -> bool:
    """`--update` replaces a plan, even one that is broken, but no other file."""
    if not file.is_file():
        return False
    text = read_text(file)
    try:
        data = read_json(text)
        return isinstance(data, dict) and "shardrules" in data
    except ValueError:
        # With the marks of a merge, cut off, or empty: other JSON may be invalid, too, as a tsconfig with comments is.
        return '"shardrules"' in text or '{"shardrules"'.startswith("".join(text.split()))


def _changes(plan: ShardingPlan, file: Path) -> Iterator[Finding]:
    """The differences from a golden plan."""
    diff = golden_plan(file).diff(plan)
    accept = "To accept it, run again with --update"
    if diff.old_mesh != diff.new_mesh:
        why = f"the mesh is {diff.new_mesh}, but {diff.old_mesh} in {file}"
        yield Finding("error", "changed", why, remedy=accept)
    for change in diff.changes:
        sizes = f"{bytes_text(change.old_bytes)} -> {bytes_text(change.new_bytes)} per device"
        why = f"{change.old or 'absent'} -> {change.new or 'absent'}, {sizes}"
        yield Finding("error", "changed", why, change.path, accept, change.shape)


COMMAND = Command(
    "check",
    "Checks a plan against a golden plan and a memory budget, for CI.",
    "MODEL --rules RULES --mesh MESH [options]",
    (
        (
            "check docs/examples/train_gpt.py:GPT --mesh data:4,model:2 \\\n"
            "      --rules docs/examples/train_gpt.py:RULES --budget 2MiB"
        ),
    ),
    _declare,
    _run,
    "findings",
)
