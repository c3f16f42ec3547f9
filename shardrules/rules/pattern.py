"""Path patterns, and the part of the index of a layer that they read.

`layers/\\d+/mlp` treats layer 3 and layer 112 alike, `layers/3/mlp` does not. A rule whose patterns cannot tell equal
layers apart lets the engine decide them once, which is what makes planning fast. So a pattern's text is compared with
the forms that people write. Every other pattern counts as one that may read indices: slower, never wrong.
"""

import functools
import re
from typing import Literal, TypeAlias

from shardrules.core.errors import PatternError
from shardrules.core.tree import ReadsIndex

Match: TypeAlias = Literal["search", "fullmatch", "match"]
"""The way a pattern is matched against a path: anywhere in it, as a whole, or from its beginning."""

# An index is a run of digits with a slash, a dot, or an end of the path, on either side. So what stands right behind or
# right before another character of a name never matches a digit of an index, and of the rest only pieces count that
# match either all digits or none.
_ITEM = r"(?:[A-Za-z_]-[A-Za-z_] | [^]\[\\^0-9-] | \\[./-])"  # of a character class, without digits
_NAME = r"(?:[^]\[0-9\\(){}.*+?|^$/] | \\[^A-Za-z0-9/.])"  # a character that is neither a digit nor a separator
_NO_DIGIT = rf"(?:{_NAME} | /|\\[/.] | \\[DWs] | \[-?{_ITEM}+-?\])"
_ANY_DIGIT = rf"(?:\. | \\[dwS] | \[-?{_ITEM}*(?:0-9|\\[dw]){_ITEM}*-?\] | \[\^-?{_ITEM}+-?\])"
_DIGIT_OF_NAME = r"(?:[0-9] | \\[dw] | \[(?:\w-\w|\w)+-?\])"  # none of these matches a separator
_END = r"(?![*+?{])"  # no quantifier follows
_IN_NAME = rf"(?:{_DIGIT_OF_NAME}{_END})*{_NAME}(?:\+\??)?{_END}(?:{_DIGIT_OF_NAME}(?:[*+?]\??)?{_END})*(?:\.{_END})?"
_PRESENT = rf"(?:{_IN_NAME} | {_NO_DIGIT}(?:\+\??)?{_END})"
_OPEN = r"\((?:\?:)?"
_PIECE = rf"""(?:
    {_PRESENT} | {_NO_DIGIT}[*?]\??{_END}
    | {_ANY_DIGIT}(?:\*\??{_END} | (?={_NAME}(?![*?{{])))  # any number of digits, none included; or right before a name
    | [|^$] | \\[bAZ] | {_OPEN}(?!\?) | \)\??\??{_END}  # groups are not repeated: repeating would count digits
)"""
# At least one digit: of two such pieces in a row each would take one, and `\d+\d+` matches layer 12 but not layer 3. So
# one of them may stand anywhere, and each further one only where something that matches no digit is right before it.
_DIGITS = rf"{_ANY_DIGIT}\+\??{_END}"
_FURTHER_DIGITS = rf"{_PRESENT}(?:{_OPEN}(?:[A-Za-z_]+\|)*)*{_DIGITS}"

_FLAGS = re.compile(r"\(\?[aims]+\)")  # these change nothing for digits
_NO = re.compile(rf"{_PIECE}*+(?:{_DIGITS})?(?:(?>{_FURTHER_DIGITS} | {_PIECE}))*+", re.VERBOSE)
# Indices of as many digits are alike to pieces that match all digits or none, however these are repeated.
_WIDTH = re.compile(
    rf"(?>{_IN_NAME} | {_NO_DIGIT} | {_ANY_DIGIT} | [|^$)*+?] | \\[bAZ] | {_OPEN}(?!\?) | \{{[0-9]*,?[0-9]*\}})*+",
    re.VERBOSE,
)


def check_beginning(pattern: str, owner: str) -> None:
    """Refuses a pattern that starts with a slash but must match from the beginning, since no path starts with one."""
    if pattern.startswith("/"):
        raise PatternError(
            f"{owner}: pattern {pattern!r} cannot match any path, since paths never start with '/'. Remove the slash; "
            "'(.*/)?w' matches a name at the beginning of a path as well as inside"
        )


@functools.lru_cache(maxsize=4096)  # the patterns of a rule are read again for every plan
def reads_index(pattern: str | re.Pattern[str]) -> ReadsIndex:
    """Returns `"no"` when a pattern matches either all indices in a path or none, else `"width"` or `"value"`.

    ```python
    import re

    from shardrules.rules.pattern import reads_index

    assert reads_index(re.compile(r"layers/\\d+/mlp/.*")) == "no"
    assert reads_index(re.compile(r"layers/\\d/mlp")) == "width"
    assert reads_index(re.compile(r"layers/3/mlp")) == "value"
    ```
    """
    text = pattern if isinstance(pattern, str) else pattern.pattern
    if text.startswith("(?"):
        text = _FLAGS.sub("", text, count=1)
    # Other flags, which may come with a compiled pattern or stand in its text, match nothing below.
    if isinstance(pattern, re.Pattern) and pattern.flags & re.VERBOSE:
        return "value"
    if all(map(_NO.fullmatch, [text] if "(" in text else text.split("|"))):
        return "no"
    return "width" if _WIDTH.fullmatch(text) else "value"
