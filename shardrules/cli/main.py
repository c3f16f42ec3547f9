"""The `shardrules` command."""

import argparse
import io
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version

import jax
from rich.text import Text

from shardrules.cli.command import BUG, FINDINGS, HELP, SUCCESS, USAGE
from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.interrupt import INTERRUPTED
from shardrules.cli.registry import COMMANDS, load_command
from shardrules.cli.terminal import complain, emit
from shardrules.core.errors import DoesNotFitError, PlanError, RulesFileError, ShardRulesError, printable, suggest


def top_parser() -> argparse.ArgumentParser:
    """Returns the parser of options that precede a command."""
    listed = "\n".join(f"  {name:<12}{summary}" for name, summary in COMMANDS.items())
    parser = argparse.ArgumentParser(
        "shardrules",
        usage="shardrules COMMAND ... [--traceback]",
        description=f"Plans, explains and checks how the arrays of JAX models are sharded.\n\ncommands:\n{listed}",
        epilog="shardrules COMMAND --help shows options and examples.",
        formatter_class=HELP,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"shardrules {version('shardrules')}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command with `argv`, by default the arguments of the process, and returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Paths may hold characters that a terminal cannot show.
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    # Accepted anywhere, since it matters most when a command fails to load or to parse.
    shows_traceback = "--traceback" in words
    words = [word for word in words if word != "--traceback"]
    try:
        return _run(words)
    except (ShardRulesError, OSError) as error:
        if shows_traceback:
            emit(Text(traceback.format_exc().rstrip()), is_error=True)
        if isinstance(error, PlanError | DoesNotFitError):
            complain(str(error))
            return FINDINGS
        # Only errors about files of rules have several lines.
        is_listing = isinstance(error.__cause__, RulesFileError)
        complain(
            str(error) if is_listing else printable(str(error) if isinstance(error, UsageError) else one_line(error))
        )
        return USAGE
    except SystemExit as ended:
        # argparse has printed the help or the version.
        return int(ended.code or SUCCESS)
    except KeyboardInterrupt:
        # Raised by the user's own code: `end_on_interrupt` raises nothing.
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  the last resort: every expected error is handled above
        if shows_traceback:
            emit(Text(traceback.format_exc().rstrip()), is_error=True)
        complain(f"{type(error).__name__}: {one_line(error)}. This is a bug in shardrules; --traceback shows where")
        return BUG


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "--version"):
        # argparse prints the help or the version, and exits.
        top_parser().parse_args(words[:1] or ["--help"])
    name, *rest = words
    if name.startswith("-"):
        raise UsageError(f"{name} must follow a command: shardrules COMMAND {name} ...")
    if name not in COMMANDS:
        raise UsageError(
            f"unknown command {name!r}{suggest(name.lower(), COMMANDS)}; the commands are {', '.join(COMMANDS)}"
        )
    command = load_command(name)
    args = command.parse(rest)
    args.command_line = shlex.join(["shardrules", *words])
    if "JAX_PLATFORMS" not in os.environ:
        # No command needs an accelerator, and other processes may be using it.
        jax.config.update("jax_platforms", "cpu")
    return command.run(args)
