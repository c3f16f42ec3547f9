"""`shardrules completion`: a script for the shell, made by shtab from the parsers of all commands."""

import argparse

from shardrules.cli.command import SUCCESS, Command
from shardrules.cli.objects import import_extra
from shardrules.cli.registry import COMMANDS, load_command
from shardrules.cli.terminal import show

_SHELLS = ("bash", "zsh", "fish", "tcsh")


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))


def _run(args: argparse.Namespace) -> int:
    shtab = import_extra("shtab", "completion", "cli")
    parser = argparse.ArgumentParser("shardrules")
    commands = parser.add_subparsers()
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        load_command(name).declare(command)
        # Values that are not choices complete to files: most are.
        for action in command._actions:
            if action.nargs != 0 and action.choices is None:
                action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    show(shtab.complete(parser, args.shell))
    return SUCCESS


COMMAND = Command(
    "completion",
    "Prints a script that completes commands, options and files in a shell.",
    "SHELL",
    ("completion bash",),
    _declare,
    _run,
)
