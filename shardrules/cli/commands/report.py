"""`shardrules report`: one page that shows a plan, and perhaps an audit and an autoplan."""

import argparse
from pathlib import Path

from shardrules.cli.command import SUCCESS, Command
from shardrules.cli.files import read_text, write
from shardrules.cli.models import read_report
from shardrules.cli.subject import add_subject, load_subject, read_rules
from shardrules.cli.terminal import complain, show, working
from shardrules.core.axes import mesh_text
from shardrules.core.text import bytes_text
from shardrules.page.page import report_page
from shardrules.programs.audits.report import AuditReport
from shardrules.programs.autoplan.answer.report import AutoPlanReport
from shardrules.programs.training.answer.report import TrainingPlanReport


def _declare(parser: argparse.ArgumentParser) -> None:
    add_subject(parser)
    parser.add_argument("--audit", metavar="FILE", type=Path, help="an audit, from shardrules audit -o FILE")
    parser.add_argument("--autoplan", metavar="FILE", type=Path, help="an autoplan, from shardrules autoplan -o FILE")
    parser.add_argument(
        "--train-plan", metavar="FILE", type=Path, help="a training plan, from shardrules train-plan -o FILE"
    )
    parser.add_argument("--title", metavar="TEXT", default="", help="the heading (default: model and mesh)")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default=Path("report.html"), help="the page (default: report.html)"
    )


def _run(args: argparse.Namespace) -> int:
    audit = None if args.audit is None else read_report(args.audit, AuditReport, "audit")
    autoplan = None if args.autoplan is None else read_report(args.autoplan, AutoPlanReport, "autoplan")
    train_plan = args.train_plan
    training = None if train_plan is None else read_report(train_plan, TrainingPlanReport, "train-plan")
    rules = read_rules(args)
    subject = load_subject(args, rules)
    mesh = mesh_text(subject.plan.mesh)
    # Still shown: the files may be from another mesh on purpose.
    for name, result in (("audit", audit), ("autoplan", autoplan), ("training plan", training)):
        if result is not None and result.mesh != mesh:
            complain(f"the {name} is for the mesh {result.mesh}, the plan for {mesh}: the page shows both", "warning")
    title = args.title or f"{subject.name} on {mesh}"
    with working("writing the page"):
        page = report_page(
            subject.plan,
            state=subject.state,
            audit=audit,
            planned=autoplan,
            training=training,
            title=title,
            # A file has comments, too.
            rules=None if rules is None else read_text(rules.file.file) if rules.file.file.name else rules.file.rules,
            command=args.command_line,
        )
    write(args.output, page)
    shown = [finding for finding in subject.findings if finding.severity != "note"]
    many = f"{len(shown)} finding{'s' * (len(shown) != 1)}"
    show(f"{args.output}: {subject.summary}, {many}; the page has {bytes_text(len(page.encode()))}")
    return SUCCESS


COMMAND = Command(
    "report",
    "Writes a page: a treemap, every array and its blocks, and all findings.",
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
