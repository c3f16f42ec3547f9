"""Declarations of commands: a help text that fits a screen, examples, and the function that runs."""

import argparse
import functools
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import NoReturn, final

import attrs

from shardrules.cli.errors import UsageError
from shardrules.cli.interrupt import INTERRUPTED
from shardrules.core.errors import suggest

SUCCESS, FINDINGS, USAGE, BUG = 0, 1, 2, 3
"""Exit codes: no complaint; there are findings; an invalid command; a bug. After Ctrl-C it is `INTERRUPTED`."""


_COLUMNS = 80
"""The width of help: a terminal's own by default."""

HELP = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=22, width=_COLUMNS)
"""Help with the meanings of options in one column."""


@final
@attrs.frozen
class Command:
    """A command of `shardrules`."""

    name: str
    summary: str
    usage: str
    """The arguments in its usage line."""
    examples: tuple[str, ...]
    """Command lines without the leading `shardrules`; a test runs each of them."""
    declare: Callable[[argparse.ArgumentParser], None]
    """Adds its arguments to a parser."""
    run: Callable[[argparse.Namespace], int]
    """Runs it, and returns the exit code."""
    findings: str = ""
    """The meaning of exit code 1; empty for a command that never ends with it."""

    def parser(self) -> argparse.ArgumentParser:
        """Returns its parser, which raises a `UsageError` for invalid arguments."""
        examples = "\n".join(f"  shardrules {example}" for example in self.examples)
        parser = argparse.ArgumentParser(
            f"shardrules {self.name}",
            description=self.summary,
            usage=f"shardrules {self.name} {self.usage}",
            epilog=f"{self._exit_codes()}\n\nexamples:\n{examples}",
            formatter_class=HELP,
            allow_abbrev=False,
        )
        self.declare(parser)
        # argparse prints its usage and exits: raise instead, so that every mistake is one line.
        parser.error = functools.partial(_refuse, parser)  # pyright: ignore[reportAttributeAccessIssue]
        return parser

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Returns the arguments in `words`. A `UsageError` says what is wrong with them."""
        parser = self.parser()
        options = parser._option_string_actions
        joined: list[str] = []
        for word in words:
            last = options.get(joined[-1]) if joined else None
            # argparse takes -5GiB for an option. As a value of the option before, it gets an error about values.
            # After `--` nothing is an option any more.
            takes_value = last is not None and last.nargs is None and "--" not in joined
            if (
                takes_value
                and word.startswith("-")
                and word not in ("-", "--")
                and word.partition("=")[0] not in options
            ):
                # A long option takes its value behind `=`, a short one right behind its letter.
                joined[-1] += f"={word}" if joined[-1].startswith("--") else word
            else:
                joined.append(word)
        return parser.parse_args(joined)

    def _exit_codes(self) -> str:
        codes = {
            SUCCESS: "success",
            FINDINGS: self.findings,
            USAGE: "invalid command",
            BUG: "bug",
            INTERRUPTED: "Ctrl-C",
        }
        listed = ", ".join(f"{code} {meaning}" for code, meaning in codes.items() if meaning)
        return textwrap.fill(f"exit codes: {listed}", _COLUMNS, subsequent_indent="  ")


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Raises a one-line error, as all other mistakes do, in place of argparse's usage text."""
    unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
    near = (
        ""
        if unknown is None
        else suggest(unknown[1], [option for option in parser._option_string_actions if option != "--help"])
    )
    raise UsageError(f"{message}{near}; see {parser.prog} --help")
