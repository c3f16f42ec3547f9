"""The `shardrules` command."""

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version

import jax

from shardrules.cli.command import BUG, FOUND, HELP, USAGE
from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.registry import COMMANDS, load_command
from shardrules.cli.terminal import complain
from shardrules.core.errors import PlanError, ShardRulesError, suggest


def top_parser() -> argparse.ArgumentParser:
    """Returns the parser of what stands before a command."""
    listed = "\n".join(f"  {name:<12}{summary}" for name, summary in COMMANDS.items())
    found = argparse.ArgumentParser(
        "shardrules",
        usage="shardrules COMMAND ... [--traceback]",
        description=f"Plans, explains and proves how the arrays of JAX models are sharded.\n\ncommands:\n{listed}",
        epilog="shardrules COMMAND --help says more, with examples.",
        formatter_class=HELP,
        allow_abbrev=False,
    )
    found.add_argument("--version", action="version", version=f"shardrules {version('shardrules')}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    **Arguments:**

    - `argv`: its words; by default those that the process was started with.

    **Returns:**

    The exit code: 0, 1 where something was found, 2 where the command cannot be meant, 3 for a bug of our own.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # paths may hold what a terminal cannot show
    words = list(sys.argv[1:] if argv is None else argv)
    shows_traceback = "--traceback" in words
    words = [word for word in words if word != "--traceback"]
    try:
        return _run(words)
    except (ShardRulesError, OSError) as error:
        if shows_traceback:
            traceback.print_exc()
        if isinstance(error, PlanError):
            complain(str(error))
            return FOUND
        complain(str(error) if isinstance(error, UsageError) else one_line(error))
        return USAGE
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001  ours: whatever else a command can meet is told above
        if shows_traceback:
            traceback.print_exc()
        what = f"{type(error).__name__}: {one_line(error)}"
        complain(f"{what}. This is a bug of shardrules; --traceback shows where")
        return BUG


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "--version"):
        top_parser().parse_args(words[:1] or ["--help"])
    name, *rest = words
    if name.startswith("-"):
        raise UsageError(f"{name} stands before a command: write shardrules COMMAND {name} ...")
    if name not in COMMANDS:
        raise UsageError(f"there is no command {name!r}{suggest(name, COMMANDS)}; there are {', '.join(COMMANDS)}")
    command = load_command(name)
    args = command.parser().parse_args(rest)
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # nothing here runs on accelerators, which others may be using
    return command.run(args)
