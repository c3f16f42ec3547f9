"""The list of commands. Each is loaded when it is called: some take long to import."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from shardrules.cli.command import Command

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "init": "writes a first guess of rules, a golden plan and a workflow",
        "plan": "shows every array with its spec, its bytes and the reason",
        "autoplan": "finds the best plan of a step",
        "train-plan": "plans training on a cluster, from a loss",
        "explain": "shows which rule decided an array, and why",
        "check": "for CI: findings, a golden plan, a memory budget",
        "audit": "compiles a step: collectives, memory, surprises",
        "diff": "compares two plans or two audits",
        "report": "writes one page with all of it",
        "completion": "completion for bash, zsh, fish or tcsh",
    }
)
"""All commands with their summaries, in the order of the help."""


def load_command(name: str) -> Command:
    """Returns a command of `COMMANDS`."""
    return importlib.import_module(f"shardrules.cli.commands.{name.replace('-', '_')}").COMMAND
