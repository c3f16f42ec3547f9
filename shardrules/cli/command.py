"""How commands are declared: a help text that fits a screen, examples, and what is done."""

import argparse
import functools
import re
from collections.abc import Callable
from typing import NoReturn, final

import attrs

from shardrules.cli.errors import UsageError
from shardrules.core.errors import suggest

FINE, FOUND, USAGE, BUG = 0, 1, 2, 3
"""Exit codes: nothing to complain of; something was found; the command cannot be meant; a bug of our own."""


HELP = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=22, width=80)
"""Help as wide as any terminal, with what options mean in one column."""


@final
@attrs.frozen
class Command:
    """A command of `shardrules`.

    **Arguments:**

    - `name`: its name.
    - `summary`: what it does, in one line.
    - `usage`: what stands behind its name.
    - `examples`: command lines without the leading `shardrules`; a test runs each of them.
    - `declare`: adds its arguments to a parser.
    - `run`: does it, and returns the exit code.
    """

    name: str
    summary: str
    usage: str
    examples: tuple[str, ...]
    declare: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]

    def parser(self) -> argparse.ArgumentParser:
        """Returns its parser."""
        shown = "\n".join(f"  shardrules {example}" for example in self.examples)
        found = argparse.ArgumentParser(
            f"shardrules {self.name}",
            description=self.summary,
            usage=f"shardrules {self.name} {self.usage}",
            epilog=f"examples:\n{shown}",
            formatter_class=HELP,
            allow_abbrev=False,
        )
        self.declare(found)
        found.error = functools.partial(_refuse, found)  # pyright: ignore[reportAttributeAccessIssue]
        return found


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Refuses words in one line, as everything else does."""
    unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
    near = "" if unknown is None else suggest(unknown[1], parser._option_string_actions)
    raise UsageError(f"{message}{near}; {parser.prog} --help shows what it takes")
