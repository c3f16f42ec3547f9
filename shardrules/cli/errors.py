"""Errors of the command line: one line that says what is wrong, where, and how to fix it."""

from typing import final

from shardrules.core.errors import ShardRulesError

_MOST_CHARACTERS = 300
"""Four lines of a terminal. Doubled, errors of JAX fill the screen; halved, many lose the part that matters."""


@final
class UsageError(ShardRulesError, ValueError):
    """A command that names something missing or unreadable. The process ends with 2."""


def one_line(error: BaseException) -> str:
    """Returns the message of an error as one line of at most 300 characters, or its class if it has none.

    ```python
    from shardrules.cli.errors import one_line

    assert one_line(ValueError("unknown axis\\n    -> use another")) == "unknown axis -> use another"
    ```
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1].rstrip()}…"
