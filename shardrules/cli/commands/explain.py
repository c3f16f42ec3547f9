"""`shardrules explain`: which rule decided a leaf, and what each other rule would decide."""

import argparse

from shardrules.cli.command import SUCCESS, Command
from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.subject import add_subject, load_subject
from shardrules.cli.terminal import show
from shardrules.core.errors import PatternError, TreeError


def _declare(parser: argparse.ArgumentParser) -> None:
    add_subject(parser)
    parser.add_argument("path", metavar="PATH", help="the path of an array, or a regular expression")


def _run(args: argparse.Namespace) -> int:
    subject = load_subject(args)
    try:
        if subject.state is not None and args.path.startswith("optimizer/"):
            show(subject.state.explain(args.path.removeprefix("optimizer/")))
        else:
            show(subject.plan.explain(args.path))
    except (TreeError, PatternError) as error:
        raise UsageError(one_line(error)) from error
    return SUCCESS


COMMAND = Command(
    "explain",
    "Shows which rule decided an array, and what each other rule says about it.",
    "MODEL PATH --rules RULES --mesh MESH [options]",
    (
        (
            "explain docs/examples/train_gpt.py:GPT blocks/0/up/weight \\\n"
            "      --rules docs/examples/train_gpt.py:RULES --mesh data:4,model:2"
        ),
    ),
    _declare,
    _run,
)
