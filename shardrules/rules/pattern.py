"""Path patterns, and what they read of the index of a layer.

`layers/\\d+/mlp` treats layer 3 and layer 112 alike, `layers/3/mlp` does not. A rule whose patterns cannot tell equal
layers apart lets the engine decide them once, which is what makes planning fast. So a pattern's text is compared with
the forms that people write. Every other pattern counts as one that may read indices: slower, never wrong.
"""

import re
from typing import Literal, TypeAlias

from shardrules.core.errors import PatternError
from shardrules.core.tree import ReadsIndex

Match: TypeAlias = Literal["search", "fullmatch", "match"]
"""How a pattern is matched against a path: anywhere in it, as a whole, or from its beginning."""

# An index is a run of digits with a slash, or an end of the path, on either side. Below, the only tokens that can match
# digits of an index match any digits, and as many as it has: what matches one index matches every other one.
_IGNORES_INDICES = re.compile(
    r"""
    (?:\(\?[aims]+\))?                                              # flags for the whole pattern
    (?:
        # A letter, and what stands right behind it: digits of a name, or any character, but not of an index.
        [A-Za-z_](?:[0-9]|\\d\+?|\[[0-9-]+\]\+?)*[?.]?
        | [/|^$,:=@~-] | \\[./b-]                                   # what matches no digit
        | (?:\.|\\d|\\w|\[0-9\]|\[\^/\])\*                          # any number of characters, none included
        # At least one character, but only where nothing right before it can match digits: of two such in a row, each
        # would take a digit, and `\d+\d+` finds layer 12 and not layer 3.
        | (?:\A|(?<=[/^])|(?<=/\())(?:\.|\\d|\\w|\[0-9\]|\[\^/\])\+
        | \((?:\?:)? | \)\??                                        # groups; not repeated, since layers would count
    )*
    """,
    re.VERBOSE,
)


def compile_pattern(pattern: str | re.Pattern[str], owner: str) -> re.Pattern[str]:
    """Returns `pattern` compiled; `owner` is the rule or function named in the error."""
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise PatternError(f"{owner}: pattern {pattern!r} is not a regular expression: {error}") from error


def check_beginning(pattern: str, owner: str) -> None:
    """Refuses a pattern that starts with a slash but must match from the beginning, since no path starts with one."""
    if pattern.startswith("/"):
        raise PatternError(
            f"{owner}: pattern {pattern!r} cannot match any path, since paths never start with '/'. Remove the slash; "
            "'(.*/)?w' matches a name at the beginning of a path as well as inside"
        )


def reads_index(pattern: re.Pattern[str]) -> ReadsIndex:
    """Returns `"no"` when a pattern matches either all indices in a path or none, else `"value"`.

    ```python
    import re

    from shardrules.rules.pattern import reads_index

    assert reads_index(re.compile(r"layers/\\d+/mlp/.*")) == "no"
    assert reads_index(re.compile(r"layers/3/mlp")) == "value"
    ```
    """
    return "no" if _IGNORES_INDICES.fullmatch(pattern.pattern) else "value"
