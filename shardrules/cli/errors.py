"""Errors of the command line: one line that says what is wrong, where, and how to fix it."""

from typing import final

from shardrules.core.errors import ConfigError, ShardRulesError
from shardrules.core.fields import read_bytes

_MOST_CHARACTERS = 300
"""Four lines of a terminal, chosen by hand."""


@final
class UsageError(ShardRulesError, ValueError):
    """A command that names something missing or unreadable. The process ends with 2."""


def one_line(error: BaseException) -> str:
    """Returns the message of an error as one line of at most 300 characters, or its class if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1].rstrip()}…"


def byte_option(option: str, text: str | None) -> int | None:
    """Returns the bytes that an option names, `"16GiB"` or a plain number; `None` where it is not given."""
    try:
        return None if text is None else read_bytes(option, f"{text} B" if text.isdecimal() else text)
    except ConfigError as error:
        raise UsageError(one_line(error)) from error
