"""The commands that there are. Each is loaded when it is asked for: some take long to load."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from shardrules.cli.command import Command

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "plan": "every array with its spec, its bytes and the reason",
        "autoplan": "finds the plan of a step by itself",
        "explain": "which rule decided an array, and what the others said",
        "check": "for CI: findings, a golden plan, a budget of memory",
        "audit": "what a compiler makes of a step: collectives, memory",
        "diff": "what changed between two plans or two audits",
        "report": "one page with all of it",
        "completion": "completion for bash, zsh or fish",
    }
)
"""All commands with what they are for, in the order of the help."""


def load_command(name: str) -> Command:
    """Returns a command.

    **Arguments:**

    - `name`: one of `COMMANDS`.

    **Returns:**

    The command.
    """
    return importlib.import_module(f"shardrules.cli.commands.{name}").COMMAND
