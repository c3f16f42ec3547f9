"""`shardrules diff`: what changed between two plans, or two audits, and what the change sends."""

import argparse
from pathlib import Path
from typing import Any

import attrs

from shardrules.cli.command import FINDINGS, SUCCESS, Command
from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.files import read_text, write
from shardrules.cli.models import read_json, read_plan
from shardrules.cli.terminal import show
from shardrules.core.errors import ReportError
from shardrules.core.storage.codec import finding_to_json
from shardrules.core.storage.records import Format
from shardrules.core.views.diff import PlanDiff
from shardrules.page.difference import diff_page
from shardrules.programs.audits.diff import AuditDiff
from shardrules.programs.audits.report import AuditReport
from shardrules.programs.autoplan.answer.move import PlanMove

_FORMAT = Format("shardrules_diff", 1)


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD", type=Path, help="the JSON of a plan, of an autoplan, or of an audit")
    parser.add_argument("new", metavar="NEW", type=Path, help="another of the same kind")
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=_page,
        nargs="?",
        const=Path("diff.html"),
        help="write a page of two plans (default: diff.html)",
    )
    parser.add_argument("--exit-code", action="store_true", help="exit 1 if they differ, as git diff does")
    parser.add_argument("--format", choices=("text", "json"), metavar="FORMAT", default="text", help="text or json")


def _page(text: str) -> Path:
    """The name of a page: `--html old.json new.json` must not replace a plan."""
    if not text.lower().endswith((".html", ".htm")):
        raise argparse.ArgumentTypeError(f"a page ends in .html, {text!r} does not; write OLD NEW --html")
    return Path(text)


def _run(args: argparse.Namespace) -> int:
    are_audits = [_is_audit(file) for file in (args.old, args.new)]
    if are_audits[0] != are_audits[1]:
        audit, plan = (args.old, args.new) if are_audits[0] else (args.new, args.old)
        raise UsageError(f"{audit} is an audit and {plan} is not: compare two audits, or two plans")
    if are_audits[0] and args.html is not None:
        raise UsageError(f"--html is for plans, and {args.old} is an audit: shardrules report --audit shows it")
    if are_audits[0]:
        changes: Any = _read_audit(args.old).diff(_read_audit(args.new))
        show(_as_json("audits", changes) if args.format == "json" else str(changes))
    else:
        old, new = read_plan(args.old), read_plan(args.new)
        changes = old.diff(new)
        # Equal plans move nothing, and say no more than that.
        move = PlanMove.between(old, new) if changes else None
        if args.format == "json":
            show(_as_json("plans", changes, None if move is None else attrs.asdict(move)))
        else:
            show(str(changes) if move is None else f"{changes}\n{move}")
        if args.html is not None:
            title = f"{args.old.name} → {args.new.name}"
            write(args.html, diff_page(old, new, title=title, command=args.command_line))
            if args.format == "text":  # JSON has to stay one document
                show(f"{args.html}: the page of this difference")
    return FINDINGS if changes and args.exit_code else SUCCESS


def _as_json(kind: str, changes: PlanDiff | AuditDiff, move: dict[str, Any] | None = None) -> str:
    data = attrs.asdict(changes, recurse=True)
    for name in ("appeared", "vanished"):
        if isinstance(changes, AuditDiff):
            data[name] = [finding_to_json(finding) for finding in getattr(changes, name)]
    moves = {"move": move} if kind == "plans" else {}
    return _FORMAT.write({"of": kind, **data, **moves})


def _is_audit(file: Path) -> bool:
    data = read_json(file, read_text(file))
    return isinstance(data, dict) and "shardrules_audit" in data


def _read_audit(file: Path) -> AuditReport:
    try:
        return AuditReport.from_json(read_text(file))
    except ReportError as error:
        raise UsageError(f"{file}: {one_line(error)}") from error


COMMAND = Command(
    "diff",
    "Shows what changed between two plans or two audits, in bytes and collectives.",
    "OLD NEW [options]",
    ("diff before.json after.json",),
    _declare,
    _run,
    "difference, with --exit-code",
)
