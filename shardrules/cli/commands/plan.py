"""`shardrules plan`: the plan of a model as a table, or as JSON."""

import argparse
import json
from pathlib import Path

from shardrules.cli.command import FINDINGS, SUCCESS, Command
from shardrules.cli.files import write
from shardrules.cli.models import PLANS
from shardrules.cli.subject import Subject, add_subject, load_subject
from shardrules.cli.terminal import show, show_findings, show_plan


def _declare(parser: argparse.ArgumentParser) -> None:
    add_subject(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write the plan of the model as JSON")
    parser.add_argument("--format", choices=("text", "json"), metavar="FORMAT", default="text", help="text or json")


def _run(args: argparse.Namespace) -> int:
    subject = load_subject(args)
    if args.output is not None:
        write(args.output, f"{subject.plan.to_json()}\n")
    if args.format == "json":
        show(subject.plan.to_json() if subject.state is None else _json_with_state(subject))
    else:
        show_plan(subject.plan)
        if subject.state is not None:
            show(f"\n{subject.state_text()}", "bold")
            show_findings(subject.state.findings)
    return FINDINGS if any(finding.severity == "error" for finding in subject.findings) else SUCCESS


def _json_with_state(subject: Subject) -> str:
    assert subject.state is not None
    plans = {"model": subject.plan, "optimizer": subject.state}
    parts = {name: json.loads(plan.to_json()) for name, plan in plans.items()}
    return PLANS.write(parts)


COMMAND = Command(
    "plan",
    "Prints every array of a model with its spec, its bytes, and the rule and reason.",
    "MODEL --rules RULES --mesh MESH [options]",
    (
        (
            "plan docs/examples/train_gpt.py:GPT --mesh data:4,model:2 \\\n"
            "      --rules docs/examples/train_gpt.py:RULES --optimizer adamw"
        ),
        ("plan docs/examples/llama_405b.py:shapes \\\n      --rules docs/examples/llama_405b.toml"),
    ),
    _declare,
    _run,
    "unsound plan",
)
