"""`shardrules report`: one page that shows a plan, and an audit and an autoplan where there are any."""

import argparse
from pathlib import Path
from typing import Any

from shardrules.analysis.audits.report import AuditReport
from shardrules.cli.command import FINE, Command
from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.files import read_text, write
from shardrules.cli.subject import add_subject, load_subject
from shardrules.cli.terminal import complain, show, working
from shardrules.core.axes import mesh_text
from shardrules.core.check import bytes_text
from shardrules.core.errors import ReportError
from shardrules.page.page import report_page
from shardrules.planning.answer.report import AutoPlanReport


def _declare(parser: argparse.ArgumentParser) -> None:
    add_subject(parser)
    parser.add_argument("--audit", metavar="FILE", type=Path, help="an audit, from shardrules audit -o FILE")
    parser.add_argument("--autoplan", metavar="FILE", type=Path, help="an autoplan, from shardrules autoplan -o FILE")
    parser.add_argument("--title", metavar="TEXT", default="", help="the heading; by default model and mesh")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, default=Path("report.html"), help="(report.html)")


def _run(args: argparse.Namespace) -> int:
    audit = None if args.audit is None else _read(args.audit, AuditReport, ReportError, "audit")
    planned = None if args.autoplan is None else _read(args.autoplan, AutoPlanReport, ReportError, "autoplan")
    subject = load_subject(args)
    mesh = mesh_text(subject.plan.mesh)
    for name, found in (("audit", audit), ("autoplan", planned)):
        if found is not None and found.mesh != mesh:
            complain(f"the {name} is for the mesh {found.mesh}, the plan for {mesh}: the page shows both", "warning")
    title = args.title or f"{subject.name} on {mesh}"
    with working("writing the page"):
        page = report_page(subject.plan, state=subject.state, audit=audit, planned=planned, title=title)
    write(args.output, page)
    loud = [one for one in subject.findings if one.severity != "note"]
    many = f"{len(loud)} finding{'s' * (len(loud) != 1)}"
    show(f"{args.output}: {subject.summary}, {many}; the page has {bytes_text(len(page.encode()))}")
    return FINE


def _read(file: Path, kind: Any, error: type[Exception], command: str) -> Any:
    try:
        return kind.from_json(read_text(file))
    except error as found:
        hint = f"write one with shardrules {command} -o {file.name}"
        raise UsageError(f"--{command} {file}: {one_line(found)}; {hint}") from found


COMMAND = Command(
    "report",
    "Writes a page of its own: a treemap, every array and its blocks, all findings.",
    "MODEL --rules RULES --mesh MESH [options]",
    (
        (
            "report docs/examples/train_gpt.py:GPT --mesh data:4,model:2 \\\n"
            "      --rules docs/examples/train_gpt.py:RULES --optimizer adamw -o report.html"
        ),
    ),
    _declare,
    _run,
)
"""What `shardrules report` is."""
