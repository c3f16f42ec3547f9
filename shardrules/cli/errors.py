"""What can be wrong with a command: one line that says what, where, and how to mend it."""

from typing import final

from shardrules.core.errors import ShardRulesError


@final
class UsageError(ShardRulesError, ValueError):
    """A command that names something which is not there, or cannot be read. The process ends with 2."""


def one_line(error: BaseException, most: int = 300) -> str:
    """Returns what an error says, in one line.

    **Arguments:**

    - `error`: any error.
    - `most`: how many characters it may take.

    **Returns:**

    Its message; its class where it has none.

    ```python
    assert one_line(ValueError("no such axis\\n    -> name another")) == "no such axis -> name another"
    ```
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"
